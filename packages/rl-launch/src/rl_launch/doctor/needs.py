"""Needs of a recipe, read from its config: workers, environments, and estimates of memory and disk for its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rl_core import resolve
from rl_core.config import RawConfig, plain
from rl_core.devices import CPU, CUDA, Device, device_named
from rl_core.environments.instance import EnvironmentInstance, instance_of
from rl_core.facts.model_size import ModelSize, RankMemory, size_of_fields, size_of_name, trained_size
from rl_launch.backends import ModelBackend
from rl_launch.cluster.device import AUTO
from rl_launch.model_files.model_facts import hf_fields
from rl_launch.placement.topology import Topology
from rl_launch.planning.accelerators import Accelerator
from rl_launch.planning.plan import Plan, num_checkpoints, plan_run, vision_of
from rl_launch.recipes import source_name
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.role_envs import role_specs
from rl_launch.worker_envs.provision import Mode
from rl_launch.worker_envs.spec import WorkerEnvSpec

_CHECKPOINT_BYTES = 14
"""Bytes of each parameter in a checkpoint: float32 weights, two moments, and the Hugging Face files in bfloat16."""
_MERGED_BYTES = 2
"""Bytes of each parameter in a checkpoint of adapters, whose Hugging Face files are the merged model."""


@dataclass(frozen=True)
class ModelNeeds:
    """Estimated needs of one model.

    Args:
        role: Role of the model.
        section: Dotted key of its config section.
        name: Folder or hub name of the model.
        basis: Number of parameters and where it was read; empty if it is not known.
        ranks: Ranks that share the model.
        device_bytes: Memory of each rank's device, without activations and logits; None if it is not estimated.
        host_bytes: Host memory of each node, or of this machine if the run computes on the CPU.
        checkpoint_bytes: Size of the model in a checkpoint; 0 if it is not saved.
    """

    role: str
    section: str
    name: str
    basis: str = ""
    ranks: int = 1
    device_bytes: float | None = None
    host_bytes: float = 0
    checkpoint_bytes: float = 0


@dataclass(frozen=True)
class Needs:
    """Needs of a recipe.

    Args:
        recipe: Its name.
        device: Device that it runs on.
        num_nodes: Machines.
        ranks_per_node: GPUs of each, or ranks on the CPU.
        worker_envs: `cluster.worker_envs`.
        workers: Environments of its workers by role.
        runs: Folder of its runs.
        environments: Environments that score its completions, as far as the config contains them.
        num_engines: Processes of this machine that generate.
        models: Estimated memory and disk of its models.
        num_checkpoints: Maximum number of checkpoints at a time; None if all are kept, 0 if none is saved.
        server_problems: Asks the servers that generate elsewhere, and returns their problems; None if the run has its
            own engine.
        plan_on: Plans the run on a kind of GPU; None if it runs on the CPU.
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
    server_problems: Callable[[], Sequence[str]] | None = None
    plan_on: Callable[[Accelerator], Plan] | None = None

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
    return needs_of_plan(read_plan(recipe, overrides), source_name(recipe), num_gpus=num_gpus)


def needs_of_plan(plan: RunPlan, name: str, *, num_gpus: int) -> Needs:
    """Return the needs of a planned run.

    Args:
        plan: Plan of the run.
        name: Name of its recipe.
        num_gpus: See `needs_of`.
    """
    config = plan.config
    cluster = config.cluster
    device = device_named(cluster.device) if cluster.device != AUTO else CUDA if num_gpus else CPU
    environments = [instance_of(config.env, name) for name in dict.fromkeys(_environments(plan.resolved.raw))]
    ranks_per_node = device.ranks_per_node(cluster)
    topology = plan.backends.topology(cluster.num_nodes, ranks_per_node, device)
    num_engines = 0
    if plan.backends.generation is not None:
        num_engines = topology.num_replicas * topology.replica_nodes if device.is_logical else topology.engines_per_node
    return Needs(
        recipe=name,
        device=device,
        num_nodes=cluster.num_nodes,
        ranks_per_node=ranks_per_node,
        worker_envs=cluster.worker_envs,
        workers=role_specs(plan.backends, environments, device),
        runs=Path(config.run_dir).expanduser().parent if config.run_dir else Path("runs"),
        environments=tuple(environments),
        num_engines=num_engines,
        models=tuple(_models(plan, topology)),
        num_checkpoints=num_checkpoints(plan),
        server_problems=partial(_server_problems, plan) if topology.num_servers else None,
        plan_on=partial(_planned, plan, name, device) if device.runs_on_gpus else None,
    )


def _planned(plan: RunPlan, name: str, device: Device, accelerator: Accelerator) -> Plan:
    return plan_run(plan, name, accelerator=accelerator, device=device)


def _server_problems(plan: RunPlan) -> list[str]:
    """Ask the servers of a run, from this machine."""
    generation = plan.backends.generation
    assert generation is not None, "only generation has servers"
    found: list[str] = resolve(generation.plugin.preflight)(plain(plan.section(generation.section)))
    return [f"{generation.section}.{problem}" for problem in found]


def _environments(raw: RawConfig) -> Iterator[str]:
    """Yield the environments in the config; the environments in rows of a dataset are known once the data is read."""
    yield from raw.select("env") or {}
    data = raw.select("data") or {}
    for section in data.values():
        for dataset in section if isinstance(section, list) else [section]:
            if isinstance(dataset, Mapping) and dataset.get("env_name"):
                yield dataset["env_name"]


def _models(plan: RunPlan, topology: Topology) -> Iterator[ModelNeeds]:
    for role, model in plan.backends.models.items():
        needs = ModelNeeds(role, model.section, model.config.model_name, ranks=topology.devices(role).count)
        fields = hf_fields(model.config)
        source, size = "config.json", size_of_fields(fields)
        if size is None and not model.config.hf_config_overrides:
            source, size = "its name", size_of_name(needs.name)
        if size is None or model.plugin.memory is None:
            yield needs
            continue
        vision = vision_of(model.config)
        if vision is not None:
            size = replace(size, vision=vision.parameters())
        training = () if vision is None else vision.training(model.config.vision)
        trains_weights = model.spec.trains and not model.config.lora_cfg.enabled
        trained = trained_size(model.config, fields, size, training) if trains_weights else ModelSize(0)
        memory = model.plugin.memory(model.config, model.backend, size, needs.ranks, trained=trained)
        each = _MERGED_BYTES if model.config.lora_cfg.enabled else _CHECKPOINT_BYTES
        basis = f"{size.count / 10**9:.1f}B parameters by {source}"
        saved, on_host = size.count * each if model.spec.trains else 0, _on_host(role, model, memory, topology)
        yield replace(needs, basis=basis, device_bytes=memory.device, host_bytes=on_host, checkpoint_bytes=saved)


def _on_host(role: str, model: ModelBackend, memory: RankMemory, topology: Topology) -> float:
    own, device = topology.devices(role), topology.device
    waits = memory.kept if topology.takes_turns(role) else 0
    held = memory.host + (memory.weights if model.spec.keeps_reference else 0)
    if device.runs_on_gpus:
        return own.ranks * (held + waits)
    return own.ranks * (topology.num_nodes if device.is_logical else 1) * (held + memory.device)
