"""Conversions of files of weights in an environment with torch, which the driver does not have."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rl_core.config import did_you_mean
from rl_core.errors import ConfigError, RLError
from rl_core.plugins import POLICIES, BackendPlugin, plugin, plugins
from rl_launch.cluster.device import resolve_device
from rl_launch.root_config import POLICY, ClusterConfig
from rl_launch.worker_envs.provision import DriverEnvs, Mode
from rl_launch.worker_envs.spec import worker_env
from rl_launch.worker_envs.variables import worker_process_environment

_KEY = "cluster.worker_envs"
_BACKEND = "dtensor"


def torch_interpreter(overrides: Sequence[str], what: str) -> str:
    """Return the interpreter of the environment of trainers on this machine, which runs share.

    Args:
        overrides: `cluster.worker_envs=...`; no other key has an effect.
        what: What is converted, and how, for messages.

    Raises:
        ConfigError: If another key is set.
        WorkerEnvironmentError: If no environment with torch can be provided.
    """
    mode = _mode(overrides, what)
    found = plugins(POLICIES)
    chosen: BackendPlugin = plugin(POLICIES, _BACKEND if _BACKEND in found else next(iter(found), _BACKEND))
    specs = {POLICY: worker_env(chosen.requirement, resolve_device(ClusterConfig()).extras)}
    return DriverEnvs.provided(specs, mode).interpreters[POLICY]


def answer_of(python: str, script: str, source: Path, target: Path, *arguments: str) -> dict[str, Any]:
    """Run a script on two folders without GPUs; returns the JSON object of its last line.

    Raises:
        ConfigError: If the object has a `problem`.
        RLError: If the script does not finish.
    """
    answer = _answer(python, script, source, target, *arguments)
    if "problem" in answer:
        raise ConfigError(f"{source}: {answer['problem']}")
    return answer


def _answer(python: str, script: str, source: Path, target: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", script, str(source.absolute()), str(target.absolute()), *arguments],
        env={**worker_process_environment(python), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RLError(f"the conversion ended with exit code {done.returncode} in {python}:\n{done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _mode(overrides: Sequence[str], what: str) -> Mode:
    """Return the value of `cluster.worker_envs`.

    Raises:
        ConfigError: If another key is set.
    """
    mode: Mode = "auto"
    for override in overrides:
        key, _, value = override.partition("=")
        allowed = get_args(Mode)
        if key != _KEY:
            raise ConfigError(f"{key} has no effect on {what}; remove it ({_KEY} is the only key)")
        if value not in allowed:
            raise ConfigError(f"{_KEY}: got {value!r}{did_you_mean(value, allowed)}; allowed: {', '.join(allowed)}")
        mode = value  # type: ignore[assignment]  # one of the allowed
    return mode
