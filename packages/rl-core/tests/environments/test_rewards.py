"""Several functions as one reward."""

import pickle

import pytest

from rl_core.config import assemble
from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.instance import environment_types, instance_of, problem_with, tools_of
from rl_core.environments.process import EnvironmentProcess, _load
from rl_core.rollouts.environment import Conversation

REWARDS = """
def right(response, answer):
    return float(answer in response)

def brief(responses):
    return [-float(len(response)) for response in responses]

class Twice:
    def step(self, response):
        self.count = getattr(self, "count", 0) + 1
        return 10.0 if self.count == 2 else "again"
"""


def settings(section):
    written = {"sums": section}
    return assemble("Env", environment_types(written, {}))(**written)


def outcomes(instance, *completions):
    _, built = _load(instance.environment, "sums", None)
    process = EnvironmentProcess("sums", built)
    turns = [Conversation("0", (), {"answer": "2"}, text) for text in completions]
    return [process.step([pickle.dumps(turn)])[0].result for turn in turns]


@pytest.fixture
def file(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    return f"{tmp_path}/rewards.py"


def test_functions_are_summed_by_their_weights_and_reported_without(file):
    env = settings({"rewards": {"right": f"{file}:right", "brief": f"{file}:brief"}, "reward_weights": {"brief": 0.25}})
    assert problem_with("sums", env) == ""
    [result] = outcomes(instance_of(env, "sums"), "it is 2!")
    assert result.rewards() == {"right": 1.0, "brief": -8.0, "reward": -1.0}
    assert tools_of(instance_of(env, "sums")) == ()


def test_they_are_added_to_the_reward_of_an_environment_when_it_ends(file):
    env = settings({"type": f"{file}:Twice", "rewards": {"brief": f"{file}:brief"}, "reward_weights": {"brief": 0.5}})
    first, last = outcomes(instance_of(env, "sums"), "a", "bb")
    assert (first.done, first.rewards()) == (False, {"reward": 0.0})
    assert last.rewards() == {"reward": 9.0, "brief": -2.0}


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"rewards": {"a": "{file}:wrong"}}, "has no 'wrong'"),
        ({"rewards": {"a": "right"}}, "is not a function"),
        ({"rewards": {"a": "{file}:right"}, "reward_weights": {"b": 1.0}}, "reward_weights has b,"),
    ],
)
def test_rewards_that_do_not_exist_are_told_before_a_run(file, section, problem):
    section = {**section, "rewards": {name: path.format(file=file) for name, path in section["rewards"].items()}}
    assert problem in problem_with("sums", settings(section))


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"rewards": ["{file}:right", "{file}:right"]}, "two functions called right"),
        ({"rewards": ["{file}:right"], "reward_weights": [1.0, 2.0]}, "2 weights for 1 rewards"),
        ({"rewards": {"a": "{file}:right"}, "reward_weights": [1.0]}, "write {a: 1.0}"),
        ({"rewards": ["right"]}, "is not a function"),
    ],
)
def test_lists_of_rewards_that_cannot_be_used_are_told_before_a_run(file, section, problem):
    given = section["rewards"]
    paths = (
        {name: path.format(file=file) for name, path in given.items()}
        if isinstance(given, dict)
        else [path.format(file=file) for path in given]
    )
    assert problem in problem_with("sums", settings({**section, "rewards": paths}))


def test_a_section_without_rewards_has_none():
    assert EnvironmentConfig().rewards == {}
