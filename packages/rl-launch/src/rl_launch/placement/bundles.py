"""Devices for a run: the groups of bundles that the cluster can hold, and the wait until they are free."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

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


class NodeResources(NamedTuple):
    """A living node and all its resources, free or not.

    Attributes:
        address: Address of the node.
        total: Its resources.
    """

    address: str
    total: Resources

    def __str__(self) -> str:
        return f"{self.address} with {described(self.total)}"


class PlacementTimeouts(NamedTuple):
    """Timeouts in seconds of the wait for devices.

    Attributes:
        busy_s: Timeout for devices that the cluster has and others use.
        absent_s: Timeout for devices that it does not have: nodes that an autoscaling cluster adds, or that replace a
            lost one.
    """

    busy_s: float
    absent_s: float = 0.0


def lacking(groups: Sequence[Resources], nodes: Sequence[NodeResources]) -> str:
    """Return the reason that these nodes cannot hold these groups, even if all were free; empty if none is found.

    Each group must be on one node. Groups of different sizes may still not fit together. Only the placement shows it.
    """
    for group in Counter(map(_key, groups)):
        wanted = dict(group)
        at_least = [each for each in groups if all(each.get(name, 0) >= amount for name, amount in group)]
        needed = [(name, amount) for name, amount in group if amount]
        times = [min((each.total.get(name, 0) // amount for name, amount in needed), default=inf) for each in nodes]
        room = int(sum(times))
        if room < len(at_least):
            return f"there is room for {room} of {len(at_least)} groups of {described(wanted)}"
    return ""


class Wait:
    """The wait for groups of bundles. It logs the missing devices, and raises an error after its timeouts.

    Args:
        groups: Resources of each group. One group is on one node.
        timeouts: Timeouts of the wait.
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
            now: Time in seconds of a monotonic clock.

        Raises:
            PlacementError: If the cluster does not have the devices, or after the timeout.
        """
        reason = lacking(self._groups, nodes)
        if self._since is None or bool(reason) != bool(self._reason):
            self._since = self._reported = now
        self._reason = reason
        waited = now - self._since
        counts = Counter(map(_key, self._groups))
        wanted = " and ".join(f"{count} x {described(dict(group))}" for group, count in counts.items())
        asked = f"{self._keys} request {wanted}, each on one node"
        if reason and waited >= self._timeouts.absent_s:
            after = f" after {self._timeouts.absent_s:.0f} s" if self._timeouts.absent_s else ""
            raise PlacementError(
                f"{asked}, but the cluster has {_listed(nodes)}{after}: {reason}. Lower {self._keys}, or add nodes. If "
                "the cluster adds nodes automatically, set cluster.autoscaling=true."
            )
        if not reason and waited >= self._timeouts.busy_s:
            raise PlacementError(
                f"{asked}, but {len(self._groups) - num_placed} of {len(self._groups)} were not free within "
                f"{self._timeouts.busy_s:.0f} s (cluster.placement_timeout_s); the cluster has {_listed(nodes)}. "
                "Wait until other runs have ended, or request fewer."
            )
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


def described(resources: Resources) -> str:
    """Return the devices among resources in words: `8 GPU, 64 CPU`."""
    return ", ".join(f"{resources[name]:g} {name}" for name in ("GPU", "CPU") if name in resources) or "no devices"


def _listed(nodes: Sequence[NodeResources], count: int = 8) -> str:
    shown = "; ".join(str(node) for node in nodes[:count]) or "no node"
    return shown if len(nodes) <= count else f"{shown}; and {len(nodes) - count} more"


def _key(group: Resources) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(group.items()))
