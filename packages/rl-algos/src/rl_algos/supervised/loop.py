"""Learning from given rows: one optimizer step on each batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rl_algos.supervised.config import SupervisedConfig
from rl_core.data.batch import Batch
from rl_core.metrics import Metric, combine
from rl_core.model import Loss, Model
from rl_core.run import Run

if TYPE_CHECKING:
    from rl_algos.supervised.data import SupervisedData

T = TypeVar("T")


@dataclass(frozen=True)
class RowObjective(Generic[T]):
    """An objective: the loss of rows, and the columns that it needs.

    Args:
        loss: Loss with one total, the divisor of the mean of a validation.
        to_batch: Function from rows to the columns that they hold.
        complete: Adds the columns that the loss needs and only a model knows, such as logprobs of the reference; None
            if there are none.
        describe: Metrics of the rows of a step; None if there are none.
    """

    loss: Loss
    to_batch: Callable[[Sequence[T]], Batch]
    complete: Callable[[Batch, Model], Batch] | None = None
    describe: Callable[[Sequence[T]], Mapping[str, float]] | None = None


def train(
    config: SupervisedConfig,
    objective: RowObjective[T],
    policy: Model,
    data: SupervisedData[T],
    run: Run,
    *,
    batch_size: int,
    scores: Callable[[int], None] | None = None,
) -> None:
    """Train for `max_num_steps` steps or `max_num_epochs` epochs, whichever is less; the last batch may be smaller.

    Args:
        config: Config section of the algorithm.
        objective: Loss of rows, and the columns that it needs.
        policy: Model to train.
        data: Rows to train and validate on.
        run: Owns steps, timing and checkpoints.
        batch_size: Number of rows of a step.
        scores: Scores tasks after a step if they are due, step 0 before the first; None without tasks.
    """
    max_steps = min(bound for bound in (config.max_num_steps, data.train.num_batches(batch_size)) if bound is not None)
    for step in run.steps(max_steps, models={"policy": policy}, state={"data": data.train}):
        if step == 1 and config.val_at_start:
            validate(objective, policy, data, run, step=0)
        if step == 1 and scores is not None:
            scores(0)
        data.train.begin(step)
        with run.phase("data"):
            rows = data.train.take(batch_size)
            batch = objective.to_batch(rows)
        if objective.complete is not None:
            with run.phase("logprobs"):
                batch = objective.complete(batch, policy)
        with run.phase("training"):
            metrics = policy.train_step(batch, objective.loss)
        described = {} if objective.describe is None else objective.describe(rows)
        run.record(step, {"train/epoch": data.train.epoch, **described})
        run.record(step, {f"train/{name}": value for name, value in metrics.items()})
        if run.due(config.val_period, step, at_end=config.val_at_end):
            reached = validate(objective, policy, data, run, step=step)
            if config.stop_at_validation_loss is not None and reached <= config.stop_at_validation_loss:
                run.stop(f"val/loss is {reached:.4g}, the goal was {config.stop_at_validation_loss:.4g}")
        if scores is not None:
            scores(step)


def validate(objective: RowObjective[T], policy: Model, data: SupervisedData[T], run: Run, *, step: int) -> float:
    """Return the mean loss over all validation rows; infinite if there is no data. It is recorded as `val/loss`, with
    the loss's other metrics and its divisor, and for each dataset if there are several.
    """
    if not data.validation:
        return math.inf
    with run.phase("validation"):
        by_dataset = {
            name: combine(_evaluated(objective, policy, objective.to_batch(rows)) for rows in batches)
            for name, batches in data.validation.items()
        }
    whole = combine(by_dataset.values())
    run.record(step, {f"val/{name}": metric for name, metric in whole.items()})
    if len(by_dataset) > 1:
        parts = {f"val/{name}/{key}": metric for name, found in by_dataset.items() for key, metric in found.items()}
        run.record(step, parts)
    return whole["loss"].result()


def _evaluated(objective: RowObjective[T], policy: Model, batch: Batch) -> dict[str, Metric]:
    """Return the loss's metrics on one batch, as parts of the metrics of all batches."""
    if objective.complete is not None:
        batch = objective.complete(batch, policy)
    totals = objective.loss.totals(batch)
    if len(totals) != 1:
        raise ValueError(
            f"{type(objective.loss).__name__}.totals returned {', '.join(totals) or 'nothing'}; validation needs "
            "exactly one total to divide by, such as the pairs or tokens of the batch"
        )
    [(unit, total)] = totals.items()
    metrics = dict(policy.evaluate(batch, objective.loss))
    del metrics["num_tokens"]  # It counts whole rows, prompts included.
    mean = Metric(metrics["loss"].result() * total, total)
    return {**metrics, "loss": mean, f"num_{unit}": Metric(total, reduction="sum")}
