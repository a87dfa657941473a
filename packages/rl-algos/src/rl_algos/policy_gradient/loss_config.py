"""The config of the loss: its sections are the parts that the loss is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rl_algos.losses.aggregation import Aggregation
from rl_algos.losses.entropy import EntropyBonus
from rl_algos.losses.filters import Filters
from rl_algos.losses.importance import ImportanceCorrection
from rl_algos.losses.kl import KLPenalty
from rl_algos.losses.policy import RatioDenominator
from rl_algos.losses.staleness import StalenessDecay
from rl_algos.losses.surrogates import Clip, Surrogate
from rl_algos.policy_gradient.renamed_keys import RENAMED
from rl_core.config import NamedConfig, Rename


class LossConfig(NamedConfig):
    """The policy loss of GRPO and its family."""

    renamed: ClassVar[Mapping[str, Rename]] = RENAMED

    name: Literal["policy"] = "policy"
    """Name of the loss: `policy`, or your own class as `package.module:Class` or `file.py:Class`."""
    surrogate: Surrogate = Clip()
    """The policy term of a token: a name, or a name and the settings of that surrogate."""
    aggregation: Aggregation = Aggregation()
    """How the losses of tokens are reduced to one number: a name, or a name and a divisor."""
    ratio_denominator: RatioDenominator = "prev"
    """Logprobs in the denominator of the ratio, around which a surrogate clips: `prev` uses the policy before the step,
    `generation` uses the logprobs of the engine, whatever its weights. `prev` with `importance` is the loss of
    decoupled PPO (arXiv:2505.24298); with `generation`, the ratio itself corrects for tokens that older weights
    sampled."""
    force_on_policy_ratio: bool | None = None
    """Set the value of the ratio to 1 (its gradient is kept), and skip the pass that computes `prev_logprobs`: with one
    minibatch per step they equal the logprobs of the update itself. If unset, this is done if a step has one minibatch
    and nothing else needs `prev_logprobs`."""
    kl: KLPenalty = KLPenalty()
    """KL divergence to the reference policy, as a term of the loss or a penalty on rewards."""
    importance: ImportanceCorrection | None = None
    """Weight the policy term by `exp(prev - generation)` (logprobs), because the engine samples from a distribution
    that differs from the trainer's. `{}` uses the defaults; null turns the correction off."""
    allow_uncorrected_precision: bool = False
    """Accept rollouts or training in fewer bits than `policy.precision` (`vllm_cfg.quantization`, FP8 training) without
    a correction. Otherwise such a run must set `importance`, or `ratio_denominator` to `generation`."""
    staleness: StalenessDecay | None = None
    """Weight the policy term of a token by the age of the weights that sampled it; null weights all ages equally."""
    filters: Filters = Filters()
    """Tokens and sequences that the policy term leaves out."""
    entropy_bonus: EntropyBonus = EntropyBonus()
    """Bonus for the policy's entropy."""
    positive_example_nll_weight: float = Field(default=0.0, ge=0)
    """Weight of the mean negative log-likelihood of the tokens of rollouts with a reward above 0 (VAPO)."""


class CustomLossConfig(NamedConfig):
    """A loss other than `policy`; the keys next to `name` are the fields of its class."""

    name: str
    """Path of the class: `package.module:Class` or `file.py:Class`."""
