"""The policy loss of GRPO and its family, described; computed by `rl_algos.torch.policy_loss`.

It is put together from parts that know nothing of one another:

- a surrogate (`rl_algos.losses.surrogates`), the policy term of a token;
- an importance correction (`rl_algos.losses.importance`), weights of that term;
- weights of that term by the age of tokens (`rl_algos.losses.terms`);
- filters (`rl_algos.losses.terms`), tokens and sequences that it leaves out;
- a KL penalty (`rl_algos.losses.terms`), an entropy bonus (`rl_algos.losses.terms`) and a term for positive examples,
  each added to it;
- a term of demonstrations (`rl_algos.losses.terms`), rows that the policy did not sample and which no other part reads;
- an aggregation (`rl_algos.losses.terms`), from tokens to one number.

The parts are the sections of `loss_fn`: a config holds the objects that the loss is made of.

Each is a function of one sequence, and the loss is sums over sequences divided by global counts: microbatches, packing
and meshes change nothing. A sequence is a row, or the rows of equal `pair`, the segments of a rollout. Values of the
whole step (the tokens of highest covariance, weights that adapt) come as a column or as a setting, computed before the
step (`rl_algos.policy_gradient.objective`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rl_algos.losses.importance import ImportanceCorrection, importance_weights
from rl_algos.losses.mask import DEMONSTRATION, by_sequence, num_observed, without_demonstrations
from rl_algos.losses.surrogates import Clip, Surrogate
from rl_algos.losses.terms import Aggregation, Demonstrations, EntropyBonus, Filters, KLPenalty, StalenessDecay
from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR
from rl_core.model import ENTROPY, LOGPROBS, Read
from rl_core.token_filter import TokenFilter

RatioDenominator = Literal["prev", "generation"]

_CLIP, _TOKEN_MEAN, _NO_FILTERS = Clip(), Aggregation(), Filters()


def surrogate_column(setting: str) -> str:
    """Return the column, float32 `[rows]`, with the values of a setting of the surrogate."""
    return f"surrogate_{setting}"


@dataclass(frozen=True)
class PolicyLoss:
    """Aggregation of `w surrogate + kl - entropy_bonus H` over sampled tokens, plus the term of positive examples.

    Args:
        surrogate: The policy term.
        aggregation: From tokens to one number.
        on_policy: The ratio is 1 with its gradient; `prev_logprobs` are the logprobs of the pass itself and not a
            column.
        ratio_denominator: Logprobs that the ratio of the surrogate compares with. `generation` uses them instead of
            `prev`, only in the surrogate: the behaviour policy is then the centre of the clip.
        kl: The KL term, None for none.
        importance: The correction w, None for none.
        staleness: Weights by age, which w is multiplied by; None for none.
        weight_version: Version of the weights that the step trains, the end of a token's age.
        filters: Tokens and sequences that the policy term leaves out, such as tokens where one of the columns
            `filters.columns` is 0.
        mismatch_threshold: Leaves sequences whose mean `exp|prev - generation|` is above it out of all terms.
        entropy_bonus: Bonus for the mean entropy H of the next token's distribution; None does not read it.
        positive_example_nll_weight: Weight of the mean `-logp` over the tokens of positive examples (VAPO,
            arXiv:2504.05118), the rows whose column `positive` is 1.
        observation_nll_weight: Weight of the mean `-logp` over the tokens between two turns of a row
            (`rl_algos.losses.mask.num_observed`).
        demonstrations: The term of the rows whose column `demonstration` is 1; None without such rows.
        surrogate_by_row: Settings of the surrogate that each row has its own value of, in the columns `surrogate_NAME`;
            empty if all rows have the same surrogate.
        has_segments: A sequence may be several rows. Terms of whole sequences then read the column `pair`, the
            number of each row's sequence, which also keeps its rows in one microbatch.
        temperature: Sampling temperature.
        token_filter: Filter of sampling. Logprobs and entropy are normalised over the tokens that it keeps, and the
            reference's logprobs over all tokens.
    """

    surrogate: Surrogate = _CLIP
    aggregation: Aggregation = _TOKEN_MEAN
    on_policy: bool = False
    ratio_denominator: RatioDenominator = "prev"
    kl: KLPenalty | None = None
    importance: ImportanceCorrection | None = None
    staleness: StalenessDecay | None = None
    weight_version: int = 0
    filters: Filters = _NO_FILTERS
    mismatch_threshold: float | None = None
    entropy_bonus: EntropyBonus | None = None
    positive_example_nll_weight: float = 0.0
    observation_nll_weight: float = 0.0
    demonstrations: Demonstrations | None = None
    surrogate_by_row: tuple[str, ...] = ()
    has_segments: bool = False
    temperature: float = 1.0
    token_filter: TokenFilter | None = None
    implementation: str = "rl_algos.torch.policy_loss:compute"

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask`, `generation_logprobs` `[tokens]`, `advantages` `[rows]` or `[tokens]`, and further columns of
        the terms in use.
        """
        prev = () if self.on_policy else ("prev_logprobs",)
        ref = ("ref_logprobs",) if self.kl else ()
        positive = ("positive",) if self.positive_example_nll_weight else ()
        versions = ("weight_versions",) if self.staleness else ()
        marks = (DEMONSTRATION,) if self.demonstrations else ()
        pair = (PAIR,) if self.has_segments and self._has_sequence_terms else ()
        settings = tuple(map(surrogate_column, self.surrogate_by_row))
        of_surrogate = (*self.surrogate.columns, *settings)
        terms = (*prev, *ref, *self.filters.columns, *positive, *versions, *marks, *of_surrogate, *pair)
        return ("loss_mask", "advantages", "generation_logprobs", *terms)

    @property
    def reads(self) -> tuple[Read, ...]:
        """The policy's logprobs, and its entropy for a bonus."""
        reads = (LOGPROBS,) if self.entropy_bonus is None else (LOGPROBS, ENTROPY)
        return tuple(replace(read, token_filter=self.token_filter) for read in reads)

    @property
    def normalizes_weights(self) -> bool:
        """True if the policy term is divided by importance weights instead of a count."""
        return self.importance is not None and self.importance.batch_normalize

    @property
    def _has_sequence_terms(self) -> bool:
        """True if the loss of a token depends on other tokens of its sequence, or on their number."""
        of_weights = self.importance is not None and self.importance.is_by_sequence
        filters = self.filters.off_policy_threshold is not None or self.mismatch_threshold is not None
        of_surrogate = self.surrogate.level == "sequence"
        return of_surrogate or of_weights or filters or self.aggregation.denominator == "sequences"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return sampled `tokens` that train, `sequences` with at least one, and further divisors of the terms in
        use."""
        whole = by_sequence(batch, batch.ragged("loss_mask")).sums()
        if self.demonstrations is not None:
            batch = without_demonstrations(batch)
        mask = by_sequence(batch, batch.ragged("loss_mask"))
        sampled = mask.sums()
        totals = {"tokens": float(sampled.sum()), "sequences": float(np.count_nonzero(sampled))}
        if self.importance is not None and self.importance.batch_normalize:
            weights = importance_weights(self.importance, batch).sums()
            of_tokens = self.aggregation.denominator == "tokens"
            totals["importance_weights"] = float((weights if of_tokens else weights / np.maximum(sampled, 1)).sum())
        if self.positive_example_nll_weight:
            of_rows = batch.ragged("loss_mask").sums()
            totals["positive_tokens"] = float(of_rows[batch.array("positive") > 0].sum())
        if self.observation_nll_weight:
            totals["observed_tokens"] = num_observed(batch)
        if self.demonstrations is not None:
            totals["demonstration_tokens"] = float((whole - sampled).sum())
            totals |= {"all_tokens": float(whole.sum()), "all_sequences": float(np.count_nonzero(whole))}
        return totals
