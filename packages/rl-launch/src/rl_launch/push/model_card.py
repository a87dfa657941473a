"""The model card of a checkpoint: its `README.md`, as the Hugging Face hub reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rl_core.config import tree_to_yaml
from rl_launch.session.directory.run_folder import RunFolder, is_run

FILE_NAME = "README.md"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = re.compile(r"val/.*|eval/.*|reward/mean|train/loss")
_CAUSAL = "ForCausalLM"
_DEEPEST = 5
"""Runs that each start from the model of another, which are followed to the model of the hub."""


def model_card(
    run: RunFolder,
    *,
    title: str,
    name: str,
    step: int,
    metrics: Mapping[str, float | None],
    architecture: str,
    is_adapter: bool,
) -> str:
    """Return the text of a model card. It has no paths of this machine.

    Args:
        run: Run that made the checkpoint.
        title: Heading of the card.
        name: Name by which `from_pretrained` finds the model.
        step: Step of the checkpoint.
        metrics: Metrics of the step.
        architecture: Class of the model, as its config names it; empty if it does not.
        is_adapter: Whether the files are adapters, without the model that they sit on.
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
    max_steps = run.state().max_steps
    rows = {
        "algorithm": described.algorithm,
        "base model": _linked(base, "https://huggingface.co/") if base else "a model without a public name",
        "data": ", ".join(_linked(each, "https://huggingface.co/datasets/") for each in datasets),
        "step": f"{step} of {max_steps}" if max_steps else str(step),
        "files": "adapters (PEFT)" if is_adapter else "the whole model",
    }
    shown = {key: value for key, value in metrics.items() if _SHOWN.fullmatch(key) and value is not None}
    parts = [
        f"---\n{tree_to_yaml(front)}---",
        f"# {title}",
        _table(("", ""), {key: value for key, value in rows.items() if value}),
        f"## Metrics of step {step}\n\n"
        + _table(("metric", "value"), {key: f"{shown[key]:.6g}" for key in sorted(shown)})
        if shown
        else "",
        f"## Load it\n\n```python\n{_loading(name, base, architecture, is_adapter=is_adapter)}\n```",
        "## Versions\n\n" + ", ".join(f"{package} {version}" for package, version in described.versions.items())
        if described.versions
        else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def base_model(name: str, depth: int = 0) -> str:
    """Return the public name of the model that a run starts from, through the runs in between; empty if it is a folder
    of this machine."""
    path = Path(name).expanduser()
    if not name:
        return ""
    if not path.is_dir():
        return "" if path.is_absolute() or name.startswith((".", "~")) else name
    runs = [each for each in path.absolute().parents if is_run(each)]
    return base_model(RunFolder(runs[0]).description().model, depth + 1) if runs and depth < _DEEPEST else ""


def _datasets(data: Any) -> Iterator[str]:
    """Names of the training data; of a file of this machine only its own name."""
    train = data.get("train") if isinstance(data, Mapping) else None
    for each in train if isinstance(train, list) else [train]:
        if not isinstance(each, Mapping):
            continue
        if each.get("dataset_name"):
            yield str(each["dataset_name"])
        elif each.get("data_path"):
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


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
    return "\n".join(lines)
