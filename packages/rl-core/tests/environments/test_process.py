"""An environment's process, called in this one."""

import pickle

import pytest

from rl_core.config import Config
from rl_core.environments.instance import instance_of, tools_of
from rl_core.environments.process import EnvironmentProcess, _built
from rl_core.environments.reward_function import as_environment
from rl_core.plugins import resolve
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, ToolCall

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
    assert failure.fault == "raised"
    assert failure.reason.startswith("environment judge raised JSONDecodeError: Expecting value")
    assert failure.reason.endswith("(at reward.py:5)")


SERVICE = """
from rl_core.errors import InfrastructureFailed

def score(response):
    raise InfrastructureFailed("no sandbox started within 30 s")
"""


def test_a_service_that_fails_is_told_apart_from_a_conversation_that_does(tmp_path):
    (tmp_path / "service.py").write_text(SERVICE)
    process = EnvironmentProcess("judge", as_environment(resolve(f"{tmp_path}/service.py:score")))
    failure = outcome(process, "1")
    assert failure.fault == "process"
    assert "no sandbox started" in failure.reason


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


GAME = """
class Count:
    tools = []

    def __init__(self, *, limit: int = 2):
        self.count, self.limit = 0, limit

    def step(self, response):
        self.count += 1
        return float(self.count) if self.count == self.limit else "go on"
"""

TOOLS = """
from rl_core.environments.tool_environment import ToolEnvironment


def look_up(word: str) -> int:
    \"\"\"Look up a number.\"\"\"
    return {"two": 2}[word]


def score(response, answer):
    return float(answer in response)


environment = ToolEnvironment([look_up], score)
"""


def stepped(process, completion, *calls):
    conversation = Conversation("0", (), {"answer": "2"}, completion, tool_calls=calls)
    [answer] = process.step([pickle.dumps(conversation)])
    return answer


def test_a_class_that_is_called_is_a_reward_that_keeps_something(tmp_path):
    (tmp_path / "reward.py").write_text(
        "class Count:\n    def __init__(self): self.n = 0\n"
        "    def __call__(self, response):\n        self.n += 1\n        return self.n\n"
    )
    process = EnvironmentProcess("reward", _built(resolve(f"{tmp_path}/reward.py:Count"), "reward", None))
    assert [stepped(process, "a").result.reward, stepped(process, "b").result.reward] == [1.0, 2.0]


def test_a_class_plays_conversations_with_its_settings(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    target = resolve(f"{tmp_path}/game.py:Count")
    process = EnvironmentProcess("game", _built(target, "game", None))
    assert [stepped(process, "a").has_state, stepped(process, "b").result.reward] == [True, 2.0]
    assert stepped(process, "c").has_state


def test_tools_of_a_file_are_called_and_rewarded(tmp_path):
    (tmp_path / "my_tools.py").write_text(TOOLS)
    process = EnvironmentProcess("tools", _built(resolve(f"{tmp_path}/my_tools.py:environment"), "tools", None))
    first = stepped(process, "", ToolCall("look_up", {"word": "two"}, "call00000"))
    assert (first.has_state, first.result.observation[0]["content"]) == (True, "2")
    assert stepped(process, "it is 2").result.reward == 1.0


def test_the_tools_of_an_environment_are_known_before_it_runs(tmp_path):
    (tmp_path / "my_tools.py").write_text(TOOLS)
    found = tools_of(instance_of(Config(), f"{tmp_path}/my_tools.py:environment"))
    assert [tool["function"]["name"] for tool in found] == ["look_up"]
    assert tools_of(instance_of(Config(), f"{tmp_path}/my_tools.py:score")) == ()
