"""Rows of preference data, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_algos.data.encoding import storable
from rl_algos.images.columns import with_image_column
from rl_algos.losses.preference import STEP_LABELS
from rl_core.data.batch import TOKENS, Batch, Column
from rl_core.data.microbatch import PAIR
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import LOSS_MASK

ID = "id"
"""Column of strings that identify each row of a batch across epochs and runs."""


@storable
@dataclass(frozen=True)
class EncodedResponse:
    """A conversation that ends with a response.

    Args:
        tokens: int32 `[tokens]`.
        loss_mask: uint8 `[tokens]`, 1 on the assistant's text in the response.
        images: Digests of the images, in the order of their tokens.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairRow:
    """Two responses to one prompt.

    Args:
        id: Unique within the run and stable across runs.
        chosen, rejected: The better and the worse response.
        margin: How much the chosen response is better; None if it is not known.
    """

    id: str
    chosen: EncodedResponse
    rejected: EncodedResponse
    margin: float | None = None


@dataclass(frozen=True)
class JudgedRow:
    """One response and the verdict on it.

    Args:
        id: Unique within the run and stable across runs.
        response: Response with its prompt.
        verdict: A label, 1 for a good one and 0 for a bad one, or a score.
    """

    id: str
    response: EncodedResponse
    verdict: float


@dataclass(frozen=True)
class StepsRow:
    """One response whose steps have labels.

    Args:
        id: Unique within the run and stable across runs.
        response: Response with its prompt.
        labels: float32 `[tokens]`, the label of each step at its last token, and -1 at other tokens.
    """

    id: str
    response: EncodedResponse
    labels: np.ndarray


def pair_batch(rows: Sequence[PairRow]) -> Batch:
    """Return two rows for each pair, the chosen one first: tokens, `loss_mask`, `pair`, `is_chosen` uint8 and `margin`
    float32 (0 if it is not known) `[rows]`."""
    numbers = np.arange(len(rows))
    margins = np.array([row.margin or 0.0 for row in rows], dtype=np.float32)
    columns: dict[str, Column] = {
        PAIR: np.repeat(numbers, 2),
        "is_chosen": np.tile(np.array([1, 0], dtype=np.uint8), len(rows)),
        "margin": np.repeat(margins, 2),
    }
    sides = [(f"{row.id}:{name}", side) for row in rows for name, side in (("+", row.chosen), ("-", row.rejected))]
    return _batch(sides).with_columns(columns)


def judged_batch(rows: Sequence[JudgedRow]) -> Batch:
    """Return tokens, `loss_mask` and `verdict` float32 `[rows]`."""
    verdicts = np.array([row.verdict for row in rows], dtype=np.float32)
    return _batch([(row.id, row.response) for row in rows]).with_columns({"verdict": verdicts})


def steps_batch(rows: Sequence[StepsRow]) -> Batch:
    """Return tokens, `loss_mask` and `step_labels` float32 `[tokens]`."""
    labels = Ragged.from_rows([row.labels for row in rows], dtype=np.float32)
    return _batch([(row.id, row.response) for row in rows]).with_columns({STEP_LABELS: labels})


def _batch(responses: Sequence[tuple[str, EncodedResponse]]) -> Batch:
    batch = Batch(
        {
            ID: np.array([id for id, _ in responses]),
            TOKENS: Ragged.from_rows([response.tokens for _, response in responses], dtype=np.int32),
            LOSS_MASK: Ragged.from_rows([response.loss_mask for _, response in responses], dtype=np.uint8),
        }
    )
    return with_image_column(batch, [response.images for _, response in responses])
