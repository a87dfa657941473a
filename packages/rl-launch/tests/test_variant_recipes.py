"""What the recipes of GRPO's variants choose."""

import pytest

from rl_algos.grpo.estimators import chosen
from rl_algos.policy_gradient.loss import objective_of
from rl_launch.run_config.reading import read_plan

VARIANTS = {
    # recipe: surrogate, aggregation, estimator
    "grpo-arithmetic": ("clip", "token-mean", "grpo"),
    "dapo-tiny": ("clip", "token-mean", "grpo"),
    "dapo-math-8b": ("clip", "token-mean", "grpo"),
    "drgrpo-tiny": ("clip", "sequence-mean-token-sum", "drgrpo"),
    "gspo-tiny": ("gspo", "sequence-mean", "grpo"),
    "gspo-qwen3-30b-a3b": ("gspo", "sequence-mean", "grpo"),
    "cispo-tiny": ("cispo", "token-mean", "grpo"),
    "sapo-tiny": ("sapo", "sequence-mean", "grpo"),
    "rloo-tiny": ("reinforce", "token-mean", "rloo"),
    "reinforce-pp-tiny": ("clip", "token-mean", "reinforce_plus_plus"),
}
ON_CPU = ["cluster.device=cpu"]


@pytest.mark.parametrize("recipe", VARIANTS)
def test_a_recipe_of_a_variant_chooses_its_parts(recipe):
    config = read_plan(recipe, ON_CPU if recipe.endswith("tiny") else []).config
    loss = objective_of(config, config.grpo).loss
    assert (loss.surrogate.name, loss.aggregation.name, chosen(config.grpo)) == VARIANTS[recipe]


def test_variants_with_kl_in_the_reward_keep_a_reference_and_have_no_kl_in_the_loss():
    for recipe in ("rloo-tiny", "reinforce-pp-tiny"):
        config = read_plan(recipe, ON_CPU).config
        objective = objective_of(config, config.grpo)
        assert "ref_logprobs" in objective.columns
        assert objective.loss.kl is None


def test_the_divisor_of_dr_grpo_follows_the_longest_response():
    config = read_plan("drgrpo-tiny", [*ON_CPU, "policy.generation.max_new_tokens=7"]).config
    assert objective_of(config, config.grpo).loss.aggregation.divisor == 7.0
