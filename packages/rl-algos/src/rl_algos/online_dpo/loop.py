"""Online DPO (arXiv:2402.04792): sample groups, pair the rollouts of a prompt by their rewards, and take a step of a
preference loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_algos.dpo.algorithm import preference_objective
from rl_algos.online_dpo.config import OnlineDPOConfig, OnlineDPORoot
from rl_algos.preference.comparison import Pairing
from rl_algos.rollouts.algorithm import RolloutAlgorithm
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.setup import steps_of
from rl_algos.rollouts.training.batch import build_batch
from rl_algos.rollouts.training.metrics import rollout_metrics, signal_metrics, training_metrics
from rl_algos.rollouts.training.rewards import compared
from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR, PREFIX
from rl_core.model import Model
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup
from rl_core.run import Components, Run

if TYPE_CHECKING:
    from rl_algos.supervised.loop import RowObjective


class OnlineDPO(RolloutAlgorithm[OnlineDPORoot]):
    """Preference optimization on the policy's own rollouts."""

    def run(self, config: OnlineDPORoot, components: Components, run: Run) -> None:
        train(
            config.online_dpo,
            preference_objective(config.online_dpo, max_tokens=config.policy.max_total_sequence_length),
            policy=components.models["policy"],
            steps=steps_of(config, components, run),
            pairs_per_minibatch=config.policy.train_global_batch_size,
        )


def train(
    config: OnlineDPOConfig,
    objective: RowObjective[Any],
    *,
    policy: Model,
    steps: RolloutSteps,
    pairs_per_minibatch: int,
) -> None:
    """Train the policy for `config.max_num_steps` steps, or until the data or the run ends.

    A step whose rewards are all equal within their groups has no pairs, and makes no update.

    Args:
        config: Config section of the algorithm.
        objective: Loss of pairs, and the columns that it needs from the policy and its reference.
        policy: Policy to train.
        steps: Rollouts of each step, weight sync, validation and checkpoints.
        pairs_per_minibatch: Number of pairs of one optimizer step.
    """
    run = steps.run
    for step, groups, aside, _ in steps.take(models={"policy": policy}):
        batch = build_batch(groups, config)
        pairs, updates = paired(batch, groups, config.pairing), []
        for part in parts_of(pairs, pairs_per_minibatch):
            with run.phase("logprobs"):
                # Ranks of pairs are of the policy as it is before this update.
                part = part if objective.complete is None else objective.complete(part, policy)
            with run.phase("training"):
                updates.append(policy.train_step(part, objective.loss))
        if run.due(config.reference_sync_period, step):
            policy.update_reference()
        steps.sync(step, batch)
        run.record(step, {**training_metrics(updates), "rollout/pairs": float(len(pairs) // 2)})
        run.record(step, {**rollout_metrics(groups), **signal_metrics(groups, aside)})
        run.record_rollouts(step, [*groups, *aside], np.zeros(0), batch=batch)


def paired(batch: Batch, groups: Sequence[RolloutGroup], pairing: Pairing) -> Batch:
    """Return two rows for each pair, the better one first, with `pair`, `is_chosen` and `margin`, the difference of
    their rewards `[rows]`.

    Failed rollouts, and those without a token to learn, are in no pair. Of equal rewards, the best is the first rollout
    and the worst the last.

    Args:
        batch: One row for each rollout, from `build_batch`.
        groups: Groups of the rollouts, in the order of the rows.
        pairing: Which pairs to form.
    """
    learns = batch.ragged(LOSS_MASK).sums() > 0
    rows: list[int] = []
    margins: list[float] = []
    start = 0
    for group in groups:
        rewards = group.rewards()
        usable = ~np.isnan(rewards) & learns[start : start + len(rewards)]
        for own in compared(group):
            order = [int(place) for place in np.argsort(-rewards, kind="stable") if own[place] and usable[place]]
            chosen = combinations(order, 2) if pairing == "all" else [(order[0], order[-1])] if order else []
            for better, worse in chosen:
                if rewards[better] > rewards[worse]:
                    rows += [start + better, start + worse]
                    margins.append(float(rewards[better] - rewards[worse]))
        start += len(rewards)
    columns = [name for name in batch if name != PREFIX]
    return (
        batch.only(columns)
        .select(rows)
        .with_columns(
            {
                PAIR: np.repeat(np.arange(len(margins)), 2),
                "is_chosen": np.tile(np.array([1, 0], dtype=np.uint8), len(margins)),
                "margin": np.repeat(np.array(margins, dtype=np.float32), 2),
            }
        )
    )


def parts_of(pairs: Batch, size: int) -> Iterator[Batch]:
    """Yield consecutive parts of at most `size` pairs each."""
    for first in range(0, len(pairs), 2 * size):
        yield pairs.select(range(first, min(first + 2 * size, len(pairs))))
