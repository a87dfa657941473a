"""Supervised fine-tuning: one optimizer step on each batch of conversations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rl_algos.losses.nll import NLLLoss
from rl_algos.sft.config import SFTConfig, SFTRoot
from rl_algos.sft.data import SFTData, TrainingRow, to_batch
from rl_core.batch import Batch
from rl_core.metrics import Metric
from rl_core.model import Loss, Model
from rl_core.run import Components, Run


def run(config: SFTRoot, components: Components, run: Run) -> None:
    """Fine-tune the policy as configured; `components.data` is what `prepare` returned."""
    policy = components.models["policy"]
    train(config.sft, NLLLoss(), policy, components.data, run, batch_size=config.policy.train_global_batch_size)


def train(config: SFTConfig, loss: Loss, policy: Model, data: SFTData, run: Run, *, batch_size: int) -> None:
    """Train for `max_num_steps` steps or `max_num_epochs` epochs, whichever is less; the last batch may be smaller."""
    max_steps = min(bound for bound in (config.max_num_steps, data.train.num_batches(batch_size)) if bound is not None)
    names = [dataset[0].dataset for dataset in data.train.datasets]
    for step in run.steps(max_steps, models={"policy": policy}, state={"data": data.train}):
        if step == 1 and config.val_at_start:
            validate(policy, data.validation, loss, run, step=0)
        with run.phase("data"):
            rows = data.train.take(batch_size)
            batch = to_batch(rows)
        with run.phase("training"):
            metrics = policy.train_step(batch, loss)
        run.record(step, {"train/epoch": data.train.epoch, **shares(rows, names)})
        run.record(step, {f"train/{name}": value for name, value in metrics.items()})
        if run.due(config.val_period, step, at_end=config.val_at_end):
            reached = validate(policy, data.validation, loss, run, step=step)
            if config.stop_at_validation_loss is not None and reached <= config.stop_at_validation_loss:
                run.stop(f"val/loss is {reached:.4g}, the goal was {config.stop_at_validation_loss:.4g}")


def validate(policy: Model, validation: Mapping[str, Sequence[Batch]], loss: Loss, run: Run, *, step: int) -> float:
    """The mean loss over all tokens under it, recorded as `val/loss` with their number, and that of each dataset if
    there are several; infinite if there is no data.
    """
    if not validation:
        return math.inf
    with run.phase("validation"):
        parts = {name: _evaluated(policy, batches, loss) for name, batches in validation.items()}
    whole = sum(parts.values(), Metric(0.0, 0.0))
    by_dataset = {f"val/{name}/loss": part for name, part in parts.items()} if len(parts) > 1 else {}
    run.record(step, {"val/loss": whole, "val/num_tokens": whole.weight, **by_dataset})
    return whole.result()


def shares(rows: Sequence[TrainingRow], datasets: Sequence[str]) -> dict[str, float]:
    """Share of each of several datasets in the tokens under the loss of some rows."""
    if len(datasets) == 1:
        return {}
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row.dataset] += int(row.loss_mask.sum())
    return {f"train/{name}/share": tokens[name] / max(1, tokens.total()) for name in datasets}


def _evaluated(policy: Model, batches: Sequence[Batch], loss: Loss) -> Metric:
    """The loss, weighted by tokens."""
    tokens = [loss.totals(batch)["tokens"] for batch in batches]
    losses = [policy.evaluate(batch, loss)["loss"].result() for batch in batches]
    return Metric(sum(value * count for value, count in zip(losses, tokens, strict=True)), sum(tokens))
