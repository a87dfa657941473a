"""Needs of a recipe, read from its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.config import Problem, RawConfig
from rl_core.devices import CPU, CUDA, Device, device_named
from rl_core.environments.instance import EnvironmentInstance, instance_of
from rl_launch.cluster.device import AUTO
from rl_launch.run_config.inputs import input_problems
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.role_envs import role_specs
from rl_launch.worker_envs import Mode, WorkerEnvSpec


@dataclass(frozen=True)
class Needs:
    """Needs of a recipe.

    Args:
        recipe: Its name.
        device: What it runs on.
        num_nodes: Machines.
        ranks_per_node: GPUs of each, or ranks on the CPU.
        worker_envs: `cluster.worker_envs`.
        workers: Environments of its workers by role.
        runs: Folder of its runs.
        unreadable: Problems of the models, files, folders and names that it reads.
        environments: Environments that score its completions, as far as the config names them.
    """

    recipe: str
    device: Device
    num_nodes: int
    ranks_per_node: int
    worker_envs: Mode
    workers: Mapping[str, WorkerEnvSpec]
    runs: Path
    unreadable: tuple[Problem, ...] = ()
    environments: tuple[EnvironmentInstance, ...] = ()


def needs_of(recipe: str, overrides: Sequence[str], *, num_gpus: int) -> Needs:
    """Return the needs of a recipe on a machine with this many GPUs.

    Args:
        recipe: Its name, a YAML file, or a run directory.
        overrides: `key=value`.
        num_gpus: Decides the device if `cluster.device` is `auto`; asking another cluster would start Ray.

    Raises:
        ConfigError: If the config is wrong.
    """
    plan = read_plan(recipe, overrides)
    config = plan.config
    cluster = config.cluster
    device = device_named(cluster.device) if cluster.device != AUTO else CUDA if num_gpus else CPU
    environments = [instance_of(config.env, name) for name in dict.fromkeys(_environments(plan.resolved.raw))]
    return Needs(
        recipe=Path(recipe).stem,
        device=device,
        num_nodes=cluster.num_nodes,
        ranks_per_node=device.ranks_per_node(cluster),
        worker_envs=cluster.worker_envs,
        workers=role_specs(plan.backends, environments, device),
        runs=Path(config.run_dir).expanduser().parent if config.run_dir else Path("runs"),
        unreadable=tuple(input_problems(plan)),
        environments=tuple(environments),
    )


def _environments(raw: RawConfig) -> Iterator[str]:
    """Environments that the config names; one that rows of a dataset name is known once the data is read."""
    yield from raw.select("env") or {}
    data = raw.select("data") or {}
    for section in data.values():
        for dataset in section if isinstance(section, list) else [section]:
            if isinstance(dataset, Mapping) and dataset.get("env_name"):
                yield dataset["env_name"]
