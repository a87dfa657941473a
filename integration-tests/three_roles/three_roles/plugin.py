"""The algorithms as rl-launch finds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.requirement import LOSSES
from rl_algos.sft.config import SFTConfig
from rl_core.model import ModelSpec
from rl_core.plugins import AlgorithmPlugin, ModelNeed, Requirement


def models(config: Any) -> dict[str, ModelNeed]:
    """Roles, and sections of other names."""
    return {
        "policy": ModelNeed("policy", ModelSpec(seed=config.sft.seed)),
        "critic": ModelNeed("value", ModelSpec(role="critic", seed=config.sft.seed)),
        "teacher": ModelNeed("teachers.first", ModelSpec(role="teacher", trains=False)),
    }


PLUGIN = AlgorithmPlugin(
    name="three-roles",
    sections={"sft": SFTConfig, "data": DataConfig},
    implementation="three_roles.loop:ThreeRoles",
    generates=False,
    models=models,
    model_sections=("policy", "value", "teachers.first"),
    requirements=(LOSSES, Requirement("three-roles", imports=("three_roles",))),
)

ROLLOUTS = replace(
    PLUGIN, name="three-roles-rollouts", implementation="three_roles.rollouts:ThreeRolesOnRollouts", generates=True
)
