"""Work of single operations, against what is counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from ledger.costs import Costs, Work
from ledger.counter import CostCounter
from ledger.flash import inner_backward
from ledger.operations import num_bytes, register_cost

META = torch.device("meta")


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, device=META, dtype=dtype)


def counted(compute):
    with CostCounter() as counter:
        compute()
    return counter.costs


A, B = on_meta(6, 4), on_meta(6, 4)
IDS = on_meta(3, dtype=torch.int64)
CASES = {
    "reads both, writes one": (lambda: A + B, Work(1, 3 * 96)),
    "one tensor twice is read once": (lambda: A * A, Work(1, 2 * 96)),
    "in place": (lambda: on_meta(6, 4).add_(A), Work(1, 3 * 96)),
    "into a given tensor": (lambda: torch.add(A, B, out=on_meta(6, 4)), Work(1, 3 * 96)),
    "a copy does not read its target": (lambda: on_meta(6, 4).copy_(A), Work(1, 2 * 96)),
    "filling only writes": (lambda: on_meta(6, 4).zero_(), Work(1, 96)),
    "new zeros only write": (lambda: A.new_zeros(6, 4), Work(1, 96)),
    "a broadcast tensor is read once": (lambda: A + on_meta(1, 4).expand(6, 4), Work(1, 96 + 16 + 96)),
    "gather reads what it returns": (lambda: on_meta(1000, 4).index_select(0, IDS), Work(1, 24 + 2 * 48)),
    "look-up": (lambda: F.embedding(IDS, on_meta(1000, 4)), Work(1, 24 + 2 * 48)),
    "scatter touches its values": (lambda: on_meta(1000, 4).index_add_(0, IDS, on_meta(3, 4)), Work(1, 24 + 3 * 48)),
    "scatter into a copy": (
        lambda: on_meta(1000, 4).index_add(0, IDS, on_meta(3, 4)),
        Work(2, 24 + 3 * 48 + 2 * 16000),
    ),
    "another dtype": (lambda: A.to(torch.bfloat16), Work(1, 96 + 48)),
    "padding by nothing is a copy": (lambda: F.pad(A, (0, 0)), Work(1, 2 * 96)),
    "views": (lambda: A.view(4, 6).t()[1:].unsqueeze(0).expand(2, 5, 4).detach(), Work()),
    "no data is made": (lambda: (torch.empty_like(A), A.new_empty(3), torch.empty(3, device=META)), Work()),
    "splits are views": (lambda: A.split(2), Work()),
}


@pytest.mark.parametrize(("compute", "work"), CASES.values(), ids=CASES)
def test_work_is_that_counted_by_hand(compute, work):
    costs = counted(compute)
    assert costs.other == work
    assert costs.products == Work()


def test_products_are_counted_apart():
    other = on_meta(4, 5)
    costs = counted(lambda: A @ other)
    assert costs == Costs(products=Work(1, 96 + 80 + 120), flops=2 * 6 * 4 * 5, peak_bytes=120)
    assert counted(lambda: F.linear(A, on_meta(5, 4), on_meta(5))).products == Work(1, 96 + 80 + 20 + 120)


def test_groups_of_experts_are_one_product_of_the_rows_they_have():
    rows, stack = on_meta(32, 16, dtype=torch.bfloat16), on_meta(4, 16, 64, dtype=torch.bfloat16)
    ends = on_meta(4, dtype=torch.int32)
    forward = counted(lambda: torch._grouped_mm(rows, stack, offs=ends))
    assert forward.products == Work(1, 2 * (32 * 16 + 4 * 16 * 64 + 32 * 64) + 16)
    assert forward.flops == 2 * 32 * 16 * 64
    grad = on_meta(32, 64, dtype=torch.bfloat16)
    by_stack = counted(lambda: torch._grouped_mm(rows.t(), grad, offs=ends))
    assert by_stack.flops == forward.flops


def test_bytes_of_a_tensor_leave_out_what_is_repeated():
    assert num_bytes(A) == 96
    assert num_bytes(on_meta(1, 4).expand(6, 4)) == 16
    assert num_bytes(A[:0]) == 0
    assert num_bytes(A[:, :1]) == 24


@pytest.fixture(scope="module")
def custom():
    """An operation that reads its argument twice, and one whose costs are not registered."""

    @torch.library.custom_op("rl_ledger_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("rl_ledger_test::once", mutates_args=())
    def once(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for operation in (twice, once):
        operation.register_fake(torch.empty_like)
        operation.register_autograd(lambda ctx, grad: grad * 2)

    @register_cost(torch.ops.rl_ledger_test.twice)
    def cost(x, *, out):
        return Costs(other=Work(1, 2 * num_bytes(x) + num_bytes(out)))

    return torch.ops.rl_ledger_test


def test_a_custom_operation_costs_what_is_registered_and_one_without_costs_is_refused(custom):
    assert counted(lambda: custom.twice(A)).other == Work(1, 3 * 96)
    with pytest.raises(ValueError, match=r"rl_ledger_test.once.* has no formula of its costs; register one"):
        counted(lambda: custom.once(A))


def test_nothing_is_launched_for_tensors_without_entries():
    assert counted(lambda: on_meta(0, 4).zero_()).other == Work()


@pytest.mark.parametrize(("generation", "grouped"), [("FA2", 2 * 2 * 2 * 32), ("FA3", 2 * 4 * 4 * 8)])
def test_attention_sums_gradients_by_queries_in_float32_and_those_of_groups_by_generation(generation, grouped):
    """Qwen3-8B: 32 heads of queries and 8 of keys."""
    alone = inner_backward(generation, 10, 32, 32, 128)
    inner = inner_backward(generation, 10, 32, 8, 128)
    # cleared, read and written while it is summed, read when it is converted; and the gradient by the output once more
    assert inner.by_queries == alone.by_queries == Work(2, 10 * 32 * 128 * (4 * 4 + 2))
    assert alone.by_groups == Work()
    assert inner.by_groups.bytes == 10 * 128 * grouped


def test_a_formula_is_registered_once(custom):
    with pytest.raises(ValueError, match="already has a formula"):
        register_cost(custom.twice)(lambda x, *, out: Costs())
