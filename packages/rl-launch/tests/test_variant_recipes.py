"""What the recipes of GRPO's variants choose."""

from itertools import pairwise

import pytest

from rl_algos.grpo.estimators import chosen
from rl_algos.policy_gradient.loss import objective_of
from rl_launch.run_config.reading import read_plan

VARIANTS = {
    # recipe: surrogate, aggregation, estimator
    "grpo-arithmetic": ("clip", "token-mean", "grpo"),
    "dapo-tiny": ("clip", "token-mean", "grpo"),
    "dapo-math-8b": ("clip", "token-mean", "grpo"),
    "dapo-math-32b": ("clip", "token-mean", "grpo"),
    "deepscaler-1.5b-8k": ("clip", "token-mean", "grpo"),
    "deepswe-32b": ("clip", "sequence-mean-token-sum", "rloo"),
    "drgrpo-tiny": ("clip", "sequence-mean-token-sum", "drgrpo"),
    "drgrpo-math-7b": ("clip", "sequence-mean-token-sum", "drgrpo"),
    "gspo-tiny": ("gspo", "sequence-mean", "grpo"),
    "gspo-qwen3-30b-a3b": ("gspo", "sequence-mean", "grpo"),
    "cispo-tiny": ("cispo", "token-mean", "grpo"),
    "sapo-tiny": ("sapo", "sequence-mean", "grpo"),
    "luffy-tiny": ("clip", "token-mean", "grpo"),
    "chord-tiny": ("clip", "token-mean", "grpo"),
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


def test_recipes_of_demonstrations_take_rows_and_learn_them():
    luffy, chord = (read_plan(recipe, ON_CPU).config for recipe in ("luffy-tiny", "chord-tiny"))
    terms = [objective_of(config, config.grpo).loss.demonstrations for config in (luffy, chord)]
    assert [(term.name, term.by_probability) for term in terms] == [("shaped", False), ("nll", True)]
    assert (luffy.grpo.demonstrations.share, chord.grpo.demonstrations.rows_per_step) == (0.125, 64)
    # Rows that are held out for validation are not among the demonstrations.
    assert chord.grpo.demonstrations.dataset.settings == chord.data.train.settings


def test_the_divisor_of_dr_grpo_follows_the_longest_response():
    config = read_plan("drgrpo-tiny", [*ON_CPU, "policy.generation.max_new_tokens=7"]).config
    assert objective_of(config, config.grpo).loss.aggregation.divisor == 7.0


def updates(config):
    """Return the number of updates of a step."""
    grpo = config.grpo
    return grpo.num_prompts_per_step * grpo.num_generations_per_prompt / config.policy.train_global_batch_size


@pytest.mark.parametrize(
    ("recipe", "prompts", "samples", "num_updates", "answer"),
    [
        # As published: arXiv:2503.14476, 2503.20783 and 2503.09516, and the authors' scripts.
        ("deepscaler-1.5b-8k", 128, 8, 2, 8192),
        ("deepscaler-1.5b-16k", 128, 16, 2, 16384),
        ("deepscaler-1.5b-24k", 128, 16, 2, 24576),
        ("dapo-math-32b", 512, 16, 16, 20480),
        ("drgrpo-math-7b", 128, 8, 8, 3000),
        ("search-r1-7b", 512, 5, 10, 500),
        ("deepswe-32b", 8, 8, 1, 4096),
    ],
)
def test_a_recipe_of_a_paper_has_its_batches_and_lengths(recipe, prompts, samples, num_updates, answer):
    config = read_plan(recipe).config
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (prompts, samples)
    assert updates(config) == num_updates
    assert config.policy.generation.max_new_tokens == answer
    assert config.policy.optimizer.kwargs["lr"] == 1e-6
    assert config.cluster.num_nodes * config.cluster.gpus_per_node % 8 == 0


def test_a_warm_up_counts_the_updates_of_its_steps():
    for recipe, steps in (("dapo-math-32b", 20), ("search-r1-7b", 286)):
        config = read_plan(recipe).config
        [schedule] = config.policy.scheduler
        assert schedule.kwargs["total_iters"] == steps * updates(config)


def test_stages_of_deepscaler_differ_in_lengths_and_samples_only():
    stages = [read_plan(f"deepscaler-1.5b-{length}").config for length in ("8k", "16k", "24k")]
    for before, after in pairwise(stages):
        assert before.policy.generation.max_new_tokens < after.policy.generation.max_new_tokens
        assert before.loss_fn == after.loss_fn
        assert before.policy.optimizer == after.policy.optimizer
        assert before.policy.model_name == after.policy.model_name
        assert before.data == after.data


def test_dapo_penalises_long_answers_as_published():
    config = read_plan("dapo-math-32b").config
    shaping = config.grpo.reward_shaping
    assert (shaping.max_response_length, shaping.overlong_buffer_length) == (20480, 4096)
    assert (shaping.overlong_buffer_penalty, config.env.math.wrong_reward) == (1.0, -1.0)
    assert (config.loss_fn.surrogate.clip_low, config.loss_fn.surrogate.clip_high) == (0.2, 0.28)
