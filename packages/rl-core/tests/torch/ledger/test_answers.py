"""Code that reads the device runs on tensors without data."""

import torch
from ledger.answers import Answers
from ledger.counter import CostCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

META = torch.device("meta")


def lengths(asked):
    return torch.tensor([3, 4]) if asked.shape == (2,) else torch.tensor(7)


def test_the_host_reads_what_it_is_given():
    ends = torch.empty(3, dtype=torch.int64, device=META)
    with Answers(lengths, 7):
        assert ends.diff().tolist() == [3, 4]
        assert int(ends[-1]) == 7
        assert torch.equal(ends, ends)


def test_results_are_as_large_as_they_can_be():
    with Answers(lengths, 7):
        assert torch.empty(5, dtype=torch.bool, device=META).nonzero().shape == (5, 1)
        assert torch.repeat_interleave(torch.empty(2, dtype=torch.int64, device=META)).shape == (7,)
        assert torch.bincount(torch.empty(5, dtype=torch.int64, device=META), minlength=9).shape == (9,)


def test_fake_tensors_are_answered_too():
    with FakeTensorMode(), Answers(lengths, 7):
        ends = torch.empty(3, dtype=torch.int64)
        assert int(ends[-1]) == 7
        assert (ends > 0).nonzero().shape == (3, 1)


def test_a_list_of_a_fake_tensor_is_one_wait():
    with FakeTensorMode(), Answers(lengths, 7), CostCounter("cpu") as counter:
        assert torch.empty(2, dtype=torch.int64).tolist() == [3, 4]
    assert counter.costs.num_waits == 1
    assert FakeTensor.tolist.__module__.startswith("torch.")


def test_tensors_with_data_answer_for_themselves():
    with Answers(lengths, 7):
        assert int(torch.tensor(5)) == 5
        assert torch.tensor([0, 1]).nonzero().tolist() == [[1]]


def test_tensors_with_data_stay_so_among_fake_ones():
    ranks = torch.arange(6)
    with FakeTensorMode(allow_non_fake_inputs=True), Answers(lengths, 7):
        assert ranks.view(2, 3)[1].tolist() == [3, 4, 5]
        assert isinstance(torch.tensor([1, 2]), FakeTensor)
