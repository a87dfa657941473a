"""Settings of the dataset `calculations`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_core.config import Config


class CalculationsSettings(Config):
    """Generated products of two numbers, which a tiny model cannot compute without a tool."""

    form: Literal["calculator", "program"] = "calculator"
    """Environment of the rows: `text_tools` for `calculator`, which the policy calls, or `code` for `program`, which
    the policy writes."""
    max_operand: int = Field(default=99, ge=9, le=9999)
    """Largest operand."""
    size: int = Field(default=1000, gt=0, le=10**6)
    """Number of rows in the split; `train` and `validation` share no pair of operands."""
    seed: int = Field(default=0, ge=0)
    """Seed of the operands."""
    demonstrations: bool = False
    """Rows for supervised fine-tuning: half of them show the right call or program, the others a guessed answer or the
    program of a sum. A model that has learned from them does either, so reinforcement learning can compare both."""
