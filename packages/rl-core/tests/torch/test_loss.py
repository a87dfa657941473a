import pytest
import torch

from rl_core.model import UNDIVIDED
from rl_core.torch.loss import LossSums


def test_each_objective_is_divided_by_its_total_and_a_plain_sum_by_nothing():
    sums = LossSums({"tokens": torch.tensor(6.0), UNDIVIDED: torch.tensor(0.5), "sequences": torch.tensor(3.0)})
    assert sums.loss({"tokens": 4.0, "sequences": 2.0}).item() == 6 / 4 + 0.5 + 3 / 2


def test_a_total_of_zero_contributes_zero_with_a_gradient():
    value = torch.tensor(2.0, requires_grad=True)
    share = LossSums({"tokens": value}).loss({"tokens": 0.0})
    share.backward()
    assert (share.item(), value.grad.item()) == (0.0, 0.0)


def test_an_objective_without_a_total_is_an_error():
    with pytest.raises(KeyError, match="tokens"):
        LossSums({"tokens": torch.tensor(1.0)}).loss({})
