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
from rl_core.config import NamedConfig


class LossConfig(NamedConfig):
    """The policy loss of GRPO and its family."""

    renamed: ClassVar[Mapping[str, str]] = RENAMED

    name: Literal["policy"] = "policy"
    """`policy`, or the class of another loss: `package.module:Class` or `file.py:Class`."""
    surrogate: Surrogate = Clip()
    """The policy term of a token: a name, or a name and the settings of that surrogate."""
    aggregation: Aggregation = Aggregation()
    """How the losses of tokens become one number: a name, or a name and a divisor."""
    ratio_denominator: RatioDenominator = "prev"
    """Logprobs that the ratio compares with, around which a surrogate clips: `prev` takes the policy before the step,
    `generation` the logprobs of the engine, whatever weights it had. `prev` with `importance` is the loss of decoupled
    PPO (arXiv:2505.24298); with `generation` the ratio itself corrects for what older weights sampled."""
    force_on_policy_ratio: bool | None = None
    """Take the ratio as 1 with its gradient, and save the pass that computes `prev_logprobs`: with one minibatch a step
    they equal the logprobs of the update itself. Unset, this is done if a step has one minibatch and nothing else needs
    `prev_logprobs`."""
    kl: KLPenalty = KLPenalty()
    """KL divergence to the reference policy, as a term of the loss or a penalty on rewards."""
    importance: ImportanceCorrection | None = None
    """Weigh the policy term by `exp(prev - generation)` logprobs, because the engine sampled from another distribution
    than the trainer computes; `{}` takes the defaults, null turns it off."""
    staleness: StalenessDecay | None = None
    """Weigh the policy term of a token by the age of the weights that sampled it; null weighs all ages alike."""
    filters: Filters = Filters()
    """Tokens and sequences that the policy term leaves out."""
    entropy_bonus: EntropyBonus = EntropyBonus()
    """Bonus for the policy's entropy."""
    positive_example_nll_weight: float = Field(default=0.0, ge=0)
    """Weight of the mean negative log-likelihood of the tokens of rollouts with a reward above 0 (VAPO)."""


class CustomLossConfig(NamedConfig):
    """A loss other than `policy`; the keys next to `name` are the fields of its class."""

    name: str
    """`package.module:Class` or `file.py:Class`."""
