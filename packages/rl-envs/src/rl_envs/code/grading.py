"""Verdicts on a program, by its tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl_envs.code import harness
from rl_envs.code.cases import Assertions, Calls, InputOutput, Tests
from rl_envs.code.comparison import same_text, same_value
from rl_envs.sandbox.program import Limits, Outcome, Program
from rl_envs.sandbox.sandbox import Runner


@dataclass(frozen=True)
class Verdict:
    """How many of a program's tests pass.

    Args:
        num_passed, num_tests: tests that pass, and all.
        problem: The first that fails, and how; empty if none does.
    """

    num_passed: int
    num_tests: int
    problem: str = ""


def grade(
    solution: str, tests: Tests, runner: Runner, limits: Limits, *, tolerance: float, stop_early: bool
) -> Verdict:
    """Run a program's tests.

    Args:
        solution: Text of the program.
        tests: Tests by output, by calls or by assertions.
        runner: Where it runs.
        limits: Limits of each run of the program.
        tolerance: Relative and absolute tolerance of floats in outputs and results; not used by assertions.
        stop_early: True to leave out the tests after the first that fails.
    """
    num_passed, problem = 0, ""
    match tests:
        case InputOutput():
            problems, num_tests = _by_output(solution, tests, runner, limits, tolerance), len(tests.pairs)
        case Calls():
            problems, num_tests = _by_calls(solution, tests, runner, limits, tolerance), len(tests.arguments)
        case Assertions():
            problems, num_tests = _by_assertions(solution, tests, runner, limits), len(tests.texts)
    for index, found in enumerate(problems):
        num_passed += not found
        if found and not problem:
            problem = f"test {index + 1}: {found}"
            if stop_early:
                break
    return Verdict(num_passed, num_tests, problem)


def _by_output(solution: str, tests: InputOutput, runner: Runner, limits: Limits, tolerance: float) -> Iterator[str]:
    """For each test how it fails; empty if it passes. The program runs once for each."""
    for given, expected in tests.pairs:
        outcome = runner.run(Program(solution, stdin=given.encode(errors="replace")), limits)
        if not outcome.ok:
            yield outcome.describe(limits)
        else:
            is_right = same_text(outcome.stdout.decode(errors="replace"), expected, tolerance)
            yield "" if is_right else "another output"


def _by_calls(solution: str, tests: Calls, runner: Runner, limits: Limits, tolerance: float) -> Iterator[str]:
    program, mark = harness.calls(solution, tests.function, tests.arguments)
    outcome = runner.run(program, limits)
    reports = harness.reports(outcome, mark)
    for index, results in enumerate(tests.results):
        report = reports.get(index) or reports.get(-1)
        if report is None or "result" not in report:
            yield _failure(report, outcome, limits)
        else:
            yield _compared(report["result"], results, tolerance)


def _by_assertions(solution: str, tests: Assertions, runner: Runner, limits: Limits) -> Iterator[str]:
    program, mark = harness.assertions(solution, tests.texts)
    outcome = runner.run(program, limits)
    reports = harness.reports(outcome, mark)
    for index in range(len(tests.texts)):
        report = reports.get(index) or reports.get(-1)
        yield "" if report is not None and "result" in report else _failure(report, outcome, limits)


def _compared(value: object, results: Sequence[object], tolerance: float) -> str:
    try:
        is_right = any(same_value(value, result, tolerance) for result in results)
    except RecursionError:
        return "its result is nested too deeply"
    return "" if is_right else "another result"


def _failure(report: dict[str, object] | None, outcome: Outcome, limits: Limits) -> str:
    if report is None:
        return outcome.describe(limits)
    error = report.get("error")
    return error if isinstance(error, str) else "no result"
