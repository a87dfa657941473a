"""Preference optimisation as an algorithm plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_algos.dpo.config import DPOConfig, DPORoot, PreferenceObjectiveConfig
from rl_algos.dpo.loss import (
    KTO,
    OF_BOTH,
    OF_PAIRS,
    OF_RESPONSES,
    added_section,
    learns_from_responses,
    loss_section,
    preference_loss_of,
    uses_reference,
)
from rl_algos.losses.custom import chosen_type, is_path, loss_requirements
from rl_algos.losses.preference import PAIR_TERMS, PreferenceLoss
from rl_algos.preference.config import preference_data_problems
from rl_algos.supervised.config import validation_metrics as metrics_of
from rl_algos.supervised.plugin import supervised_algorithm
from rl_core.config import Config, Problem, assemble, is_changed, settings_of
from rl_core.model import Loss, ModelSpec
from rl_core.plugins import ModelNeed, TrainingDefaults

_OF_PAIRS = ("accuracy", "loss", "margin", "num_pairs", "preference_loss", "reward_chosen", "reward_rejected")
_OF_RESPONSES = ("accuracy", "kl", "loss", "num_responses", "reward_desirable", "reward_undesirable")

OF_REFERENCE = ("cache_reference_logprobs", "reference_sync_period")
"""Keys that some algorithms have for the reference policy."""

_OF_PREFERENCE_LOSS = (
    "preference_loss_weight",
    "preference_average_log_probs",
    "sft_loss_weight",
    "sft_average_log_probs",
    "added_losses",
    "f_divergence",
    "f_divergence_alpha",
    "ld_alpha",
    "weigh_by_policy",
)


def dpo_section(written: Any) -> type[Config]:
    """Return the type of `dpo`, with the settings of the losses that are written there."""
    return assemble("DPO", loss_sections(written), base=DPOConfig)


def loss_sections(written: Any) -> dict[str, type[Config]]:
    """Return the types of `loss` and `added_losses` in a section, with the settings that are written there."""
    loss, added = (written.get(key) if isinstance(written, Mapping) else None for key in ("loss", "added_losses"))
    return {"loss": chosen_type("loss.name", loss, loss_section), "added_losses": added_section(added)}


def check(config: DPORoot) -> Iterator[Problem]:
    """Yield problems of the whole resolved config, in addition to problems of every algorithm with given rows."""
    yield from preference_data_problems("dpo", config.data)
    yield from objective_problems("dpo", config.dpo)
    loss = created(config.dpo)
    if loss is None or not learns_from_responses(loss):
        return
    name, rows = config.dpo.loss.name, config.policy.train_global_batch_size
    if config.dpo.pairing == "all":
        yield Problem.unused("dpo.pairing", f"with the loss {name}, which learns from single responses")
    if "kl" in loss.columns and rows < 2:
        reason = f"must be at least 2, because {name} estimates its reference point from responses to other prompts"
        yield Problem("policy.train_global_batch_size", f"{reason} of the batch", got=rows)


def created(settings: PreferenceObjectiveConfig) -> Loss | None:
    """Return the loss of a section; None if it cannot be created, which the checks report."""
    try:
        return preference_loss_of(settings)
    except (ValueError, TypeError):
        return None


def objective_problems(key: str, settings: PreferenceObjectiveConfig) -> Iterator[Problem]:
    """Yield problems of the loss of a section and its options.

    Args:
        key: Key of the section.
        settings: The section.
    """
    name = settings.loss.name
    for each, own in dict(settings.added_losses).items():
        try:
            PAIR_TERMS[each](**settings_of(own))
        except ValueError as error:
            yield Problem(f"{key}.added_losses.{each}", f"could not be created: {error}")
            return
    try:
        loss = preference_loss_of(settings)
        columns, temperature = tuple(loss.columns), loss.temperature
    except (ValueError, TypeError) as error:
        yield Problem(f"{key}.loss", f"could not create {name}: {error}")
        return
    if is_path(name):
        yield from _custom(key, name, columns, temperature)
    yield from _unused(key, settings, loss)


def _custom(key: str, name: str, columns: tuple[str, ...], temperature: float) -> Iterator[Problem]:
    """Yield problems of a loss of the user's that reads columns which a batch does not have."""
    of_pairs, of_responses = ([column for column in columns if column in known] for known in (OF_PAIRS, OF_RESPONSES))
    unknown = [column for column in columns if column not in (*OF_BOTH, *OF_PAIRS, *OF_RESPONSES)]
    if unknown:
        known = f"{', '.join(OF_BOTH)}, for pairs {', '.join(OF_PAIRS)}, for single responses {', '.join(OF_RESPONSES)}"
        reason = f"needs {', '.join(unknown)}, which a batch does not have"
        yield Problem(f"{key}.loss.name", reason, got=name, allowed=f"columns {known}")
    if of_pairs and of_responses:
        needed = f"needs {', '.join(of_pairs)} of pairs and {', '.join(of_responses)} of single responses"
        yield Problem(f"{key}.loss.name", f"{needed}, but a batch has one kind of rows", got=name)
    if temperature != 1:
        reason = f"has temperature {temperature}, but preferences are learned at temperature 1"
        yield Problem(f"{key}.loss.name", reason, got=name)


def _unused(section: str, dpo: PreferenceObjectiveConfig, loss: Loss) -> Iterator[Problem]:
    """Yield keys that the loss does not read, and weights that leave nothing to learn."""
    name = dpo.loss.name
    for key in ("reference_policy_kl_penalty", *OF_REFERENCE):
        if key in type(dpo).model_fields and not uses_reference(loss) and is_changed(dpo, key):
            yield Problem.unused(f"{section}.{key}", f"with the loss {name}, which does not use a reference policy")
    if uses_reference(loss) and is_path(name) and is_changed(dpo, "reference_policy_kl_penalty"):
        remedy = "Remove this key, and add a field for it to the class"
        yield Problem.unused(f"{section}.reference_policy_kl_penalty", f"with the loss {name}", remedy=remedy)
    for key in _OF_PREFERENCE_LOSS:
        if name not in PAIR_TERMS and is_changed(dpo, key):
            because = ", which has one term of summed logprobs" if name == KTO else ""
            yield Problem.unused(f"{section}.{key}", f"with the loss {name}{because}")
    if name not in PAIR_TERMS or not isinstance(loss, PreferenceLoss):
        return
    yield from _of_terms(section, dpo, loss)
    if not (loss.weight or loss.sft_weight or loss.added):
        reason = f"must not be 0 if {section}.sft_loss_weight is 0 too, because nothing would be learned"
        got, remedy = dpo.preference_loss_weight, "Increase one of the two"
        yield Problem(f"{section}.preference_loss_weight", reason, got=got, remedy=remedy)
    if dpo.sft_average_log_probs is not None and not loss.sft_weight:
        remedy = f"Remove this key, or set {section}.sft_loss_weight above 0"
        yield Problem.unused(f"{section}.sft_average_log_probs", f"with {section}.sft_loss_weight=0", remedy=remedy)


def _of_terms(section: str, dpo: PreferenceObjectiveConfig, loss: PreferenceLoss) -> Iterator[Problem]:
    """Yield options that the terms of a loss of pairs do not take."""
    names = [dpo.loss.name, *(added.term.name for added in loss.added)]
    kinds = [PAIR_TERMS[name] for name in names]
    without = next((kind.name for kind in kinds if not kind.uses_reference), None)
    sorting = next((kind.name for kind in kinds if kind.sorts is not None), None)
    if without is not None:
        for key in ("added_losses", "f_divergence", "ld_alpha"):
            if is_changed(dpo, key):
                reason = f"needs a reference policy, but the loss {without} has none"
                yield Problem(
                    f"{section}.{key}", reason, remedy=f"Remove this key, or set {section}.loss to one of {_allowed()}"
                )
        return
    other = next((kind.name for kind in kinds if not kind.is_of_difference), None)
    if dpo.f_divergence != "reverse_kl" and other is not None:
        reason = f"needs losses that depend on the difference of both responses only, which {other} does not"
        allowed = "reverse_kl, or the losses " + ", ".join(k.name for k in PAIR_TERMS.values() if k.is_of_difference)
        yield Problem(f"{section}.f_divergence", reason, got=dpo.f_divergence, allowed=allowed)
    if dpo.f_divergence != "alpha_divergence" and is_changed(dpo, "f_divergence_alpha"):
        yield Problem.unused(f"{section}.f_divergence_alpha", f"with {section}.f_divergence={dpo.f_divergence}")
    if sorting is None:
        return
    if dpo.loss.name == sorting and PAIR_TERMS[sorting].sorts == "responses" and loss.added:
        reason = f"cannot be combined with {sorting}, which forms other pairs"
        yield Problem(
            f"{section}.added_losses", reason, got=names[1:], remedy=f"Remove this key, or set {section}.loss=aot"
        )
    if dpo.weigh_by_policy:
        reason = f"weighs single pairs, but {sorting} compares the sorted margins of a batch"
        yield Problem(
            f"{section}.weigh_by_policy", reason, got=True, remedy=f"Remove this key, or use another {section}.loss"
        )
    averaged = {
        f"{section}.preference_average_log_probs": dpo.loss.name == sorting and dpo.preference_average_log_probs
    }
    averaged |= {
        f"{section}.added_losses.{added.term.name}.average_log_probs": added.average_logprobs
        for added in loss.added
        if added.term.name == sorting
    }
    for key, is_set in averaged.items():
        if is_set:
            yield Problem(
                key, f"is not defined for {sorting}, which sorts sums of logprobs", got=True, remedy="Remove it"
            )


def _allowed() -> str:
    return ", ".join(kind.name for kind in PAIR_TERMS.values() if kind.uses_reference)


def validation_metrics(config: DPORoot) -> list[str] | None:
    """Return the metrics that a validation records, none if there is no validation; None for a loss of the user's,
    which has its own metrics."""
    name = config.dpo.loss.name
    if is_path(name):
        return None
    of_pairs = (*_OF_PAIRS, *(f"preference_loss_{each}" for each in dict(config.dpo.added_losses)))
    return metrics_of(config.dpo, config.data, _OF_RESPONSES if name == KTO else of_pairs)


def models(config: DPORoot) -> dict[str, ModelNeed]:
    """Return the policy, which trains, and keeps its reference if the loss compares with it."""
    loss = created(config.dpo)
    keeps_reference = loss is not None and uses_reference(loss)
    return {"policy": ModelNeed("policy", ModelSpec(keeps_reference=keeps_reference, seed=config.dpo.seed))}


PLUGIN = supervised_algorithm(
    "dpo",
    sections={"dpo": dpo_section},
    implementation="rl_algos.dpo.algorithm:DPO",
    models=models,
    validation_metrics=validation_metrics,
    training_defaults=TrainingDefaults(lr=5e-7, adapter_lr=5e-6, rows=128),
    further=lambda config: loss_requirements(config.dpo.loss.name),
    checks=(check,),
    scores_tasks=True,
)
