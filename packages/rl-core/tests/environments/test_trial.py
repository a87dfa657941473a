"""Environments tried on a few rows before a run starts."""

import asyncio
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.instance import EnvironmentInstance
from rl_core.environments.trial import Attempt, Trial, attempts_on, raised_remedy, try_out
from rl_core.plugins import Requirement
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.user_code import FromFile


@pytest.fixture
def trial(tmp_path):
    """A trial of a file's function or class on one row."""

    def make(text, name="score", *, deadline_s=60.0, **row):
        path = tmp_path / "reward.py"
        path.write_text(text)
        source = FromFile.read(f"{path}:{name}")
        instance = EnvironmentInstance(
            f"{path}:{name}", source, EnvironmentConfig(deadline_s=deadline_s), Requirement("rl-core")
        )
        question = ({"role": "user", "content": "1+2="},)
        return Trial(instance, attempts_on("prompts.jsonl, line 3", "prompts:train:2", question, row))

    return make


def test_rewards_that_can_be_used_pass(trial):
    several = [
        trial("def score(response, **row):\n    return len(response)\n"),
        trial("async def score(response, answer):\n    print(response)\n    return {'a': 1, 'b': True}\n", answer=3),
        trial("def score(completions, **rows):\n    return [0.5] * len(completions)\n"),
        trial(
            "from rl_core import StepResult\n\nclass Game:\n    def step(self, conversations, states):\n"
            "        return [StepResult(1.0) for _ in conversations]\n    def close(self, states): ...\n",
            "Game",
        ),
        trial(
            "from rl_core import Environment, StepResult\n\nclass Game:\n    def step(self, conversations, states):\n"
            "        return [StepResult(1.0) for _ in conversations]\n    def close(self, states): ...\n\n"
            "def make() -> Environment:\n    return Game()\n",
            "make",
        ),
    ]
    verdict = try_out(several)
    assert (verdict.problems, verdict.warnings) == ([], [])


def test_judges_are_not_asked_and_a_function_that_asks_one_is_not_judged_by_what_follows(trial):
    asks = "async def score(response, critic):\n    return await critic.ask(response)\n"
    broken = "async def score(response, critic):\n    return (await critic.ask(response)) + nothing\n"
    never = "async def score(response, critic):\n    return nothing\n"
    tried = [replace(trial(text), judges=("critic",)) for text in (asks, broken)]
    verdict = try_out(tried)
    assert (verdict.problems, verdict.warnings) == ([], [])
    [problem] = try_out([replace(trial(never), judges=("critic",))]).problems
    assert "NameError" in problem
    [problem] = try_out([trial(asks)]).problems
    assert "asks for 'critic'" in problem
    [problem] = try_out([replace(trial("def score(response, critic): ..."), judges=("critic",))]).problems
    assert "make it an async function" in problem
    [problem] = try_out([replace(trial(asks), reward_models=("critic",))]).problems
    assert "judges.critic is a reward model, which only functions under env.NAME.rewards can ask" in problem
    scores = "async def score(messages, critic):\n    return await critic.score(messages)\n"
    of_model = replace(trial(scores), judges=("strict",), reward_models=("critic",), is_scored=True)
    verdict = try_out([of_model])
    assert (verdict.problems, verdict.warnings) == ([], [])


def test_a_notebook_tries_environments_in_its_running_loop(trial):
    tried = trial("def score(response):\n    return None\n")

    async def cell():
        return try_out([tried])

    (problem,) = asyncio.run(cell()).problems
    assert "the reward is None; return a number" in problem


UNUSABLE = [
    ("def score(response):\n    return None", r"score \(reward\.py:1\): the reward is None; return a number"),
    ("def score(response):\n    return 'good'", "the reward is 'good'"),
    ("def score(response):\n    return float('nan')", "the reward is nan; return a finite number"),
    ("def score(response, anwser):\n    return 1.0", r"asks for 'anwser'; did you mean answer\?"),
    ("def score(response):\n    return {}[response]", r"raised KeyError: .*\(at reward\.py:2\)\. .* raises too"),
    ("def score(response):\n    exit('done')", r"ended its process with SystemExit: done \(at reward\.py:2\)"),
    ("import os\ndef score(response):\n    os._exit(5)", "ended: exit code 5"),
    ("import no_such_package\ndef score(response):\n    return 1.0", "cannot be built: .* imports no_such_package"),
    ("def helper(): return SCALE\nhelper()\ndef score(response): ...", r"NameError: .*\(at reward\.py:1\)"),
    ("def score(response):\n    return {}", "the reward has no parts"),
    ("class score: ...", "score is not an environment: it lacks the method `step`"),
    ("score = 3", "3 is not a function"),
]
"""A reward, and what is said of it."""


@pytest.mark.parametrize(("text", "says"), partly_exhaustive(UNUSABLE, always=UNUSABLE[::3]))
def test_a_reward_that_cannot_be_used_is_named_with_its_line_and_the_row(trial, text, says):
    [problem] = try_out([trial(text, answer="3")]).problems
    assert problem.startswith(("environment reward.py:score", "the process of environment reward.py:score"))
    assert re.search(says, problem), problem
    if "cannot be built" not in problem:
        assert "It was tried on prompts.jsonl, line 3, with the response 'The answer is 3.'" in problem


def test_a_reward_that_hangs_is_told_of_with_where_it_was(trial):
    hangs = trial("import threading\n\ndef score(response):\n    threading.Event().wait()\n", deadline_s=0.5)
    [problem] = try_out([hangs]).problems
    assert "gave no answer within its deadline of 0.5 s (deadline_s beside `type: reward.py:score` under" in problem


def test_an_async_reward_that_hangs_is_told_of_with_its_own_line(trial):
    text = (
        "import asyncio\nasync def ask():\n    await asyncio.sleep(100)\nasync def score(response):\n    await ask()\n"
    )
    [problem] = try_out([trial(text, deadline_s=2.0)]).problems
    assert "it was in ask (reward.py:3)" in problem


def test_a_reward_that_forks_is_answered_by_the_process_that_was_asked(trial):
    # the forked process is given the time to answer first
    text = "import os, time\ndef score(response):\n    return time.sleep(0.1) or 1.0 if os.fork() else 'of the fork'\n"
    assert try_out([trial(text)]).problems == []


def test_a_score_that_is_added_to_other_numbers_is_a_warning(trial):
    [warning] = try_out([trial("def score(response):\n    return {'score': 1.0, 'acc': 1.0}\n")]).warnings
    assert "returns score, acc: their sum is trained on" in warning
    named = trial("def score(response):\n    return {'score': 1.0, 'acc': 1.0, 'reward': 1.0}\n")
    assert try_out([named]).warnings == []


def test_a_reward_that_raises_on_some_responses_is_a_warning(trial):
    verdict = try_out([trial("def score(response):\n    return float(response.split()[0] == 'The')\n")])
    assert verdict.problems == []
    [warning] = verdict.warnings
    assert "raised IndexError: list index out of range (at reward.py:2)" in warning
    assert "with the response ''; a rollout with such a response fails" in warning


def test_a_trial_runs_in_another_interpreter_without_the_file(trial, tmp_path):
    sent = pickle.dumps([trial("def score(response):\n    return None\n")])
    (tmp_path / "reward.py").unlink()
    command = [sys.executable, "-c", "from rl_core.environments.trial import main; main()"]
    done = subprocess.run(command, input=sent, capture_output=True, check=True)
    assert b"the reward is None" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("reason", "is_text", "mentions"),
    [
        (
            "TypeError: string indices must be integers, not 'str' (at r.py:2)",
            True,
            "prompts of rows.jsonl are strings",
        ),
        ("AttributeError: 'str' object has no attribute 'get'", True, "completions are strings"),
        ("TypeError: string indices must be integers, not 'str' (at r.py:2)", False, "0.0"),
        ("KeyError: 'answer'", True, "0.0"),
    ],
)
def test_a_function_that_takes_strings_for_messages_gets_its_own_remedy(reason, is_text, mentions):
    question = ({"role": "user", "content": "1+2="},)
    attempt: Attempt = attempts_on("rows.jsonl, line 3", "rows:train:2", question, {}, is_text=is_text)[0]
    assert mentions in raised_remedy(reason, attempt)


ROW = {"id": 3, "answer": 4, "gold": ["4"], "text": "4"}
INT = "`answer` is an int in rows.jsonl; compare with str(answer)"


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("TypeError: 'in <string>' requires string as left operand, not int (at r.py:2)", INT),
        ("AttributeError: 'int' object has no attribute 'strip'", INT),
        ("TypeError: expected string or bytes-like object, got 'int'", INT),
        (
            "AttributeError: 'list' object has no attribute 'lower'",
            "`gold` is a list in rows.jsonl; compare with the text in it",
        ),
        ("TypeError: int() argument must be a string, not 'NoneType'", "a reward is a number"),
        ("ValueError: invalid literal for int", "a reward is a number"),
    ],
)
def test_an_error_about_the_type_of_a_column_names_the_column(reason, remedy):
    attempt = attempts_on("rows.jsonl, line 3", "rows:train:2", [], ROW)[0]
    assert raised_remedy(reason, attempt).startswith(remedy)
