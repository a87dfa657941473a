"""The loss that `loss_fn` describes: the clipped policy loss, or a class of the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_algos.grpo.config import CustomLossConfig, GRPORoot, LossConfig
from rl_algos.losses.policy import ImportanceCorrection, KLPenalty, PolicyLoss
from rl_core.config import Config, section_of, settings_of
from rl_core.model import Loss
from rl_core.plugins import resolve

COLUMNS = ("loss_mask", "advantages", "generation_logprobs", "prev_logprobs", "ref_logprobs")
"""What a loss may read of a batch, beside `tokens`."""

_DERIVED = ("temperature", "implementation")
_MEMBERS = ("columns", "reads", "temperature", "implementation", "totals")


def loss_section(name: str | None) -> type[Config]:
    """The type of `loss_fn`: the name of a loss and its settings.

    Raises:
        ValueError: if there is no such loss, or its class is not a loss.
        ModuleNotFoundError: if its package is not installed.
    """
    if name in (None, LossConfig().name):
        return LossConfig
    return section_of(_loss_class(str(name)), CustomLossConfig, derived=_DERIVED)


def loss_of(config: GRPORoot) -> Loss:
    """The loss of a run."""
    if isinstance(config.loss_fn, LossConfig):
        return policy_loss(config, config.loss_fn)
    kind = _loss_class(config.loss_fn.name)
    fields = {field.name for field in dataclasses.fields(kind)}
    derived: Mapping[str, Any] = {"temperature": config.policy.generation.temperature}
    settings = {**settings_of(config.loss_fn), **{key: derived[key] for key in fields & derived.keys()}}
    loss: Loss = kind(**settings)
    return loss


def columns_of(config: GRPORoot) -> tuple[str, ...]:
    """Columns that the loss reads; none of a loss that cannot be made, which the plugin's checks report."""
    try:
        return tuple(loss_of(config).columns)
    except (ValueError, TypeError):
        return ()


def policy_loss(config: GRPORoot, loss: LossConfig) -> PolicyLoss:
    """The clipped policy loss."""
    kl = KLPenalty(
        weight=loss.reference_policy_kl_penalty,
        estimator=loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
    )
    importance = ImportanceCorrection(
        truncation=loss.truncated_importance_sampling_type,
        low=loss.truncated_importance_sampling_ratio_min,
        high=loss.truncated_importance_sampling_ratio,
    )
    has_one_minibatch = config.policy.train_global_batch_size == config.grpo.rollouts_per_step
    on_policy = has_one_minibatch if loss.force_on_policy_ratio is None else loss.force_on_policy_ratio
    return PolicyLoss(
        clip_low=loss.ratio_clip_min,
        clip_high=loss.ratio_clip_max,
        dual_clip=loss.ratio_clip_c,
        level="token" if loss.token_level_loss else "sequence",
        sequence_ratio=loss.sequence_level_importance_ratios,
        cispo=loss.use_cispo,
        on_policy=on_policy,
        kl=kl if kl.weight > 0 else None,
        importance=importance if loss.use_importance_sampling_correction else None,
        mismatch_threshold=config.grpo.seq_logprob_error_threshold,
        temperature=config.policy.generation.temperature,
    )


def _loss_class(name: str) -> Any:
    if ":" not in name:
        raise ValueError(
            f"got {name!r}; allowed: {LossConfig().name}, or a class of yours as package.module:Class or file.py:Class"
        )
    kind = resolve(name)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{name} is not a dataclass, as a loss is (rl_core.model.Loss)")
    fields = {field.name for field in dataclasses.fields(kind)}
    missing = [member for member in _MEMBERS if member not in fields and not hasattr(kind, member)]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}, which a loss has (rl_core.model.Loss)")
    return kind
