"""Models that are made on this machine, so that a first run needs no download."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rl_launch.worker_envs import default_root

_log = logging.getLogger(__name__)

TINY = "tiny-arithmetic"
"""A Qwen3 of about 0.7M parameters with random weights, and a tokenizer of single characters."""

WARMED_UP = "tiny-arithmetic-sft"
"""The same after the `sft-arithmetic` recipe: it gets some sums right, so that rewards differ from the first step."""


MADE_HERE = frozenset({TINY, WARMED_UP})
"""Names of models that are made on this machine."""


def model_folders(policy: Any) -> dict[str, str]:
    """Folders of this machine that a resolved `policy` section loads a model or a tokenizer from, by key."""
    named = {"policy.model_name": policy.model_name, "policy.tokenizer.name": policy.tokenizer.name}
    return {key: name for key, name in named.items() if name is not None and Path(name).is_dir()}


def models_folder() -> Path:
    """The folder of the models that are made here."""
    return default_root().parent / "models"


def tiny_model() -> Path:
    """The folder of `tiny-arithmetic`, made if it is not there yet."""
    folder = models_folder() / TINY
    if not (folder / "model.safetensors").exists():
        # imports transformers, which takes a second
        from rl_algos.tiny_model import make_tiny_model

        _log.info("making %s in %s", TINY, folder)
        make_tiny_model(folder)
    return folder
