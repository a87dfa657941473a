"""Heads of one output: what is read from them, and their first weights."""

import torch

from rl_core.model import SCORES, VALUES
from rl_core.torch.heads.reads import new_head, scalar_reads
from rl_core.torch.loss import Rows


def test_values_are_those_before_each_token_and_scores_those_behind_the_last():
    rows = Rows(torch.tensor([0, 3, 4]), {"tokens": torch.arange(4)})
    outputs = torch.tensor([1.0, 2.0, 3.0, 4.0])
    both = scalar_reads(outputs, rows, [VALUES, SCORES])
    assert both["values"].tolist() == [0.0, 1.0, 2.0, 0.0]
    assert both["scores"].tolist() == [3.0, 4.0]
    assert list(scalar_reads(outputs, rows, [VALUES])) == ["values"]


def test_a_new_head_of_a_critic_is_zero_and_that_of_a_reward_model_follows_from_the_seed():
    assert not new_head("critic", (1, 64), std=0.1, seed=3).any()
    first, again, other = (new_head("reward_model", (1, 4096), std=0.1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert abs(first.std().item() - 0.1) < 0.01
