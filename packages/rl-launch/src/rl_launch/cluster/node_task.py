"""The part of preparing a node that runs on the node itself, as a Ray task.

It needs only the standard library, ray and `node_build`: a node that has ray and nothing of this project runs it, sent
whole with `ray.cloudpickle.register_pickle_by_value`.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from rl_launch.worker_envs.node_build import (
    BuiltEnv,
    EnvBuildError,
    EnvIdentity,
    EnvPlan,
    EnvReport,
    build,
    find_built,
    pack,
    report,
)

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that choose the interface of gloo and NCCL."""

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Files that state a container's share of the machine's cores."""


@dataclass(frozen=True)
class NodeFacts:
    """Facts that a node reports about itself.

    Args:
        cores: Cores that a process may use.
        interface: The network interface that holds the node's address; empty if it was not found.
        variables: The variables of `INTERFACE_VARIABLES` that are set for the node's Ray.
    """

    cores: int
    interface: str
    variables: Mapping[str, str]


class Sight(NamedTuple):
    """The driver's folders as a node sees them.

    Attributes:
        problem: Why the shared folder differs from the driver's; empty if it does not.
        listings: Digest of the names and sizes in each requested folder; empty if the folder does not exist.
    """

    problem: str
    listings: Mapping[str, str]


def facts_of_this_node(address: str) -> NodeFacts:
    """Read the facts of the node that this runs on.

    Args:
        address: Address of the node, as others reach it.
    """
    variables = {name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)}
    return NodeFacts(usable_cores(), interface_of(address), variables)


def usable_cores() -> int:
    """Count the cores that this process may use: its affinity, limited by its control group's share."""
    available = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_LIMIT.read_text().split()
    except (OSError, ValueError):
        return available
    return available if quota == "max" else max(1, min(available, math.ceil(int(quota) / int(period))))


def interface_of(address: str) -> str:
    """Return the name of the network interface that holds an address; empty if there is none."""
    # psutil comes with Ray.
    import ray  # noqa: F401 - makes the next line work where psutil itself is not installed
    import psutil  # isort: skip

    held = {name: [each.address.partition("%")[0] for each in found] for name, found in psutil.net_if_addrs().items()}
    exact = (name for name, addresses in held.items() if address in addresses)
    # The loopback interface has all of 127/8.
    loops = (name for name, addresses in held.items() if "127.0.0.1" in addresses)
    try:
        return next(exact, "") or (next(loops, "") if ip_address(address).is_loopback else "")
    except ValueError:
        return ""


def meet(folder: str, token: str, name: str, folders: Sequence[str], patience_s: float) -> Sight:
    """Read the driver's file in a folder, and write an answer there.

    Args:
        folder: Folder with a file `driver` that holds the token.
        token: Token of this start.
        name: Name of the file to answer with.
        folders: Folders to list.
        patience_s: How long a shared file system may take to show the driver's file.
    """
    end = time.monotonic() + patience_s
    written = Path(folder) / "driver"
    while (found := _text(written)) != token:
        if time.monotonic() >= end:
            return Sight("it does not exist" if found is None else "it is a different folder under the same name", {})
        time.sleep(0.1)
    try:
        (Path(folder) / name).write_text(token)
    except OSError as error:
        return Sight(f"it cannot be written: {error.strerror}", {})
    return Sight("", {each: listing(each) for each in folders})


def listing(folder: str) -> str:
    """Return a digest of the names and sizes of the files in a folder; empty if there is no such folder."""
    try:
        held = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return ""
    return hashlib.sha256(repr(held).encode()).hexdigest()


def all_differences(asked: Sequence[tuple[EnvIdentity, str, EnvReport]]) -> list[list[str]]:
    """Return the reasons that interpreters of this node cannot replace the driver's; empty for one that can.

    Args:
        asked: Required equality, interpreter and report of the driver's environment, for each environment.
    """
    found = []
    for identity, python, driver in asked:
        if not Path(python).exists():
            found.append([f"{python} does not exist there"])
            continue
        try:
            found.append(report(identity, python).differences(driver))
        except EnvBuildError as error:
            found.append([str(error)])
    return found


def held(plans: Sequence[EnvPlan]) -> list[str | None]:
    """Return the interpreters of the environments of plans on this node; None for an environment that is missing."""
    return [find_built(plan) for plan in plans]


def built(plan: EnvPlan, parts: Sequence[Any] | None = None) -> BuiltEnv | str:
    """Return the environment of a plan on this node; the reason as text if that fails.

    Args:
        plan: The environment, built if it is missing.
        parts: References to the objects of `packed`, which are unpacked instead.
    """
    import ray
    from ray.exceptions import RayError

    try:
        # One part at a time is in memory.
        return build(plan, parts=None if parts is None else (ray.get(part) for part in parts))
    except (EnvBuildError, OSError, RayError) as error:
        return str(error)


def packed(plan: EnvPlan) -> Iterator[bytes]:
    """Yield the parts of an environment of this node, each an object of Ray that the other nodes copy."""
    yield from pack(plan)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
