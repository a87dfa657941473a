"""What a PPO config becomes, and what is refused."""

from types import SimpleNamespace

import pytest
from problem_fields import MENTIONS, assert_fields

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.policy_gradient.config import LossConfig
from rl_algos.policy_gradient.loss import policy_loss_of
from rl_algos.ppo.config import PPOConfig
from rl_algos.ppo.plugin import PLUGIN
from rl_core.config import Config
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.plugins import export_suffixes


def make_config(*, loss=None, policy_rows=8, value=None, **settings):
    return SimpleNamespace(
        ppo=PPOConfig(**{"num_prompts_per_step": 8} | settings),
        loss_fn=LossConfig(**loss or {}),
        policy=SimpleNamespace(
            train_global_batch_size=policy_rows,
            max_total_sequence_length=64,
            generation=GenerationConfig(backend="none", max_new_tokens=8),
        ),
        value=ModelConfig(
            **{"model_name": "critic", "train_global_batch_size": 8, "max_total_sequence_length": 64} | (value or {})
        ),
        data=DataConfig(train=DatasetConfig(dataset_name="arithmetic")),
        env=Config(),
        judges=Config(),
        eval=EvaluationConfig(),
    )


def problems(config):
    return [problem for check in PLUGIN.checks for problem in check(config)]


def test_policy_and_critic_train_and_the_policy_alone_keeps_a_reference():
    needs = PLUGIN.models(make_config())
    assert (needs["critic"].section, needs["critic"].spec.role) == ("value", "critic")
    assert needs["policy"].spec.keeps_reference
    assert needs["critic"].spec.trains
    assert not needs["critic"].spec.keeps_reference
    without = PLUGIN.models(make_config(loss={"kl": {"weight": 0.0}}))
    assert not without["policy"].spec.keeps_reference


def test_the_critic_is_exported_if_that_is_asked_for():
    for wanted in (False, True):
        needs = PLUGIN.models(make_config(export_critic=wanted))
        assert needs["critic"].exported is wanted
        assert export_suffixes(needs) == {"policy": "", **({"critic": "_critic"} if wanted else {})}


def test_a_reference_may_follow_the_policy_if_the_loss_reads_it():
    moves = {"reference_sync_period": 4, "reference_mixup_alpha": 0.6}
    assert problems(make_config(**moves)) == []
    assert PLUGIN.models(make_config(**moves))["policy"].spec.keeps_reference
    (problem,) = problems(make_config(loss={"kl": {"weight": 0.0}}, **moves))
    assert_fields(problem, "ppo.reference_sync_period", {"is_unused": True, MENTIONS: ["loss_fn.kl.weight"]})
    (problem,) = problems(make_config(reference_mixup_alpha=0.6))
    assert_fields(problem, "ppo.reference_mixup_alpha", {"is_unused": True, MENTIONS: ["reference_sync_period"]})


@pytest.mark.parametrize(("rows", "passes", "on_policy"), [(8, 1, True), (4, 1, False), (8, 2, False)])
def test_prev_logprobs_are_spared_only_if_a_step_takes_one_update(rows, passes, on_policy):
    config = make_config(policy_rows=rows, num_ppo_epochs=passes)
    assert policy_loss_of(config, config.ppo).on_policy is on_policy


REFUSED = [
    ({"value": {"train_global_batch_size": 3}}, "value.train_global_batch_size", {"got": 3, MENTIONS: ["8 rollouts"]}),
    ({"policy_rows": 3}, "policy.train_global_batch_size", {"got": 3, MENTIONS: ["ppo.num_prompts_per_step 8 x"]}),
    (
        {"value": {"max_total_sequence_length": 32}},
        "value.max_total_sequence_length",
        {"got": 32, MENTIONS: ["policy.max_total_sequence_length (64)"]},
    ),
    (
        {"critic_warmup_steps": 5, "max_num_steps": 5},
        "ppo.critic_warmup_steps",
        {"got": 5, MENTIONS: ["ppo.max_num_steps (5)"]},
    ),
    (
        {"use_dynamic_sampling": True},
        "ppo.use_dynamic_sampling",
        {"got": True, MENTIONS: ["ppo.num_generations_per_prompt", "2"]},
    ),
    ({"batch_multiplier": 2.0}, "ppo.batch_multiplier", {"is_unused": True, MENTIONS: ["use_dynamic_sampling=true"]}),
    (
        {"gae_lambda": 0.9, "length_adaptive_alpha": 0.05, "critic_gae_lambda": 1.0},
        "ppo.gae_lambda",
        {"is_unused": True, MENTIONS: ["length_adaptive_alpha", "critic_gae_lambda"]},
    ),
    (
        {"num_ppo_epochs": 2, "loss": {"force_on_policy_ratio": True}},
        "loss_fn.force_on_policy_ratio",
        {"got": True, "remedy": "Remove this key"},
    ),
    ({"val_period": 3}, "ppo.val_period", {"got": 3, MENTIONS: ["data.validation"]}),
]


@pytest.mark.parametrize(("settings", "key", "fields"), REFUSED, ids=[key for _, key, _ in REFUSED])
def test_what_contradicts_itself_or_has_no_effect_is_refused(settings, key, fields):
    (problem,) = problems(make_config(**settings))
    assert_fields(problem, key, fields)


ACCEPTED = [
    {},
    {"length_adaptive_alpha": 0.05, "critic_gae_lambda": 1.0},
    {"length_adaptive_alpha": 0.05, "gae_lambda": 1.0},
    {"num_generations_per_prompt": 2, "use_dynamic_sampling": True},
    {"num_ppo_epochs": 4, "value_clip": None, "bootstrap_truncated": True},
]


@pytest.mark.parametrize("settings", ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_goes_together_is_accepted(settings):
    assert problems(make_config(**settings)) == []
