"""The files of one push: the files of a checkpoint, and a model card (`README.md`) for the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rl_core.config import tree_to_yaml
from rl_core.errors import RunDirectoryError
from rl_launch.run_session.checkpoints.checkpoints import ADAPTER, EXPORT, exported_model
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.directory.run_folder import RunFolder, is_run

_CARD = "README.md"
_NAMES = ("_name_or_path", "base_model_name_or_path")
"""Fields of configs that may hold a path of this machine."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = re.compile(r"val/.*|eval/.*|reward/mean|train/loss")
_CAUSAL = "ForCausalLM"
_MAX_DEPTH = 5
"""Maximum number of runs, each starting from the model of another, that are followed to a model of the hub."""


def stage(run: RunFolder, checkpoint: Path, folder: Path, *, adapter: bool, name: str) -> None:
    """Put the files of a checkpoint, and a model card, into a folder next to it. They are links if the file system has
    them, so that the checkpoint may be removed while they are pushed.

    Args:
        run: Run that made the checkpoint.
        checkpoint: Folder of the checkpoint.
        folder: Replaced if it exists.
        adapter: Whether its adapters are pushed, without their base model.
        name: Name of the pushed files for `from_pretrained`.

    Raises:
        RunDirectoryError: If the checkpoint is damaged, or has no such files.
    """
    try:
        manifest = CheckpointManifest.read(checkpoint)
        damage = manifest.damage(checkpoint)
    except ValueError as error:
        raise RunDirectoryError(f"{checkpoint} is damaged: {error}") from None
    if damage:
        raise RunDirectoryError(f"{checkpoint} is damaged: {damage}")
    source = checkpoint / ADAPTER if adapter else exported_model(checkpoint)
    if not source.is_dir() or not any(source.iterdir()):
        what = "no adapters: its run has policy.lora_cfg.enabled=false" if adapter else f"no files in {EXPORT}"
        raise RunDirectoryError(f"{checkpoint} has {what}")
    shutil.rmtree(folder, ignore_errors=True)
    for file in (each for each in source.rglob("*") if each.is_file()):
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, target)
        except OSError:  # file systems without links
            shutil.copy2(file, target)
    architecture = ""
    for config in folder.glob("*config.json"):
        fields = json.loads(config.read_text(encoding="utf-8"))
        if config.name == "config.json":
            architecture = next(iter(fields.get("architectures") or ()), "")
        # folders of this machine are replaced by the public name of their model, or by nothing
        changed = {key: base_model(fields[key]) or None for key in _NAMES if isinstance(fields.get(key), str)}
        if any(fields[key] != value for key, value in changed.items()):
            config.unlink()  # a link to the file of the checkpoint
            config.write_text(json.dumps({**fields, **changed}, indent=2) + "\n", encoding="utf-8")
    card = _model_card(run, manifest, name, architecture, is_adapter=adapter)
    (folder / _CARD).unlink(missing_ok=True)  # a link to the file of the checkpoint, if it has one
    (folder / _CARD).write_text(card, encoding="utf-8")


def base_model(name: str, depth: int = 0) -> str:
    """Return the public name of the model that a run starts from, through the runs in between; empty if it is a folder
    of this machine."""
    path = Path(name).expanduser()
    if not name:
        return ""
    if not path.is_dir():
        return "" if path.is_absolute() or name.startswith((".", "~")) else name
    runs = [each for each in path.absolute().parents if is_run(each)]
    return base_model(RunFolder(runs[0]).description().model, depth + 1) if runs and depth < _MAX_DEPTH else ""


def _model_card(run: RunFolder, manifest: CheckpointManifest, name: str, architecture: str, *, is_adapter: bool) -> str:
    """Return the text of a model card. It has no paths of this machine.

    Args:
        run: Run that made the checkpoint.
        manifest: Manifest of the checkpoint.
        name: Name of the model for `from_pretrained`.
        architecture: Class of the model, as its config lists it; empty if it does not.
        is_adapter: Whether the files are adapters, without their base model.
    """
    described, config = run.description(), run.config()
    base = base_model(described.model)
    datasets = list(dict.fromkeys(_datasets(config.get("data"))))
    front: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if _CAUSAL in architecture or is_adapter:
        front["pipeline_tag"] = "text-generation"
    if _is_of_hub(base):
        front["base_model"] = base
    if of_hub := [each for each in datasets if _is_of_hub(each)]:
        front["datasets"] = of_hub
    front["tags"] = [described.algorithm]
    max_steps, step = run.state().max_steps, manifest.step
    rows = {
        "algorithm": described.algorithm,
        "base model": _linked(base, "https://huggingface.co/") if base else "a model without a public name",
        "data": ", ".join(_linked(each, "https://huggingface.co/datasets/") for each in datasets),
        "step": f"{step} of {max_steps}" if max_steps else str(step),
        "files": "adapters (PEFT)" if is_adapter else "the whole model",
    }
    title = described.labels.name or run.path.absolute().name
    facts = _table("", "", {key: value for key, value in rows.items() if value})
    parts = [f"---\n{tree_to_yaml(front)}---", f"# {title}", facts]
    shown = {key: value for key, value in manifest.metrics.items() if _SHOWN.fullmatch(key) and value is not None}
    if shown:
        table = _table("metric", "value", {key: f"{shown[key]:.6g}" for key in sorted(shown)})
        parts.append(f"## Metrics of step {step}\n\n{table}")
    parts.append(f"## Load it\n\n```python\n{_loading(name, base, architecture, is_adapter=is_adapter)}\n```")
    if described.versions:
        versions = ", ".join(f"{package} {version}" for package, version in described.versions.items())
        parts.append(f"## Versions\n\n{versions}")
    return "\n\n".join(parts) + "\n"


def _datasets(data: Any) -> Iterator[str]:
    """Yield the name of each dataset of the training data; for a file of this machine without its folder."""
    train = data.get("train") if isinstance(data, Mapping) else None
    for each in train if isinstance(train, list) else [train]:
        if isinstance(each, Mapping) and each.get("dataset_name"):
            yield str(each["dataset_name"])
        elif isinstance(each, Mapping) and each.get("data_path"):
            yield PurePosixPath(str(each["data_path"])).name


def _is_of_hub(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _linked(name: str, address: str) -> str:
    return f"[{name}]({address}{name})" if _is_of_hub(name) else name


def _loading(name: str, base: str, architecture: str, *, is_adapter: bool) -> str:
    if is_adapter:
        return (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE_MODEL"}")\n'
            f'model = PeftModel.from_pretrained(base, "{name}")'
        )
    kind = "AutoModelForCausalLM" if _CAUSAL in architecture else "AutoModelForSequenceClassification"
    return (
        f"from transformers import {kind}, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\nmodel = {kind}.from_pretrained("{name}")'
    )


def _table(name: str, value: str, rows: Mapping[str, str]) -> str:
    return "\n".join([f"| {name} | {value} |", "|---|---|", *(f"| {key} | {text} |" for key, text in rows.items())])
