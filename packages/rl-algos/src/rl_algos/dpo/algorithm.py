"""Preference optimisation: the supervised loop on pairs of responses, or on single ones with a label, with the columns
that a loss needs from a model or from the whole batch: logprobs of the reference, the reference point of KTO, the ranks
of AOT and the token weights of LD-DPO."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rl_algos.dpo.config import DPOConfig, DPORoot, PreferenceObjectiveConfig
from rl_algos.dpo.loss import REF_LOGPROBS, learns_from_responses, preference_loss_of, uses_reference
from rl_algos.images.columns import seen_columns
from rl_algos.losses.preference import LENGTH_WEIGHTS, SORTED_SHIFT, PreferenceLoss
from rl_algos.preference.algorithm import PreferenceAlgorithm
from rl_algos.preference.comparison import Verdict
from rl_algos.preference.rows import ID, judged_batch, pair_batch
from rl_algos.supervised.loop import RowObjective, train
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.microbatch import PAIR
from rl_core.data.ragged import Ragged
from rl_core.images import IMAGES
from rl_core.model import LOGPROBS, Model
from rl_core.rollouts.group import LOSS_MASK
from rl_core.run import Components, Run

_log = logging.getLogger(__name__)


class DPO(PreferenceAlgorithm[DPORoot]):
    """Preference optimization."""

    def reads(self, config: DPORoot) -> tuple[DPOConfig, Verdict | None, bool]:
        loss = preference_loss_of(config.dpo)
        return config.dpo, "label" if learns_from_responses(loss) else None, "margin" in loss.columns

    def run(self, config: DPORoot, components: Components, run: Run) -> None:
        policy, objective = components.models["policy"], objective_of(config)
        rows, scores = config.policy.train_global_batch_size, self.scores(config, components, run)
        train(config.dpo, objective, policy, components.data, run, batch_size=rows, scores=scores)


def objective_of(config: DPORoot) -> RowObjective[Any]:
    """Return the objective: the configured loss, and the columns that it needs from a model."""
    max_tokens, cached = config.policy.max_total_sequence_length, config.dpo.cache_reference_logprobs
    return preference_objective(config.dpo, max_tokens=max_tokens, cached=cached)


def preference_objective(
    settings: PreferenceObjectiveConfig, *, max_tokens: int, cached: bool = False
) -> RowObjective[Any]:
    """Return the objective of a section of preferences.

    Args:
        settings: Config section with the loss.
        max_tokens: Maximum number of tokens of a row.
        cached: Keep the reference's logprobs of each row.
    """
    loss = preference_loss_of(settings)
    to_batch: Callable[[Sequence[Any]], Batch] = judged_batch if learns_from_responses(loss) else pair_batch
    if not uses_reference(loss):
        return RowObjective(loss, to_batch)
    reference = ReferenceLogprobs(cached=cached)
    if isinstance(loss, PreferenceLoss):
        return RowObjective(loss, to_batch, partial(pair_columns, loss, reference))
    if "kl" not in loss.columns:
        return RowObjective(loss, to_batch, reference)

    def complete(batch: Batch, policy: Model) -> Batch:
        return with_reference_point(reference(batch, policy), policy, max_tokens=max_tokens)

    return RowObjective(loss, to_batch, complete)


def pair_columns(loss: PreferenceLoss, reference: ReferenceLogprobs, batch: Batch, policy: Model) -> Batch:
    """Return a batch of pairs with `ref_logprobs`, and with what the terms of the loss need of the whole batch.

    Args:
        loss: Loss of pairs that uses the reference.
        reference: Reads the reference's logprobs.
        batch: Whole pairs, the chosen response of each first.
        policy: Policy before the step.
    """
    batch = reference(batch, policy)
    if loss.ld_alpha is not None:
        batch = batch.with_columns({LENGTH_WEIGHTS: length_weights(batch, loss.ld_alpha)})
    sorted_by = {term.sorts for term in (loss.term, *(added.term for added in loss.added))} - {None}
    if not sorted_by:
        return batch
    logprobs = policy.infer(seen_columns(batch), [LOGPROBS]).ragged("logprobs")
    own, ref = (_sums(batch, values) for values in (logprobs, batch.ragged(REF_LOGPROBS)))
    chosen = batch.array("is_chosen") > 0
    if "responses" in sorted_by:
        better, worse = (
            np.flatnonzero(side)[np.argsort((own - ref)[side], kind="stable")] for side in (chosen, ~chosen)
        )
        numbers = np.arange(len(better))
        return batch.select(np.stack([better, worse], axis=1).ravel()).with_columns({PAIR: np.repeat(numbers, 2)})
    margins, compared = (values[chosen] - values[~chosen] for values in (own, ref))
    ranks = np.argsort(np.argsort(margins, kind="stable"), kind="stable")
    shift = compared - np.sort(compared)[ranks]
    return batch.with_columns({SORTED_SHIFT: np.repeat(shift, 2).astype(logprobs.values.dtype)})


def length_weights(batch: Batch, alpha: float) -> Ragged:
    """Return `[tokens]`, 1 up to the length of the shorter response of each pair and `alpha` beyond it, in the dtype of
    the reference's logprobs.

    Args:
        batch: Whole pairs, one after another.
        alpha: Weight of the tokens beyond.
    """
    mask = batch.ragged(LOSS_MASK)
    places = [np.cumsum(row > 0) for row in mask]
    shared = np.minimum.reduceat(mask.sums(), np.arange(0, len(mask), 2)).repeat(2)
    rows = [np.where(place <= length, 1.0, alpha) for place, length in zip(places, shared, strict=True)]
    return Ragged.from_rows(rows, dtype=batch.ragged(REF_LOGPROBS).values.dtype)


def _sums(batch: Batch, logprobs: Ragged) -> np.ndarray:
    """Return float64 `[rows]`, the weighted sums of the logprobs of responses."""
    mask = batch.ragged(LOSS_MASK).values > 0
    weights = batch.ragged(LENGTH_WEIGHTS).values if LENGTH_WEIGHTS in batch else 1.0
    return logprobs.like(np.where(mask, logprobs.values.astype(np.float64), 0.0) * weights).sums()


def with_reference_point(batch: Batch, policy: Model, *, max_tokens: int) -> Batch:
    """Return the batch with `kl` float32 `[rows]`, one number: the estimate of KL(policy || reference) of KTO
    (arXiv:2402.01306), `max(0, mean over i of logp(y') - ref(y'))` with y' a response to another prompt, after the
    prompt of row i. It is 0 for a batch with one prompt only.

    It is a mean over the whole batch, regardless of ranks and microbatches.

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

    No row is returned twice unless more than half of the rows have one prompt, so that every response of the batch is
    used. If all prompts differ, it is the next row.
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
    """Return tokens and `loss_mask` of the prompt of each row with the response of another row, cut to `max_tokens`. A
    row without another one stays as it is, without tokens that count. Rows keep their images, which are assumed to be
    in the prompt; a model refuses rows with images elsewhere, because the tokens of these images are then missing."""
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


class ReferenceLogprobs:
    """Adds the column `ref_logprobs` to batches.

    Args:
        cached: Keep what was read, by row, so that later epochs and validations do not read it again. It takes 4 bytes
            for each token of the data, in the driver's memory.
    """

    def __init__(self, *, cached: bool = False) -> None:
        self._kept: dict[str, np.ndarray] | None = {} if cached else None

    def __call__(self, batch: Batch, policy: Model) -> Batch:
        """Return the batch with the column."""
        if self._kept is None:
            return batch.with_columns({REF_LOGPROBS: _read(batch, policy).columns["logprobs"]})
        ids = batch.array(ID).tolist()
        missing = [row for row, id in enumerate(ids) if id not in self._kept]
        if missing:
            read = _read(batch.select(missing), policy).ragged("logprobs")
            self._kept.update((ids[row], np.array(read[place])) for place, row in enumerate(missing))
        return batch.with_columns({REF_LOGPROBS: Ragged.from_rows([self._kept[id] for id in ids], dtype=np.float32)})


def _read(batch: Batch, policy: Model) -> Batch:
    return policy.infer(seen_columns(batch), [LOGPROBS], reference=True)
