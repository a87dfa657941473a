"""Models that are made on this machine, so that a first run needs no download."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_launch.worker_envs import default_root

_log = logging.getLogger(__name__)

TINY = "tiny-arithmetic"
"""A Qwen3 of about 0.7M parameters with random weights, and a tokenizer of single characters."""

WARMED_UP = "tiny-arithmetic-sft"
"""The same after the `sft-arithmetic` recipe: it gets some sums right, so that rewards differ from the first step."""


def local_model(name: str) -> str:
    """The folder of a model that is made here, made where it is not there yet; any other name as it is, a folder below
    the home folder written out."""
    make = _MAKERS.get(name)
    if make:
        return str(make(default_root().parent / "models"))
    return str(Path(name).expanduser()) if name.startswith("~") else name


def model_folders(policy: Any) -> dict[str, str]:
    """Folders of this machine that a resolved `policy` section loads a model or a tokenizer from, by key."""
    named = {"policy.model_name": policy.model_name, "policy.tokenizer.name": policy.tokenizer.name}
    return {key: name for key, name in named.items() if name is not None and Path(name).is_dir()}


def _tiny(models: Path) -> Path:
    folder = models / TINY
    if not (folder / "model.safetensors").exists():
        # imports transformers, which takes a second
        from rl_algos.tiny_model import make_tiny_model

        _log.info("making %s in %s", TINY, folder)
        make_tiny_model(folder)
    return folder


def _warmed_up(models: Path) -> Path:
    from rl_launch.root import read_config
    from rl_launch.session.checkpoints import newest_checkpoint
    from rl_launch.train import train

    run_dir, finished = models / "sft-arithmetic", models / WARMED_UP
    if not finished.is_symlink():
        _log.info("warming up %s by SFT in %s; this is done once", TINY, run_dir)
        train(read_config("sft-arithmetic").config, run_dir=run_dir, title="warm-up")
        finished.symlink_to((newest_checkpoint(run_dir) / "hf").relative_to(models), target_is_directory=True)
    return finished


_MAKERS: Mapping[str, Callable[[Path], Path]] = {TINY: _tiny, WARMED_UP: _warmed_up}

MADE_HERE = frozenset(_MAKERS)
"""Names of models that are made on this machine."""
