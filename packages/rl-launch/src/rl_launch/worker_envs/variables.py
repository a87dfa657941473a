"""Environment variables of workers."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from rl_launch.worker_envs.node_build import default_root

# an outer `uv run` leaves these, and a worker would believe it is in the driver's project
_LEAKING = ("UV", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT", "UV_RUN_RECURSION_DEPTH")


def worker_variables(python: str) -> dict[str, str]:
    """What differs in a worker's environment variables from the driver's, for Ray's `env_vars`.

    Ray can empty a variable but not remove it.

    Args:
        python: the worker's interpreter, as `provision` returned it.
    """
    variables = {name: "" for name in _LEAKING if os.environ.get(name)}
    if python != sys.executable:
        # a built environment is ours to write bytecode into, where its preflight has put it already
        return {
            **variables,
            "VIRTUAL_ENV": str(Path(python).parent.parent),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": "",
        }
    if os.environ.get("PYTHONDONTWRITEBYTECODE") and not _is_compiled():
        # importing an engine from source takes more than twice as long, in every worker
        variables["PYTHONDONTWRITEBYTECODE"] = ""
        variables["PYTHONPYCACHEPREFIX"] = os.environ.get("PYTHONPYCACHEPREFIX") or str(
            default_root().parent / "pycache"
        )
    return variables


def worker_process_environment(python: str) -> dict[str, str]:
    """All environment variables of a process that is started with a worker's interpreter."""
    return {**os.environ, **worker_variables(python)}


def _is_compiled() -> bool:
    """Whether the libraries of the driver's environment have their bytecode."""
    spec = importlib.util.find_spec("numpy")
    assert spec is not None
    assert spec.origin is not None
    return any(Path(spec.origin).parent.glob("__pycache__/__init__.*.pyc"))
