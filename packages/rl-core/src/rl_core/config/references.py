"""Values from environment variables, which stay references wherever a config is stored or shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_core.config.entry import Entry
from rl_core.config.interpolation import escaped
from rl_core.config.key_path import KeyPath, parse_path
from rl_core.config.keys import plain
from rl_core.config.schema import Config

_VARIABLE = "oc.env"
_KEY = re.compile(r"\$\{\s*(\.*)([^${}:]+?)\s*\}")
_COMPUTED = re.compile(r"\$\{[^{}]*[:$]")
"""A resolver other than a key, or an interpolation inside another."""


def environment_references(entry: Entry) -> dict[KeyPath, str]:
    """What was written at the keys whose values come from environment variables, also by way of other keys.

    An interpolation whose keys cannot be told without resolving it counts as one of them, if there are any: as it was
    written, it is as good.
    """
    written = {path: each.value for path, each in entry.leaves() if isinstance(each.value, str) and "${" in each.value}
    found = {path for path, text in written.items() if _VARIABLE in text}
    if found:
        found |= {path for path, text in written.items() if _COMPUTED.search(text)}
    named = {path: _keys(path, text) for path, text in written.items()}
    while more := {path for path in named.keys() - found if any(_meets(key, found) for key in named[path])}:
        found |= more
    return {path: text for path, text in written.items() if path in found}


def as_written(config: Config) -> Any:
    """A config as nested plain values that read back to it, with the interpolations of environment variables in place
    of their values: what is stored, uploaded and compared."""
    tree = escaped(plain(config))
    for path, text in config.references.items():
        tree = _replaced(tree, path, text)
    return tree


def reference_at(references: Mapping[KeyPath, str], path: KeyPath) -> str | None:
    """What was written at a key, or at a section around it, if its value comes from an environment variable."""
    return next((references[path[:end]] for end in range(len(path) + 1) if path[:end] in references), None)


def _keys(path: KeyPath, text: str) -> list[KeyPath]:
    """Absolute paths of the keys that an interpolation names."""
    keys = []
    for dots, name in _KEY.findall(text):
        base = path[: len(path) - len(dots)] if dots else ()
        try:
            keys.append((*base, *parse_path(name)))
        except ValueError:
            continue
    return keys


def _meets(key: KeyPath, paths: set[KeyPath]) -> bool:
    """Whether a key is one of the paths, or around or below one."""
    texts = [str(segment) for segment in key]
    return any(all(one == str(other) for one, other in zip(texts, path, strict=False)) for path in paths)


def _replaced(tree: Any, path: KeyPath, text: str) -> Any:
    if not path:
        return text
    head, *rest = path
    match tree:
        case dict() if head in tree:
            return {**tree, head: _replaced(tree[head], tuple(rest), text)}
        case list() if isinstance(head, int) and head < len(tree):
            return [_replaced(item, tuple(rest), text) if index == head else item for index, item in enumerate(tree)]
        case _:
            return tree
