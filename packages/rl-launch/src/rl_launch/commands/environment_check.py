"""`rl env check`: whether an environment behaves as rollouts need it to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from rl_core.environments.conformance import Conformance, Sample, check
from rl_core.environments.instance import row_check_of
from rl_core.errors import DataError
from rl_launch.commands.environment_source import GivenEnvironment
from rl_launch.commands.response_texts import SoughtText

MOST_ATTEMPTS = 25
"""Maximum number of conversations in each pass of the check: five rows with five responses."""
MOST_SAMPLES = 10
"""Maximum number of conversations whose rewards are shown."""

_MARKS = {"ok": "ok  ", "warned": "warn", "failed": "FAIL", "skipped": "-   "}


def check_environment(given: GivenEnvironment, responses: Sequence[str] = ()) -> Conformance:
    """Check an environment on its first rows, with usual responses and those that the user gives.

    Raises:
        DataError: If no response can answer a row.
    """
    _check_rows(given)
    every = chain.from_iterable(row.attempts(responses) for row in given.rows)
    attempts = list(islice(every, MOST_ATTEMPTS + len(responses)))
    return check(given.instance, attempts, given.tools)


def _check_rows(given: GivenEnvironment) -> None:
    """Raise a `DataError` for a row that no response can answer."""
    check_row = row_check_of(given.instance)
    if check_row is None:
        return
    for row in given.rows:
        try:
            check_row(row.fields)
        except ValueError as error:
            raise DataError(f"{row.place}: the environment {given.instance.label} cannot score it: {error}") from None


def as_text(found: Conformance, sought: Sequence[SoughtText] = ()) -> str:
    """A line for every check, with the remedy below one that failed or a note below one that holds, and sample rewards.

    Args:
        found: Findings of the checks, and sample rewards.
        sought: Strings that the code of the environment looks for, shown below the remedy of the rewards.
    """
    lines = []
    for finding in found.findings:
        lines.append(f"{_MARKS[finding.status]}  {finding.name:10}  {finding.said}")
        if finding.remedy:
            lines.append(f"{'':18}{'note' if finding.status == 'ok' else 'remedy'}: {finding.remedy}")
        if sought and finding.name == "rewards" and finding.remedy and finding.status != "failed":
            lines.append(f"{'':18}its code looks for:")
            lines += [f"{'':20}{each}" for each in sought]
    samples = found.samples[:MOST_SAMPLES]
    if samples:
        lines += ["", "rewards:", *map(_sample, samples)]
    return "\n".join(lines) + "\n"


def as_json(found: Conformance) -> dict[str, object]:
    """The findings and samples as plain values."""
    return {
        "schema": 1,
        "holds": found.holds,
        "checks": [
            {"name": each.name, "status": each.status, "said": each.said, "remedy": each.remedy}
            for each in found.findings
        ],
        "samples": [
            {
                "place": each.attempt.place,
                "response": each.attempt.conversation.completion,
                "rewards": dict(each.rewards),
                "num_turns": each.num_turns,
                "done": each.done,
            }
            for each in found.samples[:MOST_SAMPLES]
        ],
    }


def _sample(sample: Sample) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.rewards.items() if name != "reward")
    turns = f", {sample.num_turns} turns" if sample.num_turns > 1 else ""
    named = f" ({parts})" if parts else ""
    total = f"{sample.rewards.get('reward', 0.0):g}"
    return f"  {total:>8}{named}  {sample.attempt.place}{turns}: {sample.attempt.conversation.completion!r:.60}"
