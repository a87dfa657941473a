"""The environment that each worker of a run needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.devices import Device
from rl_core.environments.instance import EnvironmentInstance
from rl_core.plugins import Requirement
from rl_launch.backends import Backend, Backends
from rl_launch.worker_envs.spec import ROLLOUT_WORKER, WorkerEnvSpec, worker_env


def role_specs(
    backends: Backends, environments: Iterable[EnvironmentInstance], device: Device
) -> dict[str, WorkerEnvSpec]:
    """Specs of a run's workers by role: each model's, `generation`, and `env.<name>` for each environment.

    Args:
        backends: Backends of the models and of generation.
        environments: Those that score its prompts.
        device: Decides which extras bring their engines.
    """
    specs = {role: _engine_env(model, device, backends.requirements) for role, model in backends.models.items()}
    if backends.generation is not None:
        # rollout programs compute no losses, so the extras that losses need are left out
        programs = [Requirement(each.distribution) for each in backends.requirements]
        specs["generation"] = _engine_env(backends.generation, device, [ROLLOUT_WORKER, *programs])
    for instance in sorted(environments, key=lambda each: each.name):
        specs[environment_role(instance.name)] = worker_env(instance.requirement, device.extras)
    return specs


def environment_role(name: str) -> str:
    """Role of an environment's processes."""
    return f"env.{name}"


def _engine_env(chosen: Backend[Any], device: Device, sent: Iterable[Requirement]) -> WorkerEnvSpec:
    """The environment of a backend with its settings, and of the code that is sent to it."""
    return worker_env(chosen.plugin.requirement, device.extras, also=(*chosen.plugin.further(chosen.backend), *sent))
