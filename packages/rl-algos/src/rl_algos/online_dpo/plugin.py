"""Online DPO as an algorithm plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_algos.dpo.loss import learns_from_responses, uses_reference
from rl_algos.dpo.plugin import created, loss_sections, objective_problems
from rl_algos.losses.custom import loss_requirements
from rl_algos.online_dpo.config import OnlineDPOConfig, OnlineDPORoot
from rl_algos.rollouts.plugin import rollout_algorithm
from rl_core.config import Config, Problem, assemble
from rl_core.model import ModelSpec
from rl_core.plugins import ModelNeed, TrainingDefaults, WrittenValues


def online_dpo_section(written: Any) -> type[Config]:
    """Return the type of `online_dpo`, with the settings of the losses that are written there."""
    return assemble("OnlineDPO", loss_sections(written), base=OnlineDPOConfig)


def models(config: OnlineDPORoot) -> dict[str, ModelNeed]:
    """Return the policy, which trains, and keeps its reference if the loss compares with it."""
    loss = created(config.online_dpo)
    keeps_reference = loss is not None and uses_reference(loss)
    return {"policy": ModelNeed("policy", ModelSpec(keeps_reference=keeps_reference, seed=config.online_dpo.seed))}


def check(config: OnlineDPORoot) -> Iterator[Problem]:
    """Yield problems of the whole resolved config, after the problems of its rollouts."""
    settings = config.online_dpo
    yield from objective_problems("online_dpo", settings)
    loss = created(settings)
    if loss is not None and learns_from_responses(loss):
        reason = "learns from single responses, but rollouts are compared in pairs"
        yield Problem("online_dpo.loss.name", reason, got=settings.loss.name, remedy="Use a loss of pairs, such as dpo")
    if settings.splits:
        split = "agent" if settings.agent is not None else "rewritten_history"
        yield Problem(f"online_dpo.{split}", "makes rollouts of several segments, but a pair has two rows")


def training_defaults(written: WrittenValues) -> dict[str, TrainingDefaults]:
    """Return the defaults of one update of the policy with all pairs of a step."""
    rows = OnlineDPOConfig.rollouts_written(written)
    return {"policy": TrainingDefaults(lr=5e-7, adapter_lr=5e-6, rows=rows)}


PLUGIN = rollout_algorithm(
    "online_dpo",
    sections={"online_dpo": online_dpo_section},
    implementation="rl_algos.online_dpo.loop:OnlineDPO",
    models=models,
    training_defaults=training_defaults,
    # The loss does not compare with the distribution that was sampled from.
    reads_filtered=True,
    further=lambda config: loss_requirements(config.online_dpo.loss.name),
    checks=(check,),
)
