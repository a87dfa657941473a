"""`rl worker-envs`: the environments of a recipe's workers, built before a run needs them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rl_core.errors import ConfigError
from rl_launch.cluster.local_gpus import local_gpus
from rl_launch.doctor.needs import needs_of
from rl_launch.worker_envs import provision


def build_worker_envs(recipe: str, overrides: Sequence[str], *, roles: Collection[str] = ()) -> dict[str, str]:
    """Find or build the environments of a recipe's workers on this machine, as a run does before it starts.

    Args:
        recipe: A recipe's name, a YAML file, or a run directory.
        overrides: Keys to set. Without GPUs on this machine, `cluster.device=cuda` builds the environments for GPUs.
        roles: Only those of these roles, such as `policy`, `generation` or `env.math`; empty for all.

    Returns:
        The Python interpreter of each role.

    Raises:
        ConfigError: If the config is wrong, or has no such role.
        WorkerEnvironmentError: If an environment cannot be built.
    """
    needs = needs_of(recipe, overrides, num_gpus=local_gpus())
    unknown = sorted(set(roles) - needs.workers.keys())
    if unknown:
        raise ConfigError(f"{recipe} has no role {unknown[0]!r}. Its roles: {', '.join(needs.workers)}")
    wanted = {role: spec for role, spec in needs.workers.items() if not roles or role in roles}
    built = provision(wanted.values(), needs.worker_envs)
    return {role: built[spec] for role, spec in wanted.items()}
