"""Live memory is that of the storages that are there."""

import torch
from ledger.counter import CostCounter

META = torch.device("meta")
SIZE = 1000 * 4


def tensor():
    return torch.empty(1000, device=META)


def peak(compute, device="meta"):
    with CostCounter(device) as counter:
        compute()
    return counter.costs.peak_bytes


def test_what_is_freed_no_longer_counts():
    def chain():
        x = tensor()
        for _ in range(10):
            x = x + 1

    assert peak(chain) == 2 * SIZE


def test_what_is_kept_counts_until_the_end():
    assert peak(lambda: [tensor() for _ in range(10)]) == 10 * SIZE


def test_views_count_once_and_what_was_there_before_does_not():
    before = tensor()
    assert peak(lambda: [before.view(10, 100), before[:5], before.add_(1)]) == 0
    assert peak(lambda: (before + 1).view(10, 100)[0]) == SIZE


def test_a_forward_pass_keeps_what_its_backward_pass_needs():
    weight = torch.empty(1000, device=META, requires_grad=True)
    with CostCounter() as counter:
        result = (weight.exp() * 2).sum()  # of exp the result is kept, and of the product nothing
        assert counter.live_bytes == SIZE + 4
        result.backward()
        del result
        assert counter.live_bytes == SIZE  # the gradient


def test_storages_that_are_resized_count_by_their_size():
    kept = []

    def resized():
        x, y = torch.empty(1000), torch.empty(1000)
        x.untyped_storage().resize_(0)
        z = y + 1  # only x is gone
        x.untyped_storage().resize_(3 * SIZE)
        kept.extend([x, y, z])
        torch.add(x, 1, out=x)

    assert peak(resized, "cpu") == 5 * SIZE
