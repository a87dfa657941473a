"""Processors of programming problems: rows as the cards of their datasets have them."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.processors import PROCESSORS
from rl_core.errors import DataError

SETTINGS = DatasetConfig(data_path="problems.jsonl")

STDIN = [{"input": "2\n", "output": "4\n", "testtype": "stdin"}]
FUNCTIONAL = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]


def _hidden(tests: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def _livecodebench(tests: Any, **more: Any) -> dict[str, Any]:
    base = {
        "question_title": "t", "question_content": "Do it.", "platform": "atcoder", "question_id": "1",
        "contest_id": "1", "contest_date": "2024-01-01", "starter_code": "", "difficulty": "easy",
        "public_test_cases": json.dumps(tests), "private_test_cases": _hidden(tests), "metadata": "{}",
    }  # fmt: skip
    return base | more


APPS = {
    "problem_id": 1, "question": "Do it.", "solutions": "[]", "difficulty": "easy", "url": "", "starter_code": "",
    "input_output": json.dumps({"inputs": ["2\n", ["5", "1"]], "outputs": ["4\n", ["10"]]}),
}  # fmt: skip
APPS_FUNCTION = APPS | {
    "input_output": json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}),
    "starter_code": "def f(a, b):",
}


@pytest.mark.parametrize(
    ("kind", "row", "info"),
    [
        ("livecodebench", _livecodebench(STDIN), {"tests": [{"input": "2\n", "output": "4\n"}] * 2}),
        (
            "livecodebench",
            _livecodebench(FUNCTIONAL, metadata='{"func_name": "f"}', starter_code="class Solution:"),
            {"function": "f", "tests": [{"arguments": [[1, 2], 3], "result": 6}] * 2},
        ),
        (
            "livecodebench",
            _livecodebench(STDIN, private_test_cases=json.dumps(STDIN)),
            {"tests": [{"input": "2\n", "output": "4\n"}] * 2},
        ),
        ("apps", APPS, {"tests": [{"input": "2\n", "output": "4\n"}, {"input": "5\n1", "output": "10"}]}),
        ("apps", APPS_FUNCTION, {"function": "f", "tests": [{"arguments": [1, 2], "results": [[3], 3]}]}),
        (
            "eurus_code",
            {
                "data_source": "apps", "prompt": [{"role": "user", "content": "Do it."}], "ability": "code",
                "reward_model": {"style": "rule", "ground_truth": APPS["input_output"]},
            },
            {"tests": [{"input": "2\n", "output": "4\n"}, {"input": "5\n1", "output": "10"}]},
        ),
        (
            "humaneval_plus",
            {
                "task_id": "HumanEval/0", "prompt": "def f(a):\n    '''Twice.'''\n", "entry_point": "f",
                "canonical_solution": "    return 2 * a", "test": "def check(c):\n    assert c(2) == 4",
            },
            {"test_code": ["def check(c):\n    assert c(2) == 4\n\ncheck(f)\n"]},
        ),
        (
            "mbpp_plus",
            {
                "task_id": 2, "code": "", "prompt": "Twice.", "source_file": "", "test_imports": ["import math"],
                "test_list": ["assert f(2) == 4"], "test": "assert f(3) == 6",
            },
            {"test_code": ["import math\nassert f(3) == 6"]},
        ),
    ],
)  # fmt: skip
def test_rows_of_the_hub_become_problems(kind: str, row: dict[str, Any], info: dict[str, Any]) -> None:
    example = PROCESSORS[kind](row, SETTINGS)
    assert {name: value for name, value in example.info.items() if value is not None} == info
    assert example.environment == "code"
    assert [message["role"] for message in example.messages] == ["user"]
    reads_input = kind != "eurus_code" and "tests" in info and "function" not in info
    assert ("reads standard input" in example.messages[0]["content"]) == reads_input


class _Danger:
    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


def _packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("apps", {"question": "x"}, "no column 'input_output'; the columns are question"),
        ("apps", APPS | {"input_output": "{"}, "the tests must be JSON"),
        ("apps", APPS | {"input_output": "[]"}, "need `inputs` and `outputs`"),
        ("apps", APPS | {"input_output": '{"inputs": ["1"], "outputs": []}'}, "1 inputs and 0 outputs"),
        ("livecodebench", _livecodebench(FUNCTIONAL), "call a function that `metadata` does not name"),
        ("livecodebench", _livecodebench([{"input": "1"}]), "has another form"),
        ("livecodebench", _livecodebench(STDIN, private_test_cases="AAAA"), "cannot be unpacked"),
        ("livecodebench", _livecodebench(STDIN, private_test_cases="!"), "has another form"),
        ("livecodebench", _livecodebench(STDIN, private_test_cases=_packed([1])), "holds no tests"),
        pytest.param(
            "livecodebench",
            _livecodebench(STDIN, private_test_cases=_packed(_Danger())),
            "may hold text only",
            id="a pickle of code [huggingface/lighteval#1241]",
        ),
        ("mbpp_plus", {"prompt": "x", "test_list": "assert f()"}, "`test_list` must be a list of strings"),
        ("humaneval_plus", {"prompt": 1}, "'prompt' must be a string"),
    ],
)
def test_a_row_of_another_form_is_refused(
    kind: str, row: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=says):
        PROCESSORS[kind](row, SETTINGS)
    assert "unpickled" not in capsys.readouterr().out


def test_rows_carry_their_tests_once(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(_livecodebench(STDIN)) + "\n")
    data = DataConfig.model_validate({"train": {"data_path": str(path), "processor": "livecodebench"}})
    [dataset] = load_datasets(data, "train")
    [example] = dataset.examples.values()
    assert dataset.environments() == {"code": "test.jsonl:train:0"}
    assert example.info["private_test_cases"] is None
    assert len(example.info["tests"]) == 2
