"""The reference point of KTO, computed over the whole batch before a step."""

from __future__ import annotations

import numpy as np

from rl_algos.images.columns import seen_columns
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.images import IMAGES
from rl_core.model import LOGPROBS, Model
from rl_core.rollouts.group import LOSS_MASK


def with_reference_point(batch: Batch, policy: Model, *, max_tokens: int) -> Batch:
    """The batch with `kl` float32 `[rows]`, one number: the estimate of KL(policy || reference) of KTO
    (arXiv:2402.01306), `max(0, mean over i of logp(y') - ref(y'))` with y' the response of row i + 1 to the prompt of
    row i.

    It is a mean over the whole batch, whatever ranks and microbatches hold of it.

    Args:
        batch: Batch with `loss_mask`.
        policy: Policy, which must keep its reference.
        max_tokens: Maximum number of tokens of a row; a longer one is cut.
    """
    others = mismatched(batch, max_tokens)
    own, ref = (
        policy.infer(seen_columns(others), [LOGPROBS], reference=reference).ragged("logprobs")
        for reference in (False, True)
    )
    mask = others.ragged(LOSS_MASK)
    difference = np.zeros(len(mask.values))
    is_said = mask.values > 0
    difference[is_said] = own.values[is_said].astype(np.float64) - ref.values[is_said]
    estimate = mask.like(difference).sums().mean()
    return batch.with_columns({"kl": np.full(len(batch), max(0.0, float(estimate)), dtype=np.float32)})


def mismatched(batch: Batch, max_tokens: int) -> Batch:
    """Tokens and `loss_mask` of the prompt of each row with the response of the next one, that of the first after the
    last; cut to `max_tokens`. Images are those of the row, which are taken to be in its prompt; a model refuses rows
    in which they are elsewhere, as their tokens are then missing."""
    tokens, mask = batch.ragged(TOKENS), batch.ragged(LOSS_MASK)
    starts = [int(np.argmax(row > 0)) for row in mask]
    rows = []
    for index, start in enumerate(starts):
        follows = (index + 1) % len(starts)
        said = starts[follows]
        prompt, prompt_mask = tokens[index][:start], np.zeros(start, dtype=np.uint8)
        rows.append(
            (
                np.concatenate([prompt, tokens[follows][said:]])[:max_tokens],
                np.concatenate([prompt_mask, mask[follows][said:]])[:max_tokens],
            )
        )
    return Batch(
        {
            TOKENS: Ragged.from_rows([row for row, _ in rows], dtype=np.int32),
            LOSS_MASK: Ragged.from_rows([row for _, row in rows], dtype=np.uint8),
            **{name: column for name, column in batch.columns.items() if name == IMAGES},
        }
    )
