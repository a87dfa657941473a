"""Defaults that suit reinforcement learning, and with which fine-tuning hardly moves a model."""

from __future__ import annotations

import logging

from rl_core.config import is_changed
from rl_core.model_config import ModelConfig

_log = logging.getLogger(__name__)

FEW_STEPS = 20
"""Number of steps below which a default batch size is too large for the data."""


def warn_of_learning_rate(policy: ModelConfig) -> None:
    """Warn of a learning rate that nobody has set.

    Args:
        policy: Section `policy`.
    """
    if is_changed(policy.optimizer, "kwargs"):
        return
    trained, usual = ("adapters", "1e-4") if policy.lora_cfg.enabled else ("all weights", "1e-5")
    _log.warning(
        "policy.optimizer.kwargs.lr is %g, its default, which is for reinforcement learning; for fine-tuning of %s, %s "
        "is usual: policy.optimizer.kwargs.lr=%s",
        policy.optimizer.kwargs["lr"],
        trained,
        usual,
        usual,
    )


def warn_of_batch_size(policy: ModelConfig, *, num_rows: int, num_steps: int) -> None:
    """Warn of a batch size that nobody has set and that leaves few steps.

    Args:
        policy: Section `policy`.
        num_rows: Number of rows of an epoch.
        num_steps: Number of steps that the epochs have.
    """
    if num_steps >= FEW_STEPS or is_changed(policy, "train_global_batch_size"):
        return
    _log.warning(
        "the epochs have %d step(s): the data has %d rows, and policy.train_global_batch_size is %d, its default; set "
        "it lower, such as policy.train_global_batch_size=%d",
        num_steps,
        num_rows,
        policy.train_global_batch_size,
        suited_batch_size(num_rows),
    )


def suited_batch_size(num_rows: int) -> int:
    """Return a power of two from 4 to 128 with which an epoch of these rows has about 20 steps or more."""
    size = 128
    while size > 4 and num_rows // size < FEW_STEPS:
        size //= 2
    return size
