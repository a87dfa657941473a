"""Code that reads the device runs on tensors without data."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_core.torch.ledger.answers import Answers

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


def test_tensors_with_data_answer_for_themselves():
    with Answers(lengths, 7):
        assert int(torch.tensor(5)) == 5
        assert torch.tensor([0, 1]).nonzero().tolist() == [[1]]
