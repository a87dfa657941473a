"""Compute the devices of a run's models and of its generation from the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from rl_core.config import Problem
from rl_core.devices import Device
from rl_core.errors import NOT_GIVEN
from rl_core.model_config import ColocatedConfig
from rl_core.weights import TransportKind, WeightSyncChoice, WeightSyncEncoding, WeightTarget

GENERATION = "generation"
"""Name of generation among the holders of devices, and its role in messages."""


@dataclass(frozen=True)
class Claim:
    """Devices that a model, or generation, requests.

    Args:
        name: Role of the model, or `GENERATION`.
        key: Dotted key of its config section.
        ranks: Number of ranks in one copy: a data-parallel shard of a model, or a replica.
        colocated: `enabled` if it shares devices with others; otherwise it has its own.
        sizes: Parallel sizes above 1 that result in these ranks, by dotted key.
        spans_nodes: True if one copy can be on several nodes.
        servers: Number of replicas that run elsewhere, on no device of the run; 0 if it computes on the run's devices.
    """

    name: str
    key: str
    ranks: int
    colocated: ColocatedConfig
    sizes: Mapping[str, int] = field(default_factory=dict)
    spans_nodes: bool = True
    servers: int = 0

    @property
    def largest(self) -> tuple[str, Any]:
        """Key and value of its largest parallel size; the key of its section if all are 1."""
        return max(self.sizes.items(), key=lambda each: each[1], default=(self.key, NOT_GIVEN))

    @property
    def in_sizes(self) -> str:
        """Its ranks as the product of its parallel sizes, in brackets; empty for a single one."""
        names = [f"{key.rpartition('.')[2]} {size}" for key, size in self.sizes.items()]
        return f" ({' x '.join(names)})" if len(names) > 1 else ""


@dataclass(frozen=True)
class Devices:
    """Devices of one claim, or shared by several claims.

    Args:
        num_nodes: Number of nodes.
        ranks: Number of devices per node.
    """

    num_nodes: int
    ranks: int

    @property
    def count(self) -> int:
        """Total number of devices."""
        return self.num_nodes * self.ranks


@dataclass(frozen=True)
class Topology:
    """Devices of a run.

    Args:
        claims: Claims of the models and of generation, by name.
        shared: Devices of all holders without their own devices.
        own: Devices of the other holders, by name.
        device: Kind of all devices.
        num_nodes: Total number of nodes.
        weight_sync: `policy.generation.weight_sync`.
        weight_sync_encoding: `policy.generation.weight_sync_encoding`.
        min_replicas, max_replicas: Keys of `policy.generation`. Without these bounds the number of replicas does not
            change during the run.
    """

    claims: Mapping[str, Claim]
    shared: Devices
    own: Mapping[str, Devices]
    device: Device
    num_nodes: int
    weight_sync: WeightSyncChoice = "auto"
    weight_sync_encoding: WeightSyncEncoding = "full"
    min_replicas: int | None = None
    max_replicas: int | None = None

    def devices(self, name: str) -> Devices:
        """Return the devices of a model or of generation."""
        return self.own.get(name, self.shared)

    @property
    def sharing(self) -> tuple[str, ...]:
        """Names of the holders that share devices."""
        return tuple(name for name in self.claims if name not in self.own)

    def takes_turns(self, name: str) -> bool:
        """Return whether this model, or generation, must free device memory for others."""
        return self.device.has_gpus and name in self.sharing and len(self.sharing) > 1

    @property
    def num_servers(self) -> int:
        """Number of replicas that run elsewhere; 0 if generation computes on devices of the run."""
        return self.claims[GENERATION].servers if GENERATION in self.claims else 0

    @property
    def replica_ranks(self) -> int:
        """Number of ranks of one replica."""
        return self.claims[GENERATION].ranks

    @property
    def replica_nodes(self) -> int:
        """Number of nodes of one replica."""
        if self.num_servers or not self.device.has_gpus:
            return 1
        return max(1, self.replica_ranks // self.devices(GENERATION).ranks)

    @property
    def engines_per_node(self) -> int:
        """Number of replicas, or parts of replicas over nodes, on each node of generation. The cores of a CPU are not
        divided among replicas: one has all of generation's."""
        return 0 if self.num_servers else self.devices(GENERATION).ranks // self.replica_resources

    @property
    def num_replicas(self) -> int:
        """Number of replicas at the start of a run."""
        return self.num_servers or self.devices(GENERATION).num_nodes // self.replica_nodes * self.engines_per_node

    @property
    def replica_resources(self) -> int:
        """Number of devices that a replica takes from each of its nodes."""
        if self.num_servers:
            return 0
        return self.replica_ranks // self.replica_nodes if self.device.has_gpus else self.devices(GENERATION).ranks

    @property
    def fewest_replicas(self) -> int:
        """Minimum number of replicas of a run that continues."""
        return self.min_replicas or self.num_replicas

    @property
    def most_replicas(self) -> int:
        """Maximum number of replicas of a run."""
        return self.max_replicas or self.num_replicas

    @property
    def is_elastic(self) -> bool:
        """True if replicas can join and leave during the run."""
        return (self.min_replicas, self.max_replicas) != (None, None)

    def transport_of(self, role: str) -> TransportKind:
        """Return the transport of a model's weights: the configured one. With `auto`, memory if the sender and
        receivers share it, files if the receivers are servers, otherwise collectives.
        """
        if self.weight_sync != "auto":
            return self.weight_sync
        if self.num_servers:
            return "disk"
        return "ipc" if self.shares_memory(role) else "collective"

    def shares_memory(self, role: str) -> bool:
        """Return whether every receiver of a model's weights can access the memory of a sender, on its GPU or its
        node."""
        return {GENERATION, role} <= {*self.sharing} and (self.shared.num_nodes == 1 or self.device.has_gpus)


def plan(
    claims: Sequence[Claim],
    *,
    num_nodes: int,
    ranks_per_node: int,
    device: Device,
    weight_sync: WeightSyncChoice = "auto",
    weight_sync_encoding: WeightSyncEncoding = "full",
    min_replicas: int | None = None,
    max_replicas: int | None = None,
) -> Topology:
    """Return the topology of a run. A model's own devices are taken from the shared ones: some devices of a single
    node, or whole nodes.
    """
    placed = [claim for claim in claims if not claim.servers]
    apart = {claim.name: claim.colocated.resources for claim in placed if not claim.colocated.enabled}
    own = {name: Devices(found.num_nodes or 1, found.gpus_per_node or ranks_per_node) for name, found in apart.items()}
    if num_nodes == 1:
        own = {name: Devices(1, found.ranks) for name, found in own.items()}
        shared = Devices(1, ranks_per_node - sum(found.ranks for found in own.values()))
    else:
        shared = Devices(num_nodes - sum(found.num_nodes for found in own.values()), ranks_per_node)
    by_name = {claim.name: claim for claim in claims}
    own |= {claim.name: Devices(0, 0) for claim in claims if claim.servers}
    settings = weight_sync, weight_sync_encoding, min_replicas, max_replicas
    return Topology(by_name, shared, own, device, num_nodes, *settings)


def colocated_problems(claims: Sequence[Claim]) -> Iterator[Problem]:
    """Yield the problems of devices reserved for a model that shares the devices of the policy."""
    for claim in claims:
        for name in ("num_nodes", "gpus_per_node"):
            value = getattr(claim.colocated.resources, name)
            if value is not None and claim.colocated.enabled:
                reason = f"reserves devices for {claim.name}, which is colocated and uses the policy's devices"
                remedy = f"Set {claim.key}.colocated.enabled=false, or remove this key"
                yield Problem(f"{claim.key}.colocated.resources.{name}", reason, got=value, remedy=remedy)


def weight_sync_problems(topology: Topology) -> Iterator[Problem]:
    """Yield the problems of a transport that cannot work with the placement of generation and of the models whose
    weights are sent to it."""
    key = "policy.generation.weight_sync"
    senders = [name for name in get_args(WeightTarget) if name in topology.claims]
    apart = [name for name in senders if not topology.shares_memory(name)]
    if topology.weight_sync == "ipc" and apart:
        own = "they have their own devices or are on other nodes"
        reason = f"needs memory that the generators share with the {apart[0]}, but {own}"
        yield Problem(key, reason, got="ipc", allowed="auto, collective, disk")
    if topology.weight_sync == "collective" and topology.takes_turns(GENERATION):
        reason = "needs one process per GPU, but the policy and the generators share GPUs"
        yield Problem(key, reason, got="collective", allowed="auto, ipc, disk")
    is_on_one_node = not topology.device.has_gpus or topology.devices("policy").num_nodes == 1
    if topology.weight_sync_encoding == "changes" and topology.transport_of("policy") == "ipc" and is_on_one_node:
        reason = "saves network traffic, but the policy and the generators share the memory of a node (weight_sync=ipc)"
        remedy = f"Set it to full, or set {key} to disk"
        yield Problem(f"{key}_encoding", reason, got="changes", remedy=remedy)
    if topology.weight_sync_encoding == "parts" and topology.transport_of("policy") == "disk":
        reason = "is for ranks that send to one another, and files are written by one (weight_sync=disk)"
        remedy = f"Set it to full, or set {key} to auto"
        yield Problem(f"{key}_encoding", reason, got="parts", remedy=remedy)


def replica_bound_problems(topology: Topology) -> Iterator[Problem]:
    """Yield the problems of bounds of the number of replicas that cannot be met."""
    if not topology.is_elastic or topology.num_servers:
        return
    least, most, key = topology.min_replicas, topology.max_replicas, topology.claims[GENERATION].key
    if GENERATION in topology.sharing:
        for name, value in (("min_replicas", least), ("max_replicas", most)):
            if value is not None:
                fixed = "the number of replicas is fixed while generation shares the policy's devices"
                reason = f"needs generation with its own devices, because {fixed}"
                remedy = f"Set {key}.colocated.enabled=false, or remove this key"
                yield Problem(f"{key}.{name}", reason, got=value, remedy=remedy)
        return
    if least and most and least > most:
        reason, remedy = f"exceeds max_replicas ({most})", "Lower it, or increase max_replicas"
        yield Problem(f"{key}.min_replicas", reason, got=least, remedy=remedy)
        return
    resources = f"{key}.colocated.resources"
    start = f"the {topology.num_replicas} replicas that the run starts with on the devices of {resources}"
    if least and least > topology.num_replicas:
        remedy = f"Lower it, or add devices in {resources}"
        yield Problem(f"{key}.min_replicas", f"exceeds {start}", got=least, remedy=remedy)
    if most and most < topology.num_replicas:
        remedy = f"Increase it, or remove devices from {resources}"
        yield Problem(f"{key}.max_replicas", f"is less than {start}", got=most, remedy=remedy)


def topology_problems(topology: Topology) -> Iterator[Problem]:
    """Yield the problems of too few devices, and of devices that cannot be divided by the parallel sizes."""
    ranks_key = topology.device.ranks_key
    if topology.sharing and (topology.shared.num_nodes < 1 or topology.shared.ranks < 1):
        for name in topology.own:
            claim, sharing = topology.claims[name], " and ".join(topology.sharing)
            key, given = f"{claim.key}.colocated.resources.gpus_per_node", claim.colocated.resources.gpus_per_node
            if topology.num_nodes > 1 or given:
                reason, got = f"leaves no device for {sharing}", NOT_GIVEN if given is None else given
                remedy = f"Give fewer devices to {name}, or increase {ranks_key}"
            else:
                ranks = topology.own[name].ranks
                reason = (
                    f"is not set, so with {claim.key}.colocated.enabled=false {name} takes all devices "
                    f"({ranks_key}={ranks}) and leaves none for {sharing}"
                )
                raised = f"{ranks_key}=2 and " if ranks == 1 else ""
                got, remedy = NOT_GIVEN, f"Set {raised}{key}={max(1, ranks // 2)}"
            yield Problem(key, reason, got=got, remedy=remedy)
        return
    for name, claim in topology.claims.items():
        count, (key, size) = topology.devices(name).count, claim.largest
        if name != GENERATION and count % claim.ranks:
            copy = f"one copy of the {name} needs {claim.ranks} ranks{claim.in_sizes}"
            reason = f"{copy}, which does not divide the number of its ranks, {count}"
            yield Problem(key, reason, got=size, remedy=f"Lower its parallel sizes, or change {ranks_key}")
    if not topology.device.has_gpus or GENERATION not in topology.claims or topology.num_servers:
        return
    claim, ranks = topology.claims[GENERATION], topology.devices(GENERATION).ranks
    key, got = claim.largest
    if claim.ranks > ranks:
        num_nodes, has = topology.devices(GENERATION).num_nodes, f"a replica has {claim.ranks} ranks{claim.in_sizes}"
        if not claim.spans_nodes:
            reason = f"{has} and cannot span nodes with this backend, but a node has {ranks} for generation"
            remedy = f"Lower the parallel sizes of the generator, or increase {ranks_key}"
            yield Problem(key, reason, got=got, remedy=remedy)
        elif claim.ranks % ranks or num_nodes % (claim.ranks // ranks):
            reason = f"{has}, which the {num_nodes} nodes of generation with {ranks} GPUs each cannot be divided into"
            remedy = f"Set parallel sizes whose product is {ranks} times a divisor of {num_nodes}, or add nodes"
            yield Problem(key, reason, got=got, remedy=remedy)
    elif ranks % claim.ranks:
        reason = f"the {ranks} GPUs per node cannot be divided into replicas of {claim.ranks} GPUs{claim.in_sizes}"
        remedy = f"Set the parallel sizes of the generator so that their product divides {ranks}"
        yield Problem(key, reason, got=got, remedy=remedy)
