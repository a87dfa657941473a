"""The files of one push: the files of a checkpoint, with a model card."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from rl_core.errors import RunDirectoryError
from rl_launch.push.model_card import FILE_NAME, base_model, model_card
from rl_launch.session.checkpoints.checkpoints import ADAPTER, EXPORT, STAGED, exported_model
from rl_launch.session.checkpoints.manifest import Manifest
from rl_launch.session.directory.run_folder import RunFolder

_NAMES = ("_name_or_path", "base_model_name_or_path")
"""Fields of configs that may hold a path of this machine."""


def stage(run: RunFolder, checkpoint: Path, folder: Path, *, adapter: bool, name: str) -> None:
    """Put the files of a checkpoint, and a model card, into a folder next to it. They are links if the file system has
    them, so that the checkpoint may be removed while they are pushed.

    Args:
        run: Run that made the checkpoint.
        checkpoint: Folder of the checkpoint.
        folder: Replaced if it exists.
        adapter: Whether its adapters are pushed, without the model that they sit on.
        name: Name by which the pushed files are loaded.

    Raises:
        RunDirectoryError: If the checkpoint is damaged, or has no such files.
    """
    manifest = _checked(checkpoint)
    source = checkpoint / ADAPTER if adapter else exported_model(checkpoint)
    if not source.is_dir() or not any(source.iterdir()):
        what = "no adapters: its run has policy.lora_cfg.enabled=false" if adapter else f"no files in {EXPORT}"
        raise RunDirectoryError(f"{checkpoint} has {what}")
    shutil.rmtree(folder, ignore_errors=True)
    for file in (each for each in source.rglob("*") if each.is_file()):
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(file, target)
    for config in folder.glob("*config.json"):
        _without_paths(config)
    card = model_card(
        run,
        title=run.description().labels.name or run.path.absolute().name,
        name=name,
        step=manifest.step,
        metrics=manifest.metrics,
        architecture=_architecture(folder),
        is_adapter=adapter,
    )
    (folder / FILE_NAME).unlink(missing_ok=True)  # a link to the file of the checkpoint, if it has one
    (folder / FILE_NAME).write_text(card, encoding="utf-8")


def staging_folder(checkpoint: Path) -> Path:
    """Return the folder next to a checkpoint that its files are pushed from."""
    return checkpoint.with_name(f".{checkpoint.name}{STAGED}")


def _checked(checkpoint: Path) -> Manifest:
    try:
        manifest = Manifest.read(checkpoint)
        damage = manifest.damage(checkpoint)
    except ValueError as error:
        raise RunDirectoryError(f"{checkpoint} is damaged: {error}") from None
    if damage:
        raise RunDirectoryError(f"{checkpoint} is damaged: {damage}")
    return manifest


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # file systems without links
        shutil.copy2(file, target)


def _without_paths(config: Path) -> None:
    """Replace folders of this machine in a config by the public name of their model, or by nothing."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    changed = {key: base_model(fields[key]) or None for key in _NAMES if isinstance(fields.get(key), str)}
    if any(fields[key] != value for key, value in changed.items()):
        config.unlink()  # a link to the file of the checkpoint
        config.write_text(json.dumps({**fields, **changed}, indent=2) + "\n", encoding="utf-8")


def _architecture(folder: Path) -> str:
    path = folder / "config.json"
    if not path.is_file():
        return ""
    return next(iter(json.loads(path.read_text(encoding="utf-8")).get("architectures") or ()), "")
