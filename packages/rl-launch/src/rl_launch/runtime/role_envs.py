"""The environment that each worker of a run needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.devices import Device
from rl_core.environments.instance import EnvironmentInstance
from rl_core.model_config import ModelConfig
from rl_core.plugins import Requirement
from rl_launch.backends import Backend, Backends
from rl_launch.worker_envs.spec import ROLLOUT_WORKER, WorkerEnvSpec, worker_env

IMAGES = Requirement("rl-core", {"cpu": ("vision",), "cuda": ("vision",)}, ("PIL",))
"""Images of conversations, for processes that read or make them (`rl_core.images`)."""


def role_specs(
    backends: Backends, environments: Iterable[EnvironmentInstance], device: Device
) -> dict[str, WorkerEnvSpec]:
    """Specs of a run's workers by role: each model's, `generation`, and `env.<name>` for each environment.

    Args:
        backends: Backends of the models and of generation.
        environments: Those that score its prompts.
        device: Decides which extras bring their engines.
    """
    specs = {
        role: _engine_env(model, device, [*backends.requirements, *_for_images(model, model.config)])
        for role, model in backends.models.items()
    }
    if backends.generation is not None:
        # rollout programs compute no losses, so the extras that losses need are left out
        programs = [Requirement(each.distribution) for each in backends.requirements]
        engine = backends.generation
        sent = [ROLLOUT_WORKER, *programs, *_for_images(engine, engine.model)]
        specs["generation"] = _engine_env(engine, device, sent)
    stored = [IMAGES] if any(model.config.vision.enabled for model in backends.models.values()) else []
    for instance in sorted(environments, key=lambda each: each.name):
        specs[environment_role(instance.name)] = worker_env(instance.requirement, device.extras, also=stored)
    return specs


def environment_role(name: str) -> str:
    """Role of an environment's processes."""
    return f"env.{name}"


def _engine_env(chosen: Backend[Any], device: Device, sent: Iterable[Requirement]) -> WorkerEnvSpec:
    """The environment of a backend with its settings, and of the code that is sent to it."""
    return worker_env(chosen.plugin.requirement, device.extras, also=(*chosen.plugin.further(chosen.backend), *sent))


def _for_images(chosen: Backend[Any], model: ModelConfig) -> list[Requirement]:
    """What the environment of a backend needs for the images of its model; nothing without."""
    own = chosen.plugin.images
    return [own, IMAGES] if model.vision.enabled and own is not None else []
