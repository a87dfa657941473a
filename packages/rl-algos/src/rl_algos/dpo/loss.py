"""The loss that `dpo.loss` names."""

from __future__ import annotations

from rl_algos.dpo.config import DPOConfig, PreferenceLossConfig
from rl_algos.losses.preference import PAIR_TERMS, KTOLoss, PairTerm, PreferenceLoss
from rl_core.config import Config, did_you_mean, section_of, settings_of

KTO = "kto"

LOSSES = (*PAIR_TERMS, KTO)
"""Names of all losses."""


def loss_section(name: str | None) -> type[Config]:
    """The type of `dpo.loss`: the name of a loss and its settings.

    Raises:
        ValueError: if there is no such loss.
    """
    if name is None:
        name = PreferenceLossConfig().name
    if name == KTO:
        return section_of(KTOLoss, PreferenceLossConfig, derived=("beta", "implementation"))
    if name not in PAIR_TERMS:
        raise ValueError(f"got {name!r}{did_you_mean(name, LOSSES)}; allowed: {', '.join(LOSSES)}")
    kind = PAIR_TERMS[name]
    # the weight of the KL divergence has a key of its own
    return section_of(kind, PreferenceLossConfig, derived=("beta",) if kind.uses_reference else ())


def loss_of(dpo: DPOConfig) -> PreferenceLoss | KTOLoss:
    """The loss of a run.

    Raises:
        ValueError: if a setting is out of its bounds.
    """
    if dpo.loss.name == KTO:
        return KTOLoss(beta=dpo.reference_policy_kl_penalty, **settings_of(dpo.loss))
    term = term_of(dpo)
    averages = dpo.preference_average_log_probs or term.averages
    return PreferenceLoss(
        term,
        weight=term.weight if dpo.preference_loss_weight is None else dpo.preference_loss_weight,
        average_logprobs=averages,
        sft_weight=term.sft_weight if dpo.sft_loss_weight is None else dpo.sft_loss_weight,
        sft_average_logprobs=averages if dpo.sft_average_log_probs is None else dpo.sft_average_log_probs,
    )


def term_of(dpo: DPOConfig) -> PairTerm:
    """The term of a pair, with its settings."""
    kind = PAIR_TERMS[dpo.loss.name]
    beta = {"beta": dpo.reference_policy_kl_penalty} if kind.uses_reference else {}
    return kind(**beta, **settings_of(dpo.loss))


def uses_reference(dpo: DPOConfig) -> bool:
    """Whether the loss compares with the reference policy."""
    return dpo.loss.name == KTO or PAIR_TERMS[dpo.loss.name].uses_reference
