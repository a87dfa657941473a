"""An environment's process, called in this one."""

import pickle

import pytest

from rl_core.environment import Conversation, EnvironmentFailure
from rl_core.environments.process import EnvironmentProcess
from rl_core.plugins import resolve
from rl_core.reward_function import as_environment

REWARD = """
import json

def points(text):
    return json.loads(text)["points"]

def score(response):
    return points(response)
"""


@pytest.fixture
def process(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    return EnvironmentProcess("judge", as_environment(resolve(f"{tmp_path}/reward.py:score")))


def outcome(process, response):
    [answer] = process.step([pickle.dumps(Conversation("0", (), {}, completion=response))])
    return answer.result


def test_a_failure_names_the_innermost_line_of_the_users_own_code(process):
    failure = outcome(process, "not JSON")
    assert isinstance(failure, EnvironmentFailure)
    assert failure.raised
    assert failure.reason.startswith("environment judge raised JSONDecodeError: Expecting value")
    assert failure.reason.endswith("(at reward.py:5)")


def test_the_log_has_each_distinct_traceback_once_from_the_users_code_on(process, capsys):
    for response in ("not JSON", "nor this", '{"score": 1}', '{"score": 2}'):
        outcome(process, response)
    printed = capsys.readouterr().err
    assert printed.count("environment judge raised:") == 2
    first, second = printed.split("environment judge raised:\n")[1:]
    assert first.splitlines()[0].endswith('reward.py", line 8, in score')
    assert "return points(response)" in first
    assert "process.py" not in printed
    assert "reward_function.py" not in printed
    assert second.splitlines()[-1] == "KeyError: 'points'"
