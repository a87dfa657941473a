"""Validation that a config turns off by taking out its data: `data.validation: null`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.config import COMMAND_LINE, PYTHON, Origin, RawConfig
from rl_core.plugins import AlgorithmPlugin

_DATA, _METRIC = "data.validation", "checkpointing.metric_name"


def takes_out_validation(raw: RawConfig) -> bool:
    """Return whether a config says `data.validation: null` and holds out no rows of training data to validate on."""
    data = raw.plain().get("data")
    if not isinstance(data, Mapping) or data.get("validation", data) is not None:
        return False
    train = data.get("train")
    several = train if isinstance(train, list) else [train]
    return not any(isinstance(each, Mapping) and each.get("split_validation_size") for each in several)


def without_validation(raw: RawConfig, algorithm: AlgorithmPlugin) -> RawConfig:
    """Return a config that takes out its validation data with the keys turned off that ask for a validation or need
    one, as far as they are inherited. Those that were written together with `data.validation`, or over it, stay, for
    the checks to refuse.
    """
    off: dict[str, Any] = dict(algorithm.without_validation)
    if str(_written(raw, _METRIC)).startswith(("val:", "val/")):
        off[_METRIC] = None
    place = _layer(raw, raw.origin(_DATA))
    for key, value in off.items():
        if raw.is_written(key) and _layer(raw, raw.origin(key)) < place:
            *sections, name = key.split(".")
            nested: dict[str, Any] = {name: value}
            for section in reversed(sections):
                nested = {section: nested}
            raw = raw.with_values(nested, f"{_DATA}: null")
    return raw


def _written(raw: RawConfig, key: str) -> Any:
    tree: Any = raw.plain()
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _layer(raw: RawConfig, origin: Origin) -> int:
    """The place of an origin among the layers of a config, from the first file that is inherited."""
    if origin in (COMMAND_LINE, PYTHON):
        return len(raw.files) + 1
    file = Path(origin.source).resolve()
    return raw.files.index(file) if file in raw.files else len(raw.files)
