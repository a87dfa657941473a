"""The process environment an engine is started in."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from rl_core.devices import Device
from rl_core.devices.device import node_address
from rl_core.rollouts.generation import Placement

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
    # the sampler compiles a kernel of its own otherwise, whatever `enforce_eager` says
    return {**DEFAULTS, **({} if device.runs_on_gpus or not eager else {"TORCHDYNAMO_DISABLE": "1"})}


def variables(placement: Placement) -> dict[str, str]:
    """Return the environment variables of vLLM and its processes, for a replica placed so."""
    found = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": node_address(),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # one position more than the model has: scoring a full-length row samples one more token, which is discarded;
        # longer rows are refused before anything starts (rl_core.hf_config.num_positions)
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "OMP_NUM_THREADS": str(placement.cpu_threads),
    }
    if placement.kind.runs_on_gpus:
        # its kernel is compiled at the start, and serves no request with a seed or logprobs after top_p, as all are
        found["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        return found
    # binding threads to cores is left to the scheduler: several replicas and trainers share them
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
    environ.update(variables(placement))
    # one rank on CPU runs inside the engine's process; vLLM would give it another one and halve the throughput
    together = not own_process or (not placement.kind.runs_on_gpus and num_ranks == 1)
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if together else "1"
    defaults = import_variables(placement.kind, eager=eager)
    if not placement.kind.runs_on_gpus:
        defaults |= CPU_DEFAULTS
    if quantises:
        defaults |= QUANTISED_DEFAULTS
    for name, value in defaults.items():
        environ.setdefault(name, value)
    prefix = bytecode_folder(environ)
    if prefix is not None:
        environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(prefix)
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False


def bytecode_folder(environ: Mapping[str, str]) -> Path | None:
    """Folder in which to keep bytecode, if vLLM came without and none can be written next to it; otherwise None.

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
