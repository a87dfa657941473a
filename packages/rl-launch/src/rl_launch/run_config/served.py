"""The plan of a recipe whose policy is served to programs that train adapters of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_algos.requirement import LOSSES
from rl_core.algorithm import Algorithm
from rl_core.errors import ConfigError
from rl_core.model import ModelSpec
from rl_core.plugins import AlgorithmPlugin, ModelNeed
from rl_launch.backends import backends_of
from rl_launch.recipes import source_name
from rl_launch.root_config import POLICY
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan


class Served(Algorithm[Any, None, None]):
    """An algorithm that reads no data: programs bring it."""


SERVED = AlgorithmPlugin(
    name="tinker",
    sections={},
    implementation=f"{__name__}:{Served.__name__}",
    generates=True,
    models=lambda config: {POLICY: ModelNeed(POLICY, ModelSpec())},
    requirements=(LOSSES,),
)
"""The algorithm of a recipe that is served: the policy trains, and nothing else of the recipe's own algorithm runs."""

SETTINGS = {
    "policy.lora_cfg.enabled": "true",
    "policy.generation.backend": "vllm",
    "policy.generation.lora_sync": "adapter",
    "policy.max_grad_norm": "null",
}
"""What a recipe needs for clients with adapters, who set the limit of the gradient of each step."""

DEFAULTS = {
    "policy.lora_cfg.max_adapters": "8",
    "policy.lora_cfg.dim": "32",
    "policy.generation.colocated.enabled": "false",
    "policy.generation.colocated.resources.gpus_per_node": "1",
}
"""Values of keys that the user does not write."""

ADAMW = "torch.optim.AdamW"


def served_plan(recipe: str, overrides: Sequence[str] = ()) -> RunPlan:
    """Return the plan of a recipe with what a server of its policy needs.

    Raises:
        ConfigError: If the recipe has problems, does not generate, or has an optimizer that clients cannot set.
    """
    # Keys of adapters are refused where there are none, and a server always has some.
    given = read_plan(recipe, ["policy.lora_cfg.enabled=true", *overrides])
    if given.raw is None or not given.plugin.generates:
        raise ConfigError(
            f"algorithm: {given.plugin.name} does not generate, so its recipes have no engine to sample with. Serve a "
            "recipe that generates, such as grpo-arithmetic"
        )
    added = [f"{key}={value}" for key, value in DEFAULTS.items() if not given.raw.is_written(key)]
    plan = read_plan(recipe, [*overrides, *added, *(f"{key}={value}" for key, value in SETTINGS.items())])
    optimizer = plan.config.policy.optimizer.name
    if optimizer != ADAMW:
        raise ConfigError(
            f"policy.optimizer.name: clients set betas, eps and weight decay of AdamW in each step, but it is "
            f"{optimizer}; set {ADAMW}, or remove this key"
        )
    if plan.config.policy.lora_cfg.max_adapters == 1:
        raise ConfigError("policy.lora_cfg.max_adapters: set the number of adapters that train at a time, at least 2")
    return replace(plan, plugin=SERVED, backends=backends_of(SERVED, plan.config))


def served_folder(plan: RunPlan, recipe: str) -> Path:
    """Return the run directory of a server.

    Args:
        plan: Its plan.
        recipe: Name of its recipe, or a YAML file.
    """
    return Path(plan.config.run_dir or f"runs/{source_name(recipe)}-tinker").expanduser()
