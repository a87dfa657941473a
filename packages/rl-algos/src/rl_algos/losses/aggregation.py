"""From the losses of tokens to one number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rl_core.model import UNDIVIDED

AggregationName = Literal["token-mean", "sequence-mean", "token-sum", "sequence-mean-token-sum"]


@dataclass(frozen=True)
class Aggregation:
    """A sum over all sampled tokens of the batch, divided by one global count.

    With token losses l, the N sampled tokens of the batch, and the R sequences that have any, n_i tokens each:

    - `token-mean`: `sum l / N` (DAPO, arXiv:2503.14476): long sequences weigh more.
    - `sequence-mean`: `sum_i (sum_t l / n_i) / R` (GRPO, arXiv:2402.03300): each sequence weighs the same.
    - `sequence-mean-token-sum`: `sum_i (sum_t l / divisor) / R`; with a constant divisor, the longest response allowed,
      it is Dr. GRPO's (arXiv:2503.20783): neither short nor long sequences are favoured.
    - `token-sum`: `sum l / divisor`: a batch with more tokens takes a larger step.

    What a filter (the importance correction, a mismatch threshold) leaves out of the sums stays in N and R; what the
    loss mask leaves out, such as rollouts that failed or are filtered as overlong, does not.

    Args:
        name: one of these.
        divisor: a constant, for the last two.
    """

    name: AggregationName = "token-mean"
    divisor: float = 1.0

    @property
    def denominator(self) -> str:
        """Name of the total that sums are divided by."""
        return _DENOMINATORS[self.name]


_DENOMINATORS: Mapping[AggregationName, str] = {
    "token-mean": "tokens",
    "sequence-mean": "sequences",
    "token-sum": UNDIVIDED,
    "sequence-mean-token-sum": "sequences",
}
