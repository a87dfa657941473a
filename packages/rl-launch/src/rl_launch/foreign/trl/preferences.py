"""The losses of TRL's DPOTrainer, KTOTrainer, CPOTrainer and ORPOTrainer."""

from __future__ import annotations

from typing import Any

from rl_launch.foreign.translation import Translation

_SFT = "sft"
_WITHOUT_REFERENCE = ("cpo", "simpo", "orpo")
_NAMES = {"gamma": "simpo_gamma", "tau": "discopop_tau"}
_ALONE = (*_WITHOUT_REFERENCE, "kto", "apo_zero_unpaired", "aot_unpaired")
"""Losses that cannot be added to another, or have another added to them."""


def translate_preferences(config: Translation) -> None:
    """Answer the fields of DPOConfig, KTOConfig, CPOConfig and ORPOConfig."""
    kinds = _kinds(config)
    pairs = [(kind, weight) for kind, weight in kinds if kind != _SFT]
    likelihoods = [weight for kind, weight in kinds if kind == _SFT]
    if reason := _refused(config, [kind for kind, _ in pairs]):
        config.refuse("loss_type", f"the preference loss {' + '.join(str(kind) for kind, _ in kinds)}: {reason}")
    elif likelihoods and config.get("use_weighting"):
        config.refuse("use_weighting", "a likelihood that is weighted by pairs (use_weighting with the loss sft)")
    else:
        _losses(config, pairs, sum(likelihoods) if likelihoods else None)
    for name, feature in config.table.tables["features"].items():
        if config.get(name):
            config.refuse(name, feature)
        config.unneeded(name, "off")
    for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
        config.unneeded(name, "sync_ref_model is off")
    config.unneeded("max_prompt_length", "a prompt may fill policy.max_total_sequence_length; longer rows are left out")
    config.unneeded("max_completion_length", "a response may fill policy.max_total_sequence_length")


def _kinds(config: Translation) -> list[tuple[str, float]]:
    """Return the losses of the file, with their weights."""
    given = config.get("loss_type", "sigmoid")
    kinds = given if isinstance(given, list) else [given]
    weights = config.get("loss_weights") or [1.0] * len(kinds)
    if config.get("reference_free"):
        if kinds == ["sigmoid"] and not config.get("label_smoothing"):
            # This is the term of CPO without a reference and without a likelihood.
            kinds = ["cpo"]
            config.values.setdefault("cpo_alpha", 0.0)
        else:
            config.refuse("reference_free", f"the loss {kinds[0]} without a reference (reference_free)")
        return [(kind, 1.0) for kind in kinds]
    config.unneeded("reference_free", "off")
    return list(zip(kinds, weights, strict=False))


def _refused(config: Translation, pairs: list[str]) -> str:
    """Return why losses of pairs cannot be converted; empty if they can."""
    losses = config.table.tables["preferences"]
    if not pairs:
        return "a loss of pairs is needed too; sft is dpo.sft_loss_weight"
    if unknown := next((kind for kind in pairs if kind not in losses), None):
        return f"{unknown} is not offered; allowed: {', '.join(losses)}"
    if len(pairs) > 1 and (alone := next((kind for kind in pairs if kind in _ALONE), None)):
        return f"{alone} cannot be mixed with other losses of pairs"
    added = [losses[kind]["name"] for kind in pairs[1:]]
    if twice := next((name for name in added if added.count(name) > 1), None):
        return f"{twice} is added twice"
    return ""


def _losses(config: Translation, pairs: list[tuple[str, float]], sft: float | None) -> None:
    (kind, weight), *added = pairs
    smoothing = config.get("label_smoothing", 0.0)
    losses = config.table.tables["preferences"]
    if smoothing and not any(losses[each].get("smooths") for each, _ in pairs):
        config.refuse("label_smoothing", f"label smoothing in the loss {kind}")
    section = {"name": losses[kind]["name"], **_settings(config, kind)}
    if smoothing and kind == "sigmoid" and not added:
        section["label_smoothing"] = smoothing
        config.notes.append(
            "dpo.loss.label_smoothing: TRL smooths this loss in its releases before 1.0 only. Remove it for later ones"
        )
    config.put("dpo.loss", section)
    if losses[kind].get("averages"):
        config.put("dpo.preference_average_log_probs", True)
    for each, of_added in added:
        own = {"weight": of_added, **_settings(config, each)}
        averages = {"average_log_probs": True} if losses[each].get("averages") else {}
        config.put(f"dpo.added_losses.{losses[each]['name']}", {**own, **averages})
    if kind not in _WITHOUT_REFERENCE:
        config.compute("beta", "dpo.reference_policy_kl_penalty", config.get("beta", 0.1))
    if weight != 1:
        config.put("dpo.preference_loss_weight", weight)
    _likelihood(config, kind, sft)
    if config.get("f_divergence_type") == "alpha_divergence":
        config.compute("f_alpha_divergence_coef", "dpo.f_divergence_alpha", config.get("f_alpha_divergence_coef", 0.5))
    for key in ("desirable_weight", "undesirable_weight", "discopop_tau", "f_alpha_divergence_coef", "simpo_gamma"):
        config.unneeded(key, f"the loss is {kind}")


def _settings(config: Translation, kind: str) -> dict[str, Any]:
    """Return the settings of a loss of pairs, and answer their fields."""
    loss = config.table.tables["preferences"][kind]
    settings = loss.get("settings", {})
    names = {setting: _NAMES.get(setting, setting) for setting in settings}
    config.follows(names.values(), "dpo.loss")
    found = {setting: config.get(names[setting], default) for setting, default in settings.items()}
    return {**found, **loss.get("fixed", {})}


def _likelihood(config: Translation, kind: str, sft: float | None) -> None:
    """Set the weight of the likelihood of the chosen response, which TRL averages over the tokens of the batch."""
    if kind == "orpo":
        # The paper's lambda, which TRL calls beta, weighs the log odds. Their own scale is 1.
        config.compute("beta", "dpo.preference_loss_weight", config.get("beta", 0.1))
        config.notes.append(
            "dpo.sft_loss_weight: ORPOTrainer learns the prompt too in its likelihood; here only the chosen response"
        )
        return
    if kind in ("cpo", "simpo"):
        sft = config.get("cpo_alpha", 1.0)
    elif sft is None:
        sft = config.get("rpo_alpha")
    if sft is None:
        return
    config.put("dpo.sft_loss_weight", sft)
    if sft:
        config.put("dpo.sft_average_log_probs", True)
        config.notes.append(
            "dpo.sft_average_log_probs: the likelihood is averaged over the tokens of each response; TRL averages over "
            "the tokens of the batch, so that long responses weigh more"
        )
