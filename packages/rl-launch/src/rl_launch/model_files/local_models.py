"""Models made on this machine, so that a first run needs no download."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rl_core.model_config import ModelConfig
from rl_launch.session.directory.writable import check_writable
from rl_launch.worker_envs import check_home, default_root

_log = logging.getLogger(__name__)

TINY = "tiny-arithmetic"
"""A Qwen3 of about 0.7M parameters with random weights, and a tokenizer of single characters."""

TINY_VISION = "tiny-vision"
"""A Qwen2.5-VL of about 0.6M parameters with random weights, and a tokenizer of single characters."""

WARMED_UP: Mapping[str, str] = {
    "tiny-arithmetic-sft": "sft-arithmetic",
    "tiny-tools-sft": "sft-tools-tiny",
    "tiny-code-sft": "sft-code-tiny",
    "tiny-sliding-puzzle-sft": "sft-sliding-puzzle-tiny",
    "tiny-nim-sft": "sft-nim-tiny",
    "tiny-proposer-sft": "sft-proposer-tiny",
    "tiny-vision-sft": "sft-vlm-tiny",
}
"""These after a recipe of supervised fine-tuning, by name: it gets some rows right, so that rewards differ from the
first step."""

MADE_HERE = frozenset({TINY, TINY_VISION, *WARMED_UP})
"""Names of the models that are made on this machine."""

_OF_IMAGES = frozenset({TINY_VISION, "tiny-vision-sft"})


def model_folders(models: Mapping[str, ModelConfig]) -> dict[str, str]:
    """Folders of this machine that models or tokenizers are loaded from, by key.

    Args:
        models: Models, by the key of their section.
    """
    named = {f"{key}.model_name": model.model_name for key, model in models.items()}
    named |= {f"{key}.tokenizer.name": model.tokenizer.name or "" for key, model in models.items()}
    return {key: name for key, name in named.items() if name and Path(name).is_dir()}


def models_folder() -> Path:
    """Return the folder of the models that are made here."""
    return default_root().parent / "models"


def writable_models_folder() -> Path:
    """Return the folder of the models that are made here, before one is made.

    Raises:
        RunDirectoryError: If it cannot be written to.
    """
    check_home()
    check_writable(models_folder(), remedy="Set RL_HOME to a folder that you may write to.")
    return models_folder()


def untrained_model(name: str) -> Path:
    """The folder of the untrained model that one of `MADE_HERE` is or begins as, made if it is not there yet. It has
    the tokenizer and the layers of the model."""
    return tiny_vision_model() if name in _OF_IMAGES else tiny_model()


def tiny_vision_model() -> Path:
    """The folder of `tiny-vision`, made if it is not there yet."""
    folder = models_folder() / TINY_VISION
    if not (folder / "model.safetensors").exists():
        writable_models_folder()
        # imports transformers, which takes a second
        from rl_algos.tiny_vision_model import make_tiny_vision_model

        _log.info("making %s in %s", TINY_VISION, folder)
        make_tiny_vision_model(folder)
    return folder


def tiny_model() -> Path:
    """The folder of `tiny-arithmetic`, made if it is not there yet."""
    folder = models_folder() / TINY
    if not (folder / "model.safetensors").exists():
        writable_models_folder()
        # imports transformers, which takes a second
        from rl_algos.tiny_model import make_tiny_model

        _log.info("making %s in %s", TINY, folder)
        make_tiny_model(folder)
    return folder
