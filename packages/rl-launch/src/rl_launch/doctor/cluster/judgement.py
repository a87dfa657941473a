"""Judgement of a cluster: pure functions from the results of all probes to findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from rl_launch.doctor.cluster.network_judgement import all_reduce, bandwidth, links, ports
from rl_launch.doctor.cluster.node_readings import Readings, Room
from rl_launch.doctor.cluster.survey import Survey
from rl_launch.doctor.cluster.words import grouped, size
from rl_launch.doctor.findings import Finding
from rl_launch.doctor.gpus import driver_remedy

CLOCK_S = 0.1
"""Seconds by which a clock may differ: spans of a timeline, and lines of logs, are ordered by it."""

GIB = 2**30
_IN_USE = 0.1
_LEAST_FILES = 4096
_LEAST_PROCESSES = 4096
_LEAST_LOCKED_BYTES = 2**30
_LEAST_GIB, _AMPLE_GIB = 0.25, 5.0

_FREE = {
    "runs": "Free some, or set run_dir to a folder with space that you may write to.",
    "temporary files": "Free some, or set TMPDIR before Ray starts on the node.",
    "Ray": "Free some, or start Ray with --temp-dir on a disk with space.",
    "RL_HOME": "Free some, or set RL_HOME before Ray starts on the node.",
}


def nodes(survey: Survey) -> Iterator[Finding]:
    """Number of nodes, and those that do not answer."""
    usable, wanted = survey.usable, survey.num_nodes
    unit = "GPUs" if survey.device.has_gpus else "CPUs"
    found = f"{len(survey.nodes)} in the cluster, {len(usable)} with {survey.ranks_per_node} {unit}; {wanted} needed"
    if len(usable) >= wanted:
        yield Finding("nodes", "ok", found)
    elif survey.autoscaling:
        yield Finding("nodes", "warning", found, "The cluster must add the rest when the run starts.")
    else:
        keys = f"cluster.num_nodes or {survey.device.ranks_key}"
        yield Finding("nodes", "missing", found, f"Start Ray on more nodes, or decrease {keys}.")
    for name, problem in survey.silent.items():
        remedy = "Look at the logs of Ray on the node, restart Ray there, or take the node out of the cluster."
        yield Finding(f"node {name}", "missing", problem, remedy)


def clocks(survey: Survey) -> Iterator[Finding]:
    """Clocks, compared with the driver's."""
    off = {name: clock for name, clock in survey.clocks.items() if abs(clock.offset_s) - clock.uncertainty_s > CLOCK_S}
    for name, clock in off.items():
        side = "ahead of" if clock.offset_s > 0 else "behind"
        found = f"{abs(clock.offset_s):.3g} s {side} the driver's clock (± {1000 * clock.uncertainty_s:.2g} ms)"
        yield Finding(f"clock of {name}", "warning", found, "Synchronise it: chronyc tracking, or timedatectl.")
    if survey.clocks and not off:
        most = max(survey.clocks.values(), key=lambda clock: abs(clock.offset_s))
        found = f"within {1000 * abs(most.offset_s):.2g} ms of the driver's (± {1000 * most.uncertainty_s:.2g} ms)"
        yield Finding("clocks", "ok", found)


def versions(survey: Survey) -> Iterator[Finding]:
    """Python and Ray, which must be the driver's, and the GPUs' driver, which should be the same everywhere."""
    for what, drivers in survey.versions.items():
        own = {name: getattr(each, what) for name, each in survey.readings.items()}
        others = {name: f"{found}; the driver's is {drivers}" for name, found in own.items() if found != drivers}
        remedy = f"Install {what} {drivers} on the node."
        yield from grouped(f"{what} of", others, "missing", remedy)
        if own and not others:
            yield Finding(what, "ok", f"{drivers} on all nodes")
    having = {name: each for name, each in survey.readings.items() if each.gpus.driver}
    for cuda in dict.fromkeys(each.gpus.cuda for each in having.values()):
        if survey.cuda and (remedy := driver_remedy(cuda, survey.cuda)):
            old = {name: each.gpus.driver for name, each in having.items() if each.gpus.cuda == cuda}
            found = {
                name: f"{driver} runs CUDA {cuda}; torch is built for {survey.cuda}" for name, driver in old.items()
            }
            yield from grouped("NVIDIA driver of", found, "missing", remedy)
    for what, read in _OF_GPUS.items():
        values = {name: read(each) for name, each in having.items()}
        yield from _alike(what, values)


_OF_GPUS: Mapping[str, Callable[[Readings], str]] = {
    "NVIDIA driver": lambda each: each.gpus.driver,
    "CUDA of the driver": lambda each: each.gpus.cuda,
    "GPU models": lambda each: _inventory([gpu.name for gpu in each.gpus.gpus]),
    "NVLinks": lambda each: _inventory([f"{gpu.num_nvlinks} NVLinks" for gpu in each.gpus.gpus]),
}


def _inventory(kinds: Iterable[str]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).items())


def _alike(what: str, values: Mapping[str, str]) -> Iterator[Finding]:
    if not values:
        return
    usual, _ = Counter(values.values()).most_common(1)[0]
    others = {name: f"{found or 'none'}; most nodes have {usual}" for name, found in values.items() if found != usual}
    yield from grouped(f"{what} of", others, "warning", "Use nodes that are alike: the slowest one sets the pace.")
    if not others:
        yield Finding(what, "ok", f"{usual} on all nodes with GPUs")


def gpus(survey: Survey) -> Iterator[Finding]:
    """GPUs: their number, faults, and memory that others use."""
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
        yield Finding(f"GPUs of {name}", "missing" if fault.is_fatal else "warning", fault.text, remedy)
    busy = {name: text for name, each in readings.items() if (text := _busy(each))}
    yield from grouped("GPU memory of", busy, "warning", "End the programs that use it: nvidia-smi lists them.")
    if readings and not broken and not few and not faults and not busy:
        yield Finding(
            "gpus", "ok", f"{sum(len(each.gpus.gpus) for each in readings.values())} without faults, all free"
        )


def _busy(readings: Readings) -> str:
    used = [
        f"GPU {gpu.index} {size(gpu.used_bytes)}"
        for gpu in readings.gpus.gpus
        if gpu.memory_bytes and gpu.used_bytes and gpu.used_bytes > _IN_USE * gpu.memory_bytes
    ]
    return f"in use by others: {', '.join(used)}" if used else ""


def folders(survey: Survey) -> Iterator[Finding]:
    """The folder of runs, and folders of models."""
    remedy = "Set run_dir to a folder on a file system that all nodes see under the same path."
    yield from grouped(
        "run directory on",
        {name: f"{survey.runs}: {text}" for name, text in survey.unshared.items()},
        "missing",
        remedy,
    )
    if not survey.unshared and len(survey.readings) > 1:
        yield Finding("run directory", "ok", f"{survey.runs} is shared by all nodes")
    for key, problems in survey.unlike_models.items():
        remedy = "Put it on a shared file system, copy it to the same path on every node, or pass a hub name."
        yield from grouped(f"{key} on", problems, "missing", remedy)


def disks(survey: Survey) -> Iterator[Finding]:
    """Free space of each folder that a run writes to."""
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
            is_missing = not room.is_writable or room.free_bytes < _LEAST_GIB * GIB
            yield Finding(f"disk of {use} on {name}", "missing" if is_missing else "warning", found, _FREE[use])
    if least:
        shown = ", ".join(f"{size(room.free_bytes)} for {use}" for use, room in least.items())
        yield Finding("disks", "ok", f"free on every node: {shown}")


def shared_memory(survey: Survey) -> Iterator[Finding]:
    """/dev/shm, which must hold Ray's object store."""
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
        yield Finding("shared memory", "ok", f"at least {size(min(sizes))} on every node")


def limits(survey: Survey) -> Iterator[Finding]:
    """Limits of processes."""
    low: dict[str, str] = {}
    for name, each in survey.readings.items():
        least = {"nofile": _LEAST_FILES, "nproc": _LEAST_PROCESSES}
        if survey.device.runs_on_gpus and each.infiniband_bytes_per_s:
            least["memlock"] = _LEAST_LOCKED_BYTES
        found = {kind: each.limits.get(kind) for kind in least}
        if few := [f"{kind} {value}" for kind, value in found.items() if value is not None and value < least[kind]]:
            low[name] = ", ".join(few)
    remedy = "Raise them for the process that starts Ray: ulimit -Hn, -Hu, -Hl, or the container's --ulimit."
    yield from grouped("limits of", low, "warning", remedy)
    if survey.readings and not low:
        yield Finding("limits", "ok", "open files, processes and locked memory are sufficient on all nodes")


def hub(survey: Survey) -> Iterator[Finding]:
    """The model hub, if the recipe names models there."""
    if survey.hub is None:
        return
    remedy = "Allow the connection (HTTPS_PROXY), set HF_ENDPOINT, or download the models to a shared HF_HOME."
    yield from grouped("model hub on", survey.hub, "missing", remedy)
    if not survey.hub:
        yield Finding("model hub", "ok", "all nodes reach the recipe's models")


CLUSTER_CHECKS: tuple[Callable[[Survey], Iterable[Finding]], ...] = (
    nodes,
    versions,
    gpus,
    clocks,
    folders,
    disks,
    shared_memory,
    limits,
    hub,
    ports,
    links,
    bandwidth,
    all_reduce,
)
"""The checks of `rl doctor --cluster`, in its order."""


def judged(survey: Survey) -> Iterator[Finding]:
    """Yield the findings of all checks."""
    for check in CLUSTER_CHECKS:
        yield from check(survey)
