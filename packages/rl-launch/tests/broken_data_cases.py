"""Broken rewards, environments, processors and datasets of users, and what the message shows."""

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


def _reward(name: str, code: str, *, shows: tuple[str, ...], recipe: str = RECIPE, rows: str = "") -> Case:
    """A recipe with a reward next to it. By default its data is one valid row."""

    def write(folder: Path) -> None:
        (folder / "run.yaml").write_text(recipe)
        (folder / "reward.py").write_text(code)
        (folder / "prompts.jsonl").write_text(rows or f"{json.dumps(ROW)}\n")

    return Case(name, ("run.yaml",), shows=shows, files=write)


def _data(
    name: str, rows: str | bytes, *arguments: str, shows: tuple[str, ...], algorithm: str = SFT, code: str = ""
) -> Case:
    """Rows in a file, and a processor next to it."""

    def write(folder: Path) -> None:
        (folder / "rows.jsonl").write_bytes(rows if isinstance(rows, bytes) else rows.encode())
        if code:
            (folder / "rows.py").write_text(code)

    return Case(name, (algorithm, "data.train={data_path: rows.jsonl}", *arguments), shows=shows, files=write)


def _rows(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


AT_ROW = "prompts.jsonl, line 1"
WITH_OWN_SECTION = RECIPE.replace("reward.py:score", "mine") + "env: {mine: {type: reward.py:score, deadline_s: 1.0}}\n"

_REWARDS = (
    _reward(
        "a reward that always raises",
        "def score(response, answer):\n    return {}[answer]\n",
        shows=("reward.py:score", "KeyError: '3'", "reward.py:2", AT_ROW, "0.0"),
    ),
    _reward(
        "a reward that is None",
        "def score(response, answer):\n    if response == answer:\n        return 1.0\n",
        shows=("reward.py:score", "reward.py:1", "None", "1.0", AT_ROW),
    ),
    _reward(
        "a reward that is a string",
        "def score(response):\n    return '1.0'\n",
        shows=("reward.py:1", "'1.0'", "number", AT_ROW),
    ),
    _reward(
        "a reward that is NaN",
        "def score(response):\n    return float('nan')\n",
        shows=("reward.py:1", "nan", "finite", AT_ROW),
    ),
    _reward(
        "a reward that is infinite",
        "import math\n\ndef score(response):\n    return {'length': -math.inf}\n",
        shows=("reward.py:3", "'length'", "-inf", "finite", AT_ROW),
    ),
    _reward(
        "a list of rewards for one response",
        "def score(response):\n    return [1.0]\n",
        shows=("reward.py:1", "[1.0]", "number"),
    ),
    _reward(
        "one reward for a list of responses",
        "def score(completions, **rows):\n    return 1.0\n",
        shows=("reward.py:1", "score returned 1.0", "list of rewards"),
    ),
    _reward(
        "a parameter that is not a field of the row",
        "def score(response, anwser):\n    return 1.0\n",
        shows=("reward.py:1", "'anwser'", "answer?"),
    ),
    _reward(
        "a parameter that is taken by position",
        "def score(response, /):\n    return 1.0\n",
        shows=("reward.py:score", "response", "`/`"),
    ),
    _reward(
        "a reward that hangs",
        "import threading\n\ndef score(response):\n    threading.Event().wait()\n",
        recipe=WITH_OWN_SECTION,
        shows=("mine (reward.py:score)", "1 s", "env.mine.deadline_s", "score (reward"),
    ),
    _reward(
        "a reward that ends its process",
        "import os\n\ndef score(response):\n    print('bye', flush=True)\n    os._exit(3)\n",
        shows=("reward.py:score", "exit code 3", "'bye'", AT_ROW),
    ),
    _reward("a reward that calls exit", "def score(response):\n    exit(1)\n", shows=("SystemExit: 1", "reward.py:2")),
    _reward(
        "a reward that imports what is not installed",
        "import no_such_judge\n" + GOOD,
        shows=("reward.py", "no_such_judge"),
    ),
    _reward("a reward that is not Python", "def score(response)\n", shows=("reward.py:1", "not valid Python")),
    _reward(
        "a file without the function",
        "def scor(response):\n    return 1.0\n",
        shows=("data.train.env_name (run.yaml:3)", "reward.py", "'score'", "scor?"),
    ),
    _reward(
        "a file that is not there",
        GOOD,
        recipe=RECIPE.replace("reward.py:score", "rewards.py:score"),
        shows=("data.train.env_name (run.yaml:3)", "rewards.py", "No such file"),
    ),
    _reward(
        "an environment that is a class without a step",
        "class score:\n    def close(self, states): ...\n",
        shows=("reward.py:score", "`step`"),
    ),
    _reward(
        "a class that steps many with something else",
        "class score:\n"
        "    def step(self, conversations, states):\n        return 1.0\n"
        "    def close(self, states): ...\n",
        shows=("reward.py:1", "StepResult", "1.0"),
    ),
    _reward(
        "a class that steps with what no row has",
        "class score:\n    def step(self, turns, states):\n        return 1.0\n",
        shows=("reward.py:1", "score.step", "'turns'", "answer"),
    ),
    _reward(
        "a setting that the class does not have",
        "class score:\n    def __init__(self, *, size: int = 3): ...\n",
        recipe=WITH_OWN_SECTION.replace("deadline_s: 1.0", "sise: 4"),
        shows=("env.mine.sise (run.yaml:5)", "env.mine.size?"),
    ),
    _reward(
        "an environment without a type",
        GOOD,
        recipe=RECIPE + "env: {mine: {deadline_s: 1.0}}\n",
        shows=("env.mine (run.yaml:5)", "'mine'", "`type`"),
    ),
    _reward(
        "a row without the field that the reward asks for",
        GOOD,
        rows=_rows({"messages": "1+2="}),
        shows=("'answer'", AT_ROW),
    ),
)

_DATASETS = (
    _data(
        "a line break in a JSON string",
        b'{"messages": "1+2="}\n{"messages": "a\x01b"}\n',
        shows=("rows.jsonl, line 2", "Invalid control character", "column 16"),
    ),
    _data(
        "quotes of Python in JSON", "{'messages': '1+2='}\n", shows=("rows.jsonl, line 1", "column 2", "double quotes")
    ),
    _data("a file that is not UTF-8", b'{"a": "\xff"}\n', shows=("rows.jsonl, line 1", "UTF-8")),
    _data(
        "a row without messages, after an empty line",
        "\n" + _rows({"message": "1+2="}),
        shows=("rows.jsonl, line 2", "'messages'", "message?"),
    ),
    _data(
        "an answer that the math environment cannot read",
        _rows({**QUESTION, "answer": ""}),
        algorithm=GRPO,
        shows=("rows.jsonl, line 1", "math", "empty"),
    ),
    _data(
        "a row that names a file for its environment",
        _rows({**QUESTION, "environment": "reward.py:score"}),
        algorithm=GRPO,
        shows=("rows.jsonl, line 1", "'reward.py:score'", "env_name"),
    ),
    _data(
        "a processor with another signature",
        _rows(QUESTION),
        "data.default.processor=rows.py:convert",
        code="def convert(row): ...\n",
        shows=("rows.py:convert (rows.py:1)", "def convert(row, settings)"),
    ),
    _data(
        "a processor that raises",
        _rows(QUESTION),
        "data.default.processor=rows.py:convert",
        code="def convert(row, settings):\n    return row['question']\n",
        shows=("line 1", "rows.py:convert (rows.py:1)", "KeyError: 'question'", "rows.py:2"),
    ),
    _data(
        "a processor that returns something else",
        _rows(QUESTION),
        "data.default.processor=rows.py:convert",
        code="def convert(row, settings):\n    return row\n",
        shows=("rows.py:convert (rows.py:1)", "dict", "rl_algos.Example"),
    ),
)

CASES = (*_REWARDS, *_DATASETS)
