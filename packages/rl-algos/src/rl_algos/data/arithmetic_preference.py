"""Generated sums, each with the right answer and a wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from rl_algos.data import arithmetic
from rl_algos.data.arithmetic import ArithmeticSettings
from rl_algos.data.permutation import permutation
from rl_core.plugins import DatasetPlugin, Requirement


class ArithmeticPreferenceSettings(ArithmeticSettings):
    """Generated sums of two numbers, each with a right and a wrong answer."""

    max_error: int = Field(default=9, ge=1)
    """Largest distance of the wrong answer from the right one."""


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Rows with `prompt`, `chosen` (the sum), `rejected` (a number near it) and `margin` (their distance), from the
    same sums as the dataset `arithmetic`; raises as that one.
    """
    config = ArithmeticPreferenceSettings.model_validate(dict(settings))
    rows = arithmetic.load(config.model_dump(exclude={"max_error"}), split)
    # a number for each row that follows from the seed, as large as there are signed errors
    drawn = permutation(len(rows), config.seed, 2) % (2 * config.max_error)
    errors = np.where(drawn < config.max_error, drawn + 1, config.max_error - 1 - drawn)
    return [_row(row, int(error)) for row, error in zip(rows, errors, strict=True)]


DATASET = DatasetPlugin(
    name="arithmetic_preference",
    load="rl_algos.data.arithmetic_preference:load",
    requirement=Requirement("rl-algos"),
    settings=ArithmeticPreferenceSettings,
)


def _row(row: Mapping[str, Any], error: int) -> dict[str, Any]:
    right = int(row["answer"])
    wrong = right + error if right + error >= 0 else right - error
    return {
        "prompt": row["messages"],
        "chosen": str(right),
        "rejected": str(wrong),
        "margin": float(abs(error)),
    }
