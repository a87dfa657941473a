"""Costs of a computation for a device, as numbers that add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """Work of kernels.

    Args:
        kernels: Number of operations that launch at least one.
        bytes: Memory that they read and write.
    """

    kernels: int = 0
    bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.kernels + other.kernels, self.bytes + other.bytes)

    def __sub__(self, other: Work) -> Work:
        return Work(self.kernels - other.kernels, self.bytes - other.bytes)


@dataclass(frozen=True)
class Collective:
    """A kind of collective.

    Args:
        name: Name of the operation, such as `all_gather`.
        ranks: Number of ranks in its group.
        span: Number of ranks from the first of the group to its last: a group of neighbours has as many as `ranks`, and
            one whose span exceeds the ranks of a node crosses nodes.
    """

    name: str
    ranks: int
    span: int


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind.

    Args:
        calls: Number of them.
        bytes: Size of what they move: the whole tensor that ranks gather, reduce, scatter or send, as one rank sees it.
    """

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls - other.calls, self.bytes - other.bytes)


@dataclass(frozen=True)
class Costs:
    """The costs of a computation on one rank.

    Args:
        products: Matrix products and attention.
        flops: Floating-point operations of these, as `torch.utils.flop_counter` counts them. Attention counts as if
            every query saw all keys of its row.
        other: All other kernels.
        sharding: Copies into and out of the buffers of sharded parameters and gradients.
        attention: Kernels next to the largest one of attention's backward pass, and the memory by which they exchange
            gradients. `products` has the largest, with the arguments and results.
        operators: Calls of this project's operators, each of which starts a Triton program by Python.
        waits: Number of times that the host waits for the device, by the operation that waits.
        collectives: Collectives by kind.
        peak_bytes: Maximum memory of the tensors that it makes and that are alive at one time.
    """

    products: Work = Work()
    flops: int = 0
    other: Work = Work()
    sharding: Work = Work()
    attention: Work = Work()
    operators: int = 0
    waits: Mapping[str, int] = field(default_factory=dict)
    collectives: Mapping[Collective, Traffic] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def num_launches(self) -> int:
        """Number of operations that the host starts on the device, collectives included."""
        kernels = (self.products, self.other, self.sharding, self.attention)
        return sum(work.kernels for work in kernels) + sum(moved.calls for moved in self.collectives.values())

    @property
    def num_waits(self) -> int:
        """Number of waits of all kinds."""
        return sum(self.waits.values())

    def traffic(self, name: str) -> Traffic:
        """Return the collectives of one name, over all groups."""
        return sum((moved for kind, moved in self.collectives.items() if kind.name == name), Traffic())

    def __add__(self, other: Costs) -> Costs:
        """Return the costs of one computation after another."""
        return Costs(
            self.products + other.products,
            self.flops + other.flops,
            self.other + other.other,
            self.sharding + other.sharding,
            self.attention + other.attention,
            self.operators + other.operators,
            {name: self.waits.get(name, 0) + other.waits.get(name, 0) for name in {**self.waits, **other.waits}},
            {
                kind: self.collectives.get(kind, Traffic()) + other.collectives.get(kind, Traffic())
                for kind in {**self.collectives, **other.collectives}
            },
            max(self.peak_bytes, other.peak_bytes),
        )

    def __sub__(self, other: Costs) -> Costs:
        """Return the costs that a computation has in excess of a part of it, without what they share; its memory
        likewise."""
        waits = {name: self.waits.get(name, 0) - other.waits.get(name, 0) for name in {**self.waits, **other.waits}}
        collectives = {
            kind: self.collectives.get(kind, Traffic()) - other.collectives.get(kind, Traffic())
            for kind in {**self.collectives, **other.collectives}
        }
        return Costs(
            self.products - other.products,
            self.flops - other.flops,
            self.other - other.other,
            self.sharding - other.sharding,
            self.attention - other.attention,
            self.operators - other.operators,
            {name: count for name, count in waits.items() if count},
            {kind: moved for kind, moved in collectives.items() if moved != Traffic()},
            self.peak_bytes - other.peak_bytes,
        )
