"""`rl convert` of a folder with pickled weights (`pytorch_model.bin`) to safetensors, in an environment with torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import ConfigError
from rl_launch.commands.torch_conversion import answer_of, torch_interpreter
from rl_launch.model_files.foreign_folders import PICKLED, foreign_kind
from rl_launch.model_files.weight_files import INDEX, SINGLE

_log = logging.getLogger(__name__)

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
    python = torch_interpreter(overrides, "a folder with pickled weights, whose tensors are written as they are")
    _log.info("reading %s, without running code of the pickle", source)
    answer = answer_of(python, _CONVERT, source, target)
    size = answer["num_bytes"] / 1e9
    _log.info("%d tensors in %d files, %.2f GB, equal bit by bit", answer["num_tensors"], answer["num_files"], size)
    if answer["shared"]:
        _log.info("written as separate tensors although they shared memory: %s", ", ".join(answer["shared"][:8]))
