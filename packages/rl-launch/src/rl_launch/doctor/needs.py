"""Needs of a recipe, read from its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.config import RawConfig
from rl_core.devices import CPU, CUDA, Device, device_named
from rl_core.environments.instance import EnvironmentInstance, instance_of
from rl_launch.cluster.device import AUTO
from rl_launch.doctor.model_needs import ModelNeeds, checkpoints_of, models_of
from rl_launch.run_config.plan import RunPlan
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
        environments: Environments that score its completions, as far as the config names them.
        num_engines: Processes of this machine that generate.
        models: Estimated memory and disk of its models.
        num_checkpoints: Maximum number of checkpoints at a time; None if all are kept, 0 if none is saved.
    """

    recipe: str
    device: Device
    num_nodes: int
    ranks_per_node: int
    worker_envs: Mode
    workers: Mapping[str, WorkerEnvSpec]
    runs: Path
    environments: tuple[EnvironmentInstance, ...] = ()
    num_engines: int = 0
    models: tuple[ModelNeeds, ...] = ()
    num_checkpoints: int | None = 0

    @property
    def num_ranks(self) -> int:
        """Ranks on this machine, which has all nodes of a rehearsal."""
        return self.ranks_per_node * (self.num_nodes if self.device.is_logical else 1)


def needs_of(recipe: str, overrides: Sequence[str], *, num_gpus: int) -> Needs:
    """Return the needs of a recipe on a machine with this many GPUs.

    Args:
        recipe: Its name, a YAML file, or a run directory.
        overrides: `key=value`.
        num_gpus: Decides the device if `cluster.device` is `auto`; asking another cluster would start Ray.

    Raises:
        ConfigError: If the config is wrong.
    """
    return needs_of_plan(read_plan(recipe, overrides), Path(recipe).stem, num_gpus=num_gpus)


def needs_of_plan(plan: RunPlan, name: str, *, num_gpus: int) -> Needs:
    """Return the needs of a planned run.

    Args:
        plan: Plan of the run.
        name: Name of its recipe.
        num_gpus: As of `needs_of`.
    """
    config = plan.config
    cluster = config.cluster
    device = device_named(cluster.device) if cluster.device != AUTO else CUDA if num_gpus else CPU
    environments = [instance_of(config.env, name) for name in dict.fromkeys(_environments(plan.resolved.raw))]
    return Needs(
        recipe=name,
        device=device,
        num_nodes=cluster.num_nodes,
        ranks_per_node=device.ranks_per_node(cluster),
        worker_envs=cluster.worker_envs,
        workers=role_specs(plan.backends, environments, device),
        runs=Path(config.run_dir).expanduser().parent if config.run_dir else Path("runs"),
        environments=tuple(environments),
        num_engines=_engines(plan, device),
        models=tuple(models_of(plan, device)),
        num_checkpoints=checkpoints_of(plan),
    )


def _engines(plan: RunPlan, device: Device) -> int:
    if plan.backends.generation is None:
        return 0
    cluster = plan.config.cluster
    topology = plan.backends.topology(cluster.num_nodes, device.ranks_per_node(cluster), device)
    return topology.num_replicas if device.is_logical else topology.replicas_per_node


def _environments(raw: RawConfig) -> Iterator[str]:
    """Environments that the config names; one that rows of a dataset name is known once the data is read."""
    yield from raw.select("env") or {}
    data = raw.select("data") or {}
    for section in data.values():
        for dataset in section if isinstance(section, list) else [section]:
            if isinstance(dataset, Mapping) and dataset.get("env_name"):
                yield dataset["env_name"]
