"""The tests of a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rl_core.rollouts.environment import UnusableAnswer
from rl_envs.code.harness import whole_number
from rl_envs.grader import fields_of


@dataclass(frozen=True)
class InputOutput:
    """Programs that read `stdin` and must write `stdout`, test by test."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Calls:
    """Calls of a function, or of the method of a class `Solution`.

    Args:
        function: Its name.
        arguments: Arguments of each call.
        results: Results of each call, those that are right.
    """

    function: str
    arguments: tuple[Sequence[Any], ...]
    results: tuple[Sequence[Any], ...]


@dataclass(frozen=True)
class Assertions:
    """Python code that raises if the program is wrong; each text is a test."""

    texts: tuple[str, ...]


Tests = InputOutput | Calls | Assertions


def read_tests(info: Mapping[str, Any], most: int | None) -> Tests:
    """Return the tests in a prompt's info.

    The info has either of these fields:

    - `tests`: a list of `{"input": text, "output": text}`; with a field `function`, of `{"arguments": [...],
      "result": value}`, or `"results"` with all values that are right. The list may be written as JSON.
    - `test_code`: Python text, or a list of such texts.

    Raises:
        UnusableAnswer: If it has neither, or one of another form.
    """
    if "test_code" in info:
        given = info["test_code"]
        texts = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise UnusableAnswer(f"`test_code` must be a string of Python code or a list of strings, got {given!r:.80}")
        return Assertions(texts[:most])
    if "tests" not in info:
        raise UnusableAnswer(f"the row needs the field `tests` or `test_code`; its fields are {fields_of(info)}")
    tests = info["tests"]
    if isinstance(tests, str):
        try:
            tests = json.loads(tests, parse_int=whole_number)
        except (ValueError, RecursionError) as error:
            raise UnusableAnswer(f"`tests` is a string that is not valid JSON: {error}") from None
    if not isinstance(tests, list | tuple) or not tests:
        raise UnusableAnswer(f"`tests` must be a list with at least one test, got {_shown(tests)}")
    tests = list(tests)[:most]
    try:
        if function := info.get("function"):
            calls = []
            for test in tests:
                arguments, results = test["arguments"], test["results"] if "results" in test else [test["result"]]
                if not isinstance(arguments, list | tuple) or not isinstance(results, list | tuple) or not results:
                    raise TypeError
                try:
                    json.dumps(arguments)
                except (TypeError, ValueError, RecursionError) as error:
                    raise UnusableAnswer(f"the arguments of a test must be plain data of JSON: {error}") from None
                calls.append((arguments, results))
            return Calls(str(function), tuple(given for given, _ in calls), tuple(results for _, results in calls))
        return InputOutput(tuple((_text(test["input"]), _text(test["output"])) for test in tests))
    except (KeyError, TypeError):
        wanted = (
            "arguments and result, the first a list," if info.get("function") else "input and output, both strings,"
        )
        raise UnusableAnswer(f"each of `tests` must be an object with {wanted} got {_shown(tests)}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise TypeError
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{Decimal(value):f}" if is_whole else str(value)  # `str` refuses more than 4,300 digits


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
