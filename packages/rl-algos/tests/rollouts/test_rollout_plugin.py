"""What algorithms that train on their own rollouts refuse together."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_algos.distillation.plugin import OFFLINE
from rl_algos.distillation.plugin import PLUGIN as DISTILLATION
from rl_algos.dpo.plugin import PLUGIN as DPO
from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.grpo.plugin import PLUGIN as GRPO
from rl_algos.ppo.plugin import PLUGIN as PPO
from rl_algos.reward_model.plugin import PLUGIN as REWARD_MODEL
from rl_algos.rollouts.checks import engine_problems, whole_distribution
from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.plugin import rollout_algorithm
from rl_algos.sft.plugin import PLUGIN as SFT
from rl_core.model_config import GenerationConfig

ALGORITHMS = (GRPO, PPO, DISTILLATION, OFFLINE, SFT, DPO, REWARD_MODEL)


def config(**sampling):
    return SimpleNamespace(policy=SimpleNamespace(generation=GenerationConfig(**sampling)), mine=RolloutConfig())


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}])
def test_an_algorithm_that_reads_logprobs_of_all_tokens_samples_from_all(sampling):
    plugin = rollout_algorithm("mine", sections={}, implementation="mine:Mine", models=lambda _: {})
    assert whole_distribution in plugin.checks
    assert {each.key: each.got for each in whole_distribution(config(**sampling))} == {
        f"policy.generation.{key}": value for key, value in sampling.items()
    }


@pytest.mark.parametrize("plugin", ALGORITHMS, ids=lambda plugin: plugin.name)
def test_keys_that_turn_validation_off_are_keys_of_the_algorithm(plugin):
    section = next(iter(plugin.sections))
    kind = plugin.sections[section]
    fields = (kind if isinstance(kind, type) else kind(None)).model_fields
    assert plugin.without_validation
    for key, value in plugin.without_validation.items():
        assert key.startswith(f"{section}.")
        name = key.removeprefix(f"{section}.")
        # the number of steps between validations may have a default of its own
        assert name in fields
        assert name == "val_period" or fields[name].default == value


@pytest.mark.parametrize("plugin", [SFT, DPO, OFFLINE], ids=lambda plugin: plugin.name)
def test_a_run_on_given_rows_generates_only_if_it_scores_tasks(plugin):
    scoring = plugin.scoring
    assert (plugin.generates, plugin.evaluates, "eval" in plugin.root_keys) == (False, False, False)
    assert (scoring.generates, scoring.evaluates, "eval" in scoring.root_keys) == (True, True, True)
    assert set(plugin.sections) < set(scoring.sections)
    # A plugin that is made of this one keeps its own name and implementation.
    made = replace(plugin, name="mine", implementation="mine.py:Mine")
    assert (made.scoring.name, made.scoring.implementation) == ("mine", "mine.py:Mine")
    assert scoring.scoring is REWARD_MODEL.scoring is None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tasks": ["gsm8k"]}, "eval.period"),
        ({"period": 5}, "eval.tasks"),
        ({"tasks": ["gsm8k"], "at_end": True}, None),
        ({"tasks": ["gsm8k"], "at_start": True}, None),
    ],
)
def test_tasks_and_the_time_to_score_them_are_set_together(settings, key):
    found = list(engine_problems(SimpleNamespace(eval=EvaluationConfig(**settings))))
    assert [problem.key for problem in found] == ([] if key is None else [key])


def test_algorithms_of_the_policy_loss_read_the_tokens_that_sampling_keeps():
    assert whole_distribution not in (*GRPO.checks, *PPO.checks)
