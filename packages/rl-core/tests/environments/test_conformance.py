"""What a check of an environment finds, on environments with one fault each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_core.config import Config
from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.conformance import Conformance, check
from rl_core.environments.instance import instance_of, tools_of
from rl_core.environments.trial import Attempt, answer_forms, attempts_on
from rl_core.rollouts.environment import Conversation
from rl_core.testing.exhaustive import partly_exhaustive

GOOD = """
def score(response, answer):
    return {"right": float(answer in response), "short": -0.01 * len(response)}
"""

GAME = """
class Guess:
    def __init__(self):
        self.count = 0

    def step(self, response, answer):
        self.count += 1
        if answer in response:
            return 1.0 - 0.1 * self.count
        return f"guess {self.count + 1}"
"""

TOOLS = """
from rl_core.environments.tool_environment import ToolEnvironment

def look_up(item: str) -> str:
    \"\"\"Look something up.\"\"\"
    return item.upper()

environment = ToolEnvironment([look_up], lambda response: float(len(response)))
"""


def attempts() -> list[Attempt]:
    found = []
    for row, answer in enumerate(("4", "7")):
        for index, text in enumerate((f"The answer is {answer}.", answer, "")):
            messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": text})
            conversation = Conversation(f"{row}/{index}", messages, {"answer": answer}, completion=text)
            found.append(Attempt(f"rows.jsonl, line {row + 1}", conversation))
    return found


def checked(tmp_path: Path, code: str, name: str, *, rows: Sequence[Attempt] = (), **settings: object) -> Conformance:
    file = tmp_path / "mine.py"
    file.write_text(code)
    kind = type("Environments", (Config,), {"__annotations__": {"mine": EnvironmentConfig}})
    section = EnvironmentConfig(type=f"{file}:{name}", **settings)
    instance = instance_of(kind(mine=section), "mine")
    return check(instance, rows or attempts(), tools_of(instance))


def failed(found: Conformance) -> list[str]:
    return [finding.name for finding in found.findings if finding.status == "failed"]


def said(found: Conformance, name: str) -> str:
    [finding] = [finding for finding in found.findings if finding.name == name]
    return finding.said


def test_a_reward_function_holds_and_its_rewards_are_shown(tmp_path: Path) -> None:
    found = checked(tmp_path, GOOD, "score")
    names = ("start", "signature", "answers", "deadline", "rewards", "repeats", "state", "batches")
    assert [(finding.name, finding.status) for finding in found.findings] == [
        *((name, "ok") for name in names),
        ("resume", "skipped"),
    ]
    assert found.holds
    assert len(found.samples) == 6
    assert found.samples[0].rewards["right"] == 1.0
    assert "right 0 to 1" in said(found, "rewards")


def test_rewards_that_never_differ_hold_and_are_warned_of(tmp_path: Path) -> None:
    found = checked(tmp_path, "def score(response):\n    return 0.0\n", "score")
    assert found.holds
    [finding] = [finding for finding in found.findings if finding.status == "warned"]
    assert finding.name == "rewards"
    assert finding.said == "finite, and all 6 responses earn the same: reward 0 to 0"
    assert "--response TEXT" in finding.remedy


UNTEXTUAL = "`answer` is an int in rows.jsonl; compare with str(answer)"
CONSTANT = {
    "a part": ("{'right': float(response == answer), 'short': 0.2 * (len(response) < 5)}", "right", UNTEXTUAL),
    "two parts": ("{'a': 1.0, 'b': 0.0, 'c': -0.01 * len(response)}", "a and b are", UNTEXTUAL),
    "a part next to one that pays": (
        "{'right': float(str(answer) in response), 'polite': 0.0}",
        "but polite is the same for all 3 responses",
        "--response TEXT",
    ),
    "the whole": ("float(response == answer)", "all 3 responses earn the same", UNTEXTUAL),
}


@pytest.mark.parametrize("name", partly_exhaustive(CONSTANT, always=["a part", "a part next to one that pays"]))
def test_a_part_that_never_differs_is_warned_of_with_the_type_of_the_answer(tmp_path: Path, name: str) -> None:
    code, says, remedy = CONSTANT[name]
    rows = attempts_on("rows.jsonl, line 1", "0", [], {"id": 3, "answer": 4})
    found = checked(tmp_path, f"def score(response, answer):\n    return {code}\n", "score", rows=rows)
    [finding] = [finding for finding in found.findings if finding.status == "warned"]
    assert says in finding.said
    assert remedy in finding.remedy


AGENTS = """
from rl_core import StepResult

class Larger:
    def __init__(self):
        self.first = None

    def step(self, response):
        if self.first is None:
            self.first = response
            go = {"role": "user", "content": "go"}
            return StepResult(done=False, agent="first", next_agent="second", observation=(go,))
        won = (response > self.first) - (response < self.first)
        return StepResult(reward=won, agent="second", agent_rewards={"first": -won, "judge": {"form": 1.0}})
"""


def test_agents_that_are_all_given_one_response_need_not_earn_different_rewards(tmp_path: Path) -> None:
    found = checked(tmp_path, AGENTS, "Larger")
    assert [finding.name for finding in found.findings if finding.status == "warned"] == []
    assert "all agents gave the same response" in said(found, "rewards")
    assert found.samples[0].rewards == {"reward": 0.0, "first": 0.0, "judge form": 1.0}


def test_a_form_that_alone_earns_the_most_is_named(tmp_path: Path) -> None:
    def reward(code: str) -> str:
        body = f"def score(response, answer):\n    return float({code})\n"
        kind = type("Environments", (Config,), {"__annotations__": {"mine": EnvironmentConfig}})
        (tmp_path / "form.py").write_text(body)
        instance = instance_of(kind(mine=EnvironmentConfig(type=f"{tmp_path / 'form.py'}:score")), "mine")
        rows = [
            attempt
            for row, answer in enumerate("47")
            for attempt in attempts_on("", str(row), [], {"answer": answer}, answer_forms({"answer": answer}))
        ]
        return said(check(instance, rows), "rewards")

    only = r"of each row's responses only '\\boxed{4}' earns the most"
    assert reward("'boxed' in response") == f"finite: reward 0 to 1; {only}"
    assert reward("answer in response") == "finite: reward 0 to 1"
    assert reward("answer in response) - 0.001 * len(response") == "finite: reward 0 to 0.999"
    assert reward("answer == '4' and response == answer") == "finite: reward 0 to 1"


def test_a_game_is_played_over_several_turns(tmp_path: Path) -> None:
    found = checked(tmp_path, GAME, "Guess")
    assert found.holds, found.findings
    assert [(sample.num_turns, sample.done) for sample in found.samples[:3]] == [(1, True), (1, True), (4, False)]


def test_malformed_calls_of_tools_are_tried(tmp_path: Path) -> None:
    found = checked(tmp_path, TOOLS, "environment")
    assert found.holds, found.findings
    assert said(found, "tool calls") == "3 malformed calls are answered"


RAISES_ON_CALLS = """
class Fragile:
    tools = [{"type": "function", "function": {"name": "go", "description": "", "parameters": {}}}]

    def step(self, response, tool_calls):
        return 1.0 if not tool_calls else float(tool_calls[0].arguments["place"])
"""

UNBUILDABLE = """
class Judge:
    def __init__(self):
        raise OSError("no model")

    def step(self, conversations, states):
        return []

    def close(self, states):
        pass
"""

SHARED = """
class Game:
    under_way = set()

    def step(self, messages, response):
        Game.under_way.add(id(self))
        return float(len(Game.under_way)) if len(messages) > 2 else "go on"

    def close(self):
        Game.under_way.discard(id(self))
"""

FAULTS = {
    "cannot be built": (UNBUILDABLE, "Judge", "start", "no model"),
    "field": ("def score(response, anwser): return 1.0", "score", "signature", "did you mean answer?"),
    "raises": ("def score(response): return float(response[0] == 'T')", "score", "answers", "IndexError"),
    "ends its process": ("import os\ndef score(response): os._exit(3)", "score", "answers", "exit code 3"),
    "nan": ("def score(response): return float('nan')", "score", "rewards", "return a finite number"),
    "text": ("def score(response): return 'good'", "score", "rewards", "return a number"),
    "random": ("import random\ndef score(response): return random.random()", "score", "repeats", "in another process"),
    "hash": ("def score(response): return hash(response) % 1e6", "score", "repeats", "in another process"),
    "global": (
        "seen = []\ndef score(response):\n    seen.append(response)\n    return float(len(seen))",
        "score",
        "state",
        "after others in the same process",
    ),
    "shared by conversations": (SHARED, "Game", "state", "beside others in the same process"),
    "calls of tools": (RAISES_ON_CALLS, "Fragile", "tool calls", "fails its rollout"),
    "no observation": (
        "from rl_core.rollouts.environment import StepResult\ndef score(response): return StepResult(done=False)",
        "score",
        "answers",
        "neither ended the rollout nor had an observation",
    ),
}


@pytest.mark.parametrize("fault", partly_exhaustive(FAULTS, always=["raises", "random", "global", "calls of tools"]))
def test_a_fault_fails_its_check_alone_and_says_how_to_mend_it(tmp_path: Path, fault: str) -> None:
    code, name, expected, says = FAULTS[fault]
    found = checked(tmp_path, code, name)
    assert failed(found) == [expected]
    assert says in said(found, expected)
    assert all(finding.remedy for finding in found.findings if finding.status == "failed")
    assert not found.holds


IN_BATCHES = """
def score(responses):
    return [len(response) / (1 + max(map(len, responses))) for response in responses]
"""


def test_a_reward_that_depends_on_its_batch_fails_if_rollouts_share_calls(tmp_path: Path) -> None:
    assert failed(checked(tmp_path, IN_BATCHES, "score", max_batch=4)) == ["batches"]
    alone = checked(tmp_path, IN_BATCHES, "score")
    assert alone.holds
    assert "rollouts never share a call" in said(alone, "batches")


def test_a_call_above_the_deadline_is_reported_and_the_others_are_not_waited_for(tmp_path: Path) -> None:
    code = "import threading\ndef score(response):\n    threading.Event().wait()"
    found = checked(tmp_path, code, "score", deadline_s=2.0)
    assert failed(found) == ["deadline"]
    assert "deadline of 2 s" in said(found, "deadline")
    assert [finding.status for finding in found.findings[-3:]] == ["skipped"] * 3


SAVED = """
class Guess:
    def __init__(self):
        self.count, self.forgotten = 0, 0

    def step(self, response, conversation_seed):
        self.count += 1
        self.forgotten += 1
        return f"guess {self.count + 1}", float(FORGETS and self.forgotten)

    def save(self):
        return self.count

    def restore(self, saved):
        self.count = saved
"""


@pytest.mark.parametrize("forgets", [False, True])
def test_a_conversation_resumes_from_its_saved_state_in_another_process(tmp_path: Path, forgets: bool) -> None:
    found = checked(tmp_path, SAVED.replace("FORGETS", str(forgets)), "Guess")
    assert failed(found) == (["resume"] if forgets else [])
    expected = "reward 3, and 1 after it was saved and resumed" if forgets else "6 conversations were saved and resumed"
    assert expected in said(found, "resume")


def test_states_that_are_not_saved_are_reported(tmp_path: Path) -> None:
    assert "states are not saved" in said(checked(tmp_path, GAME, "Guess"), "resume")
