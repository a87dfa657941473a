"""Recounts, in Triton's interpreter, the work of every operator on small tensors by the addresses that it touches."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import DispatchKeySet, Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.heads.logprobs import Head, head_reads
from rl_core.torch.kernels.devices import as_on_gpus
from rl_core.torch.kernels.float8 import E4M3, rounded_columns, rounded_rows, rounded_whole
from rl_core.torch.kernels.norm import NormForm, add_rms_norm, rms_norm
from rl_core.torch.kernels.permutation import collect, group_by_expert, spread_weighted
from rl_core.torch.kernels.rotary import HeadNorm, rotated, rotated_pair
from rl_core.torch.kernels.swiglu import swiglu, swiglu_of_halves
from rl_core.torch.transport import digest  # noqa: F401  # It registers an operator.

Found = dict[str, list[tuple[int, int]]]
"""Kernels and bytes of each call, by operator."""


def backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])


def leaf(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(*shape, device=device, dtype=dtype).requires_grad_()


def norms(device: str) -> None:
    x, addend, weight = leaf(device, 20, 24), leaf(device, 20, 24), leaf(device, 24)
    backward(*add_rms_norm(x, addend, weight, NormForm(1e-6)))
    backward(rms_norm(x, weight.detach(), NormForm(1e-6)))


def rotations(device: str) -> None:
    angles = torch.ones(1, 9, 24, device=device, dtype=torch.bfloat16)
    x = leaf(device, 2, 9, 5, 24).transpose(1, 2)
    backward(rotated(x, angles, angles, HeadNorm(leaf(device, 24), NormForm(1e-6))))
    backward(rotated(x, angles, angles))
    few, norms = leaf(device, 2, 9, 3, 24), [HeadNorm(leaf(device, 24), NormForm(1e-6)) for _ in range(2)]
    backward(*rotated_pair(x, few.transpose(1, 2), angles, angles, (norms[0], norms[1])))


def gates(device: str) -> None:
    backward(swiglu(leaf(device, 7, 1100), leaf(device, 7, 1100)))
    backward(swiglu_of_halves(leaf(device, 7, 80), leaf(device, 7)))


def permutations(device: str) -> None:
    ids = torch.tensor([[0, 3], [2, 1], [3, 0]])
    tokens, weights = leaf(device, 3, 40), leaf(device, 3, 2, dtype=torch.float32)
    places = group_by_expert(ids, 4).places.to(device)
    rows, row_weights = spread_weighted(tokens, weights, places, 6)
    backward(collect(rows, places), row_weights)


def heads(device: str) -> None:
    targets = torch.zeros(5, dtype=torch.int64, device=device)
    reads = head_reads(leaf(device, 5, 16), Head(leaf(device, 4100, 16)), targets, entropy=True, chunk_size=5)
    backward(reads.logprobs, reads.entropy)


def casts(device: str) -> None:
    x = leaf(device, 6, 300).detach()
    rounded, largest = rounded_rows(x, with_columns=True)
    rounded_columns(rounded, largest)
    rounded_whole(x, torch.ones(1, device=device), E4M3)


def digests(device: str) -> None:
    torch.ops.rl_core.mixed_sums(torch.ones(3000, dtype=torch.int64, device=device), 0)


CASES: tuple[Callable[[str], None], ...] = (norms, rotations, gates, permutations, heads, casts, digests)


class Recount(TorchDispatchMode):
    """Records what operators of the project do: their operations of torch, and their Triton programs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Found = defaultdict(list)
        self._work: list[int] | None = None
        self._touched: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)

    def touch(self, kind: str, places: Any, mask: Any) -> None:
        """Record addresses that a program loads from or stores to."""
        width = max(1, places.get_element_ty().primitive_bitwidth // 8)
        self._touched[kind, width].append(places.data[mask.data.astype(bool)])

    def launch(self, run: Callable[[], None]) -> None:
        """Run a program, which reads and writes each address once however often it touches it."""
        work, self._work = self._work, None  # The interpreter's own copies are no work of the program.
        self._touched.clear()
        run()
        assert work is not None
        work.append(sum(width * len(np.unique(np.concatenate(places))) for (_, width), places in self._touched.items()))
        self._work = work

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace != "rl_core":
            out = function(*args, **kwargs)
            if self._work is not None and not function.is_view and "empty" not in str(function):
                fills = "zero" in str(function) or "full" in str(function)
                moved = [*([] if fills else args), out]
                size = sum(each.numel() * each.element_size() for each in moved if isinstance(each, Tensor))
                self._work += [size] if size else []
            return out
        self._work = []
        with self:
            out = function.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
        self.found[function._opname].append((len(self._work), sum(self._work)))
        self._work = None
        return out


def recounted(rank: Rank) -> Found:
    """Work of all calls of operators in the cases, on tensors with data."""
    import triton.runtime.interpreter as interpreter

    counted = Recount()
    builder, run = interpreter.InterpreterBuilder, interpreter.InterpretedFunction.run
    load, store, add = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def loaded(self: Any, places: Any, mask: Any, *rest: Any) -> Any:
        counted.touch("load", places, mask)
        return load(self, places, mask, *rest)

    def stored(self: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counted.touch("store", places, mask)
        return store(self, places, value, mask, *rest)

    def added(self: Any, kind: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counted.touch("store", places, mask)
        return add(self, kind, places, value, mask, *rest)

    with (
        as_on_gpus(),
        patch.object(builder, "create_atomic_rmw", added),
        patch.object(builder, "create_masked_load", loaded),
        patch.object(builder, "create_masked_store", stored),
        patch.object(
            interpreter.InterpretedFunction,
            "run",
            lambda self, *args, **options: counted.launch(lambda: run(self, *args, **options)),
        ),
        counted,
    ):
        for case in CASES:
            case("cpu")
    return dict(counted.found)
