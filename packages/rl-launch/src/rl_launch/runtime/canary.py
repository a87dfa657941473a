"""Fixed token rows by which an engine proves that it computes with the weights that it was given."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_core.data.ragged import Ragged
from rl_core.errors import Origin, WeightSyncError

_log = logging.getLogger(__name__)

CANARY = "weight sync canary"
"""Phase of the check, for messages."""

MAX_ROWS = 4
"""Maximum number of prompts that become rows."""

MAX_LENGTH = 64
"""Maximum number of tokens of a row."""

MIN_TOKENS = 16
"""Number of tokens of all prompts below which random rows judge better."""

FACTOR = 3.0
"""How many times the first version's difference later ones may show."""

CEILING = 10.0
"""Maximum tolerance, as a multiple of the configured one. An engine that lacks a layer's weights is further off."""


class Canary:
    """Token rows whose logprobs the generators must agree on with the policy.

    Policy and engine compute with other kernels, so their logprobs differ, in a mixture of experts by much more than in
    a dense model: a router that rounds differently sends a token to other experts. Of the first version that is sent,
    both sides have loaded the weights from the same files, so the difference that it shows is that noise. Later
    versions may show `FACTOR` times as much, or the configured tolerance if that is more; the first, and all others,
    never more than `CEILING` times the configured one. Differences above the configured one are logged.

    An engine that quantises its weights reports how far that moves its logits, relative to their spread: an estimate
    from the error that it measured on the weights of a sync (`rl_core.rollouts.quantisation`). Times the spread of the
    policy's logprobs, which is that of its logits, this is added to what is accepted.

    Args:
        rows: Int32, fixed for the run.
        tolerance: Mean absolute difference of logprobs that is accepted of any version.
    """

    def __init__(self, rows: Ragged, tolerance: float) -> None:
        self.rows = rows
        self.tolerance = tolerance
        self._first: float | None = None
        self._largest = tolerance

    @classmethod
    def of(
        cls,
        vocabulary: int,
        *,
        precision: str,
        tolerance: float | None = None,
        prompts: Sequence[Sequence[int]] = (),
        num_rows: int = 2,
        length: int = 24,
        image_token: int | None = None,
    ) -> Canary:
        """The beginnings of the run's own prompts, whose tokens are likely as those of rollouts are. Rows of random
        tokens if there are too few: their logprobs are so low that rounding changes them more.

        Args:
            vocabulary: Number of token ids to draw from.
            precision: Precision of the policy, which decides the default tolerance.
            tolerance: Accepted mean difference of logprobs; the default is the tolerance of the precision.
            prompts: Token ids of prompts of the run.
            num_rows: Number of random rows.
            length: Number of tokens of each random row.
            image_token: Id of the tokens that stand for an image, which are left out: the rows have no images. The
                weights of the vision tower are compared when they arrive, as all others are.
        """
        own = [np.asarray(prompt, dtype=np.int32) for prompt in prompts[:MAX_ROWS]]
        rows = [row for prompt in own if len(row := _without(image_token, prompt)[:MAX_LENGTH])]
        if sum(map(len, rows)) < MIN_TOKENS:
            drawn = np.random.default_rng(0).integers(0, vocabulary, (num_rows, length), dtype=np.int32)
            rows = [_without(image_token, row) for row in drawn]
        default = {"float32": 1e-3}.get(precision, 0.1)
        return cls(Ragged.from_rows(rows), default if tolerance is None else tolerance)

    @property
    def limit(self) -> float:
        """Mean absolute difference of logprobs above which a version is refused."""
        most = CEILING * self.tolerance
        return most if self._first is None else min(most, max(self.tolerance, FACTOR * self._first))

    def state(self) -> Mapping[str, Any]:
        """The difference of the first version, by which those of a run that resumes are judged too."""
        return {"first": self._first}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Judge by the first version of the run that was saved."""
        self._first = state["first"]

    def check(
        self,
        version: int,
        expected: Ragged,
        origins: Sequence[Origin],
        scores: Sequence[Sequence[np.ndarray]],
        *,
        quantisation_noise: float = 0.0,
    ) -> None:
        """Compare logprobs of the rows.

        Args:
            version: Weight version that the engines serve.
            expected: Logprobs of the policy with that version.
            origins: Engines that scored the rows.
            scores: Their logprobs.
            quantisation_noise: Relative error of logits by the quantisation of weights; 0 without it.

        Raises:
            WeightSyncError: Naming an engine that computes something else.
        """
        found = {origin: _difference(rows, expected) for origin, rows in zip(origins, scores, strict=True)}
        quantised = quantisation_noise * _spread(expected)
        limit = self.limit + quantised
        for origin, difference in found.items():
            if not difference <= limit:
                raise WeightSyncError(
                    f"{origin}: logprobs with weight version {version} differ from the policy's by {difference:.3g} on "
                    f"average, more than {limit:.3g} ({self._reason(quantised)}); the engine does not compute the "
                    "same results as the policy. If it quantises the KV cache, increase "
                    "policy.generation.canary_tolerance"
                )
        largest = max(found.values(), default=0.0)
        if largest - quantised > self._largest:
            self._largest = largest - quantised
            _log.warning(
                "logprobs of the engine with weight version %d differ from the policy's by %.3g on average, more than "
                "policy.generation.canary_tolerance (%g); up to %.3g is accepted, as engines and trainers round "
                "differently, most of all in mixtures of experts. See mismatch/mean for what it does to training",
                version,
                largest,
                self.tolerance,
                limit,
            )
        if self._first is None and found:
            self._first = max(largest - quantised, 0.0)

    def _reason(self, quantised: float) -> str:
        further = f", and {quantised:.3g} for the measured error of quantised weights" if quantised else ""
        if self._first is None:
            return f"{CEILING:g} times policy.generation.canary_tolerance{further}"
        if self.limit == self.tolerance:
            return f"policy.generation.canary_tolerance{further}"
        return f"the first version differed by {self._first:.3g}{further}"


def _spread(expected: Ragged) -> float:
    """Standard deviation of the logprobs of all tokens but the first of each row, which has none."""
    return float(np.concatenate([row[1:] for row in expected]).std())


def _difference(rows: Sequence[np.ndarray], expected: Ragged) -> float:
    """Mean absolute difference of the row that differs most; NaN if one has a NaN."""
    return float(np.max([np.abs(score - wanted).mean() for score, wanted in zip(rows, expected, strict=True)]))


def _without(token: int | None, row: np.ndarray) -> np.ndarray:
    return row if token is None else row[row != token]
