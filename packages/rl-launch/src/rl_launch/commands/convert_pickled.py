"""`rl convert` of a folder with pickled weights (`pytorch_model.bin`) to safetensors, in an environment with torch."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rl_core.config import did_you_mean
from rl_core.errors import ConfigError, RLError
from rl_core.plugins import POLICIES, BackendPlugin, plugin
from rl_launch.backends import installed
from rl_launch.cluster.device import resolve_device
from rl_launch.model_files.foreign_folders import PICKLED, foreign_kind
from rl_launch.model_files.weight_files import INDEX, SINGLE
from rl_launch.root_config import POLICY, ClusterConfig
from rl_launch.worker_envs.driver_envs import DriverEnvs
from rl_launch.worker_envs.provision import Mode
from rl_launch.worker_envs.spec import worker_env
from rl_launch.worker_envs.variables import worker_process_environment

_log = logging.getLogger(__name__)

_KEY = "cluster.worker_envs"
_BACKEND = "dtensor"
_CONVERT = """
import sys
from rl_core.torch.files.pickled import convert_to_stdout
convert_to_stdout(*sys.argv[1:])
"""


def is_pickled(folder: Path) -> bool:
    """Return whether a folder has a model with pickled weights and no safetensors."""
    if not folder.is_dir() or (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return False
    return foreign_kind(folder) is PICKLED


def write_safetensors(source: Path, target: Path, overrides: Sequence[str] = ()) -> None:
    """Write the weights of a folder as safetensors, compared bit by bit, and copy its config and tokenizer.

    Args:
        source: Folder for which `is_pickled` holds.
        target: Empty folder.
        overrides: `cluster.worker_envs=...`; no other key has an effect.

    Raises:
        ConfigError: If the folder has no config, or its files hold something else than tensors by name.
        WorkerEnvironmentError: If no environment with torch can be provided.
        RLError: If the conversion does not finish.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json, so it is not a whole model; Add the model's config.json")
    found = installed(POLICIES)
    chosen: BackendPlugin = plugin(POLICIES, _BACKEND if _BACKEND in found else next(iter(found), _BACKEND))
    # the environment of trainers on this machine, which runs share
    specs = {POLICY: worker_env(chosen.requirement, resolve_device(ClusterConfig()).extras)}
    python = DriverEnvs.provided(specs, _mode(overrides)).interpreters[POLICY]
    _log.info("reading %s, without running code of the pickle", source)
    answer = _answer(python, source, target)
    if "problem" in answer:
        raise ConfigError(f"{source}: {answer['problem']}")
    size = answer["num_bytes"] / 1e9
    _log.info("%d tensors in %d files, %.2f GB, equal bit by bit", answer["num_tensors"], answer["num_files"], size)
    if answer["shared"]:
        _log.info("written as separate tensors although they shared memory: %s", ", ".join(answer["shared"][:8]))


def _answer(python: str, source: Path, target: Path) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", _CONVERT, str(source.absolute()), str(target.absolute())],
        env={**worker_process_environment(python), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RLError(f"the conversion ended with exit code {done.returncode} in {python}:\n{done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _mode(overrides: Sequence[str]) -> Mode:
    """Return the value of `cluster.worker_envs`.

    Raises:
        ConfigError: If another key is set.
    """
    mode: Mode = "auto"
    for override in overrides:
        key, _, value = override.partition("=")
        allowed = get_args(Mode)
        if key != _KEY:
            raise ConfigError(
                f"{key} has no effect on a folder with pickled weights, whose tensors are written as they are; remove "
                f"it ({_KEY} is the only key)"
            )
        if value not in allowed:
            raise ConfigError(f"{_KEY}: got {value!r}{did_you_mean(value, allowed)}; allowed: {', '.join(allowed)}")
        mode = value  # type: ignore[assignment]  # one of the allowed
    return mode
