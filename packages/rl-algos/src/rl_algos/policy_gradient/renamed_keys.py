"""Keys of `loss_fn` in version 0.1.0, and their values today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_algos.losses.surrogates import SURROGATES
from rl_core.config import Rename, chosen, moved

_SWITCHES = {"sequence_level_importance_ratios": "gspo", "use_cispo": "cispo", "disable_ppo_ratio": "reinforce"}
"""Keys that chose a surrogate if they were true, which only one of them could be."""


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
    if section.get("aggregation"):  # which came first
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
"""How each key is read; a key that chooses something comes before the settings of that."""
