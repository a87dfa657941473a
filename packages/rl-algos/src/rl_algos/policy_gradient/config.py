"""The config of the loss: its sections are the parts of the loss, and keys of version 0.1.0 are read under their names
of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from rl_algos.losses.importance import ImportanceCorrection
from rl_algos.losses.policy import RatioDenominator
from rl_algos.losses.surrogates import SURROGATES, Clip, Surrogate
from rl_algos.losses.terms import Aggregation, Demonstrations, EntropyBonus, Filters, KLPenalty, StalenessDecay
from rl_algos.rollouts.config import RolloutRoot
from rl_core.config import NamedConfig, Rename, chosen, moved

_SWITCHES = {"sequence_level_importance_ratios": "gspo", "use_cispo": "cispo", "disable_ppo_ratio": "reinforce"}
"""Keys that chose a surrogate if they were true; only one of them could be true."""


def _named(section: str) -> Rename:
    """Return the rename of a key with a name or null, or with a mapping whose `name` could be null."""

    def values(value: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
        settings = value if isinstance(value, Mapping) else {"name": value}
        return {f"{section}.{key}": each for key, each in settings.items() if (key, each) != ("name", None)}

    return Rename(section, values)


def _clip(key: str) -> Rename:
    """Return the rename of a key of the clip range, which had no effect with surrogates that do not clip."""

    def values(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
        return {f"surrogate.{key}": value} if key in SURROGATES[_surrogate(section)].model_fields else {}

    return Rename(f"surrogate.{key}", values)


def _surrogate(section: Mapping[str, Any]) -> str:
    named = _named("surrogate").values(section.get("surrogate"), {}).get("surrogate.name")
    switched = [name for key, name in _SWITCHES.items() if section.get(key)]
    return next((str(each) for each in (named, *switched) if each in SURROGATES), "clip")


def _of_tokens(is_by_token: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
    # The key `aggregation` takes precedence.
    if section.get("aggregation"):
        return {}
    return {"aggregation.name": "token-mean" if is_by_token else "sequence-mean"}


def _importance(key: str, *, unless: Any = ...) -> Rename:
    """Return the rename of a key of the importance correction, which had no effect without it."""

    def values(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
        is_on = section.get("use_importance_sampling_correction", True)
        return {f"importance.{key}": value} if is_on and value != unless else {}

    return Rename(f"importance.{key}", values)


def _rejection(value: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
    has_bound = isinstance(value, Mapping) and any(value.get(bound) is not None for bound in ("low", "high"))
    return _importance("rejection").values(dict(value), section) if has_bound else {}


RENAMED: Mapping[str, Rename] = {
    "surrogate": _named("surrogate"),
    **{key: chosen("surrogate.name", name) for key, name in _SWITCHES.items()},
    "ratio_clip_min": _clip("clip_low"),
    "ratio_clip_max": _clip("clip_high"),
    "ratio_clip_c": _clip("dual_clip"),
    "aggregation": _named("aggregation"),
    "token_level_loss": Rename("aggregation: token-mean if true, sequence-mean if false", _of_tokens),
    "aggregation_divisor": moved("aggregation.divisor", unless=None),
    "reference_policy_kl_penalty": moved("kl.weight"),
    "reference_policy_kl_type": moved("kl.estimator"),
    "reference_policy_kl_unbiased": moved("kl.unbiased"),
    "use_on_policy_kl_approximation": moved("kl.from_generation"),
    "use_kl_in_reward": moved("kl.in_reward"),
    "adaptive_kl": Rename(
        "kl.target and kl.horizon", lambda value, _: {f"kl.{key}": each for key, each in (value or {}).items()}
    ),
    "kl_input_clamp_value": moved("kl.input_clamp"),
    "kl_output_clamp_value": moved("kl.output_clamp"),
    "use_importance_sampling_correction": Rename(
        "importance: a section if true, null if false", lambda is_on, _: {"importance": {} if is_on else None}
    ),
    "importance_sampling_level": _importance("level", unless=None),
    "importance_sampling_batch_normalize": _importance("batch_normalize"),
    "importance_sampling_rejection": Rename("importance.rejection", _rejection),
    "truncated_importance_sampling_type": _importance("truncation"),
    "truncated_importance_sampling_ratio": _importance("high", unless=None),
    "truncated_importance_sampling_ratio_min": _importance("low", unless=None),
    "staleness_decay": moved("staleness.decay", unless=1.0),
    "off_policy_sequence_mask_threshold": moved("filters.off_policy_threshold"),
    "top_entropy_share": moved("filters.top_entropy_share"),
}
"""Renames of all keys; a key that chooses a part comes before the settings of that part."""


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
    observation_nll_weight: float = Field(default=0.0, ge=0)
    """Weight of the mean negative log-likelihood of the tokens between two turns of a rollout, such as the results of
    tools, which the policy so learns to predict (ECHO)."""
    demonstrations: Demonstrations | None = None
    """How the demonstrations of a step are learned: `nll` or `shaped`, or a name and its settings. Required if the
    algorithm has `demonstrations`."""


class CustomLossConfig(NamedConfig):
    """A loss other than `policy`; the keys next to `name` are the fields of its class."""

    name: str
    """Path of the class: `package.module:Class` or `file.py:Class`."""


class ObjectiveRoot(RolloutRoot, Protocol):
    """The resolved config of a run whose policy minimises `loss_fn`."""

    loss_fn: LossConfig | CustomLossConfig
    """Settings of the loss."""
