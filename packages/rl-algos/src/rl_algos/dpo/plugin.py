"""Preference optimisation as an algorithm plugin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.dpo.config import DPOConfig, DPORoot
from rl_algos.dpo.loss import KTO, loss_of, loss_section, uses_reference
from rl_algos.losses.preference import KTOLoss
from rl_algos.preference.checks import preference_data_problems
from rl_algos.requirement import LOSSES
from rl_algos.supervised.checks import supervised_problems
from rl_algos.supervised.config import validation_metrics as metrics_of
from rl_core.config import Config, Problem, ProblemError, assemble, is_changed
from rl_core.model import ModelSpec
from rl_core.plugins import AlgorithmPlugin, ModelNeed

_OF_PAIRS = ("accuracy", "loss", "margin", "num_pairs", "preference_loss", "reward_chosen", "reward_rejected")
_OF_RESPONSES = ("accuracy", "kl", "loss", "num_responses", "reward_desirable", "reward_undesirable")


def dpo_section(written: Any) -> type[Config]:
    """The type of `dpo`, with the settings of the loss that is written there."""
    loss = written.get("loss") if isinstance(written, Mapping) else None
    name = loss.get("name") if isinstance(loss, Mapping) else loss
    try:
        # what is not text is refused by the type itself
        kind = loss_section(name if isinstance(name, str) else None)
    except ValueError as error:
        raise ProblemError(Problem("loss.name", str(error))) from None
    return assemble("DPO", {"loss": kind}, base=DPOConfig)


def check(config: DPORoot) -> Iterable[Problem]:
    """Problems of the whole resolved config."""
    yield from supervised_problems("dpo", config.dpo, config.data, config.policy)
    yield from preference_data_problems("dpo", config.data)
    yield from _loss(config)
    yield from _pairs(config)


def _loss(config: DPORoot) -> Iterator[Problem]:
    dpo = config.dpo
    name = dpo.loss.name
    try:
        loss = loss_of(dpo)
    except ValueError as error:
        yield Problem("dpo.loss", f"{name}: {error}")
        return
    if not uses_reference(dpo):
        for key in ("reference_policy_kl_penalty", "cache_reference_logprobs"):
            if is_changed(dpo, key):
                yield Problem(f"dpo.{key}", f"has no effect: {name} has no reference policy; remove this key")
    if isinstance(loss, KTOLoss):
        for key in (
            "preference_loss_weight",
            "preference_average_log_probs",
            "sft_loss_weight",
            "sft_average_log_probs",
        ):
            if is_changed(dpo, key):
                yield Problem(
                    f"dpo.{key}", "has no effect on kto, which has one term of summed logprobs; remove this key"
                )
        return
    if not (loss.weight or loss.sft_weight):
        yield Problem(
            "dpo.preference_loss_weight", "is 0, as is sft_loss_weight, so that nothing is learned; raise one"
        )
    if dpo.sft_average_log_probs is not None and not loss.sft_weight:
        yield Problem(
            "dpo.sft_average_log_probs", "has no effect while sft_loss_weight is 0; set it, or remove this key"
        )


def _pairs(config: DPORoot) -> Iterator[Problem]:
    if config.dpo.loss.name != KTO:
        return
    if config.dpo.pairing == "all":
        yield Problem("dpo.pairing", "has no effect on kto, which takes responses one by one; remove this key")
    if config.policy.train_global_batch_size < 2:
        yield Problem(
            "policy.train_global_batch_size",
            "kto estimates its reference point from responses to other prompts of the batch; set it to 2 at least",
        )


def validation_metrics(config: DPORoot) -> list[str]:
    """Metrics that a validation records; none if there is no validation."""
    return metrics_of(config.dpo, config.data, _OF_RESPONSES if config.dpo.loss.name == KTO else _OF_PAIRS)


def models(config: DPORoot) -> dict[str, ModelNeed]:
    """The policy trains, and keeps its reference if the loss compares with it."""
    spec = ModelSpec(keeps_reference=uses_reference(config.dpo), seed=config.dpo.seed)
    return {"policy": ModelNeed("policy", spec)}


PLUGIN = AlgorithmPlugin(
    name="dpo",
    sections={"dpo": dpo_section, "data": DataConfig},
    load="rl_algos.preference.data:load",
    prepare="rl_algos.dpo.data:prepare",
    run="rl_algos.dpo.loop:run",
    generates=False,
    models=models,
    requirements=(LOSSES,),
    validation_metrics=validation_metrics,
    checks=(check,),
)
