"""Memory and disk that the models of a run need, estimated from the config before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rl_core.devices import Device
from rl_core.facts.model_size import RankMemory, size_of_fields, size_of_name
from rl_launch.backends import ModelBackend
from rl_launch.model_files.model_facts import hf_fields
from rl_launch.placement.topology import Topology
from rl_launch.run_config.plan import RunPlan

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


def models_of(plan: RunPlan, device: Device) -> Iterator[ModelNeeds]:
    """Yield the needs of each model of a run.

    Args:
        plan: Plan of the run.
        device: Device that it runs on.
    """
    cluster = plan.config.cluster
    topology = plan.backends.topology(cluster.num_nodes, device.ranks_per_node(cluster), device)
    for role, model in plan.backends.models.items():
        yield _needs(role, model, topology)


def checkpoints_of(plan: RunPlan) -> int | None:
    """Return the maximum number of checkpoints that exist at a time, the one being written included; None if all are
    kept, 0 if none is saved."""
    saves = plan.config.checkpointing
    if not saves.enabled:
        return 0
    # the newest one is kept in addition if the others are the best by a metric
    return None if saves.keep_top_k is None else saves.keep_top_k + bool(saves.metric_name) + 1


def _needs(role: str, model: ModelBackend, topology: Topology) -> ModelNeeds:
    needs = ModelNeeds(role, model.section, model.config.model_name, ranks=topology.devices(role).count)
    source, size = "config.json", size_of_fields(hf_fields(model.config))
    if size is None and not model.config.hf_config_overrides:
        source, size = "its name", size_of_name(needs.name)
    if size is None or model.plugin.memory is None:
        return needs
    memory = model.plugin.memory(model.config, model.backend, size, needs.ranks, trains=model.spec.trains)
    each = _MERGED_BYTES if model.config.lora_cfg.enabled else _CHECKPOINT_BYTES
    return replace(
        needs,
        basis=f"{size.count / 10**9:.1f}B parameters by {source}",
        device_bytes=memory.device,
        host_bytes=_on_host(role, model, memory, topology),
        checkpoint_bytes=size.count * each if model.spec.trains else 0,
    )


def _on_host(role: str, model: ModelBackend, memory: RankMemory, topology: Topology) -> float:
    own, device = topology.devices(role), topology.device
    waits = memory.kept if topology.takes_turns(role) else 0
    held = memory.host + (memory.weights if model.spec.keeps_reference else 0)
    if device.runs_on_gpus:
        return own.ranks * (held + waits)
    return own.ranks * (topology.num_nodes if device.is_logical else 1) * (held + memory.device)
