"""Settings of the dataset `calculations`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rl_core.config import Config, Problem, ProblemError


class CalculationsSettings(Config):
    """Generated products of two numbers, which a tiny model cannot compute without a tool, or sums for an agent."""

    form: Literal["calculator", "program", "repository"] = "calculator"
    """Environment of the rows: `text_tools` for `calculator`, which the policy calls; `code` for `program`, which
    the policy writes; or `repository` for a repository whose `answer.py` an agent changes to have the sum of two
    numbers as `ANSWER`."""
    max_operand: int = Field(default=99, ge=9, le=9999)
    """Largest operand."""
    size: int = Field(default=1000, gt=0, le=10**6)
    """Number of rows in the split; `train` and `validation` share no pair of operands."""
    seed: int = Field(default=0, ge=0)
    """Seed of the operands."""
    demonstrations: bool = False
    """Rows for supervised fine-tuning: half of them show the right call or program, the others a guessed answer or the
    program of a sum. A model that has learned from them does either, so reinforcement learning can compare both."""

    @model_validator(mode="after")
    def _demonstrates(self) -> Self:
        if self.demonstrations and self.form == "repository":
            raise ProblemError(
                Problem(
                    "demonstrations", "cannot be combined with form=repository", remedy="Use the dataset arithmetic"
                )
            )
        return self
