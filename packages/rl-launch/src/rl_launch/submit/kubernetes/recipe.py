"""A recipe that is a file, as files of the job: its whole config, and the user's own code that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config, tree_to_yaml
from rl_core.user_code import is_in_file
from rl_launch.session.directory.user_files import copies_of

FILE_NAME = "recipe.yaml"


def recipe_files(config: Config, written: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the files that hold a config, by name; `file.py:NAME` in it names a file next to it."""
    copies = copies_of(config)
    names = {file.path: name for name, file in copies.items()}
    tree = tree_to_yaml(_beside(dict(written), names))
    return {FILE_NAME: tree, **{name: file.text for name, file in copies.items()}}


def _beside(value: Any, names: dict[str, str]) -> Any:
    match value:
        case str() if is_in_file(value):
            path, _, attribute = value.rpartition(":")
            name = names.get(str(Path(path).expanduser().absolute()))
            return value if name is None else f"{name}:{attribute}"
        case dict():
            return {key: _beside(item, names) for key, item in value.items()}
        case list():
            return [_beside(item, names) for item in value]
        case _:
            return value
