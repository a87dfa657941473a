"""Verdicts on a program, by its tests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from rl_envs.code import harness
from rl_envs.code.cases import Assertions, Calls, InputOutput, Tests
from rl_envs.sandbox.program import Limits, Program
from rl_envs.sandbox.runner import Runner


def grade(
    solution: str, tests: Tests, runner: Runner, limits: Limits, *, tolerance: float, stop_early: bool, image: str = ""
) -> tuple[int, int, str]:
    """Run a program's tests.

    Args:
        solution: Text of the program.
        tests: Tests by output, by calls or by assertions.
        runner: Where it runs.
        limits: Limits of each run of the program.
        tolerance: Relative and absolute tolerance of floats in outputs and results; not used by assertions.
        stop_early: True to leave out the tests after the first that fails.
        image: Image of the row; empty for none.

    Returns:
        Number of tests that pass, number of all tests, and the first test that fails with the reason; the reason is
        empty if none fails.
    """
    match tests:
        case InputOutput(pairs):
            problems, num_tests = _by_output(solution, pairs, runner, limits, tolerance, image), len(pairs)
        case Calls(function, arguments, results):
            asked = harness.calls(solution, function, arguments)
            problems, num_tests = _by_reports(*asked, results, runner, limits, tolerance, image), len(arguments)
        case Assertions(texts):
            asked = harness.assertions(solution, texts)
            unknown: list[Sequence[object]] = [()] * len(texts)
            problems, num_tests = _by_reports(*asked, unknown, runner, limits, tolerance, image), len(texts)
    num_passed, problem = 0, ""
    for index, found in enumerate(problems):
        num_passed += not found
        if found and not problem:
            problem = f"test {index + 1}: {found}"
            if stop_early:
                break
    return num_passed, num_tests, problem


def _by_output(
    solution: str, pairs: Sequence[tuple[str, str]], runner: Runner, limits: Limits, tolerance: float, image: str
) -> Iterator[str]:
    """Yield for each test how it fails; empty if it passes. The program runs once for each."""
    for given, expected in pairs:
        outcome = runner.run(Program(solution, stdin=given.encode(errors="replace"), image=image), limits)
        if not outcome.ok:
            yield outcome.describe(limits)
        else:
            is_right = same_text(outcome.stdout.decode(errors="replace"), expected, tolerance)
            yield "" if is_right else "another output"


def _by_reports(
    program: Program,
    mark: str,
    expected: Sequence[Sequence[object]],
    runner: Runner,
    limits: Limits,
    tolerance: float,
    image: str,
) -> Iterator[str]:
    """Yield for each test how it fails; empty if it passes. A test without expected results passes if it has any."""
    outcome = runner.run(replace(program, image=image), limits)
    reports = harness.reports(outcome, mark)
    for index, results in enumerate(expected):
        report = reports.get(index) or reports.get(-1)
        if report is None:
            yield outcome.describe(limits)
        elif "result" not in report:
            error = report.get("error")
            yield error if isinstance(error, str) else "no result"
        else:
            try:
                is_right = not results or any(same_value(report["result"], each, tolerance) for each in results)
                yield "" if is_right else "another result"
            except RecursionError:
                yield "its result is nested too deeply"


_MAX_NUMBER = 400
"""Maximum length of a string that is compared as a number."""
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)
_NOT_FINITE = {"nan": "nan", "inf": "inf", "infinity": "inf"}


def same_text(output: str, expected: str, tolerance: float) -> bool:
    """Return whether two outputs agree line by line, without regard to space at the end of lines and of the text; or,
    where they differ, word by word as numbers.
    """
    lines, others = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    if len(lines) != len(others):
        return False
    for line, other in zip(lines, others, strict=True):
        words, known = line.split(), other.split()
        if line != other and (
            len(words) != len(known)
            or any(a != b and not _same_number(a, b, tolerance) for a, b in zip(words, known, strict=True))
        ):
            return False
    return True


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two values from JSON are equal; floats may differ by the tolerance, and NaN equals NaN."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(expected, float) or isinstance(value, float):
        if not isinstance(value, int | float) or not isinstance(expected, int | float):
            return False
        try:
            # A function that must return NaN is right if it does.
            both_nan = math.isnan(value) and math.isnan(expected)
            return both_nan or value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # A whole number may be beyond the floats.
            return False
    if isinstance(expected, list | tuple) and isinstance(value, list):
        return len(value) == len(expected) and all(
            same_value(a, b, tolerance) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        return value.keys() == expected.keys() and all(same_value(value[k], expected[k], tolerance) for k in expected)
    return type(value) is type(expected) and bool(value == expected)


def _same_number(word: str, expected: str, tolerance: float) -> bool:
    number, known = _number(word), _number(expected)
    if number is None or known is None:
        return _not_finite(word) == _not_finite(expected) is not None
    if number == known:
        return True
    has_point = "." in expected or "e" in expected.lower()
    return has_point and math.isclose(float(number), float(known), rel_tol=tolerance, abs_tol=tolerance)


def _number(word: str) -> Decimal | None:
    if len(word) > _MAX_NUMBER or not _NUMBER.fullmatch(word):
        return None
    number = Decimal(word)
    return number if number.adjusted() < 300 else None


def _not_finite(word: str) -> str | None:
    """Return the usual name of NaN, whose sign means nothing, or of an infinity, as languages write them."""
    name = _NOT_FINITE.get(word.lower().lstrip("+-"))
    return "-inf" if name == "inf" and word.startswith("-") else name
