"""Inside `exact_rows` a row has the same bits alone and among others."""

import pytest
import torch
import torch.nn.functional as F

from rl_core.token_filter import TokenFilter
from rl_core.torch.heads.logprobs import Head, head_reads, logprobs_of
from rl_core.torch.kernels import exact
from rl_core.torch.kernels.exact import check_exact_rows, computes_exact_rows, exact_rows

WIDTH, OUTPUTS = 37, 11
"""Not multiples of the number of rows and columns of a product, nor of a vector register."""

WEIGHT, BIAS = torch.randn(OUTPUTS, WIDTH), torch.randn(OUTPUTS)
FUNCTIONS = {
    "linear": lambda x: F.linear(x, WEIGHT),
    "linear with a bias": lambda x: F.linear(x, WEIGHT, BIAS),
    "batched product": lambda x: torch.bmm(x[None].expand(3, -1, -1), WEIGHT.T[None].expand(3, -1, -1))[1],
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "cube": lambda x: x.abs() ** 0.3,
    "in place": lambda x: x.clone().sigmoid_(),
    "mean": lambda x: x.pow(2).mean(-1),
    "sum": lambda x: x.sum(-1, dtype=torch.float64),
    "rms norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_alone_and_among_others(name, context):
    function, x = FUNCTIONS[name], torch.randn(23, WIDTH)
    with context(), exact_rows():
        together = function(x)
        for row in range(len(x)):
            assert torch.equal(function(x[row : row + 1].clone())[0], together[row])
    torch.testing.assert_close(together.clone(), function(x))


def test_a_row_of_many_elements_does_not_depend_on_threads():
    x, found = torch.randn(3, 2 * exact.CHUNK + 5), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with exact_rows():
                found.append(torch.cat([x[:1].sum(-1), x[1:].sum(-1), F.silu(x).flatten()]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_operators_outside_keep_their_kernels():
    x = torch.randn(1, WIDTH, requires_grad=True)
    assert not computes_exact_rows()
    with exact_rows():
        assert computes_exact_rows()
        out = F.silu(F.linear(x, WEIGHT))
    assert not computes_exact_rows()
    (grad,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(F.silu(F.linear(x, WEIGHT)).sum(), x)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("token_filter", [None, TokenFilter(top_p=0.8, top_k=7), TokenFilter(min_p=0.1)])
def test_logprobs_of_drawn_tokens_are_those_that_a_head_reads(token_filter):
    hidden, weight, targets = torch.randn(9, WIDTH), torch.randn(83, WIDTH), torch.randint(83, (9,))
    with exact_rows():
        read = head_reads(hidden, Head(weight), targets, temperature=0.7, token_filter=token_filter, chunk_size=4)
        logits = F.linear(hidden, weight)
        alone = [logprobs_of(logits[row : row + 1], targets[row : row + 1], 0.7, token_filter) for row in range(9)]
    assert torch.equal(torch.cat(alone), read.logprobs)


def test_a_machine_whose_products_depend_on_their_rows_is_refused(monkeypatch):
    check_exact_rows([(OUTPUTS, WIDTH), (WIDTH, OUTPUTS)], torch.float32)
    product = exact._OPERATORS[torch.ops.aten.mm.default]

    def by_rows(func, a, b):
        return product(func, a, b) * (1 + len(a) * 1e-6)

    monkeypatch.setitem(exact._OPERATORS, torch.ops.aten.mm.default, by_rows)
    with pytest.raises(ValueError, match=f"{WIDTH} inputs and {OUTPUTS} outputs.*policy.generation.exact=false"):
        check_exact_rows([(OUTPUTS, WIDTH)], torch.float32)
