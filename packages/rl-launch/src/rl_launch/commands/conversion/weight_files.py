"""Conversions of files of weights in an environment with torch, which the driver does not have.

Pickled weights (`pytorch_model.bin`) and checkpoints of Megatron-LM become safetensors, and linear layers are quantised
for an engine.
"""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rl_core.config import did_you_mean
from rl_core.errors import ConfigError, RLError
from rl_core.plugins import POLICIES, BackendPlugin, plugin, plugins
from rl_launch.cluster.device import resolve_device
from rl_launch.model_files.weight_files import INDEX, MEGATRON, PICKLED, SINGLE, foreign_kind
from rl_launch.root_config import POLICY, ClusterConfig
from rl_launch.worker_envs.provision import DriverEnvs, Mode
from rl_launch.worker_envs.spec import worker_env
from rl_launch.worker_envs.variables import worker_process_environment

FORMATS = ("int4", "mxfp4", "float8")
DTYPES = ("float32", "bfloat16", "float16")

_KEY = "cluster.worker_envs"
_MODEL = f"{POLICY}.model_name"
_BACKEND = "dtensor"
_log = logging.getLogger(__name__)

_CONVERT = "rl_core.torch.files.pickled:convert_to_stdout"
_QUANTISE = "rl_core.torch.quantization.files:quantise_to_stdout"
_SCRIPT = "import sys; from {} import {} as run; run(*sys.argv[1:])"


@dataclass(frozen=True)
class Quantization:
    """How the linear layers of a model are quantised.

    Args:
        format: One of `FORMATS`.
        group_size: Number of inputs that share a scale, for `int4`.
        exclude: Names of modules that are left out, or endings of them, or the modules around them.
        dtype: Dtype of the weights before they are quantised; empty for the dtype of the files.
    """

    format: str
    group_size: int = 128
    exclude: tuple[str, ...] = ()
    dtype: str = ""


def is_pickled(folder: Path) -> bool:
    """Return whether a folder has a model with pickled weights and no safetensors."""
    if not folder.is_dir() or (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return False
    return foreign_kind(folder) is PICKLED


def is_megatron(folder: Path) -> bool:
    """Return whether a folder has a checkpoint that Megatron-LM or Megatron Bridge wrote."""
    return folder.is_dir() and foreign_kind(folder) is MEGATRON


def write_from_megatron(source: Path, target: Path, overrides: Sequence[str] = ()) -> None:
    """Write the weights of a checkpoint of Megatron-LM or Megatron Bridge as Hugging Face files.

    Args:
        source: Folder for which `is_megatron` holds.
        target: Empty folder.
        overrides: `policy.model_name=...`, which gives the config and the tokenizer, and `cluster.worker_envs=...`; no
            other key has an effect.

    Raises:
        ConfigError: If the model is not given, no installed backend reads such checkpoints, or the checkpoint is in
            another format or of another architecture.
        WorkerEnvironmentError: If no environment with the backend can be provided.
        RLError: If the conversion does not finish.
    """
    models = [each.partition("=")[2] for each in overrides if each.startswith(f"{_MODEL}=")]
    if not models or not models[-1]:
        raise ConfigError(
            f"{source} is {MEGATRON.name}, which has no config and tokenizer of Hugging Face. Add {_MODEL}=MODEL, the "
            "model that it was trained from"
        )
    backend = next((each for each in plugins(POLICIES).values() if each.converter), None)
    if backend is None:
        raise ConfigError(f"{source} is {MEGATRON.name}, and no installed backend reads it. Install rl-megatron")
    rest = [each for each in overrides if not each.startswith(f"{_MODEL}=")]
    python = _torch_interpreter(rest, f"{MEGATRON.name}, whose tensors are written as they are", backend)
    found = Path(models[-1]).expanduser()
    model = str(found.absolute()) if found.is_dir() else models[-1]
    _log.info("reading %s, without running code of its pickles", source)
    answer = _answer_of(python, backend.converter, source, target, model)
    counts = answer["num_tensors"], answer["num_files"], answer["num_bytes"] / 1e9
    _log.info("%d tensors in %d files, %.2f GB, from %s", *counts, answer["source"])


def write_safetensors(source: Path, target: Path, overrides: Sequence[str] = ()) -> None:
    """Write the weights of a folder as safetensors, compared bit by bit, and copy its config and tokenizer.

    Args:
        source: Folder for which `is_pickled` holds.
        target: Empty folder.
        overrides: `cluster.worker_envs=...`; no other key has an effect.

    Raises:
        ConfigError: If the folder has no config, or its files contain anything else than tensors by name.
        WorkerEnvironmentError: If no environment with torch can be provided.
        RLError: If the conversion does not finish.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json, so it is not a whole model; Add the model's config.json")
    python = _torch_interpreter(overrides, "a folder with pickled weights, whose tensors are written as they are")
    _log.info("reading %s, without running code of the pickle", source)
    answer = _answer_of(python, _CONVERT, source, target)
    size = answer["num_bytes"] / 1e9
    _log.info("%d tensors in %d files, %.2f GB, equal bit by bit", answer["num_tensors"], answer["num_files"], size)
    if answer["shared"]:
        _log.info("written as separate tensors although they shared memory: %s", ", ".join(answer["shared"][:8]))


def write_quantized(source: Path, target: Path, how: Quantization, overrides: Sequence[str] = ()) -> None:
    """Write a model quantised, for engines that read `compressed-tensors`, with its config and tokenizer.

    Args:
        source: Folder with Hugging Face files.
        target: Empty folder.
        how: Format, and layers to leave out.
        overrides: `cluster.worker_envs=...`; no other key has an effect.

    Raises:
        ConfigError: If the source is not such a folder, or the format does not fit the model.
        WorkerEnvironmentError: If no environment with torch can be provided.
        RLError: If the conversion does not finish.
    """
    if how.format not in FORMATS:
        raise ConfigError(f"--quantize: got {how.format!r}; allowed: {', '.join(FORMATS)}")
    if how.dtype and how.dtype not in DTYPES:
        raise ConfigError(f"--dtype: got {how.dtype!r}; allowed: {', '.join(DTYPES)}")
    if how.group_size < 1:
        raise ConfigError(f"--group-size: got {how.group_size}; set it to 1 or more")
    if not ((source / SINGLE).is_file() or (source / INDEX).is_file()) or not (source / "config.json").is_file():
        raise ConfigError(
            f"--quantize: {source} is not a folder with a model in Hugging Face files. Convert it first, without "
            "--quantize, and pass the result"
        )
    python = _torch_interpreter(overrides, "a model that is quantised")
    answer = _answer_of(python, _QUANTISE, source, target, json.dumps(asdict(how)))
    _log.info(
        "%d linear layers in %s of %s weights, %.2f GB instead of %.2f; weights are off by %.1f %% (root mean square)",
        *(answer["num_quantised"], how.format, answer["dtype"]),
        *(answer["num_bytes"] / 1e9, answer["num_bytes_before"] / 1e9, 100 * answer["relative_error"]),
    )


def _torch_interpreter(overrides: Sequence[str], what: str, backend: BackendPlugin | None = None) -> str:
    """Return the interpreter of the environment of trainers on this machine, which runs share.

    Args:
        overrides: `cluster.worker_envs=...`; no other key has an effect.
        what: Description of the source and its conversion, for messages.
        backend: Backend that the environment is for; any backend with torch if None.

    Raises:
        ConfigError: If another key is set.
        WorkerEnvironmentError: If no environment with torch can be provided.
    """
    mode: Mode = "auto"
    allowed = get_args(Mode)
    for override in overrides:
        key, _, value = override.partition("=")
        if key != _KEY:
            raise ConfigError(f"{key} has no effect on {what}; remove it ({_KEY} is the only key)")
        if value not in allowed:
            raise ConfigError(f"{_KEY}: got {value!r}{did_you_mean(value, allowed)}; allowed: {', '.join(allowed)}")
        mode = value  # type: ignore[assignment]  # one of the allowed
    found = plugins(POLICIES)
    chosen: BackendPlugin = backend or plugin(POLICIES, _BACKEND if _BACKEND in found else next(iter(found), _BACKEND))
    specs = {POLICY: worker_env(chosen.requirement, resolve_device(ClusterConfig()).extras)}
    return DriverEnvs.provided(specs, mode).interpreters[POLICY]


def _answer_of(python: str, function: str, source: Path, target: Path, *arguments: str) -> dict[str, Any]:
    """Run a function on two folders without GPUs; returns the JSON object of its last line.

    Raises:
        ConfigError: If the object has a `problem`.
        RLError: If the function does not finish.
    """
    script = _SCRIPT.format(*function.split(":"))
    command = [python, "-c", script, str(source.absolute()), str(target.absolute()), *arguments]
    variables = {**worker_process_environment(python), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RLError(f"the conversion ended with exit code {done.returncode} in {python}:\n{done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "problem" in answer:
        raise ConfigError(f"{source}: {answer['problem']}")
    return answer
