"""The length of a run compared with its data."""

from __future__ import annotations

import logging

from rl_algos.data.flow import FlowStream
from rl_algos.data.stream import Stream

FEW_STEPS = 10
"""Fewer optimizer steps than this hardly change a model."""

_UNBOUNDED = 2**62

_log = logging.getLogger(__name__)


def tell_extent(
    stream: Stream | FlowStream,
    batch: int,
    *,
    unit: str,
    size_key: str,
    max_num_steps: int | None,
    max_num_epochs: int | None,
) -> None:
    """Log the steps and epochs that a run will train for, and warn of so few steps, or so small a part of the epochs
    that were asked for, that the user may not have meant it.

    Args:
        stream: What the run draws from; nothing is told of one whose size nobody knows.
        batch: Items that a step draws.
        unit: Name of the items, such as `rows`.
        size_key: Key of the config that sets `batch`.
        max_num_steps: Maximum number of steps of the run; None for no limit.
        max_num_epochs: Maximum number of epochs of the run; None for no limit.
    """
    if isinstance(stream, FlowStream):
        return
    items = stream.num_items
    by_epochs = stream.num_batches(batch)
    steps = min(bound for bound in (max_num_steps, by_epochs, _UNBOUNDED) if bound is not None)
    an_epoch = items / batch
    if steps == by_epochs and steps < FEW_STEPS:
        _log.warning(
            "the run has only %s: %d %s in steps of %d (%s). If that is too few, lower that number or increase "
            "max_num_epochs",
            _counted(steps, "step"),
            items,
            unit,
            batch,
            size_key,
        )
    elif max_num_epochs is not None and steps < an_epoch:
        _log.warning(
            "the run ends after max_num_steps, %d, which is %.2g of the %s in max_num_epochs: an epoch has %d steps "
            "of %d %s; increase or remove max_num_steps to train on all of them",
            steps,
            steps / an_epoch,
            _counted(max_num_epochs, "epoch"),
            -(-items // batch),
            batch,
            unit,
        )
    elif steps < _UNBOUNDED:
        drawn = steps * batch if stream.num_left is None else min(steps * batch, stream.num_left)
        _log.info(
            "%d %s, %d a step: %s, %s", items, unit, batch, _counted(steps, "step"), _counted(drawn / items, "epoch")
        )


def _counted(number: float, unit: str) -> str:
    return f"{number:.3g} {unit}" + ("" if number == 1 else "s")
