"""Losses of reward models, described; computed by `rl_algos.torch.reward`.

Notation: `s(y)` is the score of a response y to a prompt, read at its last token; c and r are the chosen and the
rejected response of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from rl_algos.losses.preference import num_pairs
from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR
from rl_core.model import SCORES, Read

MarginUse = Literal["ignore", "subtract", "scale"]


@dataclass(frozen=True)
class BradleyTerryLoss:
    """Mean over pairs of `-logsigmoid(s(c) - s(r))` (Bradley-Terry; arXiv:2203.02155).

    Args:
        margin: What becomes of the margin m of a pair: with `subtract` the term is `-logsigmoid(s(c) - s(r) - m)`
            (Llama 2, arXiv:2307.09288), with `scale` it is `-m logsigmoid(s(c) - s(r))` (HelpSteer2-Preference,
            arXiv:2410.01257).
        center_weight: Weight of `(s(c) + s(r))^2`, which keeps scores near 0 (arXiv:2312.09244).
    """

    reads: ClassVar[tuple[Read, ...]] = (SCORES,)
    temperature: ClassVar[float] = 1.0
    margin: MarginUse = "ignore"
    center_weight: float = 0.0
    implementation: str = "rl_algos.torch.reward:compute_pairs"

    @property
    def columns(self) -> tuple[str, ...]:
        """`pair`, `is_chosen` and, if it counts, `margin` `[rows]`."""
        return (PAIR, "is_chosen") if self.margin == "ignore" else (PAIR, "is_chosen", "margin")

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`pairs`, of which each shard has whole ones."""
        return {"pairs": num_pairs(batch)}


@dataclass(frozen=True)
class RegressionLoss:
    """Mean over responses of `(s(y) - target)^2`, with the target in the column `verdict` `[rows]`."""

    columns: ClassVar[tuple[str, ...]] = ("verdict",)
    reads: ClassVar[tuple[Read, ...]] = (SCORES,)
    temperature: ClassVar[float] = 1.0
    implementation: str = "rl_algos.torch.reward:compute_regression"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`responses`."""
        return {"responses": float(len(batch))}
