"""The loss that `dpo.loss` selects: one of a pair, KTO, or a class of the user's."""

from __future__ import annotations

from rl_algos.dpo.config import DPOConfig, PreferenceLossConfig
from rl_algos.losses.custom import PATH, is_path, loss_class, unknown_name
from rl_algos.losses.preference import PAIR_TERMS, KTOLoss, PreferenceLoss
from rl_core.config import Config, section_of, settings_of
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


def loss_of(dpo: DPOConfig) -> Loss:
    """Return the loss of a run.

    Raises:
        ValueError: If a setting is out of its bounds.
    """
    if is_path(dpo.loss.name):
        loss: Loss = loss_class(dpo.loss.name)(**settings_of(dpo.loss))
        return loss
    if dpo.loss.name == KTO:
        return KTOLoss(beta=dpo.reference_policy_kl_penalty, **settings_of(dpo.loss))
    kind = PAIR_TERMS[dpo.loss.name]
    beta = {"beta": dpo.reference_policy_kl_penalty} if kind.uses_reference else {}
    term = kind(**beta, **settings_of(dpo.loss))
    averages = dpo.preference_average_log_probs or term.averages
    return PreferenceLoss(
        term,
        weight=term.weight if dpo.preference_loss_weight is None else dpo.preference_loss_weight,
        average_logprobs=averages,
        sft_weight=term.sft_weight if dpo.sft_loss_weight is None else dpo.sft_loss_weight,
        sft_average_logprobs=averages if dpo.sft_average_log_probs is None else dpo.sft_average_log_probs,
    )


def uses_reference(loss: Loss) -> bool:
    """Return whether the loss uses the reference policy; so does KTO's reference point."""
    return REF_LOGPROBS in loss.columns or "kl" in loss.columns


def learns_from_responses(loss: Loss) -> bool:
    """Return whether the loss learns from single responses with a verdict instead of pairs."""
    return any(column in OF_RESPONSES for column in loss.columns)
