"""Kernels on meta tensors have the shapes and dtypes of the plain formulas, forward and backward."""

import pytest
import torch

from rl_core.token_filter import TokenFilter
from rl_core.torch.heads.logprobs import Head, chunk_size_of, head_reads
from rl_core.torch.kernels.norm import NormForm, add_rms_norm, rms_norm
from rl_core.torch.kernels.permutation import collect, group_by_expert, spread_weighted
from rl_core.torch.kernels.rotary import HeadNorm, rotated
from rl_core.torch.kernels.swiglu import swiglu, swiglu_of_halves
from rl_core.torch.kernels.vocabulary import add_product_


def leaf(*shape, device="meta"):
    return torch.zeros(*shape, dtype=torch.bfloat16, device=device, requires_grad=True)


def rotation(device):
    # as from a projection, the heads of a token lie together
    heads = leaf(2, 5, 3, 16, device=device)
    angles = torch.zeros(1, 5, 8, dtype=torch.bfloat16, device=device)
    norm = HeadNorm(leaf(16, device=device), NormForm(1e-6))
    return [heads, norm.weight], [rotated(heads.transpose(1, 2), angles, angles, norm)]


def norms(device):
    inputs = [leaf(2, 5, 16, device=device), leaf(2, 5, 16, device=device), leaf(16, device=device)]
    form = NormForm(1e-6, offset=1.0, rounds_first=False)
    return inputs, [*add_rms_norm(*inputs, form), rms_norm(inputs[0], inputs[2], form)]


def gates(device):
    gate, up, both = leaf(4, 8, device=device), leaf(4, 8, device=device), leaf(4, 16, device=device)
    weights = leaf(4, device=device)
    return [gate, up, both, weights], [swiglu(gate, up), swiglu_of_halves(both), swiglu_of_halves(both, weights)]


def permutation(device):
    tokens, weights = leaf(5, 8, device=device), leaf(5, 2, device=device)
    places, ends = group_by_expert(torch.zeros(5, 2, dtype=torch.int64, device=device), 3)
    rows, row_weights = spread_weighted(tokens, weights, places, 10)
    return [tokens, weights], [rows, row_weights, collect(rows, places), ends]


def reads(device):
    hidden, weight = leaf(5, 8, device=device), leaf(40, 8, device=device)
    targets = torch.zeros(5, dtype=torch.int64, device=device)
    found = head_reads(hidden, Head(weight), targets, entropy=True, collision=True, k=3, chunk_size=2)
    return [hidden, weight], [found.logprobs, found.entropy, found.topk_logprobs, found.collision]


@pytest.mark.parametrize("case", [rotation, norms, gates, permutation, reads])
def test_shapes_and_dtypes_are_those_of_the_formulas(case):
    described = []
    for device in ("meta", "cpu"):
        inputs, outputs = case(device)
        sum(output.float().sum() for output in outputs).backward()
        tensors = [*outputs, *(each.grad for each in inputs)]
        described.append([(each.shape, each.dtype) for each in tensors])
    assert described[0] == described[1]


def test_more_positions_are_read_at_a_time_where_kernels_read_them():
    narrow, wide = leaf(3, 4096), leaf(3, 4097)
    assert [chunk_size_of(each, None) for each in (narrow, wide)] == [4096, 1024]
    assert chunk_size_of(narrow, None, TokenFilter(top_k=3)) == 1024
    assert chunk_size_of(torch.zeros(3, 16), None) == 1024
    assert chunk_size_of(narrow, 7) == 7


def test_products_are_added_to_a_wider_total():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((6, 40), (40, 4)))
    total = torch.ones(6, 4)
    add_product_(total, a, b)
    torch.testing.assert_close(total, 1 + (a @ b).float())
    shape = torch.zeros(6, 4, device="meta")
    add_product_(shape, a.to("meta"), b.to("meta"))
    assert shape.dtype == torch.float32
