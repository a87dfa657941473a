"""The losses of TRL's DPOTrainer, KTOTrainer, CPOTrainer and ORPOTrainer."""

from __future__ import annotations

from rl_launch.foreign.translation import Translation

_SFT = "sft"
_WITHOUT_REFERENCE = ("cpo", "simpo", "orpo")


def translate_preferences(config: Translation) -> None:
    """Answer the fields of DPOConfig, KTOConfig, CPOConfig and ORPOConfig."""
    kinds, weights = _kinds(config)
    losses, reasons = config.table.tables["preferences"], config.table.tables["reasons"]
    pairs = [kind for kind in kinds if kind != _SFT]
    if len(pairs) > 1 or not pairs:
        named = " + ".join(map(str, kinds))
        config.refuse("loss_type", f"the preference loss {named}: one loss of pairs, with or without sft, is offered")
    elif pairs[0] not in losses:
        reason = reasons.get(pairs[0], f"allowed: {', '.join(losses)}")
        config.refuse("loss_type", f"the preference loss {pairs[0]}: {reason}")
    else:
        _loss(config, pairs[0], weights.get(pairs[0], 1.0), weights.get(_SFT))
    for name, feature in config.table.tables["features"].items():
        if config.get(name):
            config.refuse(name, feature)
        config.unneeded(name, "off")
    for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
        config.unneeded(name, "sync_ref_model is off")
    config.unneeded("max_prompt_length", "a prompt may fill policy.max_total_sequence_length; longer rows are left out")
    config.unneeded("max_completion_length", "a response may fill policy.max_total_sequence_length")


def _kinds(config: Translation) -> tuple[list[str], dict[str, float]]:
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
        return kinds, {}
    config.unneeded("reference_free", "off")
    return kinds, dict(zip(kinds, weights, strict=False))


def _loss(config: Translation, kind: str, weight: float, sft: float | None) -> None:
    loss = config.table.tables["preferences"][kind]
    settings = loss.get("settings", {})
    names = {"gamma": "simpo_gamma"}
    section = {setting: config.get(names.get(setting, setting), default) for setting, default in settings.items()}
    section = {"name": loss["name"], **section}
    config.follows([names.get(setting, setting) for setting in settings], "dpo.loss")
    smoothing = config.get("label_smoothing", 0.0)
    if smoothing and not loss.get("smooths"):
        config.refuse("label_smoothing", f"label smoothing in the loss {kind}")
    elif smoothing and kind == "sigmoid":
        section["label_smoothing"] = smoothing
        config.notes.append(
            "dpo.loss.label_smoothing: TRL smooths this loss in its releases before 1.0 only. Remove it for later ones"
        )
    config.put("dpo.loss", section)
    if loss.get("averages"):
        config.put("dpo.preference_average_log_probs", True)
    if kind not in _WITHOUT_REFERENCE:
        config.compute("beta", "dpo.reference_policy_kl_penalty", config.get("beta", 0.1))
    if weight != 1:
        config.put("dpo.preference_loss_weight", weight)
    _likelihood(config, kind, sft)
    for key in ("desirable_weight", "undesirable_weight", "discopop_tau", "f_alpha_divergence_coef", "simpo_gamma"):
        config.unneeded(key, f"the loss is {kind}")


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
