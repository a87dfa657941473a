"""`rl config upgrade`: a file of an earlier version under the keys of this version."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import yaml

from rl_core.config import load, tree_to_yaml
from rl_core.config.tree import format_path, natural, parse_path, read_file
from rl_core.errors import ConfigError
from rl_launch.recipes import RECIPES
from rl_launch.run_config.root_types import type_of


def upgraded_text(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file under the keys of this version, and the keys that it replaces.

    Only sections with such keys are written again, without their comments; all else stays as it is.

    Raises:
        ConfigError: If the file cannot be read.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path} is not a YAML file")
    raw = load(path, search=[RECIPES])
    text = path.read_text(encoding="utf-8")
    root = yaml.compose(text)
    written = natural(read_file(path, str(path)).plain())
    own = load({key: value for key, value in written.items() if key != "defaults"})
    upgraded, upgrade = own.upgraded(type_of(raw), is_whole=False)
    sections = sorted({parse_path(key)[:-1] for key in upgrade.renamed}, key=len)
    outermost = [each for each in sections if not any(each[: len(one)] == one for one in sections if one != each)]
    nodes = [(_node(root, section), upgraded.select(format_path(section))) for section in outermost]
    for node, value in sorted(nodes, key=lambda each: each[0].start_mark.index, reverse=True):
        text = text[: node.start_mark.index] + _written(node, value) + text[_end(node) :]
    return text, tuple(upgrade.renamed)


def _node(node: Any, path: tuple[str | int, ...]) -> Any:
    for segment in path:
        if isinstance(segment, int):
            node = node.value[segment]
        else:
            node = next(value for key, value in node.value if key.value == segment)
    return node


def _written(node: Any, value: Any) -> str:
    if node.flow_style:
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip()
    return textwrap.indent(tree_to_yaml(value), " " * node.start_mark.column).strip()


def _end(node: Any) -> int:
    """Return where the text of a node ends; the end that YAML gives a block includes the comments behind it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, yaml.MappingNode) else last)
    end: int = node.end_mark.index
    return end
