"""What algorithms that train on their own rollouts refuse together."""

from types import SimpleNamespace

import pytest

from rl_algos.grpo.plugin import PLUGIN as GRPO
from rl_algos.ppo.plugin import PLUGIN as PPO
from rl_algos.rollouts.checks import whole_distribution
from rl_algos.rollouts.plugin import rollout_algorithm
from rl_core.model_config import GenerationConfig


def config(**sampling):
    return SimpleNamespace(policy=SimpleNamespace(generation=GenerationConfig(**sampling)))


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}])
def test_an_algorithm_that_reads_logprobs_of_all_tokens_samples_from_all(sampling):
    plugin = rollout_algorithm("mine", sections={}, run="mine:run", models=lambda _: {})
    assert whole_distribution in plugin.checks
    assert [each.key for each in whole_distribution(config(**sampling))] == [
        f"policy.generation.{key}" for key in sampling
    ]


def test_algorithms_of_the_policy_loss_read_the_tokens_that_sampling_keeps():
    assert whole_distribution not in (*GRPO.checks, *PPO.checks)
