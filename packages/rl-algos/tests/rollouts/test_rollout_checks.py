"""Settings of rollouts that contradict one another, or the rest of the config."""

from types import SimpleNamespace

import pytest
from problem_fields import MENTIONS, assert_fields

from rl_algos.distillation.config import DistillationConfig
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.plugin import grpo_section
from rl_algos.ppo.config import PPOConfig
from rl_algos.rollouts import checks
from rl_algos.rollouts.checks import rollout_problems, thinking_problems
from rl_algos.rollouts.config import AgentConfig, AsyncConfig, CurriculumConfig
from rl_core.model_config import ColocatedConfig, GenerationConfig

AHEAD = AsyncConfig(enabled=True, max_trajectory_age_steps=2)
APART = ColocatedConfig(enabled=False)


def problems(algorithm, *, colocated=APART, num_datasets=1, streaming=False, **generation):
    policy = SimpleNamespace(
        train_global_batch_size=algorithm.rollouts_per_step,
        max_total_sequence_length=100,
        generation=GenerationConfig(max_new_tokens=8, colocated=colocated, **generation),
    )
    data = SimpleNamespace(
        sections=list, validation_datasets=[], train_datasets=[SimpleNamespace(streaming=streaming)] * num_datasets
    )
    config = SimpleNamespace(policy=policy, data=data, env=None)
    return {problem.key: problem for problem in rollout_problems(config, algorithm)}


def test_constrained_turns_need_a_loss_that_reads_allowed_tokens_and_no_thinking_budget():
    assert problems(GRPOConfig(structured_output="constrain")) == {}
    (problem,) = problems(GRPOConfig(structured_output="constrain"), thinking_budget=4).values()
    assert_fields(problem, "policy.generation.thinking_budget", {"got": 4, MENTIONS: ["grpo.structured_output"]})
    for mode, keys in (("ignore", []), ("constrain", ["distillation.structured_output"])):
        policy = SimpleNamespace(generation=GenerationConfig())
        config = SimpleNamespace(policy=policy, distillation=DistillationConfig(structured_output=mode))
        assert [problem.key for problem in checks.whole_distribution(config)] == keys


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig, DistillationConfig])
def test_rolling_out_ahead_needs_devices_of_its_own(kind):
    assert problems(kind(async_grpo=AHEAD)) == {}
    (problem,) = problems(kind(async_grpo=AHEAD), colocated=ColocatedConfig()).values()
    fields = {"got": True, MENTIONS: ["policy.generation.colocated.enabled=false"]}
    assert_fields(problem, f"{kind.section}.async_grpo.enabled", fields)


@pytest.mark.parametrize(
    ("generation", "key", "fields"),
    [
        ({"thinking_budget": 4}, None, {}),
        ({"thinking_budget": 4, "thinking_end": " Now.</think>"}, None, {}),
        ({"thinking_budget": 8}, "thinking_budget", {"got": 8, MENTIONS: ["less than", "max_new_tokens (8)"]}),
        ({"thinking_budget_mode": "truncate"}, "thinking_budget_mode", {MENTIONS: ["without"]}),
        ({"thinking_end": "</think>"}, "thinking_end", {MENTIONS: ["without"]}),
        (
            {"thinking_budget": 4, "thinking_budget_mode": "truncate", "thinking_end": "</think>"},
            "thinking_end",
            {MENTIONS: ["thinking_budget_mode=truncate"]},
        ),
        ({"thinking_budget": 4, "thinking_end": "Stop."}, "thinking_end", {"got": "Stop.", MENTIONS: ["</think>"]}),
        (
            {"thinking_budget": 4, "thinking_end": "</think>\n", "stop_strings": ["</think>"]},
            "thinking_end",
            {MENTIONS: ["stop string '</think>'"]},
        ),
    ],
)
def test_a_thinking_budget_without_effect_is_refused(generation, key, fields):
    config = SimpleNamespace(policy=SimpleNamespace(generation=GenerationConfig(max_new_tokens=8, **generation)))
    found = list(thinking_problems(config))
    assert [problem.key for problem in found] == ([f"policy.generation.{key}"] if key else [])
    for problem in found:
        assert_fields(problem, f"policy.generation.{key}", fields)


def test_an_age_of_0_shares_devices_as_the_synchronous_run_does():
    at_once = AsyncConfig(enabled=True, max_trajectory_age_steps=0)
    assert problems(GRPOConfig(async_grpo=at_once), colocated=ColocatedConfig()) == {}
    assert GRPOConfig(async_grpo=at_once).max_staleness == 0


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig, DistillationConfig])
def test_updates_in_flight_are_accepted_ahead_of_training_and_refused_without_effect(kind):
    ahead = kind(async_grpo=AsyncConfig(enabled=True, in_flight_weight_updates=True))
    assert problems(ahead) == {}
    assert ahead.updates_in_flight
    assert not kind(async_grpo=AHEAD).updates_in_flight
    for settings in (
        AsyncConfig(in_flight_weight_updates=True),
        AsyncConfig(enabled=True, max_trajectory_age_steps=0, in_flight_weight_updates=True),
    ):
        (problem,) = problems(kind(async_grpo=settings)).values()
        section = f"{kind.section}.async_grpo"
        fields = {"is_unused": True, MENTIONS: [f"{section}.enabled=true", "max_trajectory_age_steps"]}
        assert_fields(problem, f"{section}.in_flight_weight_updates", fields)


def test_updates_in_flight_need_devices_of_their_own():
    settings = AsyncConfig(enabled=True, in_flight_weight_updates=True)
    assert set(problems(GRPOConfig(async_grpo=settings), colocated=ColocatedConfig())) == {"grpo.async_grpo.enabled"}


KEY = "grpo.async_grpo.recompute_kv_cache_after_weight_updates"
KEPT = AsyncConfig(enabled=True, in_flight_weight_updates=True, recompute_kv_cache_after_weight_updates=False)


def test_keys_and_values_are_kept_by_engines_that_can(monkeypatch):
    engines = {"vllm": SimpleNamespace(keeps_cache=True), "hf": SimpleNamespace(keeps_cache=False)}
    monkeypatch.setattr(checks, "names", lambda group: list(engines))
    monkeypatch.setattr(checks, "plugin", lambda group, name: engines[name])
    config = GRPOConfig(async_grpo=KEPT)
    assert config.keeps_cache
    assert problems(config, backend="vllm") == {}
    refused = problems(config, backend="hf")[KEY]
    assert_fields(refused, KEY, {"got": False, MENTIONS: ["hf", "policy.generation.backend=vllm"]})
    refused = problems(config, backend="vllm", lora_sync="adapter")[KEY]
    assert_fields(refused, KEY, {"is_unused": True, MENTIONS: ["lora_sync=merged"]})


@pytest.mark.parametrize("changed", [{"in_flight_weight_updates": False}, {"max_trajectory_age_steps": 0}])
def test_keys_and_values_are_kept_over_updates_in_flight_alone(changed):
    config = GRPOConfig(async_grpo=KEPT.model_copy(update=changed))
    assert problems(config)[KEY].is_unused
    assert not config.keeps_cache


def test_an_age_without_effect_is_refused():
    found = problems(GRPOConfig(async_grpo=AsyncConfig(max_trajectory_age_steps=2)))
    (problem,) = found.values()
    fields = {"is_unused": True, MENTIONS: ["grpo.async_grpo.enabled=true"]}
    assert_fields(problem, "grpo.async_grpo.max_trajectory_age_steps", fields)


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig])
def test_a_curriculum_needs_several_datasets(kind):
    config = kind(curriculum=CurriculumConfig(enabled=True, window=8))
    assert problems(config, num_datasets=2) == {}
    (problem,) = problems(config).values()
    fields = {"got": True, MENTIONS: ["data.train", f"{kind.section}.curriculum.by=prompt"]}
    assert_fields(problem, f"{kind.section}.curriculum.enabled", fields)


def test_a_curriculum_by_prompt_needs_every_prompt():
    assert problems(GRPOConfig(curriculum=CurriculumConfig(enabled=True, by="prompt", half_life=2))) == {}
    found = problems(GRPOConfig(curriculum=CurriculumConfig(enabled=True, by="prompt", window=9)), streaming=True)
    assert set(found) == {"grpo.curriculum.by", "grpo.curriculum.window"}
    assert_fields(found["grpo.curriculum.by"], "grpo.curriculum.by", {"got": "prompt", MENTIONS: ["`streaming`"]})
    assert_fields(found["grpo.curriculum.window"], "grpo.curriculum.window", {"is_unused": True})


def test_keys_of_a_curriculum_without_effect_are_refused():
    found = problems(GRPOConfig(curriculum=CurriculumConfig(window=8, floor=0.5)), num_datasets=2)
    assert set(found) == {"grpo.curriculum.window", "grpo.curriculum.floor"}
    for key, problem in found.items():
        assert_fields(problem, key, {"is_unused": True, MENTIONS: ["grpo.curriculum.enabled=true"]})


def test_keys_that_an_agent_leaves_without_effect_are_refused():
    agent = AgentConfig(external=True, reward="posted", env={"A": "b"}, grace_s=1.0)
    assert set(problems(GRPOConfig(agent=agent, max_rollout_turns=3))) == {
        "grpo.agent.env",
        "grpo.agent.grace_s",
        "grpo.max_rollout_turns",
    }
    assert set(problems(GRPOConfig(agent=AgentConfig(run="nowhere.py:run")))) == {"grpo.agent.run"}


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig, DistillationConfig])
def test_over_sampling_needs_no_devices_of_its_own_and_continues_rollouts_over_updates(kind):
    settings = kind(num_prompts_per_step=10, over_sampling_ratio=1.25)
    assert problems(settings, colocated=ColocatedConfig()) == {}
    assert (settings.num_ahead, settings.max_staleness, settings.sampler) == (3, 1, "ready_first")
    assert settings.updates_in_flight
    ahead = kind(async_grpo=AsyncConfig(enabled=True, in_flight_weight_updates=True), over_sampling_ratio=1.5)
    assert problems(ahead) == {}
    assert ahead.num_ahead == ahead.num_prompts_per_step // 2
    plain = kind()
    assert (plain.num_ahead, plain.max_staleness, plain.updates_in_flight) == (0, 0, False)
    assert plain.sampler == "weight_fifo"


OLDER = AsyncConfig(max_trajectory_age_steps=2)


@pytest.mark.parametrize(
    ("settings", "key", "fields"),
    [
        ({"over_sampling_ratio": 2.5}, "over_sampling_ratio", {"got": 2.5, MENTIONS: ["max_trajectory_age_steps (2)"]}),
        ({"over_sampling_ratio": 1.00000001}, "over_sampling_ratio", {MENTIONS: ["adds no prompt to the 32"]}),
        (
            {"over_sampling_ratio": 1.5, "async_grpo": AsyncConfig(enabled=True)},
            "async_grpo.in_flight_weight_updates",
            {"got": False, MENTIONS: ["grpo.over_sampling_ratio"]},
        ),
        (
            {"over_sampling_ratio": 1.5, "async_grpo": AsyncConfig(sampler="in_order")},
            "async_grpo.sampler",
            {"got": "in_order", "allowed": "ready_first, windowed"},
        ),
        ({"async_grpo": AsyncConfig(sampler="ready_first")}, "async_grpo.sampler", {"is_unused": True}),
        (
            {"over_sampling_ratio": 1.5, "async_grpo": OLDER.model_copy(update={"sampler": "windowed"})},
            "async_grpo.sampler_window",
            {MENTIONS: ["from 32 to 48"]},
        ),
        (
            {"over_sampling_ratio": 1.5, "async_grpo": AsyncConfig(sampler="windowed", sampler_window=64)},
            "async_grpo.sampler_window",
            {"got": 64, "allowed": "int from 32 (the prompts of a step) to 48 (the prompts in progress)"},
        ),
        (
            {"over_sampling_ratio": 1.5, "async_grpo": AsyncConfig(sampler_window=40)},
            "async_grpo.sampler_window",
            {"is_unused": True},
        ),
        (
            {"over_sampling_ratio": 1.5, "async_grpo": AsyncConfig(recompute_kv_cache_after_weight_updates=False)},
            "async_grpo.recompute_kv_cache_after_weight_updates",
            {"is_unused": True, MENTIONS: ["colocated.enabled=true"]},
        ),
    ],
)
def test_over_sampling_and_samplers_that_cannot_work_are_refused(settings, key, fields):
    is_ahead = "async_grpo" in settings and settings["async_grpo"].enabled
    colocated = APART if is_ahead else ColocatedConfig()
    (problem,) = problems(GRPOConfig(**settings), colocated=colocated).values()
    assert_fields(problem, f"grpo.{key}", fields)


@pytest.mark.parametrize(
    ("args", "key", "fields"),
    [
        ({}, None, {}),
        ({"compact_at": 60, "summary_tokens": 20, "summariser": "recent"}, None, {}),
        ({"summariser": "frozen"}, None, {}),
        ({"summariser": "other"}, "rollout_program_args.summariser", {MENTIONS: ["grpo.agents.other.opponent"]}),
        ({"compact_at": 95}, "rollout_program_args", {MENTIONS: ["compact_at (95)", "summary (8 tokens)"]}),
        ({"summary_tokens": 92}, "rollout_program_args", {MENTIONS: ["max_new_tokens, 8"]}),
        ({"compact_at": "x"}, "rollout_program_args", {MENTIONS: ["compact_at must be an int"]}),
    ],
)
def test_a_compaction_that_cannot_work_is_refused(args, key, fields):
    agents = {"frozen": {"opponent": {"model_name": "some"}}}
    written = {"rollout_program": "compaction", "rollout_program_args": args, "agents": agents, "max_rollout_turns": 4}
    found = problems(grpo_section(written).model_validate(written))
    assert set(found) == ({f"grpo.{key}"} if key else set())
    for problem in found.values():
        assert_fields(problem, f"grpo.{key}", fields)


def test_a_compaction_needs_turns_and_an_algorithm_with_the_agent_that_summarises():
    args = {"rollout_program": "compaction", "rollout_program_args": {"summariser": "frozen"}}
    found = problems(PPOConfig(**args))
    assert set(found) == {"ppo.max_rollout_turns", "ppo.rollout_program_args.summariser"}
