"""The loss that `dpo.loss` selects: one of a pair, KTO, or a class of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_algos.dpo.config import AddedLossConfig, AddedLosses, PreferenceLossConfig, PreferenceObjectiveConfig
from rl_algos.losses.custom import PATH, is_path, loss_class, unknown_name
from rl_algos.losses.preference import PAIR_TERMS, AddedTerm, KTOLoss, PreferenceLoss
from rl_core.config import Config, Problem, ProblemError, assemble, nearest_as_remedy, section_of, settings_of
from rl_core.data.microbatch import PAIR
from rl_core.model import Loss

KTO = "kto"

REF_LOGPROBS = "ref_logprobs"
"""Column of the reference policy's logprobs."""

LOSSES = (*PAIR_TERMS, KTO)
"""Names of all installed losses."""

OF_BOTH = ("loss_mask", REF_LOGPROBS)
"""Columns that every loss may read, in addition to `tokens`."""

OF_PAIRS = (PAIR, "is_chosen", "margin")
"""Further columns of a loss of pairs."""

OF_RESPONSES = ("verdict", "kl")
"""Further columns of a loss of single responses."""


def loss_section(name: str | None) -> type[Config]:
    """Return the type of `dpo.loss`: the name of a loss and its settings.

    Raises:
        ValueError: If there is no such loss, or its class is not a loss.
        ModuleNotFoundError: If its package is not installed.
    """
    if name is None:
        name = PreferenceLossConfig().name
    if is_path(name):
        return section_of(loss_class(name), PreferenceLossConfig, derived=("implementation",))
    if name == KTO:
        return section_of(KTOLoss, PreferenceLossConfig, derived=("beta", "implementation"))
    if name not in PAIR_TERMS:
        raise unknown_name(name, LOSSES, others=PATH)
    kind = PAIR_TERMS[name]
    # The weight of the KL divergence has its own key.
    return section_of(kind, PreferenceLossConfig, derived=("beta",) if kind.uses_reference else ())


def added_section(written: Any) -> type[Config]:
    """Return the type of `dpo.added_losses`, with the settings of each loss that is written there.

    Raises:
        ProblemError: If a name is not a loss that can be added to another.
    """
    if not isinstance(written, Mapping):
        return AddedLosses
    known = [name for name, kind in PAIR_TERMS.items() if kind.uses_reference and kind.sorts != "responses"]
    if wrong := next((name for name in written if name not in known), None):
        because = "cannot be added to another loss" if wrong in LOSSES else "is not a loss"
        remedy = nearest_as_remedy(str(wrong), known)
        raise ProblemError(Problem("added_losses", because, got=wrong, allowed=", ".join(known), remedy=remedy))
    kinds = {name: section_of(PAIR_TERMS[name], AddedLossConfig, derived=("beta",)) for name in written}
    return assemble("AddedLosses", kinds, base=AddedLosses)


def preference_loss_of(dpo: PreferenceObjectiveConfig) -> Loss:
    """Return the loss of a run.

    Raises:
        ValueError: If a setting is out of its bounds.
    """
    if is_path(dpo.loss.name):
        loss: Loss = loss_class(dpo.loss.name)(**settings_of(dpo.loss))
        return loss
    if dpo.loss.name == KTO:
        return KTOLoss(beta=dpo.reference_policy_kl_penalty, **settings_of(dpo.loss))
    kind, beta = PAIR_TERMS[dpo.loss.name], {"beta": dpo.reference_policy_kl_penalty}
    term = kind(**(beta if kind.uses_reference else {}), **settings_of(dpo.loss))
    added = tuple(
        AddedTerm(PAIR_TERMS[name](**beta, **settings_of(own)), own.weight, own.average_log_probs)
        for name, own in dict(dpo.added_losses).items()
    )
    averages = dpo.preference_average_log_probs or term.averages
    return PreferenceLoss(
        term,
        weight=term.weight if dpo.preference_loss_weight is None else dpo.preference_loss_weight,
        average_logprobs=averages,
        sft_weight=term.sft_weight if dpo.sft_loss_weight is None else dpo.sft_loss_weight,
        sft_average_logprobs=averages if dpo.sft_average_log_probs is None else dpo.sft_average_log_probs,
        added=added,
        divergence=dpo.f_divergence,
        alpha=dpo.f_divergence_alpha,
        ld_alpha=dpo.ld_alpha,
        weighs_by_policy=dpo.weigh_by_policy,
    )


def uses_reference(loss: Loss) -> bool:
    """Return whether the loss uses the reference policy; so does KTO's reference point."""
    return REF_LOGPROBS in loss.columns or "kl" in loss.columns


def learns_from_responses(loss: Loss) -> bool:
    """Return whether the loss learns from single responses with a verdict instead of pairs."""
    return any(column in OF_RESPONSES for column in loss.columns)
