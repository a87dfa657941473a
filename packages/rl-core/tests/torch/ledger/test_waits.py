"""Waits of the host are those that a GPU would have."""

import numpy as np
import pytest
import torch
from ledger.answers import Answers
from ledger.counter import CostCounter

META = torch.device("meta")
NUMBERS = torch.empty(4, device=META, dtype=torch.int64)
FLOATS = torch.empty(4, device=META)
MASK = torch.empty(4, device=META, dtype=torch.bool)
HOST = torch.arange(4)


def waits(compute):
    with Answers(lambda asked: torch.tensor(3), 12), CostCounter() as counter:
        compute()
    return counter.costs.waits


CASES = {
    "a number": (lambda: int(NUMBERS[1]), {"local_scalar_dense": 1}),
    "a condition": (lambda: bool(MASK.any()), {"local_scalar_dense": 1}),
    "a list is one copy": (lambda: NUMBERS.tolist(), {"copy to host": 1}),
    "to the host": (lambda: FLOATS.cpu(), {"copy to host": 1}),
    "from a list": (lambda: torch.tensor([1, 2], device=META), {"copy to device": 1}),
    "from an array": (lambda: torch.tensor(np.zeros(3), device=META), {"copy to device": 1}),
    "from the host": (lambda: HOST.to(META), {"copy to device": 1}),
    "into a tensor": (lambda: torch.empty(4, device=META).copy_(HOST), {"copy to device": 1}),
    "places of a mask": (lambda: MASK.nonzero(), {"nonzero": 1}),
    "repeats of unknown sum": (lambda: torch.repeat_interleave(NUMBERS), {"repeat_interleave": 2}),
    "counts": (lambda: torch.bincount(NUMBERS, minlength=9), {"bincount": 2}),
    "equality": (lambda: torch.equal(NUMBERS, NUMBERS), {"equal": 1}),
    "a copy that does not wait": (lambda: HOST.to(META, non_blocking=True), {}),
    "repeats of known sum": (lambda: torch.repeat_interleave(NUMBERS, output_size=9), {}),
    "numbers of the host": (lambda: (int(HOST[1]), HOST.nonzero(), HOST.tolist()), {}),
    "made on the device": (lambda: (torch.zeros(3, device=META), FLOATS[NUMBERS], MASK.where(MASK, MASK)), {}),
}


@pytest.mark.parametrize(("compute", "expected"), CASES.values(), ids=CASES)
def test_a_wait_is_recognised(compute, expected):
    assert waits(compute) == expected


def test_a_mask_as_an_index_waits_for_its_places():
    """On a CPU, as its size depends on data."""
    mask = torch.tensor([True, False, True])
    with CostCounter("cpu") as counter:
        chosen = torch.ones(3)[mask]
    assert len(chosen) == 2
    assert counter.costs.waits == {"index by a mask": 1}


def test_copies_between_devices_are_no_kernels():
    with CostCounter() as counter:
        HOST.to(META)
    assert counter.costs.other.kernels == 0
