"""Which devices policy and generation get, as pure arithmetic on the config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_core.config import Problem
from rl_core.devices import Device
from rl_core.weights import TransportKind, WeightSyncChoice

GENERATION = "generation"
"""Tenant of shared devices beside the models, and role of its workers in messages."""


@dataclass(frozen=True)
class Topology:
    """Devices of a run.

    Args:
        policy_nodes, policy_ranks: nodes of the policy, and its ranks on each.
        generation_nodes, generation_ranks: of generation; the same devices where colocated.
        replica_ranks: devices of one replica.
        colocated: whether generation takes turns with the policy on its devices.
        device: what they are.
        weight_sync: `policy.generation.weight_sync`.
    """

    policy_nodes: int
    policy_ranks: int
    generation_nodes: int
    generation_ranks: int
    replica_ranks: int
    colocated: bool
    device: Device
    weight_sync: WeightSyncChoice = "auto"

    @property
    def replicas_per_node(self) -> int:
        """Replicas on each node of generation. CPU cores are not divided: one replica uses them all."""
        return self.generation_ranks // self.replica_ranks if self.device.has_gpus else 1

    @property
    def shares_devices(self) -> bool:
        """Whether policy and generation must free device memory for one another."""
        return self.colocated and self.device.has_gpus

    @property
    def transport(self) -> TransportKind:
        """How weights travel: as the config says, or through memory if sender and receivers share it, else by
        collectives.
        """
        if self.weight_sync != "auto":
            return self.weight_sync
        return "ipc" if self.shares_memory else "collective"

    @property
    def shares_memory(self) -> bool:
        """Whether every receiver of weights reaches the memory of a sender: its GPU's, or its node's."""
        one_node = self.policy_nodes == 1 and self.generation_nodes == 1
        return self.colocated and (one_node or self.device.has_gpus)


def plan(*, num_nodes: int, ranks_per_node: int, device: Device, generation: Any, replica_ranks: int) -> Topology:
    """The topology of a run; `generation` is `policy.generation`, None if nothing is generated."""
    if generation is None:
        return Topology(num_nodes, ranks_per_node, num_nodes, ranks_per_node, replica_ranks, True, device)
    colocated, sync = generation.colocated, generation.weight_sync
    if colocated.enabled:
        return Topology(num_nodes, ranks_per_node, num_nodes, ranks_per_node, replica_ranks, True, device, sync)
    apart_nodes, apart_ranks = colocated.resources.num_nodes or 1, colocated.resources.gpus_per_node or ranks_per_node
    if num_nodes == 1:
        return Topology(1, ranks_per_node - apart_ranks, 1, apart_ranks, replica_ranks, False, device, sync)
    return Topology(
        num_nodes - apart_nodes, ranks_per_node, apart_nodes, apart_ranks, replica_ranks, False, device, sync
    )


def colocated_problems(colocated: Any) -> Iterator[Problem]:
    """Devices set aside for generation that takes turns with the policy on the policy's own.

    Args:
        colocated: `policy.generation.colocated`.
    """
    if not colocated.enabled:
        return
    for name in ("num_nodes", "gpus_per_node"):
        value = getattr(colocated.resources, name)
        if value is not None:
            yield Problem(
                f"policy.generation.colocated.resources.{name}",
                f"got {value}, but colocated generation has the policy's devices and none of its own; set "
                "policy.generation.colocated.enabled=false, or take this key out",
            )


def weight_sync_problems(topology: Topology) -> Iterator[Problem]:
    """A transport that cannot work where policy and generation run."""
    key = "policy.generation.weight_sync"
    if topology.weight_sync == "ipc" and not topology.shares_memory:
        yield Problem(
            key,
            "got ipc, but the generators do not share memory with the policy: they have devices of their own, or are "
            "on other nodes; set it to auto, collective or disk",
        )
    if topology.weight_sync == "collective" and topology.shares_devices:
        yield Problem(
            key,
            "got collective, but policy and generators share GPUs, and a collective takes one process per GPU; set it "
            "to auto, ipc or disk",
        )


def topology_problems(topology: Topology, policy_ranks: int) -> Iterator[Problem]:
    """What does not divide.

    Args:
        policy_ranks: ranks of one data-parallel shard of the policy.
    """
    world = topology.policy_nodes * topology.policy_ranks
    if world < 1:
        yield Problem(
            "policy.generation.colocated.resources.gpus_per_node",
            f"leaves the policy no device; give generation fewer, or raise {topology.device.ranks_key}",
        )
    elif world % policy_ranks:
        yield Problem(
            "cluster",
            f"the policy's {world} ranks are not a multiple of the {policy_ranks} that one copy of it is split over; "
            f"lower its parallel sizes, or change {topology.device.ranks_key}",
        )
    if not topology.device.has_gpus:
        return
    if topology.replica_ranks > topology.generation_ranks > 0:
        yield Problem(
            "policy.generation",
            f"a replica of {topology.replica_ranks} ranks (tensor_parallel_size x pipeline_parallel_size) does not fit "
            f"on a node, which has {topology.generation_ranks} GPUs for generation, and replicas do not span nodes; "
            f"lower its parallel sizes, or raise {topology.device.ranks_key}",
        )
    elif topology.generation_ranks % topology.replica_ranks:
        yield Problem(
            "policy.generation",
            f"{topology.generation_ranks} GPUs per node cannot be divided into replicas of {topology.replica_ranks}; "
            "set the generator's parallel sizes so that their product divides them",
        )
