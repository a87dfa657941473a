"""Rewards, environments, processors and datasets that are broken, as a user may write them, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

from bad_input_cases import GRPO, QUESTION, SFT, Case

GOOD = "def score(response, answer):\n    return float(response == answer)\n"
RECIPE = f"""\
defaults: {GRPO}
data:
  train: {{data_path: prompts.jsonl, env_name: reward.py:score}}
  validation: {{data_path: prompts.jsonl, env_name: reward.py:score}}
"""
ROW = {"messages": "1+2=", "answer": "3"}


def _reward(name: str, code: str, *, says: str, recipe: str = RECIPE, rows: str = "") -> Case:
    """A recipe with a reward beside it; its data is one good row if nothing else is given."""

    def write(folder: Path) -> None:
        (folder / "run.yaml").write_text(recipe)
        (folder / "reward.py").write_text(code)
        (folder / "prompts.jsonl").write_text(rows or f"{json.dumps(ROW)}\n")

    return Case(name, ("run.yaml",), says, write)


def _data(name: str, rows: str | bytes, *arguments: str, says: str, algorithm: str = SFT, code: str = "") -> Case:
    """Rows in a file, and a processor beside it."""

    def write(folder: Path) -> None:
        (folder / "rows.jsonl").write_bytes(rows if isinstance(rows, bytes) else rows.encode())
        if code:
            (folder / "rows.py").write_text(code)

    return Case(name, (algorithm, "data.train={data_path: rows.jsonl}", *arguments), says, write)


def _rows(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


AT_ROW = r".*It was tried on prompts\.jsonl, line 1, with the response"
WITH_OWN_SECTION = RECIPE.replace("reward.py:score", "mine") + "env: {mine: {type: reward.py:score, deadline_s: 1.0}}\n"

_REWARDS = (
    _reward(
        "a reward that always raises",
        "def score(response, answer):\n    return {}[answer]\n",
        says=rf"reward\.py:score raised KeyError: '3' \(at reward\.py:2\)\.{AT_ROW}.*such as 0\.0",
    ),
    _reward(
        "a reward that is None",
        "def score(response, answer):\n    if response == answer:\n        return 1.0\n",
        says=rf"reward\.py:score \(reward\.py:1\): the reward is None; return a number, such as 1\.0\.{AT_ROW}",
    ),
    _reward(
        "a reward that is a text",
        "def score(response):\n    return '1.0'\n",
        says=rf"\(reward\.py:1\): the reward is '1\.0'; return a number, such as 1\.0\.{AT_ROW}",
    ),
    _reward(
        "a reward that is NaN",
        "def score(response):\n    return float('nan')\n",
        says=rf"\(reward\.py:1\): the reward is nan; return a finite number\.{AT_ROW}",
    ),
    _reward(
        "a reward that is infinite",
        "import math\n\ndef score(response):\n    return {'length': -math.inf}\n",
        says=rf"\(reward\.py:3\): the reward 'length' is -inf; return a finite number\.{AT_ROW}",
    ),
    _reward(
        "a list of rewards for one response",
        "def score(response):\n    return [1.0]\n",
        says=r"\(reward\.py:1\): the reward is \[1\.0\]; return a number, such as 1\.0\.",
    ),
    _reward(
        "one reward for a list of responses",
        "def score(completions, **rows):\n    return 1.0\n",
        says=r"\(reward\.py:1\): score returned 1\.0; a function that is given lists returns a list of rewards",
    ),
    _reward(
        "a parameter that is not a field of the row",
        "def score(response, anwser):\n    return 1.0\n",
        says=r"\(reward\.py:1\): score asks for 'anwser'; did you mean answer\? The row has answer; other par",
    ),
    _reward(
        "a parameter that is taken by position",
        "def score(response, /):\n    return 1.0\n",
        says=r"reward\.py:score cannot be built: it takes response by position only; remove the `/`",
    ),
    _reward(
        "a reward that hangs",
        "import threading\n\ndef score(response):\n    threading.Event().wait()\n",
        recipe=WITH_OWN_SECTION,
        says=r"mine \(reward\.py:score\) gave no answer .* 1 s \(env\.mine\.deadline_s\); it was in score \(reward",
    ),
    _reward(
        "a reward that ends its process",
        "import os\n\ndef score(response):\n    print('bye', flush=True)\n    os._exit(3)\n",
        says=rf"reward\.py:score ended: exit code 3, after it wrote 'bye'\.{AT_ROW}",
    ),
    _reward(
        "a reward that calls exit",
        "def score(response):\n    exit(1)\n",
        says=r"ended its process with SystemExit: 1 \(at reward\.py:2\); return a reward instead",
    ),
    _reward(
        "a reward that imports what is not installed",
        "import no_such_judge\n" + GOOD,
        says=r"reward\.py imports no_such_judge, which is not installed here .*Install it, or import",
    ),
    _reward("a reward that is not Python", "def score(response)\n", says=r"reward\.py:1 is not valid Python: expected"),
    _reward(
        "a file without the function",
        "def scor(response):\n    return 1.0\n",
        says=r"data\.train\.env_name \(run\.yaml:3\): .*reward\.py has no 'score'; did you mean scor\?",
    ),
    _reward(
        "a file that is not there",
        GOOD,
        recipe=RECIPE.replace("reward.py:score", "rewards.py:score"),
        says=r"data\.train\.env_name \(run\.yaml:3\): .*rewards\.py cannot be read: No such file",
    ),
    _reward(
        "an environment that is a class without a step",
        "class score:\n    def close(self, states): ...\n",
        says=r"reward\.py:score cannot be built: score is not an environment: it lacks the method `step`",
    ),
    _reward(
        "a class that steps many with something else",
        "class score:\n"
        "    def step(self, conversations, states):\n        return 1.0\n"
        "    def close(self, states): ...\n",
        says=r"\(reward\.py:1\): step must return a list of StepResult, got 1\.0\.",
    ),
    _reward(
        "a class that steps with what no row has",
        "class score:\n    def step(self, turns, states):\n        return 1.0\n",
        says=r"\(reward\.py:1\): score\.step asks for 'turns'; the row has answer; other parameters may be response",
    ),
    _reward(
        "a setting that the class does not have",
        "class score:\n    def __init__(self, *, size: int = 3): ...\n",
        recipe=WITH_OWN_SECTION.replace("deadline_s: 1.0", "sise: 4"),
        says=r"env\.mine\.sise \(run\.yaml:5\): no such key; did you mean env\.mine\.size\?",
    ),
    _reward(
        "an environment without a type",
        GOOD,
        recipe=RECIPE + "env: {mine: {deadline_s: 1.0}}\n",
        says=r"env\.mine \(run\.yaml:5\): no environment 'mine' is installed; .*file\.py:function, given as `type`",
    ),
    _reward(
        "a row without the field that the reward asks for",
        GOOD,
        rows=_rows({"messages": "1+2="}),
        says=r"score asks for 'answer'; the row has no fields; .*It was tried on prompts\.jsonl, line 1",
    ),
)

_DATASETS = (
    _data(
        "a line break in a text of JSON",
        b'{"messages": "1+2="}\n{"messages": "a\x01b"}\n',
        says=r"rows\.jsonl, line 2: not a JSON object: Invalid control character at column 16; write",
    ),
    _data(
        "quotes of Python in JSON",
        "{'messages': '1+2='}\n",
        says=r"rows\.jsonl, line 1: not a JSON object: .* at column 2; JSON has double quotes",
    ),
    _data("a file that is not UTF-8", b'{"a": "\xff"}\n', says=r"rows\.jsonl, line 1: .*it is not text in UTF-8"),
    _data(
        "a row without messages, behind an empty line",
        "\n" + _rows({"message": "1+2="}),
        says=r"rows\.jsonl, line 2: no column 'messages'; did you mean message\?",
    ),
    _data(
        "an answer that the math environment cannot read",
        _rows({**QUESTION, "answer": ""}),
        algorithm=GRPO,
        says=r"rows\.jsonl, line 1: the environment math cannot score it: the answer .* is empty",
    ),
    _data(
        "a row that names a file for its environment",
        _rows({**QUESTION, "environment": "reward.py:score"}),
        algorithm=GRPO,
        says=r"rows\.jsonl, line 1: no environment 'reward\.py:score' is installed; .*as env_name",
    ),
    _data(
        "a processor with another signature",
        _rows(QUESTION),
        "data.default.processor=rows.py:convert",
        code="def convert(row): ...\n",
        says=r"rows\.py:convert \(rows\.py:1\) cannot be called with .* write it as def convert\(row, settings\)",
    ),
    _data(
        "a processor that raises",
        _rows(QUESTION),
        "data.default.processor=rows.py:convert",
        code="def convert(row, settings):\n    return row['question']\n",
        says=r"line 1: the processor rows\.py:convert \(rows\.py:1\) raised KeyError: 'question' \(at rows\.py:2\);",
    ),
    _data(
        "a processor that returns something else",
        _rows(QUESTION),
        "data.default.processor=rows.py:convert",
        code="def convert(row, settings):\n    return row\n",
        says=r"the processor rows\.py:convert \(rows\.py:1\) returned dict; return an rl_algos\.Example",
    ),
)

CASES = (*_REWARDS, *_DATASETS)
