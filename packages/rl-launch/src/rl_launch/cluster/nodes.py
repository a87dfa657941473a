"""Nodes of a run's workers, and the checks of each before a worker starts there.

A worker that Ray starts with an interpreter that its node does not have never answers, and one that writes into a
folder of its node only leaves an incomplete checkpoint: both are found here, by tasks pinned to the nodes.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_core.errors import ConfigError, FailureOrigin, WorkerDied, WorkerEnvironmentError, WorkerError, WorkerStalled
from rl_core.ray.calls import DECISION_S, translate
from rl_launch.cluster import node_task
from rl_launch.cluster.node_task import (
    NodeFacts,
    Sight,
    all_differences,
    built,
    facts_of_this_node,
    held,
    listing,
    meet,
    packed,
)
from rl_launch.worker_envs import node_build
from rl_launch.worker_envs.driver import identity_of
from rl_launch.worker_envs.node_build import BuiltEnv, report
from rl_launch.worker_envs.plan import portable_plan
from rl_launch.worker_envs.provision import DriverEnvs, homes
from rl_launch.worker_envs.spec import WorkerEnvSpec

_log = logging.getLogger(__name__)

SHARED_FOLDER_PATIENCE_S = 30.0
"""Maximum seconds until a file of one node is visible to another on a shared file system."""

_REPORT_S = 30.0

T = TypeVar("T")

for _module in (node_build, node_task):
    cloudpickle.register_pickle_by_value(_module)


@dataclass(frozen=True)
class PreparedNode:
    """A node that workers may be started on.

    Args:
        address: Address for other nodes.
        facts: Facts about its machine.
        interpreters: Interpreter by role, on this node.
    """

    address: str
    facts: NodeFacts
    interpreters: Mapping[str, str]

    @property
    def network_variables(self) -> Mapping[str, str]:
        """Variables that make gloo and NCCL use the interface of the node's address, except variables that its Ray was
        started with.
        """
        name = self.facts.interface
        chosen = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
        return {variable: value for variable, value in chosen.items() if variable not in self.facts.variables}


class Nodes:
    """Nodes of a run, prepared before workers are placed on them.

    Args:
        envs: Environments of the driver's node. Every other node gets them too.
        folder: The run's folder on the driver's node, which workers of every node write to.
        model_folders: Folders that models are loaded from, by their keys.
        answer_timeout_s: Timeout of a node's first answer.
        build_timeout_s: Timeout of building a node's environments.
    """

    def __init__(
        self,
        envs: DriverEnvs,
        folder: Path,
        *,
        model_folders: Mapping[str, str],
        answer_timeout_s: float,
        build_timeout_s: float,
    ) -> None:
        self._envs = envs
        self._folder = folder
        self._model_folders = dict(model_folders)
        self._answer_timeout_s = answer_timeout_s
        self._build_timeout_s = build_timeout_s
        self._home = ray.get_runtime_context().get_node_id()
        self._addresses: dict[str, str] = {}
        self._roles: dict[str, set[str]] = {}
        self._prepared: dict[str, PreparedNode] = {}

    def __getitem__(self, node: str) -> PreparedNode:
        return self._prepared[node]

    def prepare(self, roles: Mapping[str, Iterable[str]]) -> None:
        """Prove that workers of these roles can start on these nodes, and give each node the environments it lacks.

        Args:
            roles: Roles of the workers, by Ray's id of the node they are placed on.

        Raises:
            ConfigError: With the nodes that do not have a folder that must be shared.
            WorkerEnvironmentError: With the nodes that have no environment for their workers, and the remedy.
            WorkerDied: If a node is lost before it answers.
        """
        wanted = {node: set(found) for node, found in roles.items()}
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        self._addresses |= {node: addresses[node] for node in wanted}
        for node, found in wanted.items():
            self._roles.setdefault(node, set()).update(found)
        if self._home in wanted and self._home not in self._prepared:
            address = addresses[self._home]
            self._prepared[self._home] = PreparedNode(address, facts_of_this_node(address), self._envs.interpreters)
        others = {node: addresses[node] for node in wanted if node != self._home}
        unseen = {node: address for node, address in others.items() if node not in self._prepared}
        if unseen:
            self._check_folders(unseen)
            facts = self._on_each(unseen, "what the node is", facts_of_this_node, lambda node: (unseen[node],))
            self._prepared |= {node: PreparedNode(unseen[node], facts[node], {}) for node in unseen}
        lacking = {node: wanted[node] - set(self._prepared[node].interpreters) for node in others}
        self._provide({node: found for node, found in lacking.items() if found})

    def leave(self, node: str, roles: Iterable[str]) -> None:
        """Note that no workers of these roles are on a node any more."""
        self._roles[node].difference_update(roles)

    def lost(self) -> list[str]:
        """Return the addresses of lost nodes with workers of the run.

        Waits until Ray has declared them dead, as it would place workers on them until then.
        """
        # Iterate over a copy: replicas that join prepare their nodes in another thread.
        asked = {node: address for node, address in tuple(self._addresses.items()) if self._roles.get(node)}
        asked.pop(self._home, None)
        refs = {_pinned(facts_of_this_node, node).remote(address): node for node, address in asked.items()}
        if not refs:
            return []
        answered, _ = ray.wait(list(refs), num_returns=len(refs), timeout=DECISION_S)
        lost = set(asked)
        for ref in answered:
            with suppress(RayError):
                ray.get(ref)
                lost.discard(refs[ref])
        end = time.monotonic() + DECISION_S
        while lost and lost & {node["NodeID"] for node in ray.nodes() if node["Alive"]} and time.monotonic() < end:
            time.sleep(0.5)
        return sorted(asked[node] for node in lost)

    def _check_folders(self, addresses: Mapping[str, str]) -> None:
        token = uuid4().hex
        place = self._folder / f".nodes-{token[:8]}"
        place.mkdir(parents=True)
        try:
            (place / "driver").write_text(token)
            given = list(self._model_folders.values()), SHARED_FOLDER_PATIENCE_S
            awaited = "the check of the run's folder"
            seen = self._on_each(addresses, awaited, meet, lambda node: (str(place), token, node, *given))
            problems = sharing_problems(seen, place, token, SHARED_FOLDER_PATIENCE_S)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        if problems:
            raise ConfigError(
                f"the run's folder {self._folder} is not shared by all nodes: {_by_reason(problems, addresses)}. "
                "Workers on every node write logs and checkpoints there: set run_dir to a folder on a file system that "
                "all nodes see under the same path, or use one node."
            )
        for key, folder in self._model_folders.items():
            if problems := listing_problems(folder, seen):
                raise ConfigError(
                    f"{key}: {folder} is not the same on all nodes: {_by_reason(problems, addresses)}. Put it on a "
                    "shared file system or copy it to the same path on every node, or pass a hub name. (A model that "
                    "is created on the driver's machine is stored under RL_HOME, which can be a shared folder.)"
                )

    def _provide(self, roles: Mapping[str, set[str]]) -> None:
        """Find or build the environments of these roles on these nodes."""
        if not roles:
            return
        addresses = {node: self._prepared[node].address for node in roles}
        home = homes(self._envs.specs.values())
        specs = {node: list({home[self._envs.specs[role]]: None for role in found}) for node, found in roles.items()}
        interpreters = {(node, spec): self._python_of(spec) for node, found in specs.items() for spec in found}
        unlike = self._unlike_the_drivers(specs, addresses)
        if unlike and self._envs.mode == "shared":
            problem = "cluster.worker_envs is `shared`, but the driver's environment is not on every node:"
            lines = [f"  node {addresses[node]}, {spec.name}: {reason}" for (node, spec), reason in unlike.items()]
            remedy = (
                "Put it on a file system that all nodes see under the same path, or use cluster.worker_envs=auto, "
                "which builds it there."
            )
            raise WorkerEnvironmentError("\n".join([problem, *lines, remedy]))
        if unlike:
            interpreters |= self._build(unlike, addresses)
        for node, found in roles.items():
            before = self._prepared[node]
            own = {role: interpreters[node, home[self._envs.specs[role]]] for role in found}
            self._prepared[node] = PreparedNode(before.address, before.facts, {**before.interpreters, **own})

    def _python_of(self, spec: WorkerEnvSpec) -> str:
        """Return the driver's interpreter of an environment."""
        role = next(role for role, other in self._envs.specs.items() if other == spec)
        return self._envs.interpreters[role]

    def _unlike_the_drivers(
        self, specs: Mapping[str, Sequence[WorkerEnvSpec]], addresses: Mapping[str, str]
    ) -> dict[tuple[str, WorkerEnvSpec], str]:
        """Return the environments of a node that differ from the driver's, with the differences."""
        identities = {spec: identity_of(spec) for found in specs.values() for spec in found}
        mine = {spec: report(identity, self._python_of(spec)) for spec, identity in identities.items()}
        found = self._on_each(
            addresses,
            "the check of its environments",
            all_differences,
            lambda node: ([(identities[spec], self._python_of(spec), mine[spec]) for spec in specs[node]],),
        )
        return {
            (node, spec): "; ".join(problems)
            for node in specs
            for spec, problems in zip(specs[node], found[node], strict=True)
            if problems
        }

    def _build(
        self, unlike: Mapping[tuple[str, WorkerEnvSpec], str], addresses: Mapping[str, str]
    ) -> dict[tuple[str, WorkerEnvSpec], str]:
        """Find, build or copy environments on nodes that differ from the driver's.

        An environment that no node has is built on one of them, which may compile for an hour, and copied to the others
        through Ray's object store: every node that has a part passes it on.
        """
        written = {spec: portable_plan(spec) for spec in dict.fromkeys(spec for _, spec in unlike)}
        plans = {spec: ray.put(plan) for spec, plan in written.items()}
        found: dict[tuple[str, WorkerEnvSpec], BuiltEnv | str] = {}

        def call(keys: Iterable[tuple[str, WorkerEnvSpec]], parts: Mapping[WorkerEnvSpec, Sequence[Any]]) -> None:
            refs = {key: _pinned(built, key[0]).remote(plans[key[1]], parts.get(key[1])) for key in keys}
            where = {key: f"{addresses[key[0]]} ({key[1].name})" for key in refs}
            found.update(_collect(refs, where, "worker environments", self._build_timeout_s))

        def holders() -> dict[WorkerEnvSpec, list[str]]:
            wanted = [replace(plan, files={}) for plan in written.values()]
            asked = {node: addresses[node] for node, _ in unlike} | {self._home: "the driver's node"}
            pythons = self._on_each(asked, "the list of its environments", held, lambda _: (wanted,))
            return {spec: [node for node in asked if pythons[node][place]] for place, spec in enumerate(plans)}

        holding = holders()
        builders = {spec: node for node, spec in reversed(list(unlike)) if not holding[spec]}
        for (node, spec), reason in unlike.items():
            if builders.get(spec) == node:
                _log.info("node %s: building environment %s there: %s", addresses[node], spec.name, reason)
        if builders:
            call([(node, spec) for spec, node in builders.items()], {})
            # The folder of environments may be shared by the nodes.
            holding = holders() if len(unlike) > len(builders) else holding
        rest = [key for key in unlike if key not in found]
        copied = [key for key in rest if holding[key[1]] and key[0] not in holding[key[1]]]
        parts = {}
        for spec in dict.fromkeys(spec for _, spec in copied):
            _log.info("environment %s: copied from one node to the others", spec.name)
            source = _pinned(packed, holding[spec][0]).options(num_returns="streaming")
            parts[spec] = list(source.remote(plans[spec]))
        call([key for key in rest if key not in copied], {})
        call(copied, parts)
        parts.clear()
        uncopied = [key for key in copied if isinstance(found[key], str)]
        for node, spec in uncopied:
            _log.warning("node %s: environment %s is built there: %s", addresses[node], spec.name, found[node, spec])
        call(uncopied, {})
        failed = {key: result for key, result in found.items() if isinstance(result, str)}
        if failed:
            lines = [
                f"node {addresses[node]}, environment {spec.name}: {text}" for (node, spec), text in failed.items()
            ]
            raise WorkerEnvironmentError(
                "\n".join(lines) + "\nCheck the node's network and disk (RL_HOME on the node is the folder of its "
                "environments), or put the driver's environment on a file system that all nodes share and set "
                "cluster.worker_envs=shared."
            )
        pythons = {}
        for (node, spec), env in found.items():
            assert not isinstance(env, str)
            made = "copied" if (node, spec) in copied else "built"
            how = "cached" if env.cached else f"{made} in {env.seconds:.0f} s"
            _log.info("node %s: environment %s: %s", addresses[node], spec.name, how)
            pythons[node, spec] = env.python
        return pythons

    def _on_each(
        self,
        addresses: Mapping[str, str],
        awaited: str,
        function: Callable[..., T],
        arguments: Callable[[str], tuple[Any, ...]],
    ) -> dict[str, T]:
        """Call a function on each node, with arguments by node."""
        refs = {node: _pinned(function, node).remote(*arguments(node)) for node in addresses}
        return _collect(refs, addresses, awaited, self._answer_timeout_s)


def sharing_problems(seen: Mapping[str, Sight], place: Path, token: str, patience_s: float) -> dict[str, str]:
    """Return the problems of nodes that do not share a folder with the driver.

    Args:
        seen: Results of `rl_launch.cluster.node_task.meet`, by the names of the nodes' files.
        place: Folder of the files.
        token: Contents of each.
        patience_s: Maximum seconds until a shared file system shows them.
    """
    problems = {node: sight.problem for node, sight in seen.items() if sight.problem}
    end = time.monotonic() + patience_s
    while True:
        # A listing makes a network file system look again.
        found = {entry.name for entry in place.iterdir()}
        answered = [node for node in seen if node not in problems]
        left = [node for node in answered if node not in found or (place / node).read_text() != token]
        if not left or time.monotonic() >= end:
            return problems | dict.fromkeys(left, "its files there are not visible here")
        time.sleep(0.1)


def listing_problems(folder: str, seen: Mapping[str, Sight]) -> dict[str, str]:
    """Return the problems of nodes whose folder has other files than the driver's."""
    mine, differs = listing(folder), "its files differ from the driver's"
    found = {node: sight.listings[folder] for node, sight in seen.items() if folder in sight.listings}
    return {node: differs if held else "it does not exist" for node, held in found.items() if held != mine}


def _pinned(function: Callable[..., Any], node: str) -> Any:
    pin = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=pin)


def _collect(refs: Mapping[Any, Any], names: Mapping[Any, str], awaited: str, timeout_s: float) -> dict[Any, Any]:
    """Return answers by key; log from time to time which are missing."""
    key_of = {ref: key for key, ref in refs.items()}
    begun, waiting = time.monotonic(), list(key_of)
    while waiting:
        left = begun + timeout_s - time.monotonic()
        late = ", ".join(names[key_of[ref]] for ref in waiting)
        if left <= 0:
            raise WorkerStalled(f"no answer within {timeout_s:.0f} s while waiting for {awaited} on {late}")
        done, waiting = ray.wait(waiting, num_returns=1, timeout=min(left, _REPORT_S))
        if not done:
            _log.info("still waiting for %s on %s after %.0f s", awaited, late, time.monotonic() - begun)
        for ref in done:
            name = names[key_of[ref]]
            try:
                ray.get(ref)
            except RayError as error:
                found = translate(error, FailureOrigin("preparation", 0, name, "start"))
                if isinstance(found, WorkerDied):
                    raise WorkerDied(f"node {name} was lost while waiting for {awaited}: {found.args[0]}") from None
                if isinstance(found, WorkerError):
                    raise WorkerEnvironmentError(f"node {name}, {awaited}: {found.kind}: {found.message}") from None
                raise found from None
    return {key: ray.get(ref) for key, ref in refs.items()}


def _by_reason(problems: Mapping[str, str], addresses: Mapping[str, str]) -> str:
    """Return nodes grouped by their reason, in words."""
    groups: dict[str, list[str]] = {}
    for node, reason in problems.items():
        groups.setdefault(reason, []).append(addresses[node])
    return "; ".join(f"on {', '.join(found)} {reason}" for reason, found in groups.items())


def log_places(workers: Mapping[str, str]) -> None:
    """Log the workers of each node, if there are several.

    Args:
        workers: Ray's id of each worker's node, by the worker's name.
    """
    by_node: dict[str, list[str]] = {}
    for name, node in workers.items():
        by_node.setdefault(node, []).append(name)
    if len(by_node) < 2:
        return
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for number, (node, names) in enumerate(by_node.items(), start=1):
        _log.info("node %d, %s: %s", number, addresses.get(node, "unknown"), ", ".join(names))
