"""Environment variables of workers."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from rl_core.images import STORE_VARIABLE
from rl_launch.worker_envs.node_build import default_root

# An outer `uv run` sets these variables, and a worker that has them would use the driver's project.
_LEAKING = ("UV", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT", "UV_RUN_RECURSION_DEPTH")

FORWARDED_PREFIXES = (
    *("CUDA_", "FI_", "GLOO_", "GOMP_", "HF_", "KMP_", "MALLOC_", "MKL_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_"),
    *("TOKENIZERS_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_", "TRANSFORMERS_", "TRITON_", "UCX_", "VLLM_"),
)
"""Prefixes of the driver's variables that its workers get on every node."""

FORWARDED = frozenset({STORE_VARIABLE})
"""Names of further such variables."""

OF_THE_MACHINE = frozenset({"CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "OMP_NUM_THREADS"})
"""Variables with paths and counts of one machine, and with devices that placement assigns."""

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY)(_|$)")


def worker_variables(python: str) -> dict[str, str]:
    """Return a worker's environment variables that differ from the driver's, for Ray's `env_vars`.

    Ray can empty a variable but not remove it. It replaces `${NAME}` with the variable of the worker's node; so does
    `process_environment`.

    Args:
        python: The worker's interpreter, as `provision` returned it.
    """
    variables = {name: "" for name in _LEAKING if os.environ.get(name)}
    if python != sys.executable:
        # bytecode may be written into a built environment, and its preflight has already done so
        own = str(Path(python).parent.parent)
        # libraries look for the programs of their environment, such as ninja, on the path
        path = f"{own}/bin{os.pathsep}${{PATH}}"
        return variables | {"VIRTUAL_ENV": own, "PATH": path, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": ""}
    if os.environ.get("PYTHONDONTWRITEBYTECODE") and not _is_compiled():
        # importing an engine from source takes more than twice as long, in every worker
        cache = os.environ.get("PYTHONPYCACHEPREFIX") or str(default_root().parent / "pycache")
        variables |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
    return variables


def chosen_variables(*sections: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the user set for a worker.

    Args:
        sections: `env_vars` of the config that apply to it, from the most general to its own. The later win, and all of
            them win over the driver's variables.
    """
    chosen = forwarded_variables()
    for section in sections:
        chosen.update(section)
    return chosen


def forwarded_variables() -> dict[str, str]:
    """Return the driver's variables that its workers get on every node: settings of the engines' libraries.

    Secrets are left out: a token that workers need is listed in `cluster.env_vars`. Variables that describe only the
    driver's machine are left out as well.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if (name in FORWARDED or name.startswith(FORWARDED_PREFIXES))
        and name not in OF_THE_MACHINE
        and not _SECRET.search(name)
    }


def worker_process_environment(python: str) -> dict[str, str]:
    """Return all environment variables of a process that is started with a worker's interpreter."""
    return process_environment(worker_variables(python))


def process_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return all environment variables of a process that is started here with a worker's variables."""
    return {**os.environ, **{name: os.path.expandvars(value) for name, value in variables.items()}}


def _is_compiled() -> bool:
    """Return whether the libraries of the driver's environment have their bytecode."""
    spec = importlib.util.find_spec("numpy")
    assert spec is not None
    assert spec.origin is not None
    return any(Path(spec.origin).parent.glob("__pycache__/__init__.*.pyc"))
