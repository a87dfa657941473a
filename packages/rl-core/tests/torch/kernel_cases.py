"""Cases run in Triton's interpreter: kernels against the plain formulas in float64, which no kernel takes."""

import os
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from joined_rank import joined
from torch._dynamo.backends.common import aot_autograd

from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.heads.logprobs import Head, LogitTransform, head_reads
from rl_core.torch.heads.vocab_parallel import VocabShard, vocab_parallel_reads
from rl_core.torch.kernels.float8 import (
    E4M3,
    E5M2,
    Float8Matrix,
    largest_of,
    rounded_columns,
    rounded_rows,
    rounded_whole,
)
from rl_core.torch.kernels.norm import NormForm, add_rms_norm, rms_norm
from rl_core.torch.kernels.permutation import collect, group_by_expert, spread, spread_weighted
from rl_core.torch.kernels.rotary import HeadNorm, rotated, rotated_pair
from rl_core.torch.kernels.swiglu import swiglu, swiglu_of_halves
from rl_core.torch.kernels.vocabulary import LogitForm, head_products, softmax_statistics
from rl_core.torch.transport.digest import _host_sum

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORMS = {
    "llama": NormForm(1e-3),
    "olmo": NormForm(1e-3, rounds_first=False),
    "gemma": NormForm(1e-3, offset=1.0, rounds_first=False),
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def errors(function, tensors, dtype, frozen=()) -> dict[str, float]:
    """Largest differences of results and gradients between kernels in a dtype and formulas in float64, relative to the
    largest value.

    Args:
        function: Function of the tensors; a tensor or a tuple of them.
        tensors: Float64 inputs, rounded to the dtype for both.
        dtype: Dtype of the kernels.
        frozen: Indices of the inputs without a gradient.
    """
    found = []
    for each in (dtype, torch.float64):
        inputs = [tensor.to(dtype).to(each) for tensor in tensors]
        leaves = [tensor.requires_grad_(index not in frozen) for index, tensor in enumerate(inputs)]
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        total = sum((result.double() * draw(*result.shape, seed=9 + n)).sum() for n, result in enumerate(results))
        total.backward()
        found.append(
            {
                **{f"result {n}": result.detach() for n, result in enumerate(results)},
                **{f"gradient {n}": leaf.grad for n, leaf in enumerate(leaves) if n not in frozen},
            }
        )
    kernels, formulas = found
    assert kernels.keys() == formulas.keys()
    return {name: distance(kernels[name], formulas[name]) for name in formulas}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    scale = float(expected.abs().max()) or 1.0
    return float((found.double() - expected).abs().max()) / scale


def norms(rank: Rank, form: str, dtype: str) -> dict[str, float]:
    """Norms of rows that fill no tile, rows that are slices, none at all, alone and of a sum that is handed on."""
    of, kind = FORMS[form], DTYPES[dtype]
    found = {}
    for rows in (5, 0):
        found |= {
            f"{rows} rows, alone, {name}": error
            for name, error in errors(lambda x, w: rms_norm(x, w, of), [draw(rows, 24), draw(24, seed=1)], kind).items()
        }
    sliced = errors(lambda x, w: rms_norm(x[:, :, 3:27], w, of), [draw(2, 3, 30), draw(24, seed=1)], kind)
    summed = errors(
        lambda x, y, w: add_rms_norm(x, y, w, of), [draw(2, 9, 40), draw(2, 9, 40, seed=2), draw(40, seed=1)], kind
    )
    frozen = errors(lambda x, w: add_rms_norm(x, None, w, of), [draw(70, 16), draw(16, seed=1)], kind, frozen=[1])
    long = errors(lambda x, w: rms_norm(x, w, of), [draw(3, 8200), draw(8200, seed=1)], kind)
    for label, case in {"sliced": sliced, "summed": summed, "handed on": frozen, "long": long}.items():
        found |= {f"{label}, {name}": error for name, error in case.items()}
    return found


def dtypes(rank: Rank) -> dict[str, tuple[str, str]]:
    """Dtypes of norms by kernels and by formulas, from bfloat16 values and a float32 weight."""
    x, weight = draw(3, 8).bfloat16(), draw(8).float()
    return {name: (str(rms_norm(x, weight, form).dtype), str(form(x, weight).dtype)) for name, form in FORMS.items()}


def rotations(rank: Rank, dtype: str, norm: str | None) -> dict[str, float]:
    """Rotations of whole heads and of a part, of rows that share angles or do not, with heads before tokens or
    behind."""
    kind = DTYPES[dtype]
    found = {}
    for label, (shape, size, heads_dim) in {
        "whole": ((2, 3, 5, 24), 24, 1),
        "part": ((1, 4, 7, 20), 12, 1),
        "tokens first": ((2, 5, 3, 16), 16, 2),
        "no tokens": ((1, 3, 0, 16), 16, 1),
    }.items():
        tokens = shape[3 - heads_dim]
        angles = draw(1 if label == "whole" else shape[0], tokens, size, seed=3)

        def turn(x, weight, angles=angles, heads_dim=heads_dim):
            of = None if norm is None else HeadNorm(weight, FORMS[norm])
            cos, sin = angles.to(kind).cos().to(x.dtype), angles.to(kind).sin().to(x.dtype)
            # as from a projection, the heads of a token lie together
            turned = rotated(x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin, of, heads_dim=heads_dim)
            return turned if norm else turned + 0.0 * weight.sum()

        def turn_both(x, weight, few, key_weight, angles=angles, heads_dim=heads_dim):
            of = (None, None) if norm is None else (HeadNorm(weight, FORMS[norm]), HeadNorm(key_weight, FORMS[norm]))
            cos, sin = angles.to(kind).cos().to(x.dtype), angles.to(kind).sin().to(x.dtype)
            turned, other = rotated_pair(x, few, cos, sin, of, heads_dim=heads_dim)
            return turned if norm else turned + 0.0 * (weight + key_weight).sum(), other

        fewer = list(shape)
        fewer[heads_dim] -= 1
        both = [draw(*shape), draw(shape[-1], seed=1), draw(*fewer, seed=4), draw(shape[-1], seed=5)]
        case = errors(turn, both[:2], kind)
        found |= {f"{label}, {name}": error for name, error in case.items()}
        found |= {f"{label}, both, {name}": error for name, error in errors(turn_both, both, kind).items()}
    return found


def gates(rank: Rank, dtype: str) -> dict[str, float]:
    """SwiGLU of two tensors, of one that holds both, of rows that are slices, of none."""
    kind = DTYPES[dtype]
    cases = {
        "two": (swiglu, [draw(2, 3, 40), draw(2, 3, 40, seed=1)]),
        "long": (swiglu, [5 * draw(1, 1100), draw(1, 1100, seed=1)]),
        "slices": (lambda both: swiglu(both[:, 2:10], both[:, 10:18]), [draw(3, 20)]),
        "one": (swiglu_of_halves, [draw(7, 24)]),
        "none": (swiglu_of_halves, [draw(0, 24)]),
        "weighted": (swiglu_of_halves, [draw(7, 24), draw(7, seed=1)]),
        "weighted, long": (swiglu_of_halves, [draw(2, 2200), draw(2, seed=1)]),
        "weighted, none": (swiglu_of_halves, [draw(0, 24), draw(0, seed=1)]),
    }
    return {
        f"{label}, {name}": error
        for label, (function, tensors) in cases.items()
        for name, error in errors(function, tensors, kind).items()
    }


ROUTINGS = {
    # experts of each token, of six; 6 is none of them
    "even": [[0, 3], [5, 1], [2, 4], [1, 0]],
    "uneven, empty experts": [[2, 4]] * 9,
    "some elsewhere": [[6, 3], [6, 6], [0, 6]],
    "all elsewhere": [[6, 6], [6, 6]],
    "no tokens": [],
}


def permutations(rank: Rank, dtype: str) -> dict[str, float]:
    """Rows of experts, from tokens and their weights, and sums of rows by token."""
    kind = DTYPES[dtype]
    found = {}
    for (label, chosen), size in product(ROUTINGS.items(), (20, 1100)):
        ids = torch.tensor(chosen, dtype=torch.int64).view(-1, 2)
        places, ends = group_by_expert(ids, 6)
        num_rows = max(int(ends[-1]), 1)

        def run(x, weights, other, places=places, num_rows=num_rows):
            rows, row_weights = spread_weighted(x, weights, places, num_rows)
            taken = places[places >= 0].long()
            both = collect(rows * 2.0, places), collect(spread(other, places, num_rows), places)
            return rows[taken], row_weights[taken], *both

        tensors = [draw(len(ids), size), draw(len(ids), 2, seed=1), draw(len(ids), size, seed=2)]
        case = errors(run, tensors, kind)
        found |= {f"{label}, {size}, {name}": error for name, error in case.items()}
    return found


TRANSFORMS = {"plain": LogitTransform(), "capped": LogitTransform(scale=1.5, softcap=2.0)}


def heads(rank: Rank, dtype: str, transform: str, is_split: bool) -> dict[str, float]:
    """Reads of a head in chunks that do not divide the positions, of a vocabulary that no block divides: errors beyond
    those of the plain formulas in the same dtype."""
    kind = DTYPES[dtype]
    targets = torch.tensor([0, 4, 5000, 4999, 17])
    ids = torch.tensor([[3, -1, 3], [0, 10, 4], [-1, -1, -1], [4096, 4095, 2], [1, 2, 5000]])

    def read(hidden, weight, bias):
        head = Head(weight, bias, TRANSFORMS[transform])
        shard = [VocabShard(0, len(weight), dist.group.WORLD)] if is_split else []
        function = vocab_parallel_reads if is_split else head_reads
        options = {"temperature": 0.7, "entropy": True, "collision": True, "k": 2, "ids": ids, "chunk_size": 3}
        reads = function(hidden, head, targets, *shard, **options)
        alone = function(hidden[:0], head, targets[:0], *shard, entropy=True).logprobs
        plain = function(hidden, head, targets, *shard).logprobs
        values = reads.logprobs, reads.entropy, reads.topk_logprobs, reads.logprobs_at, reads.collision, plain, alone
        return tuple(value for value in values)

    tensors = [draw(5, 6), draw(5001, 6, seed=1), draw(5001, seed=2)]
    with joined(rank):
        found = errors(read, tensors, kind)
        with patch.dict(os.environ, {"TRITON_INTERPRET": "0"}):
            plain = errors(read, tensors, kind)
    assert found != plain
    # both multiply in this dtype, which rounds products and sums of thousands
    return {name: max(0.0, found[name] - 1.5 * plain[name]) for name in found}


def roundings(rank: Rank, dtype: str) -> dict[str, bool]:
    """Whether kernels and formulas that round to 8 bits agree in all values, of matrices that fill no tile, with zeros,
    NaN and rows that are slices."""
    found = {}
    for rows, columns in ((1, 16), (3, 1100), (130, 70)):
        x = (draw(rows, columns + 4) * draw(rows, columns + 4, seed=1).mul(3).exp()).to(DTYPES[dtype])[:, :columns]
        x[0, 1], x[:, 3] = 0.0, 0.0
        if rows > 1:
            x[1], x[2, 5] = 0.0, torch.nan
        kernels = _rounded(x)
        with patch.dict(os.environ, {"TRITON_INTERPRET": "0"}):
            formulas = _rounded(x)
        for name, matrix in kernels.items():
            pairs = [(each.float(), other.float()) for each, other in zip(matrix, formulas[name], strict=True)]
            found[f"{rows} x {columns}, {name}"] = all(
                bool(((each == other) | (each.isnan() & other.isnan())).all()) for each, other in pairs
            )
    return found


def _rounded(x: torch.Tensor) -> dict[str, Float8Matrix]:
    by_row, largest = rounded_rows(x, with_columns=True)
    whole, turned = rounded_whole(x, largest_of(x), E5M2)
    return {
        "rows": by_row,
        "rows alone": rounded_rows(x)[0],
        "columns": rounded_columns(x, largest),
        "columns of rows": rounded_columns(by_row, largest),
        "one scale": whole,
        "one scale, exchanged": turned,
        "one scale, rows alone": rounded_whole(x, largest_of(x), E4M3, columns=False)[0],
        "one scale, columns alone": rounded_whole(x, largest_of(x), E4M3, rows=False)[1],
    }


def digests(rank: Rank) -> dict[str, bool]:
    """Whether the program sums lanes as the host does: none, a part of a block, several blocks, positions beyond 32
    bits."""
    lanes = torch.randint(-(2**63), 2**63 - 1, (2051,), generator=torch.Generator().manual_seed(0))
    found = {}
    for (start, stop), first in product(((0, 0), (3, 8), (0, 1024), (2, 2051)), (0, 2**33)):
        part = lanes[start:stop]
        on_device = int(torch.ops.rl_core.mixed_sums(part, first).sum())
        found[f"{start}:{stop} from {first}"] = (on_device - _host_sum(part.numpy(), first)) % 2**64 == 0
    return found


def compiled(rank: Rank) -> tuple[set[str], dict[str, float]]:
    """Operators in the graph of a compiled function of norms, gates and rotations, and distances from the results and
    gradients of the same function uncompiled."""
    form = FORMS["llama"]

    def layer(x, addend, weight, heads, cos, sin):
        normed, total = add_rms_norm(x, addend, weight, form)
        gated = swiglu(normed, total) + rms_norm(total, weight, form)
        return gated * swiglu_of_halves(torch.cat([gated, x], -1)), rotated(heads, cos, sin, HeadNorm(weight, form))

    found: set[str] = set()

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.update(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("rl_core."))
        return graph.forward

    generator = torch.Generator().manual_seed(0)
    shapes = (6, 16), (6, 16), (16,), (1, 2, 6, 16), (1, 6, 16), (1, 6, 16)
    inputs = [torch.randn(*shape, generator=generator) for shape in shapes]
    leaves = [each.requires_grad_() for each in inputs[:4]]
    outcomes = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=note))):
        outputs = function(*inputs)
        outcomes.append([*outputs, *torch.autograd.grad(sum(each.sin().sum() for each in outputs), leaves)])
    torch._dynamo.reset()
    errors = {str(place): float((a - b).abs().max()) for place, (a, b) in enumerate(zip(*outcomes, strict=True))}
    return found, errors


def paddings(rank: Rank) -> dict[str, bool]:
    """Whether rows that are padded in memory have the statistics and gradients of rows that are not."""
    hidden, weight, bias = draw(5, 16).bfloat16(), draw(4133, 16, seed=1).bfloat16(), draw(4133, seed=2).bfloat16()
    found = {}
    for name, of in {"plain": None, "with a bias": bias}.items():
        padded = head_products(hidden, weight, of)
        dense = F.linear(hidden, weight, of)
        found[f"{name}, products"] = torch.equal(padded, dense) and padded.stride(0) == 4144
        padded.as_strided((5, 11), (4144, 1), 4133).fill_(torch.nan)
        columns = torch.tensor([[0], [4132], [7], [4096], [1]])
        ones = torch.ones(5)
        of_both = [torch.stack(softmax_statistics(each, LogitForm(), squares=True)) for each in (padded, dense)]
        found[f"{name}, statistics"] = torch.equal(*of_both)
        for products, statistics in zip((padded, dense), of_both, strict=True):
            torch.ops.rl_core.softmax_gradient_(
                products, 1.0, None, 1.0, statistics[0], ones, None, None, None, None, columns, ones[:, None]
            )
        found[f"{name}, gradients"] = torch.equal(padded, dense)
    return found
