"""Processors of programming problems, whose tests the environment `code` runs.

Columns follow the datasets' cards on the hub; `rl_algos.data.sources.hub_datasets` lists the processor of each.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.example import Example, column, text_column
from rl_algos.data.rows.messages import as_messages
from rl_core.errors import DataError

_ANSWER = "Write your answer as one block of Python code between ```python and ```."
_STDIN = f"The program reads standard input and writes standard output. {_ANSWER}"
_MAX_TESTS_BYTES = 2**28


def apps(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `question`, `starter_code`, and the tests in `input_output` (APPS, arXiv:2105.09938; TACO,
    arXiv:2312.14852)."""
    tests = _input_output(column(row, "input_output"))
    return _asked(text_column(row, "question"), row.get("starter_code"), tests)


def eurus_code(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `prompt` as messages, and the tests in `reward_model.ground_truth`, which are written like those of APPS
    (the code rows of Eurus-2-RL-Data)."""
    tests = _input_output(column(row, "reward_model.ground_truth"))
    return Example(as_messages(column(row, "prompt")), environment="code", info=tests)


def livecodebench(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `question_content`, `starter_code`, and all public and private tests (LiveCodeBench's
    code_generation_lite, arXiv:2403.07974)."""
    public, private = column(row, "public_test_cases"), column(row, "private_test_cases")
    metadata = _json("metadata", row.get("metadata") or "{}")
    try:
        tests = [*_json("public_test_cases", public), *_private_tests(private)]
        if any(test["testtype"] == "functional" for test in tests):
            if not (function := metadata.get("func_name")):
                raise DataError("the tests call a function that `metadata` does not name")
            calls = [
                {
                    "arguments": [json.loads(line) for line in test["input"].split("\n") if line.strip()],
                    "result": json.loads(test["output"]),
                }
                for test in tests
            ]
            found = {"function": function, "tests": calls}
        else:
            found = {"tests": [{"input": test["input"], "output": test["output"]} for test in tests]}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"`public_test_cases` or `private_test_cases` has another form: {error!r:.200}") from None
    # The rollouts carry the tests that were read, and not the packed ones beside them.
    return _asked(text_column(row, "question_content"), row.get("starter_code"), {**found, "private_test_cases": None})


def humaneval_plus(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `prompt` as code to complete, and the function `check` in `test` (HumanEval+, arXiv:2305.01210)."""
    question = f"Complete this Python code:\n```python\n{text_column(row, 'prompt').rstrip()}\n```"
    test = f"{text_column(row, 'test')}\n\ncheck({text_column(row, 'entry_point')})\n"
    return _asked(question, None, {"test_code": [test]})


def mbpp_plus(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """Return `prompt` with up to three assertions of `test_list`, and the tests in `test` (MBPP+, arXiv:2305.01210)."""
    shown = column(row, "test_list")
    if not isinstance(shown, list | tuple) or not all(isinstance(each, str) for each in shown):
        raise DataError(f"`test_list` must be a list of strings, got {shown!r:.80}")
    imports = "\n".join(row.get("test_imports") or ())
    tests = [text_column(row, "test")] if row.get("test") else list(shown)
    question = "\n".join([text_column(row, "prompt").strip(), "Your code should pass these tests:", *shown[:3]])
    return _asked(question, None, {"test_code": [f"{imports}\n{test}" for test in tests]})


def _asked(question: str, starter: Any, tests: Mapping[str, Any]) -> Example:
    """Return a question with the code to start from and the form of the answer, with its tests."""
    if isinstance(starter, str) and starter.strip():
        asked = f"{question.strip()}\n\nStart from this code:\n```python\n{starter.rstrip()}\n```\n\n{_ANSWER}"
    else:
        is_called = "function" in tests or "test_code" in tests
        asked = f"{question.strip()}\n\n{_ANSWER if is_called else _STDIN}"
    return Example(({"role": "user", "content": asked},), environment="code", info=tests)


def _input_output(written: Any) -> dict[str, Any]:
    """Return tests from `inputs` and `outputs`, and `fn_name` if they call a function."""
    given = _json("the tests", written)
    try:
        inputs, outputs = given["inputs"], given["outputs"]
        if not inputs or len(inputs) != len(outputs):
            raise DataError(f"the row has {len(inputs)} inputs and {len(outputs)} outputs")
        pairs = list(zip(inputs, outputs, strict=True))
        if function := given.get("fn_name"):
            calls = []
            for arguments, result in pairs:
                # Some rows wrap a result in a list, and some do not.
                unwrapped = result[:1] if isinstance(result, list) and len(result) == 1 else ()
                calls.append({"arguments": list(arguments), "results": [result, *unwrapped]})
            return {"function": function, "tests": calls}
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the tests need `inputs` and `outputs`, both lists: {error!r:.200}") from None
    return {"tests": [{"input": _text(given), "output": _text(expected)} for given, expected in pairs]}


def _private_tests(text: str) -> Sequence[Any]:
    """Return tests from JSON, or from base64 of zlib of a pickle of it; the pickle may contain only text."""
    if text.lstrip().startswith("["):
        found: list[Any] = json.loads(text)
        return found
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text), _MAX_TESTS_BYTES)
        if unpacker.unconsumed_tail:
            raise DataError(f"`private_test_cases` unpacks to more than {_MAX_TESTS_BYTES:,} bytes")
        unpickled = _TextUnpickler(io.BytesIO(data)).load()
    except (zlib.error, pickle.UnpicklingError, EOFError, IndexError) as error:
        raise DataError(f"`private_test_cases` cannot be unpacked: {error}") from None
    tests: list[Any] = json.loads(unpickled) if isinstance(unpickled, str | bytes) else []
    if not tests:
        raise DataError("`private_test_cases` holds no tests")
    return tests


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and may hold text only")


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _json(name: str, value: Any) -> Any:
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} must be JSON: {error}") from None
