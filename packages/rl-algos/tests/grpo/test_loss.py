"""What a config's sections become."""

from types import SimpleNamespace

import pytest

from rl_algos.grpo.config import GRPOConfig, LossConfig
from rl_algos.grpo.loss import loss_of


def make_config(minibatch, **loss):
    return SimpleNamespace(
        grpo=GRPOConfig(num_prompts_per_step=4, num_generations_per_prompt=2),
        loss_fn=LossConfig(**loss),
        policy=SimpleNamespace(train_global_batch_size=minibatch, generation=SimpleNamespace(temperature=0.7)),
    )


@pytest.mark.parametrize(("minibatch", "forced", "on_policy"), [(8, None, True), (4, None, False), (8, False, False)])
def test_one_minibatch_a_step_needs_no_logprobs_from_before_it_unless_they_are_asked_for(minibatch, forced, on_policy):
    loss = loss_of(make_config(minibatch, force_on_policy_ratio=forced))
    assert loss.on_policy is on_policy
    assert ("prev_logprobs" in loss.columns) is not on_policy


def test_the_loss_divides_by_the_temperature_that_rollouts_are_sampled_at():
    assert loss_of(make_config(8)).temperature == 0.7
