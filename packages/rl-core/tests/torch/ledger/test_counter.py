"""The counter sees all that is computed under it, forward and backward."""

import torch
from ledger.costs import Work
from ledger.counter import CostCounter
from torch import nn
from torch.utils.checkpoint import checkpoint

META = torch.device("meta")


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * 2


def test_operations_of_autograd_functions_count():
    x = torch.empty(100, device=META, requires_grad=True)
    with CostCounter() as forward:
        y = Square.apply(x)
    with CostCounter() as backward:
        y.backward(torch.empty_like(y))
    assert forward.costs.other == Work(1, 800)
    # two products and the gradient that is kept
    assert backward.costs.other.kernels == 2
    assert backward.costs.other.bytes == 3 * 400 + 2 * 400


def test_a_linear_layer_has_three_products():
    layer = nn.Linear(8, 4, bias=False, device=META)
    x = torch.empty(5, 8, device=META, requires_grad=True)
    with CostCounter() as counter:
        layer(x).backward(torch.empty(5, 4, device=META))
    assert counter.costs.products.kernels == 3
    assert counter.costs.flops == 3 * 2 * 5 * 8 * 4
    assert counter.costs.other == Work()


def test_what_is_recomputed_counts_again():
    layer = nn.Sequential(nn.Linear(8, 8, device=META), nn.Tanh())
    x = torch.empty(5, 8, device=META, requires_grad=True)
    with CostCounter() as plain:
        layer(x).sum().backward()
    layer.zero_grad()
    x.grad = None
    with CostCounter() as recomputed:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert recomputed.costs.products.kernels == plain.costs.products.kernels + 1
    assert recomputed.costs.other.kernels == plain.costs.other.kernels + 1


def test_work_on_the_host_costs_nothing():
    with CostCounter() as counter:
        (torch.ones(3) + 1).sum().item()
    assert counter.costs == type(counter.costs)()


def test_costs_are_counted_by_module():
    model = nn.Sequential(nn.Linear(8, 8, device=META), nn.Linear(8, 4, device=META))
    x = torch.empty(5, 8, device=META, requires_grad=True)
    with CostCounter(by_module=True) as counter:
        model(x).sum().backward()
    first, second = (counter.modules[f"Sequential.{place}"] for place in (0, 1))
    assert first.flops == 3 * 2 * 5 * 8 * 8
    assert second.flops == 3 * 2 * 5 * 8 * 4
    assert counter.modules["Sequential"].flops == counter.costs.flops == first.flops + second.flops
