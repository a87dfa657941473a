"""Comparisons and verdicts of the responses of an example."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

from rl_algos.data.rows.example import Example, Response
from rl_core.errors import DataError

Pairing = Literal["best-worst", "all"]


@dataclass(frozen=True)
class StepVerdict:
    """Labels of the steps of a response.

    Args:
        step_end: String between the steps.
    """

    step_end: str


@dataclass(frozen=True)
class WeighedScores:
    """A score that is the weighted sum of scores for several objectives.

    Args:
        weights: Weight of each score, by its name.
    """

    weights: Mapping[str, float]

    def of(self, response: Response) -> float:
        """Return the score of a response.

        Raises:
            DataError: If it lacks one of the scores.
        """
        if missing := [name for name in self.weights if name not in response.scores]:
            known = ", ".join(response.scores) or "none"
            raise DataError(
                f"the response has no score {missing[0]!r}, which rm.score_weights lists; its scores are {known}. "
                "Add a column of this name with numbers, or map another one in `columns`"
            )
        return math.fsum(weight * response.scores[name] for name, weight in self.weights.items())


Verdict = Literal["label", "score"] | StepVerdict | WeighedScores
"""How single responses are judged: by a label, a score or several scores of the response, or by labels of its steps."""


class Comparison(NamedTuple):
    """Two responses to one conversation.

    Args:
        better: Better response.
        worse: Worse response.
        margin: Difference of their scores, or as the data has it; None if it is not known.
    """

    better: Response
    worse: Response
    margin: float | None = None


def comparisons(example: Example, pairing: Pairing) -> list[Comparison]:
    """Pair responses, a better one with a worse one; return no pair if all are equally good.

    Args:
        example: Example whose responses all have a rank or all have a score.
        pairing: `best-worst` pairs the best with the worst; `all` forms every pair with a better response.

    Raises:
        DataError: If there are fewer than two responses, or they have no order.
    """
    responses = example.responses
    if len(responses) < 2:
        raise DataError(
            f"a comparison needs two responses, but the row has {len(responses)}. Add `chosen` and `rejected`, or "
            "several `completions`, or set `processor` to a function that returns Example(messages, responses=...)"
        )
    ranks = [response.rank for response in responses if response.rank is not None]
    scores = [-response.score for response in responses if response.score is not None]
    # The place of each response, lower is better.
    places = next((known for known in (ranks, scores) if len(known) == len(responses)), None)
    if places is None:
        raise DataError("the responses have no order. Add a `rank` (lower is better) or a `score` to each of them")
    order = sorted(range(len(responses)), key=places.__getitem__)
    chosen = combinations(order, 2) if pairing == "all" else [(order[0], order[-1])]
    return [
        Comparison(responses[better], responses[worse], _margin(example, responses[better], responses[worse]))
        for better, worse in chosen
        if places[better] < places[worse] and responses[better].messages != responses[worse].messages
    ]


def verdicts(example: Example, by: Literal["label", "score"] | WeighedScores) -> list[tuple[Response, float]]:
    """Return each response with its label, 1 for a good one and 0 for a bad one, or with its score.

    Responses without a label count as good if they are the better one of a pair, and as bad if they are the worse one
    (KTO, arXiv:2402.01306, on data of pairs).

    Raises:
        DataError: If a response has no such verdict.
    """
    if not example.responses:
        raise DataError(
            "the row has no responses. Add `completion` with a `label` or a `score`, or set `processor` to a function "
            "that returns Example(messages, responses=...)"
        )
    if isinstance(by, WeighedScores):
        return [(response, by.of(response)) for response in example.responses]
    if by == "score":
        scores = [response.score for response in example.responses]
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            raise DataError(
                "a response has no `score`, which regression learns to predict. Add `completion` and `score`"
            )
        return list(zip(example.responses, known, strict=True))
    if all(response.is_desirable is not None for response in example.responses):
        return [(response, float(bool(response.is_desirable))) for response in example.responses]
    if len(example.responses) < 2:
        raise DataError("the row has no `label`: true for a good completion and false for a bad one")
    pairs = comparisons(example, "best-worst")
    return [(response, label) for pair in pairs for response, label in ((pair.better, 1.0), (pair.worse, 0.0))]


def _margin(example: Example, better: Response, worse: Response) -> float | None:
    if example.margin is not None and len(example.responses) == 2:
        return example.margin
    return None if better.score is None or worse.score is None else better.score - worse.score
