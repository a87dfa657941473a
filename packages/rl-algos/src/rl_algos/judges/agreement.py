"""Agreement of a judge with people: accuracy, Cohen's kappa, and its bias by length and by order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_algos.evaluation.estimates import NUM_RESAMPLES, Estimate, bootstrap_mean
from rl_algos.judges.rubrics import Rubric
from rl_algos.judges.service import JudgeService
from rl_core.errors import DataError
from rl_core.rollouts.judging import JudgedReward, JudgedRollout
from rl_core.rollouts.rollout import Message

FIRST, SECOND, EQUAL = "1", "2", "equal"
"""Labels of a pair of responses: the number of the better one."""

MAX_LABEL = 1e30
"""Upper bound of the size of a number that is a label."""


@dataclass(frozen=True)
class LabelledRow:
    """One response with a number, or two with the better one, as people judged them.

    Args:
        place: Place of the row, for messages.
        rollouts: The responses to one prompt.
        label: Number of the better response of two as text, or `equal`; the number for one.
    """

    place: str
    rollouts: tuple[JudgedRollout, ...]
    label: str | float

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of characters of each response."""
        return tuple(sum(len(str(message.get("content"))) for message in each.messages) for each in self.rollouts)


@dataclass(frozen=True)
class Agreement:
    """How a judge agrees with people.

    Args:
        num_rows: Number of rows with a verdict.
        num_failed: Number of rows without one; nothing else counts them.
        failures: Reasons for these, each once.
        accuracy: Share of rows whose verdict is the label. For numbers, the verdict is the nearest label that occurs.
        kappa: Cohen's kappa of verdicts and labels: 1 for agreement in all rows, 0 for as much as by chance. None if
            verdicts and labels are all the same.
        length_bias: For pairs, the share in which the judge prefers the longer response less the share in which people
            do. For numbers, the correlation of verdicts with lengths less the one of labels. None if lengths or
            verdicts do not vary.
        order_changes: Share of pairs whose verdict changes with the order of the responses; None if the judge does not
            see them together.
        first_bias: Share of questions in which the first response wins, less the share in which the second does; None
            as for `order_changes`.
    """

    num_rows: int
    num_failed: int
    failures: tuple[str, ...] = ()
    accuracy: Estimate | None = None
    kappa: Estimate | None = None
    length_bias: Estimate | None = None
    order_changes: Estimate | None = None
    first_bias: Estimate | None = None


def read_labels(lines: Sequence[str], name: str) -> list[LabelledRow]:
    """Return the rows of a JSONL file with labels of people.

    A row has a `prompt` (text or messages), and either `chosen` and `rejected`, or two `responses` and `better` (1, 2
    or "equal"), or a `response` and a `label` (a number, or true or false). Rubrics take fields from the row.

    Args:
        lines: Lines of the file.
        name: Name of the file, for messages.

    Raises:
        DataError: If a row has none of these forms, or not the form of the others.
    """
    rows = [_row(line, f"{name}, line {number}", number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise DataError(f"{name} has no rows")
    for row in rows:
        if len(row.rollouts) != len(rows[0].rollouts):
            raise DataError(f"{row.place}: has another number of responses than {rows[0].place}. Use a file for each")
    return rows


async def agreement(service: JudgeService, rubric: Rubric, rows: Sequence[LabelledRow], *, seed: int = 0) -> Agreement:
    """Ask a judge about all rows and compare its verdicts with the labels.

    Args:
        service: Service that asks the judge.
        rubric: How it judges.
        rows: Rows with labels, all of one or of two responses.
        seed: Seed of the resamples of the intervals.

    Raises:
        DataError: If a rubric that compares responses has single ones.
        JudgeBudgetSpent: If its budget is spent.
    """
    sees_both = rubric.form == "ranking" or (rubric.form == "pairwise" and rubric.compare == "group")
    if sees_both and len(rows[0].rollouts) == 1:
        raise DataError(
            f"{rows[0].place}: has one response, but the reward has form: {rubric.form}, which compares several. Use "
            "rows with chosen and rejected, or a reward with form: number"
        )
    given = await asyncio.gather(*(service.judge({"": rubric}, row.rollouts) for row in rows))
    rewards = [[each[""] for each in group] for group in given]
    judged = [(row, found) for row, found in zip(rows, rewards, strict=True) if not any(each.failure for each in found)]
    failures = dict.fromkeys(each.failure for found in rewards for each in found if each.failure)
    counts = len(judged), len(rows) - len(judged), tuple(failures)
    if not judged:
        return Agreement(*counts)
    if len(rows[0].rollouts) == 1:
        return _of_numbers(counts, judged, seed)
    return _of_pairs(counts, judged, seed, sees_both=sees_both)


def _of_numbers(
    counts: tuple[int, int, tuple[str, ...]], judged: Sequence[tuple[LabelledRow, list[JudgedReward]]], seed: int
) -> Agreement:
    labels = np.array([float(row.label) for row, _ in judged])
    values = np.array([found[0].value for _, found in judged], np.float64)
    lengths = np.array([row.lengths[0] for row, _ in judged], np.float64)
    known = np.unique(labels)
    nearest = known[np.abs(values[:, None] - known).argmin(axis=1)]
    return Agreement(
        *counts,
        accuracy=bootstrap_mean(nearest == labels, seed=seed),
        kappa=cohens_kappa(labels.tolist(), nearest.tolist(), seed=seed),
        length_bias=_correlation_difference(values, labels, lengths, seed),
    )


def _of_pairs(
    counts: tuple[int, int, tuple[str, ...]],
    judged: Sequence[tuple[LabelledRow, list[JudgedReward]]],
    seed: int,
    *,
    sees_both: bool,
) -> Agreement:
    labels = [str(row.label) for row, _ in judged]
    verdicts = [_better(float(first.value or 0), float(second.value or 0)) for _, (first, second) in judged]
    longer = [
        (_prefers(verdict, row.lengths), _prefers(str(row.label), row.lengths))
        for verdict, (row, _) in zip(verdicts, judged, strict=True)
        if row.lengths[0] != row.lengths[1]
    ]
    # Equal responses are not shown to the judge.
    by_order = [_winners(found) for _, found in judged if sees_both and found[0].verdicts]
    has_order = bool(by_order)
    # The second question shows the second response first.
    firsts = [(_sign(one) - _sign(other)) / 2 for one, other in by_order]
    return Agreement(
        *counts,
        accuracy=bootstrap_mean([a == b for a, b in zip(labels, verdicts, strict=True)], seed=seed),
        kappa=cohens_kappa(labels, verdicts, seed=seed),
        length_bias=bootstrap_mean([judge - human for judge, human in longer], seed=seed) if longer else None,
        order_changes=bootstrap_mean([one != other for one, other in by_order], seed=seed) if has_order else None,
        first_bias=bootstrap_mean(firsts, seed=seed) if has_order else None,
    )


def cohens_kappa(first: Sequence[Any], second: Sequence[Any], *, seed: int = 0) -> Estimate | None:
    """Return Cohen's kappa of two raters with its percentile bootstrap interval.

    It is `(p_o - p_e) / (1 - p_e)`: the share of rows with equal ratings, above the share that raters with the same
    frequencies would have by chance (Cohen, 1960).

    Args:
        first: Ratings of one, by row.
        second: Ratings of the other.
        seed: Seed of the resamples.

    Returns:
        The estimate; None if all ratings are the same, for which kappa is not defined.
    """
    names = {name: index for index, name in enumerate(dict.fromkeys([*first, *second]))}
    if len(names) < 2:
        return None
    size = len(names)
    cells = np.zeros((size, size))
    for one, other in zip(first, second, strict=True):
        cells[names[one], names[other]] += 1
    num_rows = len(first)
    # Rows with equal ratings are alike, so that drawing rows is drawing the counts of the cells.
    drawn = np.random.default_rng(seed).multinomial(num_rows, cells.ravel() / num_rows, size=NUM_RESAMPLES)
    low, high = np.nanquantile(_kappas(drawn.reshape(-1, size, size)), [0.025, 0.975])
    return Estimate(float(_kappas(cells[None])[0]), float(low), float(high))


def _kappas(cells: np.ndarray) -> np.ndarray:
    """Return float64 `[tables]`, kappa of each table of counts `[tables, ratings, ratings]`; NaN if not defined."""
    shares = cells / cells.sum(axis=(1, 2), keepdims=True)
    observed = np.trace(shares, axis1=1, axis2=2)
    expected = (shares.sum(axis=2) * shares.sum(axis=1)).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(expected < 1, (observed - expected) / (1 - expected), np.nan), np.float64)


def _correlation_difference(values: np.ndarray, labels: np.ndarray, lengths: np.ndarray, seed: int) -> Estimate | None:
    def difference(rows: np.ndarray) -> float:
        table = np.stack([values[rows], labels[rows], lengths[rows]])
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.corrcoef(table)
        return float(found[0, 2] - found[1, 2])

    every = np.arange(len(values))
    value = difference(every) if len(values) > 2 else np.nan
    if not np.isfinite(value):
        return None
    generator = np.random.default_rng(seed)
    drawn = [difference(generator.integers(len(values), size=len(values))) for _ in range(NUM_RESAMPLES // 10)]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def _better(first: float, second: float) -> str:
    return EQUAL if first == second else FIRST if first > second else SECOND


def _sign(verdict: str) -> int:
    return {FIRST: 1, SECOND: -1, EQUAL: 0}[verdict]


def _prefers(verdict: str, lengths: tuple[int, ...]) -> float:
    """Return 1 if a verdict prefers the longer of two responses, 0 for the shorter one, and a half for neither."""
    return 0.5 + 0.5 * _sign(verdict) * (1 if lengths[0] > lengths[1] else -1)


def _winners(found: Sequence[JudgedReward]) -> tuple[str, str]:
    """Return the better response in the question with the first response first, and in the one with the second
    first."""
    first, second = ([record["value"] for record in each.verdicts] for each in found)
    if isinstance(first[0], int):
        return _better(-first[0], -second[0]), _better(-first[1], -second[1])
    reversed_ = {FIRST: SECOND, SECOND: FIRST, EQUAL: EQUAL}
    return first[0], reversed_[first[1]]


def _row(line: str, place: str, number: int) -> LabelledRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: it is not JSON ({error})") from None
    prompt: Any = row.get("prompt") if isinstance(row, dict) else None
    is_list = isinstance(prompt, list) and all(isinstance(each, dict) for each in prompt)
    if not isinstance(prompt, str) and not is_list:
        raise DataError(f"{place}: must be an object with a prompt, which is text or a list of messages")
    responses, label = _labelled(row, place, number)
    messages: tuple[Message, ...] = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    info: Mapping[str, Any] = row
    rollouts = tuple(
        JudgedRollout(messages, ({"role": "assistant", "content": response},), info) for response in responses
    )
    return LabelledRow(place, rollouts, label)


def _labelled(row: Mapping[str, Any], place: str, number: int) -> tuple[tuple[str, ...], str | float]:
    """Return the responses of a row and its label."""
    match row:
        case {"chosen": str(chosen), "rejected": str(rejected)}:
            # The better response is the first one in every other row, so that always preferring one is not rewarded.
            return ((chosen, rejected), FIRST) if number % 2 else ((rejected, chosen), SECOND)
        case {"responses": [str(first), str(second)], "better": 1 | 2 | "1" | "2" | "equal" as better}:
            if not isinstance(better, bool):
                return (first, second), str(better)
        case {"response": str(response), "label": bool() | int() | float() as label} if abs(label) < MAX_LABEL:
            return (response,), float(label)
    raise DataError(
        f'{place}: has no label. Allowed: "chosen" and "rejected"; "responses" (two) and "better" (1, 2 or "equal"); '
        '"response" and "label" (a number, or true or false)'
    )
