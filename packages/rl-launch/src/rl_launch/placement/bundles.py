"""Devices for a run: the groups of bundles that the cluster can hold, and the wait until they are free."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from rl_core.errors import ConfigError, RLError

_log = logging.getLogger(__name__)

_REPORT_S = 15.0

Resources = Mapping[str, float]
"""Amounts by the name of a Ray resource."""


class PlacementError(ConfigError):
    """Raised if the cluster does not have the devices that a run asks for, or not in time."""


class DevicesLost(RLError):
    """Raised if a run has lost devices, and the cluster has no others in time. The same command resumes the run when
    the cluster has devices."""


@dataclass(frozen=True)
class NodeResources:
    """A living node and all its resources, free or not.

    Args:
        address: Address of the node.
        total: Its resources.
    """

    address: str
    total: Resources

    def __str__(self) -> str:
        return f"{self.address} with {described(self.total)}"


@dataclass(frozen=True)
class PlacementTimeouts:
    """Timeouts in seconds of the wait for devices.

    Args:
        busy_s: Timeout for devices that the cluster has and others use.
        absent_s: Timeout for devices that it does not have: nodes that an autoscaling cluster adds, or that replace a
            lost one.
    """

    busy_s: float
    absent_s: float = 0.0


def lacking(groups: Sequence[Resources], nodes: Sequence[NodeResources]) -> str:
    """Why these nodes cannot hold these groups even if they were all free; empty if no reason is found.

    Each group must lie on one node. Groups of different sizes may still not fit together, which only the placement
    shows.
    """
    for group, _ in Counter(_key(each) for each in groups).items():
        wanted = dict(group)
        at_least = [each for each in groups if all(each.get(name, 0) >= amount for name, amount in group)]
        room = sum(_times(node.total, wanted) for node in nodes)
        if room < len(at_least):
            return f"there is room for {room} of {len(at_least)} groups of {described(wanted)}"
    return ""


class Wait:
    """The wait for groups of bundles; the log says what is missing, and an error ends it in time.

    Args:
        groups: Resources of each group; one group lies on one node.
        timeouts: How long to wait.
        keys: The keys that ask for these devices, for messages.
    """

    def __init__(self, groups: Sequence[Resources], timeouts: PlacementTimeouts, *, keys: str) -> None:
        self._groups = list(groups)
        self._timeouts = timeouts
        self._keys = keys
        self._reason = ""
        self._since: float | None = None
        self._reported = 0.0

    def check(self, nodes: Sequence[NodeResources], num_placed: int, now: float) -> None:
        """Log from time to time which devices are missing.

        Args:
            nodes: The living nodes.
            num_placed: Groups that are placed.
            now: Seconds of a clock that does not go back.

        Raises:
            PlacementError: If the cluster does not have the devices, or if the time is over.
        """
        reason = lacking(self._groups, nodes)
        if self._since is None or bool(reason) != bool(self._reason):
            self._since = self._reported = now
        self._reason = reason
        waited = now - self._since
        if reason and waited >= self._timeouts.absent_s:
            raise PlacementError(self._absent(nodes))
        if not reason and waited >= self._timeouts.busy_s:
            raise PlacementError(self._busy(nodes, num_placed))
        if now - self._reported >= _REPORT_S:
            self._reported = now
            _log.info(
                "still waiting for devices after %.0f s, %d of %d placed (%s); the cluster has %s",
                waited,
                num_placed,
                len(self._groups),
                reason or "in use by others",
                _listed(nodes),
            )

    def _absent(self, nodes: Sequence[NodeResources]) -> str:
        waited = f" after {self._timeouts.absent_s:.0f} s" if self._timeouts.absent_s else ""
        return (
            f"{self._asked()}, but the cluster has {_listed(nodes)}{waited}: {self._reason}. "
            f"Lower {self._keys}, or add nodes. If the cluster adds nodes automatically, set cluster.autoscaling=true."
        )

    def _busy(self, nodes: Sequence[NodeResources], num_placed: int) -> str:
        return (
            f"{self._asked()}, but {len(self._groups) - num_placed} of {len(self._groups)} were not free within "
            f"{self._timeouts.busy_s:.0f} s (cluster.placement_timeout_s); the cluster has {_listed(nodes)}. "
            "Wait until other runs have ended, or request fewer."
        )

    def _asked(self) -> str:
        counts = Counter(_key(group) for group in self._groups)
        wanted = " and ".join(f"{count} x {described(dict(group))}" for group, count in counts.items())
        return f"{self._keys} request {wanted}, each on one node"


def described(resources: Resources) -> str:
    """The devices among resources, in words: `8 GPU, 64 CPU`."""
    return ", ".join(f"{resources[name]:g} {name}" for name in ("GPU", "CPU") if name in resources) or "no devices"


def _listed(nodes: Sequence[NodeResources], most: int = 8) -> str:
    shown = "; ".join(str(node) for node in nodes[:most]) or "no node"
    return shown if len(nodes) <= most else f"{shown}; and {len(nodes) - most} more"


def _key(group: Resources) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(group.items()))


def _times(total: Resources, wanted: Resources) -> int:
    return int(min((total.get(name, 0) // amount for name, amount in wanted.items() if amount), default=inf))
