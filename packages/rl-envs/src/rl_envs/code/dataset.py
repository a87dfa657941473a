"""Programming problems from a file, by the columns that datasets have on the hub."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickle
import zlib
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_envs.code.plugin import CodeProblemsSettings, Format


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` (the tests) and `environment`; the file is all of the split.

    Raises:
        DataError: If the file cannot be read, naming the line.
    """
    config = CodeProblemsSettings.model_validate(dict(settings))
    path = Path(config.path)
    rows: list[dict[str, Any]] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            numbered = ((at, text) for at, text in enumerate(file, 1) if text.strip())
            for number, line in islice(numbered, config.max_rows):
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise DataError(f"a line must be an object, got {line!r:.60}")
                    rows.append(row_of(row, config.format))
                except ValueError as error:
                    raise DataError(f"{path}:{number}: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


_ANSWER = "Write your answer as one block of Python code between ```python and ```."
_STDIN = f"The program reads standard input and writes standard output. {_ANSWER}"
_MAX_TESTS_BYTES = 2**28

Row = Mapping[str, Any]


def row_of(row: Row, kind: Format) -> dict[str, Any]:
    """Return a row as the environment `code` takes it, with `messages`, `info` and `environment`.

    Raises:
        DataError: If the row lacks a column, or one has another form.
    """
    try:
        return {**_READERS[kind](row), "environment": "code"}
    except KeyError as error:
        raise DataError(f"no column {error}; the columns are {', '.join(sorted(row))}") from None
    except (ValueError, TypeError, AttributeError, IndexError, pickle.UnpicklingError, zlib.error) as error:
        raise DataError(f"not a row of {kind}: {error}") from None


def _livecodebench(row: Row) -> dict[str, Any]:
    tests = [*_json(row["public_test_cases"]), *_private_tests(row["private_test_cases"])]
    function = _json(row.get("metadata") or "{}").get("func_name")
    info: dict[str, Any]
    if any(test["testtype"] == "functional" for test in tests):
        if not function:
            raise ValueError("its tests call a function that `metadata` does not name")
        calls = []
        for test in tests:
            arguments = [json.loads(line) for line in test["input"].split("\n") if line.strip()]
            calls.append({"arguments": arguments, "result": json.loads(test["output"])})
        info = {"function": function, "tests": calls}
    else:
        info = {"tests": [{"input": test["input"], "output": test["output"]} for test in tests]}
    return _problem(row["question_content"], row.get("starter_code"), info)


def _private_tests(text: str) -> list[Any]:
    """Return tests from JSON, or from base64 of zlib of a pickle of it; the pickle may contain only text."""
    if text.lstrip().startswith("["):
        found: list[Any] = json.loads(text)
        return found
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text), _MAX_TESTS_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"its tests have more than {_MAX_TESTS_BYTES} bytes")
    unpickled = _TextUnpickler(io.BytesIO(data)).load()
    tests: list[Any] = json.loads(unpickled) if isinstance(unpickled, str | bytes) else []
    if not tests:
        raise ValueError("`private_test_cases` holds no tests")
    return tests


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"`private_test_cases` names {module}.{name}, and may hold text only")


def _apps(row: Row) -> dict[str, Any]:
    return _problem(row["question"], row.get("starter_code"), _apps_tests(row["input_output"]))


def _eurus(row: Row) -> dict[str, Any]:
    return {"messages": list(row["prompt"]), "info": _apps_tests(row["reward_model"]["ground_truth"])}


def _apps_tests(text: Any) -> dict[str, Any]:
    given = _json(text)
    inputs, outputs = given["inputs"], given["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if function := given.get("fn_name"):
        calls = []
        for arguments, result in pairs:
            # Some rows wrap a result in a list, and some do not.
            unwrapped = result[:1] if isinstance(result, list) and len(result) == 1 else ()
            calls.append({"arguments": list(arguments), "results": [result, *unwrapped]})
        return {"function": function, "tests": calls}
    return {"tests": [{"input": _text(given), "output": _text(expected)} for given, expected in pairs]}


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _humanevalplus(row: Row) -> dict[str, Any]:
    test = f"{row['test']}\n\ncheck({row['entry_point']})\n"
    question = f"Complete this Python code:\n```python\n{row['prompt'].rstrip()}\n```"
    return _messages(f"{question}\n\n{_ANSWER}", {"test_code": [test]})


def _mbppplus(row: Row) -> dict[str, Any]:
    imports = "\n".join(row.get("test_imports") or ())
    tests = [row["test"]] if row.get("test") else list(row["test_list"])
    question = f"{row['prompt'].strip()}\nYour code should pass these tests:\n" + "\n".join(row["test_list"][:3])
    return _messages(f"{question}\n\n{_ANSWER}", {"test_code": [f"{imports}\n{test}" for test in tests]})


def _problem(question: str, starter: str | None, info: dict[str, Any]) -> dict[str, Any]:
    if starter and starter.strip():
        asked = f"{question.strip()}\n\nStart from this code:\n```python\n{starter.rstrip()}\n```\n\n{_ANSWER}"
    else:
        asked = f"{question.strip()}\n\n{_ANSWER if 'function' in info else _STDIN}"
    return _messages(asked, info)


def _messages(content: str, info: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "info": info}


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str | bytes) else value


_READERS: Mapping[Format, Callable[[Row], dict[str, Any]]] = {
    "livecodebench": _livecodebench,
    "apps": _apps,
    "taco": _apps,
    "eurus": _eurus,
    "humanevalplus": _humanevalplus,
    "mbppplus": _mbppplus,
}
