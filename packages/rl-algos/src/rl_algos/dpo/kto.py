"""The reference point of KTO, computed over the whole batch before a step."""

from __future__ import annotations

import logging

import numpy as np

from rl_algos.images.columns import seen_columns
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.images import IMAGES
from rl_core.model import LOGPROBS, Model
from rl_core.rollouts.group import LOSS_MASK

_log = logging.getLogger(__name__)


def with_reference_point(batch: Batch, policy: Model, *, max_tokens: int) -> Batch:
    """The batch with `kl` float32 `[rows]`, one number: the estimate of KL(policy || reference) of KTO
    (arXiv:2402.01306), `max(0, mean over i of logp(y') - ref(y'))` with y' a response to another prompt, after the
    prompt of row i. It is 0 for a batch with one prompt only.

    It is a mean over the whole batch, whatever ranks and microbatches hold of it.

    Args:
        batch: Batch with `loss_mask`.
        policy: Policy, which must keep its reference.
        max_tokens: Maximum number of tokens of a row; a longer one is cut.
    """
    followers = others_of(batch)
    num_compared = sum(other is not None for other in followers)
    if not num_compared:
        _log.warning(
            "kto: all %d responses of a batch answer one prompt, so its reference point is 0. Increase "
            "policy.train_global_batch_size, or mix the prompts",
            len(batch),
        )
        return batch.with_columns({"kl": np.zeros(len(batch), dtype=np.float32)})
    others = mismatched(batch, followers, max_tokens)
    own, ref = (
        policy.infer(seen_columns(others), [LOGPROBS], reference=reference).ragged("logprobs")
        for reference in (False, True)
    )
    mask = others.ragged(LOSS_MASK)
    difference = np.zeros(len(mask.values))
    is_said = mask.values > 0
    difference[is_said] = own.values[is_said].astype(np.float64) - ref.values[is_said]
    estimate = mask.like(difference).sums().sum() / num_compared
    return batch.with_columns({"kl": np.full(len(batch), max(0.0, float(estimate)), dtype=np.float32)})


def others_of(batch: Batch) -> list[int | None]:
    """Return for each row another one with another prompt; None if there is none.

    No row is returned twice unless more than half of the rows have one prompt, so that the responses are those of the
    batch. If all prompts differ, it is the next row.
    """
    tokens, starts = batch.ragged(TOKENS), _starts(batch)
    prompts = [row[:start].tobytes() for row, start in zip(tokens, starts, strict=True)]
    if IMAGES in batch:
        prompts = [prompt + row.tobytes() for prompt, row in zip(prompts, batch.ragged(IMAGES), strict=True)]
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    ordered = [row for rows in groups.values() for row in rows]
    # A shift by the size of the largest group leads out of every group that is not most of the batch.
    shift = max(map(len, groups.values()))
    found: list[int | None] = [None] * len(prompts)
    for place, row in enumerate(ordered):
        start = (place + shift) % len(ordered)
        following = (*ordered[start:], *ordered[:start])
        found[row] = next((other for other in following if prompts[other] != prompts[row]), None)
    return found


def mismatched(batch: Batch, others: list[int | None], max_tokens: int) -> Batch:
    """Tokens and `loss_mask` of the prompt of each row with the response of another row, cut to `max_tokens`. A row
    without another one stays as it is, without tokens that count. Images are those of the row, which are taken to be in
    its prompt; a model refuses rows in which they are elsewhere, as their tokens are then missing."""
    tokens, mask, starts = batch.ragged(TOKENS), batch.ragged(LOSS_MASK), _starts(batch)
    rows, masks = [], []
    for index, other in enumerate(others):
        prompt = tokens[index] if other is None else tokens[index][: starts[index]]
        response = slice(0, 0) if other is None else slice(starts[other], None)
        source = index if other is None else other
        rows.append(np.concatenate([prompt, tokens[source][response]])[:max_tokens])
        masks.append(np.concatenate([np.zeros(len(prompt), dtype=np.uint8), mask[source][response]])[:max_tokens])
    return Batch(
        {
            TOKENS: Ragged.from_rows(rows, dtype=np.int32),
            LOSS_MASK: Ragged.from_rows(masks, dtype=np.uint8),
            **{name: column for name, column in batch.columns.items() if name == IMAGES},
        }
    )


def _starts(batch: Batch) -> list[int]:
    """Return the number of tokens of each prompt."""
    return [int(np.argmax(row > 0)) for row in batch.ragged(LOSS_MASK)]
