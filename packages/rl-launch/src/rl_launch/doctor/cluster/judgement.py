"""Judgement of a cluster: pure functions from the results of all probes to findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from rl_launch.doctor.cluster.node_readings import Readings
from rl_launch.doctor.cluster.survey import Survey
from rl_launch.doctor.findings import Diagnosis, Status
from rl_launch.doctor.machine import driver_remedy
from rl_launch.doctor.room import GIB, Room, size

CLOCK_S = 0.1
"""Maximum difference of a clock in seconds: spans of a timeline, and lines of logs, are ordered by it."""

FASTEST_OF_ONE_STREAM = 1.25e9
"""Bytes/s that one TCP connection of Python reaches on any machine; faster links are not judged by it."""

_POOR = 0.25
"""Share of the promised rate below which an all-reduce of NCCL takes the wrong way."""

SLOW = 0.5
"""Share of the cluster's median below which a node or a pair is slow."""

MIN_NODES = 3
"""Minimum number of nodes that distinguishes a slow node from a slow pair."""

_IN_USE = 0.1
_MIN_FILES = 4096
_MIN_PROCESSES = 4096
_MIN_LOCKED_BYTES = 2**30
_MIN_GIB, _AMPLE_GIB = 0.25, 5.0

_FREE = {
    "runs": "Free some, or set run_dir to a folder with space that you may write to.",
    "temporary files": "Free some, or set TMPDIR before Ray starts on the node.",
    "Ray": "Free some, or start Ray with --temp-dir on a disk with space.",
    "RL_HOME": "Free some, or set RL_HOME before Ray starts on the node.",
}


def nodes(survey: Survey) -> Iterator[Diagnosis]:
    """Check the number of nodes, and report nodes that do not answer."""
    usable, wanted = survey.usable, survey.num_nodes
    unit = "GPUs" if survey.device.has_gpus else "CPUs"
    found = f"{len(survey.nodes)} in the cluster, {len(usable)} with {survey.ranks_per_node} {unit}; {wanted} needed"
    if len(usable) >= wanted:
        yield Diagnosis("nodes", "ok", found)
    elif survey.autoscaling:
        yield Diagnosis("nodes", "warning", found, "The cluster must add the rest when the run starts.")
    else:
        keys = f"cluster.num_nodes or {survey.device.ranks_key}"
        yield Diagnosis("nodes", "missing", found, f"Start Ray on more nodes, or decrease {keys}.")
    for name, problem in survey.silent.items():
        remedy = "Look at the logs of Ray on the node, restart Ray there, or take the node out of the cluster."
        yield Diagnosis(f"node {name}", "missing", problem, remedy)


def clocks(survey: Survey) -> Iterator[Diagnosis]:
    """Compare clocks with the driver's."""
    off = {name: clock for name, clock in survey.clocks.items() if abs(clock.offset_s) - clock.uncertainty_s > CLOCK_S}
    for name, clock in off.items():
        side = "ahead of" if clock.offset_s > 0 else "behind"
        found = f"{abs(clock.offset_s):.3g} s {side} the driver's clock (± {1000 * clock.uncertainty_s:.2g} ms)"
        yield Diagnosis(f"clock of {name}", "warning", found, "Synchronise it: chronyc tracking, or timedatectl.")
    if survey.clocks and not off:
        most = max(survey.clocks.values(), key=lambda clock: abs(clock.offset_s))
        found = f"within {1000 * abs(most.offset_s):.2g} ms of the driver's (± {1000 * most.uncertainty_s:.2g} ms)"
        yield Diagnosis("clocks", "ok", found)


def versions(survey: Survey) -> Iterator[Diagnosis]:
    """Compare Python and Ray, which must be the driver's, and the GPUs' driver, which should be the same everywhere."""
    for what, drivers in survey.versions.items():
        own = {name: getattr(each, what) for name, each in survey.readings.items()}
        others = {name: f"{found}; the driver's is {drivers}" for name, found in own.items() if found != drivers}
        remedy = f"Install {what} {drivers} on the node."
        yield from grouped(f"{what} of", others, "missing", remedy)
        if own and not others:
            yield Diagnosis(what, "ok", f"{drivers} on all nodes")
    having = {name: each for name, each in survey.readings.items() if each.gpus.driver}
    for cuda in dict.fromkeys(each.gpus.cuda for each in having.values()):
        if survey.cuda and (remedy := driver_remedy(cuda, survey.cuda)):
            text = f"runs CUDA {cuda}; torch is built for {survey.cuda}"
            old = {name: each.gpus.driver for name, each in having.items() if each.gpus.cuda == cuda}
            found = {name: f"{driver} {text}" for name, driver in old.items()}
            yield from grouped("NVIDIA driver of", found, "missing", remedy)
    for what, read in _OF_GPUS.items():
        yield from _alike(what, {name: read(each) for name, each in having.items()})


_OF_GPUS: Mapping[str, Callable[[Readings], str]] = {
    "NVIDIA driver": lambda each: each.gpus.driver,
    "CUDA of the driver": lambda each: each.gpus.cuda,
    "GPU models": lambda each: _inventory(gpu.name for gpu in each.gpus.gpus),
    "NVLinks": lambda each: _inventory(f"{gpu.num_nvlinks} NVLinks" for gpu in each.gpus.gpus),
}


def _inventory(kinds: Iterable[str]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).items())


def _alike(what: str, values: Mapping[str, str]) -> Iterator[Diagnosis]:
    if not values:
        return
    usual, _ = Counter(values.values()).most_common(1)[0]
    others = {name: f"{found or 'none'}; most nodes have {usual}" for name, found in values.items() if found != usual}
    yield from grouped(f"{what} of", others, "warning", "Use nodes that are alike: the slowest one sets the pace.")
    if not others:
        yield Diagnosis(what, "ok", f"{usual} on all nodes with GPUs")


def gpus(survey: Survey) -> Iterator[Diagnosis]:
    """Check GPUs: their number, faults, and memory that others use."""
    if not survey.device.runs_on_gpus:
        return
    readings = {name: survey.readings[name] for name in survey.usable if name in survey.readings}
    broken = {name: each.gpus.problem for name, each in readings.items() if each.gpus.problem}
    yield from grouped("GPUs of", broken, "missing", "Install or reload the NVIDIA driver, until nvidia-smi works.")
    few = {
        name: f"{len(each.gpus.gpus)} answer, and Ray was started with {survey.nodes[name].num_devices}"
        for name, each in readings.items()
        if name not in broken and len(each.gpus.gpus) < survey.nodes[name].num_devices
    }
    yield from grouped("GPUs of", few, "missing", "Restart the node, or replace the GPU that nvidia-smi does not show.")
    faults = [(name, fault) for name, each in readings.items() for fault in each.gpus.faults]
    for name, fault in faults:
        remedy = "Reset the GPU (nvidia-smi --gpu-reset), and look for Xid errors in dmesg."
        yield Diagnosis(f"GPUs of {name}", "missing" if fault.is_fatal else "warning", fault.text, remedy)
    busy = {name: text for name, each in readings.items() if (text := _busy(each))}
    yield from grouped("GPU memory of", busy, "warning", "End the programs that use it: nvidia-smi lists them.")
    if readings and not broken and not few and not faults and not busy:
        num_gpus = sum(len(each.gpus.gpus) for each in readings.values())
        yield Diagnosis("gpus", "ok", f"{num_gpus} without faults, all free")


def _busy(readings: Readings) -> str:
    used = [
        f"GPU {gpu.index} {size(gpu.used_bytes)}"
        for gpu in readings.gpus.gpus
        if gpu.memory_bytes and gpu.used_bytes and gpu.used_bytes > _IN_USE * gpu.memory_bytes
    ]
    return f"in use by others: {', '.join(used)}" if used else ""


def folders(survey: Survey) -> Iterator[Diagnosis]:
    """Check the folder of runs, and folders of models."""
    remedy = "Set run_dir to a folder on a file system that all nodes see under the same path."
    unshared = {name: f"{survey.runs}: {text}" for name, text in survey.unshared.items()}
    yield from grouped("run directory on", unshared, "missing", remedy)
    if not survey.unshared and len(survey.readings) > 1:
        yield Diagnosis("run directory", "ok", f"{survey.runs} is shared by all nodes")
    for key, problems in survey.unlike_models.items():
        remedy = "Put it on a shared file system, copy it to the same path on every node, or pass a hub name."
        yield from grouped(f"{key} on", problems, "missing", remedy)


def disks(survey: Survey) -> Iterator[Diagnosis]:
    """Check the free space of each folder that a run writes to."""
    least: dict[str, Room] = {}
    for name, each in survey.readings.items():
        for use, room in each.rooms.items():
            if use not in least or room.free_bytes < least[use].free_bytes:
                least[use] = room
            if not room.is_writable:
                found = f"{room.folder} is not writable"
            elif room.free_bytes < _AMPLE_GIB * GIB:
                found = f"{size(room.free_bytes)} of {size(room.total_bytes)} free at {room.folder}"
            else:
                continue
            is_missing = not room.is_writable or room.free_bytes < _MIN_GIB * GIB
            yield Diagnosis(f"disk of {use} on {name}", "missing" if is_missing else "warning", found, _FREE[use])
    if least:
        shown = ", ".join(f"{size(room.free_bytes)} for {use}" for use, room in least.items())
        yield Diagnosis("disks", "ok", f"free on every node: {shown}")


def shared_memory(survey: Survey) -> Iterator[Diagnosis]:
    """Check /dev/shm, which must hold Ray's object store."""
    remedy = "Give the container more (--shm-size), mount a larger tmpfs, or start Ray with a smaller object store."
    small = {}
    for name, each in survey.readings.items():
        store = survey.nodes[name].object_store_bytes
        if each.shared_memory is None:
            small[name] = "there is no /dev/shm"
        elif each.shared_memory.total_bytes < store:
            small[name] = f"{size(each.shared_memory.total_bytes)}, less than Ray's object store of {size(store)}"
    yield from grouped("shared memory of", small, "warning", remedy)
    sizes = [each.shared_memory.total_bytes for each in survey.readings.values() if each.shared_memory is not None]
    if sizes and not small:
        yield Diagnosis("shared memory", "ok", f"at least {size(min(sizes))} on every node")


def limits(survey: Survey) -> Iterator[Diagnosis]:
    """Check the limits of processes."""
    low: dict[str, str] = {}
    for name, each in survey.readings.items():
        least = {"nofile": _MIN_FILES, "nproc": _MIN_PROCESSES}
        if survey.device.runs_on_gpus and each.infiniband_bytes_per_s:
            least["memlock"] = _MIN_LOCKED_BYTES
        found = {kind: each.limits.get(kind) for kind in least}
        if few := [f"{kind} {value}" for kind, value in found.items() if value is not None and value < least[kind]]:
            low[name] = ", ".join(few)
    remedy = "Raise them for the process that starts Ray: ulimit -Hn, -Hu, -Hl, or the container's --ulimit."
    yield from grouped("limits of", low, "warning", remedy)
    if survey.readings and not low:
        yield Diagnosis("limits", "ok", "open files, processes and locked memory are sufficient on all nodes")


def hub(survey: Survey) -> Iterator[Diagnosis]:
    """Check the connection to the model hub, if the recipe has models there."""
    if survey.hub is None:
        return
    remedy = "Allow the connection (HTTPS_PROXY), set HF_ENDPOINT, or download the models to a shared HF_HOME."
    yield from grouped("model hub on", survey.hub, "missing", remedy)
    if not survey.hub:
        yield Diagnosis("model hub", "ok", "all nodes reach the recipe's models")


def ports(survey: Survey) -> Iterator[Diagnosis]:
    """Report failed connections between nodes, in both directions."""
    for (sender, receiver), problem in survey.broken.items():
        remedy = "Allow TCP between the nodes on all ports, and check that Ray has the address of the right interface."
        yield Diagnosis(f"ports from {sender} to {receiver}", "missing", problem, remedy)
    if survey.rates and not survey.broken:
        yield Diagnosis("ports", "ok", "every node connects to a free port of every other node")


def links(survey: Survey) -> Iterator[Diagnosis]:
    """Report links that are down, or slower than the links of most nodes."""
    inactive = {name: ", ".join(each.inactive_infiniband) for name, each in survey.readings.items()}
    down = {name: f"not active: {found}" for name, found in inactive.items() if found}
    yield from grouped("InfiniBand of", down, "warning", "Check the port (ibstat) and the subnet manager.")
    ethernet = {name: each.ethernet_bytes_per_s for name, each in survey.readings.items()}
    infiniband = {name: sum(each.infiniband_bytes_per_s.values()) or None for name, each in survey.readings.items()}
    for what, rates in (("network interface", ethernet), ("InfiniBand", infiniband)):
        known = {name: found for name, found in rates.items() if found is not None}
        if not known:
            continue
        usual, _ = Counter(known.values()).most_common(1)[0]
        slow = {name: f"{rate(found)}, most nodes have {rate(usual)}" for name, found in known.items() if found < usual}
        yield from grouped(f"{what} of", slow, "warning", "Check its cables and ports (ethtool, ibstat).")


def bandwidth(survey: Survey) -> Iterator[Diagnosis]:
    """Report nodes and pairs of nodes that are slower than the others."""
    if not survey.rates:
        return
    nodes, pairs, usual = blame(survey.rates)
    for name, (verb, slow, others) in nodes.items():
        text = f"{verb} at {rate(slow)}, the median of the cluster is {rate(others)}"
        remedy = "Check its link (ethtool, ibstat, ip -s link), or take the node out of the cluster."
        yield Diagnosis(f"bandwidth of {name}", "warning", text, remedy)
    for (sender, receiver), slow in pairs.items():
        if (sender, receiver) not in survey.broken:
            text = f"{rate(slow)}, the median of the cluster is {rate(usual)}"
            remedy = "Check the path between these two nodes: switches, cables, routes."
            yield Diagnosis(f"bandwidth from {sender} to {receiver}", "warning", text, remedy)
    promised = [each.ethernet_bytes_per_s for each in survey.readings.values() if each.ethernet_bytes_per_s]
    text = f"{rate(usual)} by TCP, the median of {len(survey.rates)} transfers between pairs of nodes"
    text += f"; the interfaces promise {rate(min(promised))}" if promised else "; the interfaces promise no rate"
    if promised and usual < min(promised) / 2 and min(promised) <= FASTEST_OF_ONE_STREAM:
        yield Diagnosis("bandwidth", "warning", text, "Check the network: other traffic, MTU, switches.")
    else:
        yield Diagnosis("bandwidth", "ok", text)


def all_reduce(survey: Survey) -> Iterator[Diagnosis]:
    """Judge the all-reduce in the process group that models have."""
    found, library = survey.all_reduce, survey.device.collectives
    if found.skipped:
        status: Status = "warning" if found.remedy else "ok"
        yield Diagnosis("all-reduce", status, f"not measured: {found.skipped}", found.remedy)
        return
    hint = "NCCL_DEBUG=INFO" if library == "nccl" else "GLOO_SOCKET_IFNAME"
    remedy = f"Check the network of these nodes; see {hint} and the other variables of docs/several-machines.md."
    yield from grouped("all-reduce on", found.problems, "missing", remedy)
    speed = found.bus_bytes_per_s
    if speed is None:
        return
    assert found.seconds is not None
    text = (
        f"{rate(speed)} of bus bandwidth by {library} over {found.num_ranks} ranks on {found.num_nodes} nodes "
        f"({size(found.num_bytes)} in {1000 * found.seconds:.3g} ms)"
    )
    kind, promised = _promise(survey)
    text += f"; {kind} promises {rate(promised)}" if promised else "; the links promise no rate"
    if library == "nccl" and promised and speed < _POOR * promised:
        remedy = "Run it with NCCL_DEBUG=INFO to see the links in use, and set NCCL_IB_HCA or NCCL_SOCKET_IFNAME."
        yield Diagnosis("all-reduce", "warning", text, remedy)
    else:
        yield Diagnosis("all-reduce", "ok", text)


def _promise(survey: Survey) -> tuple[str, float | None]:
    """Return the slowest link of an all-reduce and its rate in bytes/s; None if it is unknown."""
    readings = [survey.readings[name] for name in survey.usable if name in survey.readings]
    if survey.all_reduce.num_nodes == 1:
        speeds = [gpu.nvlink_bytes_per_s for each in readings for gpu in each.gpus.gpus]
        return "NVLink", min((speed for speed in speeds if speed), default=None)
    fabrics = [sum(each.infiniband_bytes_per_s.values()) for each in readings]
    if survey.device.collectives == "nccl" and fabrics and all(fabrics):
        return "InfiniBand", min(fabrics)
    rates = [each.ethernet_bytes_per_s for each in readings if each.ethernet_bytes_per_s]
    return "Ethernet", min(rates, default=None)


def judged(survey: Survey) -> Iterator[Diagnosis]:
    """Yield the findings of all checks of `rl doctor --cluster`, in its order."""
    on_nodes = (nodes, versions, gpus, clocks, folders, disks, shared_memory, limits, hub)
    for check in (*on_nodes, ports, links, bandwidth, all_reduce):
        yield from check(survey)


class SlowNode(NamedTuple):
    """A node that is slow with most others.

    Attributes:
        verb: `sends` or `receives`.
        rate: Its median in this direction in bytes/s; 0 if nothing arrives.
        others: Median of all nodes in bytes/s.
    """

    verb: str
    rate: float
    others: float


class Blame(NamedTuple):
    """The slow parts of a network.

    Attributes:
        nodes: Slow nodes by name.
        pairs: Bandwidth in bytes/s of slow pairs (sender, receiver) of nodes that are not slow themselves.
        rate: Median of all pairs without slow nodes in bytes/s.
    """

    nodes: Mapping[str, SlowNode]
    pairs: Mapping[tuple[str, str], float]
    rate: float


def blame(rates: Mapping[tuple[str, str], float]) -> Blame:
    """Return the slow nodes and pairs of a matrix of bandwidths.

    A node is slow if its median, as a sender or as a receiver, is under half of the median of all nodes. A pair is slow
    if it is under half of the median of the pairs without slow nodes. With two nodes, only the slower direction can be
    reported, as a pair.

    Args:
        rates: Bytes/s by sender and receiver; 0 if no connection was possible.
    """
    names = list(dict.fromkeys(name for pair in rates for name in pair))
    slow: dict[str, SlowNode] = {}
    if len(names) >= MIN_NODES:
        for place, verb in enumerate(("sends", "receives")):
            own = {name: [speed for pair, speed in rates.items() if pair[place] == name] for name in names}
            medians = {name: median(found) for name, found in own.items() if found}
            others = median(medians.values())
            for name, speed in medians.items():
                if speed < SLOW * others and (name not in slow or speed < slow[name].rate):
                    slow[name] = SlowNode(verb, speed, others)
    rest = {pair: speed for pair, speed in rates.items() if not slow.keys() & set(pair)}
    speed = median(rest.values()) if rest else 0.0
    return Blame(slow, {pair: found for pair, found in rest.items() if found < SLOW * speed}, speed)


def grouped(subject: str, problems: Mapping[str, str], status: Status, remedy: str) -> Iterator[Diagnosis]:
    """Yield a finding for each different problem, with its nodes.

    Args:
        subject: Beginning of the name of the finding.
        problems: Problems by node.
        status: Status of the findings.
        remedy: Remedy of the findings.
    """
    for text in dict.fromkeys(problems.values()):
        names = [name for name, found in problems.items() if found == text]
        yield Diagnosis(f"{subject} {', '.join(names)}", status, text, remedy)


def rate(bytes_per_s: float) -> str:
    """Return a rate in words, such as `9.4 Gbit/s`."""
    gigabits = bytes_per_s * 8 / 1e9
    return f"{gigabits:.0f} Gbit/s" if gigabits >= 10 else f"{gigabits:.2g} Gbit/s"
