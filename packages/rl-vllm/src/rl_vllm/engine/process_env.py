"""The environment of an engine's processes, and their end with nothing left in shared memory."""

from __future__ import annotations

import importlib.util
import logging
import os
import select
import signal
import sys
from collections.abc import Mapping, MutableMapping
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path
from threading import Thread

from rl_core.devices import Device
from rl_core.devices.device import node_address
from rl_core.rollouts.generation import Placement

_log = logging.getLogger(__name__)

DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING"}
"""Set unless the user has set them."""

CPU_DEFAULTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Set on CPU unless the user has set them. oneDNN keeps 1,024 compiled kernels, one for each shape: hundreds of MB,
which batches of ever other sizes fill and do not use again."""

QUANTISED_DEFAULTS = {"VLLM_USE_DEEP_GEMM": "0"}
"""Set for quantised weights unless the user has set them. With DeepGEMM vLLM quantises blocks a second time, with other
scales, which a weight sync would refuse."""


def import_variables(device: Device, *, eager: bool) -> dict[str, str]:
    """Return the variables that vLLM and torch read when they are imported."""
    # Otherwise the sampler compiles a kernel, also with `enforce_eager`.
    return {**DEFAULTS, **({} if device.runs_on_gpus or not eager else {"TORCHDYNAMO_DISABLE": "1"})}


def variables(placement: Placement) -> dict[str, str]:
    """Return the environment variables of vLLM and its processes, for a replica with this placement."""
    found = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": node_address(),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Scoring a full-length row samples one token more than the model has positions for, which is discarded.
        # Longer rows are refused before anything starts (rl_core.facts.hf_config.num_positions).
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "OMP_NUM_THREADS": str(placement.cpu_threads),
    }
    if placement.kind.runs_on_gpus:
        # Its kernel is compiled at the start, and serves no request with a seed or logprobs after top_p, as all are.
        found["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        return found
    # Binding threads to cores is left to the scheduler: several replicas and trainers share them.
    found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return found


def apply(
    placement: Placement,
    *,
    eager: bool,
    num_ranks: int,
    own_process: bool,
    environ: MutableMapping[str, str],
    quantises: bool = False,
) -> None:
    """Set the environment of this process and of the engine's, before vLLM is imported."""
    environ.update(variables(placement), **{FRONT: str(os.getpid())})
    # One rank on CPU runs inside the engine's process; in a separate one vLLM would halve the throughput.
    together = not own_process or (not placement.kind.runs_on_gpus and num_ranks == 1)
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if together else "1"
    defaults = import_variables(placement.kind, eager=eager)
    if not placement.kind.runs_on_gpus:
        defaults |= CPU_DEFAULTS
    if quantises:
        defaults |= QUANTISED_DEFAULTS
    for name, value in defaults.items():
        environ.setdefault(name, value)
    if placement.kind.runs_on_gpus and importlib.util.find_spec("flashinfer") is None:
        _log.info("FlashInfer is not in this environment: vLLM uses FlashAttention, Triton and its own kernels")
    prefix = bytecode_folder(environ)
    if prefix is not None:
        environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(prefix)
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False


def bytecode_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder for bytecode, if vLLM came without and none can be written next to it; otherwise None.

    Importing vLLM takes twice as long without bytecode.
    """
    spec = importlib.util.find_spec("vllm")
    if sys.pycache_prefix or spec is None or spec.origin is None:
        return None
    beside = Path(importlib.util.cache_from_source(spec.origin))
    if beside.exists() or (not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)):
        return None
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rl-vllm" / "bytecode"


FRONT = "RL_VLLM_FRONT"
"""Environment variable of an engine's processes: the process on their node that they end with."""

CPU_GROUPS = "/dev/shm/vllm_dist_"
"""Beginning of the names of the files that tensor-parallel ranks on CPU reduce through."""


def end_with(pid: int) -> None:
    """End this engine process, and the one above it that is not `pid` itself, as soon as process `pid` has ended.

    vLLM's engine core does not notice when the process in front of it is killed, and would keep its device for ever.
    """
    watched = os.pidfd_open(pid)
    parent = os.getppid()

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        if parent not in (pid, 1):
            os.kill(parent, signal.SIGKILL)
        os._exit(1)

    Thread(target=wait, name="parent-watch", daemon=True).start()


def forget_semaphores() -> None:
    """Remove the names of this process's semaphores from shared memory, which a killed process does not.

    Every process that shares one has opened it by now.
    """
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]  # of Python's own use
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()


def forget_cpu_groups() -> None:
    """Remove the names of the memory that this rank shares with the other ranks of its tensor-parallel group.

    vLLM leaves them, however its engine ends. Every rank of the group has mapped the memory by now.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :]
        if path.startswith(CPU_GROUPS):
            Path(path).unlink(missing_ok=True)
