"""Probes of all nodes: an actor on each, asked with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_launch.cluster import node_task
from rl_launch.doctor import room
from rl_launch.doctor.cluster import node_probe, node_readings
from rl_launch.doctor.cluster.node_probe import NodeProbe
from rl_launch.doctor.cluster.survey import ClusterNode, NodeClock
from rl_launch.worker_envs import node_build

NUM_CLOCK_READINGS = 8

_CONCURRENCY = 4

for _module in (node_build, node_task, node_probe, node_readings, room):
    cloudpickle.register_pickle_by_value(_module)


class Probes:
    """A probe on each node. A node that fails or does not answer in time is noted, and left out from then on.

    Args:
        nodes: Nodes.
        silent: Receives the names of nodes that do not answer, with the reason.
        timeout_s: Default limit of an answer in seconds.
        num_gpus: GPUs that each probe takes from Ray.
        probe: Class of the probe.

    Attributes:
        actors: Actor of each node, for `answers`.
    """

    def __init__(
        self,
        nodes: Sequence[ClusterNode],
        silent: dict[str, str],
        *,
        timeout_s: float,
        num_gpus: int = 0,
        probe: type[NodeProbe] = NodeProbe,
    ) -> None:
        self.silent = silent
        self._timeout_s = timeout_s
        actor: Any = ray.remote(probe)
        self.actors = {
            node.name: actor.options(
                num_cpus=0,
                num_gpus=num_gpus,
                max_concurrency=_CONCURRENCY,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            ).remote(node.address)
            for node in nodes
        }

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self.actors.values():
            ray.kill(actor)

    @property
    def names(self) -> list[str]:
        """Nodes that have answered so far."""
        return [name for name in self.actors if name not in self.silent]

    def ask(
        self,
        call: Callable[[Any, str], Any],
        awaited: str,
        names: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Return the answers of nodes by name.

        Args:
            call: Calls a method of the actor of a node, given with its name.
            awaited: Name of the answer, for the reason that a silent node gets.
            names: Nodes to ask; all that have answered so far if not given.
            timeout_s: Limit in seconds, instead of the default one.
        """
        names = self.names if names is None else [name for name in names if name not in self.silent]
        return self.answers({name: call(self.actors[name], name) for name in names}, awaited, timeout_s=timeout_s)

    def answers(self, refs: Mapping[str, Any], awaited: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the results of calls by the name of the node; see `ask`."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=limit) if refs else ([], [])
        finished, found = set(done), {}
        for name, ref in refs.items():
            if ref not in finished:
                self.silent[name] = f"it did not answer within {limit:g} s while waiting for {awaited}"
                continue
            try:
                found[name] = ray.get(ref)
            except RayTaskError as error:
                self.silent[name] = f"{awaited}: {type(error.cause).__name__}: {error.cause}"
            except RayError:
                self.silent[name] = f"it was lost while waiting for {awaited}"
        return found

    def clocks(self) -> dict[str, NodeClock]:
        """Compare the clock of each node with the driver's, one node at a time; the shortest of several round trips
        counts.
        """
        found = {}
        for name in self.names:
            seen = []
            for _ in range(NUM_CLOCK_READINGS):
                begun, since = time.time(), time.perf_counter()
                answer = self.ask(lambda actor, _: actor.clock.remote(), "its clock", [name])
                if name not in answer:
                    break
                half = (time.perf_counter() - since) / 2
                seen.append(NodeClock(answer[name] - (begun + half), half))
            if seen and name not in self.silent:
                found[name] = min(seen, key=lambda clock: clock.uncertainty_s)
        return found
