"""Generated sums, `12+34=`: a task that a tiny model learns in a minute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from rl_algos.data.permutation import permutation
from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.plugins import DatasetPlugin, Requirement


class ArithmeticSettings(Config):
    """Generated sums of two numbers."""

    max_operand: int = Field(default=99, ge=2, le=9999)
    """Largest operand."""
    num_rows: int | None = Field(default=None, gt=0)
    """Rows of the split; all its sums if unset."""
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    """Share of all operand pairs that are reserved for validation."""
    seed: int = Field(default=0, ge=0)
    """Seed of the choice of pairs for validation, and of the order of rows."""


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Rows of sums; `train` and `validation` share no pair of operands (a+b and b+a are one pair).

    A row has `messages` (the question), `answer` and `environment`, so that it serves reinforcement learning and
    supervised fine-tuning alike.

    Raises:
        DataError: If the split is unknown, or has fewer sums than the requested rows.
    """
    config = ArithmeticSettings.model_validate(dict(settings))
    if split not in ("train", "validation"):
        raise DataError(f"arithmetic has the splits train and validation, got {split!r}")
    pairs = _pairs(config, split)
    count = len(pairs) if config.num_rows is None else config.num_rows
    if count > len(pairs):
        raise DataError(
            f"arithmetic: {split} has {len(pairs)} different sums of operands up to {config.max_operand}, "
            f"got num_rows: {count}. Lower num_rows, or increase max_operand"
        )
    return [_row(int(a), int(b)) for a, b in pairs[:count]]


DATASET = DatasetPlugin(
    name="arithmetic",
    load="rl_algos.data.arithmetic:load",
    requirement=Requirement("rl-algos"),
    settings=ArithmeticSettings,
)


def _pairs(config: ArithmeticSettings, split: str) -> np.ndarray:
    """int64 `[pairs, 2]`, the split's operand pairs, shuffled."""
    size = config.max_operand + 1
    a, b = np.divmod(np.arange(size * size), size)
    rows, distinct = permutation(size * size, config.seed, 0), np.flatnonzero(a <= b)
    num_held_out = max(1, round(config.validation_fraction * len(distinct)))
    held_out = np.zeros((size, size), dtype=bool)
    chosen = distinct[permutation(len(distinct), config.seed, 1)[:num_held_out]]
    held_out[a[chosen], b[chosen]] = held_out[b[chosen], a[chosen]] = True
    rows = rows[held_out[a[rows], b[rows]] == (split == "validation")]
    return np.stack([a[rows], b[rows]], axis=1)


def _row(a: int, b: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"{a}+{b}="}],
        "answer": str(a + b),
        "environment": "math",
    }
