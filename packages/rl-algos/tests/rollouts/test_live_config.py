"""Settings of learning from users: each that would be ignored is refused, and estimators that need groups by name."""

from types import SimpleNamespace

import pytest
from problem_fields import MENTIONS, assert_fields

from rl_algos.data.config import DataConfig
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.plugin import _estimator, grpo_section
from rl_algos.ppo.config import PPOConfig
from rl_algos.rollouts.checks import rollout_problems
from rl_algos.rollouts.config import AgentConfig, AsyncConfig
from rl_algos.sft.config import SFTConfig
from rl_algos.supervised.plugin import supervised_problems
from rl_core.model_config import ColocatedConfig, GenerationConfig, ModelConfig

ROWS = DataConfig.model_validate({"train": {"data_path": "rows.jsonl"}})
NO_ROWS = DataConfig.model_validate({"train": []})
VALIDATED = DataConfig.model_validate({"train": [], "validation": {"data_path": "rows.jsonl"}})
AHEAD = {"async_grpo": AsyncConfig(enabled=True)}


def agent(**live):
    return AgentConfig(external=True, reward="posted", live=live)


def problems(algorithm, data=NO_ROWS, *, async_save=False):
    policy = SimpleNamespace(
        train_global_batch_size=algorithm.rollouts_per_step,
        max_total_sequence_length=100,
        generation=GenerationConfig(max_new_tokens=8, colocated=ColocatedConfig(enabled=False)),
    )
    checkpointing = SimpleNamespace(async_save=async_save)
    config = SimpleNamespace(policy=policy, data=data, env=None, checkpointing=checkpointing)
    return {problem.key: problem for problem in rollout_problems(config, algorithm)}


@pytest.mark.parametrize(
    ("settings", "data", "key", "fields"),
    [
        ({}, NO_ROWS, None, {}),
        ({}, ROWS, "data.train", {MENTIONS: ["data.train=[]"]}),
        ({"async_grpo": AsyncConfig()}, NO_ROWS, "grpo.async_grpo.enabled", {"got": False, MENTIONS: ["users"]}),
        ({"max_rollout_s": 5.0}, NO_ROWS, "grpo.max_rollout_s", {MENTIONS: ["live.deadline_s"]}),
        ({"max_num_epochs": 2}, NO_ROWS, "grpo.max_num_epochs", {"got": 2}),
        ({"use_dynamic_sampling": True}, NO_ROWS, "grpo.use_dynamic_sampling", {"got": True}),
        (
            {"async_grpo": AsyncConfig(enabled=True, sampler="in_order")},
            NO_ROWS,
            "grpo.async_grpo.sampler",
            {MENTIONS: ["order they end"]},
        ),
        ({"agent": agent(canary={"enabled": True})}, VALIDATED, None, {}),
        (
            {"agent": agent(canary={"enabled": True})},
            NO_ROWS,
            "grpo.agent.live.canary.enabled",
            {MENTIONS: ["data.validation"]},
        ),
        ({"agent": agent(canary={"max_drop": 0.2})}, NO_ROWS, "grpo.agent.live.canary.max_drop", {}),
    ],
)
def test_settings_that_do_not_fit_users_are_refused(settings, data, key, fields):
    found = problems(GRPOConfig(**{"agent": agent(), **AHEAD, **settings}), data)
    if key is None:
        assert found == {}
    else:
        assert list(found) == [key]
        assert_fields(found[key], key, fields)


def test_a_canary_and_saves_in_the_background_are_refused_together():
    algorithm = GRPOConfig(agent=agent(canary={"enabled": True}), **AHEAD)
    assert list(problems(algorithm, VALIDATED, async_save=True)) == ["checkpointing.async_save"]


def test_other_algorithms_refuse_users():
    assert "ppo.agent.live" in problems(PPOConfig(agent=agent(), **AHEAD))


@pytest.mark.parametrize(
    "written", [{"run": "a.py:run", "live": {}}, {"external": True, "reward": "environment", "live": {}}]
)
def test_users_need_an_external_agent_with_posted_rewards(written):
    with pytest.raises(ValueError, match=r"live.*external: true and reward: posted"):
        AgentConfig.model_validate(written)


def test_runs_that_learn_from_given_rows_need_some():
    (problem,) = supervised_problems("sft", SFTConfig(), NO_ROWS, ModelConfig(model_name="m"))
    assert_fields(problem, "data.train", {"got": [], MENTIONS: ["must not be empty", "grpo.agent.live"]})


@pytest.mark.parametrize(
    ("name", "size", "is_refused"),
    [
        ("grpo", 1, True),
        ("rloo", 1, True),
        ("gigpo", 1, True),
        ("remax", 1, True),
        ("remax", 4, True),
        ("grpo", 4, False),
        ("reinforce", 1, False),
        ("reinforce_plus_plus", 1, False),
        ("raft", 1, False),
    ],
)
def test_estimators_that_compare_need_groups(name, size, is_refused):
    written = {"adv_estimator": {"name": name}, "num_generations_per_prompt": size, "agent": agent().model_dump()}
    found = list(_estimator(grpo_section(written).model_validate(written), None))
    assert bool(found) == is_refused
    for problem in found:
        fitting = "reinforce, reinforce_plus_plus, raft"
        assert_fields(problem, "grpo.adv_estimator.name", {"got": name, "allowed": fitting})
