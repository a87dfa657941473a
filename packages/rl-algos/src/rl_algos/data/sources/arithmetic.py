"""Generated sums, `12+34=`: a task that a tiny model learns in a minute, alone or with right and wrong answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from rl_algos.data.stream import permutation
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


class ArithmeticHintSettings(ArithmeticSettings):
    """Generated sums of two numbers, some of which have the answer in the prompt."""

    hints: bool = False
    """Put the answer before every second prompt, as in `46 12+34=`. A model that has learned from such rows copies an
    answer that it is given, so it can be its own teacher."""


class ArithmeticPreferenceSettings(ArithmeticSettings):
    """Generated sums of two numbers, each with a right and a wrong answer."""

    max_error: int = Field(default=9, ge=1)
    """Largest distance of the wrong answer from the right one."""


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Load rows of sums; `train` and `validation` share no pair of operands (a+b and b+a are one pair).

    A row has `messages` (the question), `answer` and `environment`, so that it serves reinforcement learning and
    supervised fine-tuning alike.

    Raises:
        DataError: If the split is unknown, or has fewer sums than the requested rows.
    """
    config = ArithmeticHintSettings.model_validate(dict(settings))
    if split not in ("train", "validation"):
        raise DataError(f"arithmetic has the splits train and validation, got {split!r}")
    size = config.max_operand + 1
    a, b = np.divmod(np.arange(size * size), size)
    rows, distinct = permutation(size * size, config.seed, 0), np.flatnonzero(a <= b)
    num_held_out = max(1, round(config.validation_fraction * len(distinct)))
    held_out = np.zeros((size, size), dtype=bool)
    chosen = distinct[permutation(len(distinct), config.seed, 1)[:num_held_out]]
    held_out[a[chosen], b[chosen]] = held_out[b[chosen], a[chosen]] = True
    rows = rows[held_out[a[rows], b[rows]] == (split == "validation")]
    count = len(rows) if config.num_rows is None else config.num_rows
    if count > len(rows):
        raise DataError(
            f"arithmetic: {split} has {len(rows)} different sums of operands up to {config.max_operand}, "
            f"got num_rows: {count}. Lower num_rows, or increase max_operand"
        )
    sums = []
    for number, row in enumerate(rows[:count].tolist()):
        left, right = divmod(row, size)
        hint = f"{left + right} " if config.hints and number % 2 else ""
        messages = [{"role": "user", "content": f"{hint}{left}+{right}="}]
        sums.append({"messages": messages, "answer": str(left + right), "environment": "math"})
    return sums


def load_preferences(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Load rows with `prompt`, `chosen` (the sum), `rejected` (a number near it) and `margin` (their distance), from
    the same sums as the dataset `arithmetic`; see `load` for the errors.
    """
    config = ArithmeticPreferenceSettings.model_validate(dict(settings))
    rows = load(config.model_dump(exclude={"max_error"}), split)
    # Each row gets a number below the count of signed errors, which follows from the seed.
    drawn = permutation(len(rows), config.seed, 2) % (2 * config.max_error)
    errors = np.where(drawn < config.max_error, drawn + 1, config.max_error - 1 - drawn)
    pairs = []
    for row, error in zip(rows, errors.tolist(), strict=True):
        right = int(row["answer"])
        wrong = right + error if right + error >= 0 else right - error
        pair = {"prompt": row["messages"], "chosen": str(right), "rejected": str(wrong), "margin": float(abs(error))}
        pairs.append(pair)
    return pairs


DATASET = DatasetPlugin(
    name="arithmetic",
    load="rl_algos.data.sources.arithmetic:load",
    requirement=Requirement("rl-algos"),
    settings=ArithmeticHintSettings,
)

PREFERENCE_DATASET = DatasetPlugin(
    name="arithmetic_preference",
    load="rl_algos.data.sources.arithmetic:load_preferences",
    requirement=Requirement("rl-algos"),
    settings=ArithmeticPreferenceSettings,
)
