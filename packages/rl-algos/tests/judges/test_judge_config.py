"""Settings of judges, and of the rewards that they give."""

from types import SimpleNamespace

import pytest
from problem_fields import MENTIONS, assert_fields

from rl_algos.grpo.plugin import PLUGIN as GRPO
from rl_algos.judges.config import (
    EndpointJudgeConfig,
    GeneratorJudgeConfig,
    JudgesConfig,
    RewardModelJudgeConfig,
    functions_of_models,
    judge_problems,
    judge_type,
    judged_rewards,
)
from rl_algos.rollouts.plugin import EVALUATION, judges_section
from rl_core.config import Config, ProblemError, assemble, load, resolve, to_yaml
from rl_core.environments.config import EnvironmentConfig, JudgedRewardConfig

ENDPOINT = {"kind": "endpoint", "base_url": "http://127.0.0.1:1/v1", "model": "m"}
GENERATOR = {"kind": "generator", "model_name": "policy"}
MODEL = {"kind": "reward_model", "model_name": "m"}


def root_of(judges, rewards):
    environments = assemble("Environments", {"chat": EnvironmentConfig})
    kinds = {name: judge_type(name, written) for name, written in judges.items()}
    root = assemble("Root", {"judges": assemble("Judges", kinds, base=JudgesConfig), "env": environments})
    return resolve(load({"judges": judges, "env": {"chat": {"rewards": rewards}}}), root).config


def problems(reward, **judges):
    config = root_of({"critic": ENDPOINT, **judges}, {"right": reward})
    return list(judge_problems(config))


def test_a_judge_does_not_have_the_name_of_a_parameter_of_reward_functions():
    (problem,) = problems({"judge": "critic"}, messages=ENDPOINT)
    assert problem.key == "judges.messages"
    assert "parameter that every reward function may have" in str(problem)


@pytest.fixture
def graded(tmp_path):
    path = tmp_path / "graded.py"
    path.write_text(
        "async def margin(response, helpful): ...\nasync def both(helpful, critic): ...\n"
        "class Best:\n    async def __call__(self, response, *, helpful): ...\n"
        "def plain(response): ...\n"
    )
    return str(path)


def test_functions_that_take_a_reward_model_are_found_without_running_their_file(graded):
    rewards = {name: f"{graded}:{name}" for name in ("margin", "Best", "plain")}
    rewards |= {"format": "rl_core:thinking_format", "score": {"judge": "helpful"}}
    config = root_of({"helpful": MODEL, "critic": ENDPOINT}, rewards)
    assert functions_of_models(config) == {"chat": {"margin", "Best"}}
    assert list(judge_problems(config)) == []
    assert functions_of_models(root_of({"critic": ENDPOINT}, {"margin": f"{graded}:margin"})) == {}


def test_a_function_asks_reward_models_or_language_models_and_scores_no_agents(graded):
    (problem,) = problems(f"{graded}:both", helpful=MODEL)
    assert_fields(problem, "env.chat.rewards.right", {MENTIONS: ["takes the judge critic", "Write two functions"]})
    config = root_of({"helpful": MODEL}, {"right": f"{graded}:margin"})
    object.__setattr__(config, "grpo", SimpleNamespace(agent=object()))
    (problem,) = judge_problems(config)
    assert_fields(problem, "env.chat.rewards.right", {MENTIONS: ["asks a reward model", "Use the score itself"]})


def test_every_kind_has_its_type_in_algorithms_with_rollouts_and_in_evaluation():
    judges = {"critic": ENDPOINT, "own": GENERATOR, "rm": MODEL}
    for plugin in (GRPO, EVALUATION):
        kinds = plugin.sections["judges"](judges).model_fields
        assert {name: field.annotation for name, field in kinds.items()} == {
            "critic": EndpointJudgeConfig,
            "own": GeneratorJudgeConfig,
            "rm": RewardModelJudgeConfig,
        }
        assert "judges.*" in plugin.optional_models
        assert judge_problems in plugin.checks or plugin is GRPO
    assert judges_section(None) is JudgesConfig


@pytest.mark.parametrize(
    ("judges", "key", "reason"),
    [
        ({"critic": {}}, "critic.kind", "must be set"),
        ({"critic": None}, "critic.kind", "must be set"),
        ({"critic": {"kind": "oracle"}}, "critic.kind", "is not a kind of judges"),
        ({"the critic": ENDPOINT}, "", "has a key that cannot be the name of a judge"),
    ],
)
def test_a_section_that_is_no_judge_is_refused(judges, key, reason):
    with pytest.raises(ProblemError) as caught:
        judges_section(judges)
    (problem,) = caught.value.problems
    assert (problem.key, problem.reason) == (key, reason)


@pytest.mark.parametrize(
    ("reward", "key", "fields"),
    [
        ({"judge": "critc"}, "judge", {"got": "critc", "mentions": ["critic", "judges.critc"]}),
        ({"judge": "critic", "each": "token"}, "each", {"got": "token", "allowed": "rollout, turn"}),
        ({"judge": "critic", "rubric": "none.md"}, "rubric", {"mentions": ["cannot be read"]}),
        ({"judge": "critic", "rubric": "{"}, "rubric", {"mentions": ["is not a template"]}),
        ({"judge": "rm", "rubric": "Good?"}, "rubric", {"is_unused": True}),
        ({"judge": "rm", "form": "ranking"}, "form", {"is_unused": True}),
        ({"judge": "rm", "range": [0, 2]}, "range", {"is_unused": True}),
    ],
)
def test_rewards_that_a_judge_cannot_give_are_refused(reward, key, fields):
    (problem,) = problems(reward, rm=MODEL)
    assert_fields(problem, f"env.chat.rewards.right.{key}", fields)


@pytest.mark.parametrize(
    "reward",
    [
        {"judge": "critic", "rubric": "Is it {answer}?", "form": "number", "range": [0, 10], "weight": 0.5},
        {"judge": "critic", "compare": "group", "form": "ranking"},
        {"judge": "critic", "form": "pairwise", "compare": "gold"},
        {"judge": "critic", "each": "turn"},
        {"judge": "rm", "each": "token"},
        {"judge": "rm", "each": "turn", "weight": -1},
    ],
)
def test_rewards_that_a_judge_can_give(reward):
    assert problems(reward, rm=MODEL, own=GENERATOR) == []


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        ({"judge": "critic", "range": [1, 0]}, "range"),
        ({"judge": "critic", "range": [0, float("inf")]}, "range"),
        ({"judge": "critic", "form": "ranking", "each": "turn"}, "each"),
        ({"judge": "critic", "compare": "gold"}, "compare"),
        ({"judge": "critic", "form": "ranking", "compare": "gold"}, "compare"),
    ],
)
def test_keys_of_a_reward_that_do_not_fit_together_are_refused(reward, key):
    written = {**reward, **({"range": tuple(reward["range"])} if "range" in reward else {})}
    with pytest.raises(ValueError, match=key):
        JudgedRewardConfig(**written)


def test_rewards_by_judges_are_read_on_the_driver():
    rewards = {"right": {"judge": "critic", "rubric": "Is it {answer}?"}, "length": "rl_core:length_penalty"}
    found = judged_rewards(root_of({"critic": ENDPOINT}, rewards))
    assert {name: list(parts) for name, parts in found.items()} == {"chat": ["right"]}
    assert found["chat"]["right"].text == "Is it {answer}?"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"base_url": "judge.example/v1"}, "base_url"),
        ({"base_url": "https://user:secret@judge.example/v1"}, "base_url"),
        ({"base_url": "https://judge.example/v1?key=secret"}, "base_url"),
        ({"base_url": "https://[::1/v1"}, "base_url"),
        ({"base_url": "file:///etc/passwd"}, "base_url"),
        ({"request": {"temperature": 1}}, "request.temperature"),
        ({"request": {"seed": 1}}, "request.seed"),
        ({"limits": {"concurrent": 0}}, "concurrent"),
        ({"limits": {"tokens_per_minute": 700}}, "limits.tokens_per_minute"),
    ],
)
def test_an_endpoint_that_cannot_be_called_is_refused(change, key):
    with pytest.raises(ValueError, match=key):
        EndpointJudgeConfig(**{**ENDPOINT, **change})


def test_only_the_policy_has_weights_that_change():
    assert GeneratorJudgeConfig(**GENERATOR, update_every=5).update_every == 5
    with pytest.raises(ValueError, match="update_every"):
        GeneratorJudgeConfig(kind="generator", model_name="other", update_every=5)


def test_a_key_stays_the_name_of_a_variable(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret-0123456789")
    judges = {"critic": {**ENDPOINT, "api_key": "${oc.env:JUDGE_KEY}"}}
    config = root_of(judges, {"right": {"judge": "critic"}})
    assert dict(config.judges)["critic"].api_key == "sk-secret-0123456789"
    assert "api_key: ${oc.env:JUDGE_KEY}" in to_yaml(config)
    assert "sk-secret" not in to_yaml(config) + repr(config)
    with pytest.raises(Exception, match=r"must not contain a credential"):
        root_of({"critic": {**ENDPOINT, "api_key": "sk-secret-0123456789"}}, {"right": {"judge": "critic"}})


def test_a_config_with_judges_is_read_back():
    config = root_of({"critic": ENDPOINT, "own": GENERATOR}, {"right": {"judge": "critic", "range": [0, 2]}})
    again = resolve(load(_plain(to_yaml(config))), type(config)).config
    assert again == config
    assert isinstance(config, Config)


def _plain(text):
    import yaml

    return yaml.safe_load(text)


def test_checks_need_no_environments():
    assert list(judge_problems(SimpleNamespace(judges=JudgesConfig(), env=Config()))) == []
