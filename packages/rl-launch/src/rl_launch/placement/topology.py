"""The devices of a run's models and of its generation, as pure arithmetic on the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rl_core.config import Problem
from rl_core.devices import Device
from rl_core.model_config import ColocatedConfig
from rl_core.weights import TransportKind, WeightSyncChoice, WeightSyncEncoding

GENERATION = "generation"
"""The name of generation among the holders of devices, and its role in messages."""


@dataclass(frozen=True)
class Claim:
    """The devices that a model, or generation, asks for.

    Args:
        name: role of the model, or `GENERATION`.
        key: dotted key of its config section.
        ranks: number of ranks of one copy: of a data-parallel shard of a model, or of a replica.
        colocated: whether it takes turns on the devices that others share, or has its own.
    """

    name: str
    key: str
    ranks: int
    colocated: ColocatedConfig


@dataclass(frozen=True)
class Devices:
    """Devices of one claim, or those that several share.

    Args:
        num_nodes: nodes that they are on.
        ranks: devices on each node.
    """

    num_nodes: int
    ranks: int

    @property
    def count(self) -> int:
        """Number of all devices."""
        return self.num_nodes * self.ranks


@dataclass(frozen=True)
class ReplicaBounds:
    """Bounds of the number of replicas, which otherwise stays as it is at the start.

    Args:
        least: `policy.generation.min_replicas`.
        most: `policy.generation.max_replicas`.
    """

    least: int | None = None
    most: int | None = None


@dataclass(frozen=True)
class Topology:
    """Devices of a run.

    Args:
        claims: claims of the models and of generation, by name.
        shared: devices of all that have none of their own.
        own: devices of the others, by name.
        device: the kind of all devices.
        num_nodes: number of all nodes.
        weight_sync: `policy.generation.weight_sync`.
        weight_sync_encoding: `policy.generation.weight_sync_encoding`.
        replica_bounds: bounds of the number of replicas.
    """

    claims: Mapping[str, Claim]
    shared: Devices
    own: Mapping[str, Devices]
    device: Device
    num_nodes: int
    weight_sync: WeightSyncChoice = "auto"
    weight_sync_encoding: WeightSyncEncoding = "full"
    replica_bounds: ReplicaBounds = ReplicaBounds()

    def devices(self, name: str) -> Devices:
        """Devices of a model or of generation."""
        return self.own.get(name, self.shared)

    @property
    def sharing(self) -> tuple[str, ...]:
        """Names of those that share devices."""
        return tuple(name for name in self.claims if name not in self.own)

    def takes_turns(self, name: str) -> bool:
        """Whether this model, or generation, must free device memory for others."""
        return self.device.has_gpus and name in self.sharing and len(self.sharing) > 1

    @property
    def replica_ranks(self) -> int:
        """Devices of one replica."""
        return self.claims[GENERATION].ranks

    @property
    def replicas_per_node(self) -> int:
        """Replicas on each node of generation. CPU cores are not divided: one replica uses them all."""
        return self.devices(GENERATION).ranks // self.replica_ranks if self.device.has_gpus else 1

    @property
    def num_replicas(self) -> int:
        """Replicas that a run starts with."""
        return self.devices(GENERATION).num_nodes * self.replicas_per_node

    @property
    def replica_resources(self) -> int:
        """Devices that a replica with devices of its own takes from its node."""
        return self.replica_ranks if self.device.has_gpus else self.devices(GENERATION).ranks

    @property
    def fewest_replicas(self) -> int:
        """Replicas with which a run goes on."""
        return self.replica_bounds.least or self.num_replicas

    @property
    def most_replicas(self) -> int:
        """Replicas that a run has at most."""
        return self.replica_bounds.most or self.num_replicas

    @property
    def is_elastic(self) -> bool:
        """Whether replicas come and go while the run goes on."""
        return self.replica_bounds != ReplicaBounds()

    @property
    def transport(self) -> TransportKind:
        """The transport of weights: as the config says, or through memory if sender and receivers share it, else by
        collectives.
        """
        if self.weight_sync != "auto":
            return self.weight_sync
        return "ipc" if self.shares_memory else "collective"

    @property
    def shares_memory(self) -> bool:
        """Whether every receiver of weights reaches the memory of a sender: its GPU's, or its node's."""
        return GENERATION in self.sharing and (self.shared.num_nodes == 1 or self.device.has_gpus)


def plan(
    claims: Sequence[Claim],
    *,
    num_nodes: int,
    ranks_per_node: int,
    device: Device,
    weight_sync: WeightSyncChoice = "auto",
    weight_sync_encoding: WeightSyncEncoding = "full",
    replica_bounds: ReplicaBounds = ReplicaBounds(),
) -> Topology:
    """The topology of a run. Devices of a model's own are taken from the shared ones: some devices of the only node, or
    whole nodes.
    """
    apart = {claim.name: claim.colocated.resources for claim in claims if not claim.colocated.enabled}
    own = {name: Devices(found.num_nodes or 1, found.gpus_per_node or ranks_per_node) for name, found in apart.items()}
    if num_nodes == 1:
        own = {name: Devices(1, found.ranks) for name, found in own.items()}
        shared = Devices(1, ranks_per_node - sum(found.ranks for found in own.values()))
    else:
        shared = Devices(num_nodes - sum(found.num_nodes for found in own.values()), ranks_per_node)
    by_name = {claim.name: claim for claim in claims}
    return Topology(by_name, shared, own, device, num_nodes, weight_sync, weight_sync_encoding, replica_bounds)


def colocated_problems(claims: Sequence[Claim]) -> Iterator[Problem]:
    """Find devices that are set aside for a model that shares the policy's."""
    for claim in claims:
        for name in ("num_nodes", "gpus_per_node"):
            value = getattr(claim.colocated.resources, name)
            if value is not None and claim.colocated.enabled:
                yield Problem(
                    f"{claim.key}.colocated.resources.{name}",
                    f"got {value}, but colocated {claim.name} uses the policy's devices and has none of its own; set "
                    f"{claim.key}.colocated.enabled=false, or remove this key",
                )


def weight_sync_problems(topology: Topology) -> Iterator[Problem]:
    """Find a transport that cannot work with these places of policy and generation."""
    key = "policy.generation.weight_sync"
    if topology.weight_sync == "ipc" and not topology.shares_memory:
        yield Problem(
            key,
            "got ipc, but the generators do not share memory with the policy: they have devices of their own, or are "
            "on other nodes; set it to auto, collective or disk",
        )
    if topology.weight_sync == "collective" and topology.takes_turns(GENERATION):
        yield Problem(
            key,
            "got collective, but policy and generators share GPUs, and a collective takes one process per GPU; set it "
            "to auto, ipc or disk",
        )
    if topology.weight_sync_encoding == "changes" and topology.transport == "ipc":
        yield Problem(
            f"{key}_encoding",
            "got changes, but policy and generators share memory (weight_sync: ipc), through which all weights are "
            f"read at no cost of a link; set it to full, or {key} to disk",
        )


def replica_bound_problems(topology: Topology) -> Iterator[Problem]:
    """Find bounds of the number of replicas that cannot hold."""
    if not topology.is_elastic:
        return
    bounds, key = topology.replica_bounds, topology.claims[GENERATION].key
    if GENERATION in topology.sharing:
        for name, value in (("min_replicas", bounds.least), ("max_replicas", bounds.most)):
            if value is None:
                continue
            yield Problem(
                f"{key}.{name}",
                f"got {value}, but generation shares the policy's devices, so that its replicas are always as many; "
                f"set {key}.colocated.enabled=false, or remove this key",
            )
        return
    if bounds.least and bounds.most and bounds.least > bounds.most:
        yield Problem(
            f"{key}.min_replicas",
            f"got {bounds.least}, more than max_replicas ({bounds.most}); lower it, or raise max_replicas",
        )
        return
    start = f"the run starts with {topology.num_replicas}, on the devices of {key}.colocated.resources"
    if bounds.least and bounds.least > topology.num_replicas:
        yield Problem(f"{key}.min_replicas", f"got {bounds.least}, but {start}; lower it, or give generation more")
    if bounds.most and bounds.most < topology.num_replicas:
        yield Problem(f"{key}.max_replicas", f"got {bounds.most}, but {start}; raise it, or give generation fewer")


def _takes_all(name: str, claim: Claim, ranks: int, sharing: str, ranks_key: str) -> str:
    """The problem of a claim on the only node that does not say how many devices it takes."""
    key = f"{claim.key}.colocated.resources.gpus_per_node"
    raised = f"{ranks_key}=2 and " if ranks == 1 else ""
    return (
        f"is unset, so with {claim.key}.colocated.enabled=false {name} takes all {ranks} of {ranks_key}, which leaves "
        f"no device for {sharing}; set {raised}{key}={max(1, ranks // 2)}"
    )


def topology_problems(topology: Topology) -> Iterator[Problem]:
    """Find devices that are too few, or that parallel sizes do not divide."""
    ranks_key = topology.device.ranks_key
    if topology.sharing and (topology.shared.num_nodes < 1 or topology.shared.ranks < 1):
        for name in topology.own:
            claim, sharing = topology.claims[name], " and ".join(topology.sharing)
            key = f"{claim.key}.colocated.resources.gpus_per_node"
            if topology.num_nodes > 1 or claim.colocated.resources.gpus_per_node:
                says = f"leaves no device for {sharing}; give {name} fewer, or raise {ranks_key}"
            else:
                says = _takes_all(name, claim, topology.own[name].ranks, sharing, ranks_key)
            yield Problem(key, says)
        return
    for name, claim in topology.claims.items():
        count = topology.devices(name).count
        if name != GENERATION and count % claim.ranks:
            yield Problem(
                "cluster",
                f"the {name}'s {count} ranks are not a multiple of the {claim.ranks} that one copy of it is split "
                f"over; lower its parallel sizes in {claim.key}, or change {ranks_key}",
            )
    if topology.device.has_gpus and GENERATION in topology.claims:
        yield from _replica_problems(topology)


def _replica_problems(topology: Topology) -> Iterator[Problem]:
    ranks, size = topology.devices(GENERATION).ranks, topology.replica_ranks
    key, ranks_key = topology.claims[GENERATION].key, topology.device.ranks_key
    if size > ranks:
        yield Problem(
            key,
            f"a replica of {size} ranks (tensor_parallel_size x pipeline_parallel_size) does not fit on a node, which "
            f"has {ranks} GPUs for generation, and replicas do not span nodes; lower its parallel sizes, or raise "
            f"{ranks_key}",
        )
    elif ranks % size:
        yield Problem(
            key,
            f"{ranks} GPUs per node cannot be divided into replicas of {size}; set the generator's parallel sizes so "
            "that their product divides them",
        )
