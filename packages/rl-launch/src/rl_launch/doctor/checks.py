"""The checks: each a pure function of a machine and the needs of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from packaging.specifiers import SpecifierSet

from rl_core.install_command import install_command
from rl_launch.cluster.process_limit import remedy as limit_remedy
from rl_launch.cluster.process_limit import threads_of
from rl_launch.cluster.ray_files import folder_problem
from rl_launch.doctor.findings import Check, Diagnosis
from rl_launch.doctor.machine import Machine, driver_remedy
from rl_launch.doctor.needs import Needs
from rl_launch.doctor.room import GIB, Room, size
from rl_launch.planning.accelerators import accelerator_named, accelerator_of
from rl_launch.planning.plan import DEFAULT
from rl_launch.planning.text import verdict
from rl_launch.worker_envs.provision import Availability

NUM_PORTS = 32
"""About as many ports as a run on one machine uses: Ray's services, its workers, process groups, weight transports."""

_ENGINES = ("policy", "generation")
_IN_USE = 0.1
_PLANNED = 0.9
"""Share of a GPU's memory that the state of a model may take."""
_SMALLEST_STORE = 80 * 2**20
"""Size of the smallest object store of Ray, which is placed in /tmp if /dev/shm has less."""
_PROCESS_BYTES = 96 * 2**20
"""Memory that a forked rank or engine of the tiniest model does not share; 120 MiB and more were measured."""


def python(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check the interpreter, whose version the workers share."""
    if machine.python in SpecifierSet(machine.supported_python, prereleases=True):
        yield Diagnosis("python", "ok", machine.python)
    else:
        remedy = f"Install rl-launch into an environment of Python {machine.supported_python}."
        yield Diagnosis("python", "missing", machine.python, remedy)


def packages(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check the requirements of the driver itself, and of this project's packages next to it."""
    if unmet := machine.unmet:
        remedy = f"Install versions of one release: {install_command('rl-launch')}."
        yield Diagnosis("packages of driver", "warning", "; ".join(unmet), remedy)
    else:
        yield Diagnosis("packages of driver", "ok", "all requirements of this project's packages are met")


def plugins(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Report plugins of installed packages that do not load, including the ones that the recipe does not use."""
    for problem in machine.broken_plugins:
        yield Diagnosis("plugins", "warning", problem, "Only recipes that use this plugin are affected.")


def ray(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check Ray, and other clusters of it here."""
    version = machine.ray
    if version is None:
        remedy = f"Install rl-launch again, with Ray: {install_command('rl-launch')}."
        yield Diagnosis("ray", "missing", "not installed", remedy)
        return
    yield _cluster(machine, needs, version, machine.ray_address)
    if (found := folder_problem(machine.ray_folder)) is not None:
        yield Diagnosis("ray folder", "missing", *found)
    if (found := machine.token_problem) is not None:
        yield Diagnosis("ray token", "warning", *found)


def _cluster(machine: Machine, needs: Needs, version: str, address: str) -> Diagnosis:
    processes = machine.ray_processes
    if not address and needs.num_nodes > 1 and not needs.device.is_logical:
        found = f"{version}; the recipe needs {needs.num_nodes} machines, but RAY_ADDRESS is not set"
        remedy = (
            "Start Ray on the machines and set RAY_ADDRESS, set cluster.num_nodes=1, or rehearse it on this machine "
            "with cluster.device=rehearsal."
        )
        return Diagnosis("ray", "missing", found, remedy)
    if address:
        _, _, place = address.rpartition("/")
        is_there = bool(processes) if place == "auto" else place == "local" or machine.answers(place)
        if is_there:
            return Diagnosis("ray", "ok", f"{version}; runs go to the cluster at RAY_ADDRESS={address}")
        remedy = "Start that cluster, or unset RAY_ADDRESS so that runs start their own Ray."
        return Diagnosis("ray", "missing", f"{version}; RAY_ADDRESS is {address}, and nothing answers there", remedy)
    if processes:
        ids = ", ".join(map(str, processes))
        found = f"{version}; another Ray is running here (process {ids}) and uses memory"
        remedy = "A run starts its own Ray. To use the other one instead, set RAY_ADDRESS=auto."
        return Diagnosis("ray", "warning", found, remedy)
    return Diagnosis("ray", "ok", f"{version}; no other Ray is running here")


def uv(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check uv, which builds environments."""
    tool = machine.uv
    if tool is not None:
        yield Diagnosis("uv", "ok", f"{tool.version} ({tool.path})")
        return
    found = machine.availability(needs.workers.values(), needs.worker_envs).values()
    is_needed = any(offer.status == "unavailable" for offer in found)
    text = "not installed" if is_needed else "not installed, but all environments of this recipe exist"
    yield Diagnosis("uv", "missing" if is_needed else "warning", text, f"Install it: {install_command('uv')}.")


def environments(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check the source of each worker's packages, and the builds of the engines."""
    found = machine.availability(needs.workers.values(), needs.worker_envs)
    for role, spec in needs.workers.items():
        offer, engine = found[spec], str(spec.wanted[0])
        if offer.status == "unavailable":
            install = f"install it in the driver's environment: {install_command(engine)}"
            remedy = f"Fix this problem (uv builds environments), or {install}."
            if needs.worker_envs == "shared":
                remedy = f"Set cluster.worker_envs=auto to have it built, or {install}."
            yield Diagnosis(f"packages of {role}", "missing", f"{engine}: {offer.problem}", remedy)
        elif offer.compiled:
            yield Diagnosis(f"packages of {role}", "warning", *_compiled(engine, offer, machine, needs))
        else:
            yield Diagnosis(f"packages of {role}", "ok", f"{engine}: {_described(offer)}")


def _described(offer: Availability) -> str:
    sources = {
        "driver": "in the driver's environment",
        "built": "built",
        "to build": "is built on first use, from uv's cache or package indexes",
    }
    packages = ", ".join(f"{name} {version}" for name, version in offer.packages.items())
    return f"{sources[offer.status]} ({packages})" if packages else sources[offer.status]


def _compiled(engine: str, offer: Availability, machine: Machine, needs: Needs) -> tuple[str, str]:
    """Return the packages that an environment compiles on first use, and how to do that before GPUs are paid for."""
    nvcc = "" if machine.has_cuda_compiler else ", which was not found here"
    found = f"{engine}: {_described(offer)}; {' and '.join(offer.compiled)} is compiled, which takes about an hour on "
    remedy = (
        f"Build it first, also without a GPU: rl worker-envs {needs.recipe} cluster.device=cuda, with RL_HOME on a "
        "file system that all nodes see, or use an image."
    )
    return f"{found}each node that does not share RL_HOME and needs the compiler of CUDA (nvcc){nvcc}", remedy


def torch(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Compare the builds of torch that train and generate with the device and its driver."""
    specs = {role: spec for role, spec in needs.workers.items() if role in _ENGINES}
    found = machine.availability(needs.workers.values(), needs.worker_envs)
    driver = machine.gpu_driver if needs.device.runs_on_gpus else None
    for role, spec in specs.items():
        build = found[spec].torch
        if build is None:
            continue
        kind = {None: "not installed yet", "": "without CUDA"}.get(build.cuda, f"CUDA {build.cuda}")
        text, name = f"{build.version}, {kind}", f"torch of {role}"
        if needs.device.runs_on_gpus and build.cuda == "":
            remedy = "Install a build for CUDA in the driver's environment, or set cluster.worker_envs=isolated."
            yield Diagnosis(name, "missing", f"{text}; the recipe runs on GPUs", remedy)
        elif build.cuda and driver and (remedy := driver_remedy(driver.cuda, build.cuda)):
            yield Diagnosis(name, "missing", f"{text}; the driver {driver.version} runs CUDA {driver.cuda}", remedy)
        else:
            yield Diagnosis(name, "ok", text)


def gpus(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check GPUs and their driver, if the recipe runs on them."""
    usable, wanted = machine.num_gpus, needs.ranks_per_node
    if not needs.device.runs_on_gpus:
        yield Diagnosis("gpus", "ok", f"{usable or 'none'} available; the recipe runs on the CPU")
    elif machine.ray_address and usable < wanted:
        found = f"{usable} of {wanted} on this machine; the run uses those of the cluster at RAY_ADDRESS"
        yield Diagnosis("gpus", "warning", found, "Run rl doctor on a machine of that cluster to check its GPUs.")
    elif usable < wanted:
        remedy = "Run on a machine with GPUs, or set cluster.device=cpu."
        if usable:
            remedy = f"Set cluster.gpus_per_node={usable}, or make more visible (CUDA_VISIBLE_DEVICES)."
        yield Diagnosis("gpus", "missing", f"{usable} available, {wanted} needed on each machine", remedy)
    else:
        yield _driven(usable, machine)


def _driven(usable: int, machine: Machine) -> Diagnosis:
    try:
        driver = machine.gpu_driver
    except OSError as error:
        return Diagnosis("gpus", "missing", str(error), "Install or reload the NVIDIA driver, until nvidia-smi works.")
    if driver is None:
        found = f"{usable} available; their memory and driver are unknown without nvidia-smi"
        return Diagnosis("gpus", "warning", found, "Make nvidia-smi, which comes with the driver, available here.")
    kinds = [f"{gpu.name} ({size(gpu.memory_bytes)})" if gpu.memory_bytes else gpu.name for gpu in driver.gpus]
    inventory = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    text = f"{usable} available of {inventory}; driver {driver.version}, CUDA {driver.cuda}"
    busy = [gpu for gpu in driver.gpus if gpu.memory_bytes and (gpu.used_bytes or 0) > _IN_USE * gpu.memory_bytes]
    if busy:
        remedy = "End the programs that use them, or choose other GPUs with CUDA_VISIBLE_DEVICES."
        return Diagnosis("gpus", "warning", f"{text}; memory of {len(busy)} is in use", remedy)
    return Diagnosis("gpus", "ok", text)


def shared_memory(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check shared memory, which holds Ray's objects, and weights on their way between processes of the CPU."""
    name, space = "shared memory", machine.shared_memory
    remedy = "Give the container more (--shm-size=8g), or mount a larger tmpfs on /dev/shm."
    if space is None:
        yield Diagnosis(name, "missing", "there is no /dev/shm", remedy)
    elif space.free_bytes < _SMALLEST_STORE:
        found = f"{size(space.free_bytes)} of {size(space.total_bytes)} free at /dev/shm; Ray uses /tmp instead"
        yield Diagnosis(name, "warning", f"{found}, which is slower", remedy)
    else:
        yield _room(name, space, least=0, ample=2.0, remedy=remedy)


def ports(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check loopback ports, which Ray and process groups communicate through."""
    try:
        machine.open_ports(NUM_PORTS)
    except OSError as error:
        remedy = "Allow processes to listen and connect on 127.0.0.1."
        yield Diagnosis("ports", "missing", f"{NUM_PORTS} loopback ports could not be used: {error}", remedy)
    else:
        yield Diagnosis("ports", "ok", f"{NUM_PORTS} loopback ports opened")


def disk(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check the room for environments, packages, runs and Ray's own files."""
    found = machine.availability(needs.workers.values(), needs.worker_envs).values()
    builds = any(offer.status == "to build" for offer in found)
    home, cache = machine.home, machine.uv_cache
    least, ample = (8.0, 20.0) if builds else (0.25, 2.0)
    remedy = "Free some, or set RL_HOME to a folder with space that you may write to."
    yield _room("disk of RL_HOME", machine.space(home), least=least, ample=ample, remedy=remedy)
    if builds and cache is not None:
        remedy = "Free some (uv cache prune), or set UV_CACHE_DIR to a folder with space on RL_HOME's file system."
        yield _room("disk of uv's cache", machine.space(cache), least=least, ample=ample, remedy=remedy)
    remedy = "Free some, lower checkpointing.keep_top_k, or set run_dir to a folder with space that you may write to."
    needed, note = _checkpoints(needs)
    yield _room("disk of runs", machine.space(needs.runs), least=0.25, ample=needed / GIB, remedy=remedy, note=note)
    name, space = "disk of Ray", machine.space(machine.ray_folder)
    remedy = "Free some, or set RAY_TMPDIR to a short path with space that you may write to."
    if space.is_writable and space.free_bytes < 0.05 * space.total_bytes:
        free = f"{size(space.free_bytes)} free at {space.folder}, under 5%: Ray will spill no objects to it"
        yield Diagnosis(name, "warning", free, remedy)
    else:
        yield _room(name, space, least=0.25, ample=2.0, remedy=remedy)


def _checkpoints(needs: Needs) -> tuple[float, str]:
    """Return the maximum bytes of the checkpoints of a run, or of a first few, and the same in words."""
    num_bytes, count = sum(model.checkpoint_bytes for model in needs.models), needs.num_checkpoints
    if not num_bytes or count == 0:
        return 5.0 * GIB, ""
    kept = "keeps all of them" if count is None else f"keeps up to {count}, the one being written included"
    return num_bytes * (count or 1), f"a checkpoint takes about {size(num_bytes)}, and the run {kept}"


def _room(name: str, space: Room, *, least: float, ample: float, remedy: str, note: str = "") -> Diagnosis:
    """Return a finding on free space.

    Args:
        name: Name of the check.
        space: Free space to judge.
        least: Minimum free GiB of a run.
        ample: Minimum free GiB without a warning.
        remedy: Remedy to show if there is too little.
        note: Files that will be written there, in words.
    """
    free = f"{size(space.free_bytes)} of {size(space.total_bytes)} free at {space.folder}"
    written = f"; {note}" if note else ""
    if not space.is_writable:
        return Diagnosis(name, "missing", f"{space.folder} is not writable", remedy)
    if space.free_bytes < least * GIB:
        return Diagnosis(name, "missing", f"{free}; {size(least * GIB)} are needed", remedy)
    if space.free_bytes < ample * GIB:
        return Diagnosis(name, "warning", free + (written or "; this is too little for larger models"), remedy)
    return Diagnosis(name, "ok", free + written)


def scoring(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check environments that need something of the machine, such as a sandbox for programs that a model writes."""
    for environment in needs.environments:
        problem = machine.environment_problem(environment)
        if problem is not None:
            name = f"environment {environment.label}"
            yield (
                Diagnosis(name, "missing", problem) if problem else Diagnosis(name, "ok", "it can run on this machine")
            )


def servers(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check servers that generate elsewhere: that they answer, and were started with what the run needs."""
    if needs.server_problems is not None:
        problems = needs.server_problems()
        yield from (Diagnosis("servers", "missing", problem) for problem in problems)
        if not problems:
            yield Diagnosis("servers", "ok", "all servers answer, and serve what the run needs")


def open_files(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check the limit of open files, which Ray raises as far as it may."""
    _, most = machine.open_files
    if most < 4096:
        remedy = "Raise the limit: ulimit -Hn 65536, or the container's --ulimit nofile."
        yield Diagnosis("open files", "warning", f"at most {most} per process, which is little for Ray", remedy)
    else:
        yield Diagnosis("open files", "ok", f"up to {most} per process")


def process_limit(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check the limit of processes and threads. Ray's library ends a refused process without a word about the limit."""
    limit, name = machine.process_limit, "processes"
    needed = threads_of(needs.num_nodes if needs.device.is_logical else 1, needs.num_ranks + needs.num_engines)
    if limit is None:
        yield Diagnosis(name, "ok", "no limit of processes and threads")
    elif limit.free < needed:
        yield Diagnosis(name, "missing", f"{limit}; the run starts at least {needed} more", limit_remedy(limit))
    else:
        yield Diagnosis(name, "ok", f"{limit.free} more processes and threads may be started")


def memory(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check the memory for Ray, the engines and the driver with the smallest of models."""
    whole, free = machine.memory_bytes, machine.available_bytes
    needed = sum(model.host_bytes for model in needs.models)
    on = "each node" if needs.device.runs_on_gpus else "this machine"
    note = f"; models take about {size(needed)} of host memory on {on} (estimate)" if needed >= GIB else ""
    # A login node need not have the memory of the nodes that it submits to.
    runs_here = not needs.device.runs_on_gpus or machine.num_gpus >= needs.ranks_per_node
    found = f"{size(free)} of {size(whole)} available{note}"
    if problem := processes_problem(whole, needs):
        yield Diagnosis("memory", "missing", f"{found}; {problem}", f"Lower {ranks_keys(needs)}.")
    elif whole < 3.5 * GIB:
        yield Diagnosis("memory", "missing", f"{found}; 4 GiB are needed", "Run on a machine with more memory.")
    elif runs_here and needed > whole:
        smaller = f"a smaller model ({needs.models[0].section}.model_name)"
        remedy = f"Use machines with more memory, more nodes, or {smaller}."
        yield Diagnosis("memory", "warning", found, remedy)
    elif free < 5 * GIB:
        yield Diagnosis(
            "memory", "warning", found, "End other programs; otherwise the system may kill parts of the run."
        )
    else:
        yield Diagnosis("memory", "ok", found)


def models(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check the memory of each GPU that a model needs, as far as the config and the model's own config determine it."""
    if not needs.device.runs_on_gpus:
        return
    capacity = None
    with suppress(OSError):
        gpus = machine.gpu_driver.gpus if machine.gpu_driver else ()
        capacity = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=None)
    for model in needs.models:
        name = f"memory of {model.role}"
        if model.device_bytes is None:
            yield Diagnosis(name, "ok", f"not estimated: the number of parameters of {model.name} is not known here")
            continue
        of = f" of {size(capacity)}" if capacity else ""
        need = f"about {size(model.device_bytes)}{of} on each GPU for weights, gradients and optimizer state"
        found = f"{need}, plus activations (estimate for {model.basis}, {model.ranks} GPU{'s' * (model.ranks > 1)})"
        fits = capacity is None or model.device_bytes <= _PLANNED * capacity
        remedy = f"Use more GPUs, or train adapters ({model.section}.lora_cfg.enabled=true)."
        yield Diagnosis(name, "ok", found) if fits else Diagnosis(name, "warning", found, remedy)


def plan(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Plan the memory of the run on the GPUs of this machine, or on the default device if it has none that is known."""
    if needs.plan_on is None:
        return
    accelerator = None
    with suppress(OSError):
        gpus = machine.gpu_driver.gpus if machine.gpu_driver else ()
        accelerator = next((found for gpu in gpus if (found := accelerator_of(gpu.name))), None)
    planned = needs.plan_on(accelerator or accelerator_named(DEFAULT))
    if planned.fits is False:
        remedy = (
            f"rl plan {needs.recipe} --device {planned.machines.accelerator.name}, with the same overrides, has the "
            "smallest change that fits."
        )
        yield Diagnosis("plan", "warning", verdict(planned), remedy)
    else:
        yield Diagnosis("plan", "ok", verdict(planned))


def processes_problem(memory_bytes: int, needs: Needs) -> str:
    """Return why the ranks and engines of a recipe on the CPU cannot fit into a machine's memory; empty if they may."""
    least = 0 if needs.device.runs_on_gpus else (needs.num_ranks + needs.num_engines) * _PROCESS_BYTES
    return f"{_processes(needs)} take at least {size(least)}" if memory_bytes < least else ""


def cores(machine: Machine, needs: Needs) -> Iterator[Diagnosis]:
    """Check the cores, which the ranks share if they run on the CPU."""
    usable, ranks = machine.cores, needs.num_ranks
    if not needs.device.runs_on_gpus and usable < ranks:
        remedy = f"Set {needs.device.ranks_key}={max(1, int(usable))}, or expect slow steps."
        if needs.device.is_logical:
            remedy = f"Expect slow steps, or lower {ranks_keys(needs)}."
        yield Diagnosis("cores", "warning", f"{usable:g} for {_processes(needs)}", remedy)
    else:
        yield Diagnosis("cores", "ok", f"{usable:g}")


def _processes(needs: Needs) -> str:
    counts = {"rank": needs.num_ranks, "engine": needs.num_engines}
    return " and ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)


def ranks_keys(needs: Needs) -> str:
    """Return the keys of the config that decide how many processes a machine runs."""
    keys = ["cluster.num_nodes"] if needs.device.is_logical and needs.num_nodes > 1 else []
    return " or ".join([*keys, needs.device.ranks_key])


CHECKS: Mapping[str, Check] = {
    "python": python,
    "packages of driver": packages,
    "plugins": plugins,
    "ray": ray,
    "uv": uv,
    "packages of workers": environments,
    "torch": torch,
    "gpus": gpus,
    "shared memory": shared_memory,
    "ports": ports,
    "disk": disk,
    "memory": memory,
    "memory of models": models,
    "plan": plan,
    "cores": cores,
    "open files": open_files,
    "processes": process_limit,
    "environments": scoring,
    "servers": servers,
}
"""The checks of `rl doctor`, in its order. The name is shown if the check itself fails."""
