"""From the losses of tokens to one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rl_core.config import NamedConfig, Problem, ProblemError
from rl_core.model import UNDIVIDED

AggregationName = Literal["token-mean", "sequence-mean", "token-sum", "sequence-mean-token-sum"]


class Aggregation(NamedConfig):
    """A sum over all sampled tokens of the batch, divided by one global count.

    With token losses l, the N sampled tokens of the batch, and the R sequences that have any, n_i tokens each:

    - `token-mean`: `sum l / N` (DAPO, arXiv:2503.14476): long sequences weigh more.
    - `sequence-mean`: `sum_i (sum_t l / n_i) / R` (GRPO, arXiv:2402.03300): each sequence weighs the same.
    - `sequence-mean-token-sum`: `sum_i (sum_t l / divisor) / R`; with a constant divisor, the longest response allowed,
      it is Dr. GRPO's (arXiv:2503.20783): neither short nor long sequences are favoured.
    - `token-sum`: `sum l / divisor`: a batch with more tokens takes a larger step.

    What a filter (the importance correction, a mismatch threshold) leaves out of the sums stays in N and R; what the
    loss mask leaves out, such as rollouts that failed or are filtered as overlong, does not.
    """

    settings_follow_name: ClassVar[bool] = False

    name: AggregationName = "token-mean"
    """Name of the aggregation: `token-mean`, `sequence-mean`, `token-sum` or `sequence-mean-token-sum`. Sequences and
    tokens that a filter of the loss excludes from the sums still count in the denominators; rollouts that failed or
    were filtered as overlong do not."""
    divisor: float = Field(default=1.0, gt=0)
    """Constant by which sums over tokens are divided, such as the maximum response length (Dr. GRPO); only for
    `token-sum` and `sequence-mean-token-sum`."""

    @property
    def denominator(self) -> str:
        """Name of the total that sums are divided by."""
        return _DENOMINATORS[self.name]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.divisor != 1 and not self.name.endswith("token-sum"):
            remedy = "Remove this key, or use the aggregation token-sum or sequence-mean-token-sum"
            raise ProblemError(Problem.unused("divisor", f"with the aggregation {self.name}", remedy=remedy))
        return self


_DENOMINATORS: Mapping[AggregationName, str] = {
    "token-mean": "tokens",
    "sequence-mean": "sequences",
    "token-sum": UNDIVIDED,
    "sequence-mean-token-sum": "sequences",
}
