"""Bandwidth between all pairs of nodes: the order of the measurements, and the nodes and pairs that are slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SLOW = 0.5
"""Share of the cluster's median below which a node or a pair is slow."""

LEAST_NODES = 3
"""Number of nodes with which a slow node can be told from a slow pair."""


@dataclass(frozen=True)
class SlowNode:
    """A node that is slow with most others.

    Args:
        verb: `sends` or `receives`.
        rate: Its median in this direction in bytes/s; 0 if nothing arrives.
        others: Median of all nodes in bytes/s.
    """

    verb: str
    rate: float
    others: float


@dataclass(frozen=True)
class Blame:
    """The slow parts of a network.

    Args:
        nodes: Slow nodes by name.
        pairs: Bandwidth in bytes/s of slow pairs (sender, receiver) of nodes that are not slow themselves.
        rate: Median of all pairs without slow nodes in bytes/s.
    """

    nodes: Mapping[str, SlowNode]
    pairs: Mapping[tuple[str, str], float]
    rate: float


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return all pairs of nodes in rounds of disjoint pairs: n - 1 rounds for an even number of nodes, n for an odd one
    (https://en.wikipedia.org/wiki/Round-robin_tournament#Circle_method).
    """
    circle: list[str | None] = [*nodes] if len(nodes) % 2 == 0 else [*nodes, None]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(first, second) for first, second in pairs if first is not None and second is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def blame(rates: Mapping[tuple[str, str], float]) -> Blame:
    """Return the slow nodes and pairs of a matrix of bandwidths.

    A node is slow if its median, as a sender or as a receiver, is under half of the median of all nodes. A pair is slow
    if it is under half of the median of the pairs without slow nodes. With two nodes, only the slower direction can be
    named, as a pair.

    Args:
        rates: Bytes/s by sender and receiver; 0 if no connection was possible.
    """
    names = list(dict.fromkeys(name for pair in rates for name in pair))
    slow: dict[str, SlowNode] = {}
    if len(names) >= LEAST_NODES:
        for place, verb in enumerate(("sends", "receives")):
            own = {name: [rate for pair, rate in rates.items() if pair[place] == name] for name in names}
            medians = {name: median(found) for name, found in own.items() if found}
            others = median(medians.values())
            slow |= {
                name: SlowNode(verb, rate, others)
                for name, rate in medians.items()
                if rate < SLOW * others and (name not in slow or rate < slow[name].rate)
            }
    rest = {pair: rate for pair, rate in rates.items() if not slow.keys() & set(pair)}
    rate = median(rest.values()) if rest else 0.0
    return Blame(slow, {pair: found for pair, found in rest.items() if found < SLOW * rate}, rate)
