"""Which environment each worker of a run needs."""

from __future__ import annotations

from collections.abc import Iterable

from rl_core.registry import ENVIRONMENTS, plugin
from rl_launch.root import Backends
from rl_launch.worker_envs.spec import ROLLOUT_WORKER, TRAINER, WorkerEnvSpec, worker_env


def role_specs(
    backends: Backends, environments: Iterable[str], device: str, *, trains: bool = True
) -> dict[str, WorkerEnvSpec]:
    """Specs of a run's workers by role: `policy`, `generation`, and `env.<name>` for each environment.

    Args:
        backends: the policy's and the generator's.
        environments: names of those that score its prompts.
        device: `cpu` or `cuda`.
        trains: whether there is a policy.
    """
    specs: dict[str, WorkerEnvSpec] = {}
    if trains:
        specs["policy"] = worker_env(backends.policy.plugin.requirement, device, also=(TRAINER,))
    if backends.generation is not None:
        specs["generation"] = worker_env(backends.generation.plugin.requirement, device, also=(ROLLOUT_WORKER,))
    for name in sorted(environments):
        specs[f"env.{name}"] = worker_env(plugin(ENVIRONMENTS, name).requirement, device)
    return specs
