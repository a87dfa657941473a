"""What a key means, what it may be, and where its value came from."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from rl_core.config.key_path import KeyPath, format_path
from rl_core.config.keys import Key, all_keys, child_segments, key_at, plain
from rl_core.config.loader import path_of
from rl_core.config.nearest import did_you_mean
from rl_core.config.origin import DEFAULT, Origin
from rl_core.config.references import reference_at
from rl_core.config.schema import Config
from rl_core.config.validate import Resolved
from rl_core.errors import ConfigError


@dataclass(frozen=True)
class Explanation:
    """A key, explained.

    Args:
        key: dotted; empty for the root.
        doc: its documentation, of a section that of its type; empty where none was written.
        type: what may be written, in words.
        required: whether it must be set.
        default: as plain values; None where it is required.
        value: as plain values; that of the resolved config where there is one, otherwise the default.
        origin: where the value comes from.
        children: the keys directly below, each explained without its own children.
    """

    key: str
    doc: str
    type: str
    required: bool
    default: Any
    value: Any
    origin: Origin
    children: tuple[Explanation, ...] = ()


def explain(root: type[Config], key: str, resolved: Resolved[Any] | None = None) -> Explanation:
    """Explain a key of a config type.

    Args:
        root: the config type.
        key: dotted; empty for the root.
        resolved: a config of that type, for the present value and its origin.

    Raises:
        ConfigError: where there is no such key, naming the nearest.
    """
    path = path_of(key) if key else ()
    tree = plain(resolved.config) if resolved is not None else {}
    found = key_at(root, path, tree)
    if found is None:
        raise ConfigError(f"{key}: no such key{did_you_mean(key, all_keys(root, tree))}")
    value = _value(tree, path) if resolved is not None else found.default
    below = [key_at(root, (*path, segment), tree) for segment in child_segments(found, value)]
    children = tuple(_explained(child, tree, resolved) for child in below if child is not None)
    return _explained(found, tree, resolved, children)


def _explained(
    key: Key, tree: Any, resolved: Resolved[Any] | None, children: tuple[Explanation, ...] = ()
) -> Explanation:
    name = format_path(key.path)
    return Explanation(
        key=name,
        doc=_doc(key),
        type=key.allowed,
        required=key.required,
        default=key.default,
        value=_shown(tree, key.path, resolved) if resolved is not None else key.default,
        origin=resolved.raw.entry.origin_at(key.path) if resolved is not None else DEFAULT,
        children=children,
    )


def _doc(key: Key) -> str:
    if key.field is not None and key.field.description:
        return key.field.description
    section = key.section(None)
    # pydantic gives a class without a docstring its base's
    return inspect.cleandoc(section.__doc__ or "") if section is not None and section.__doc__ != Config.__doc__ else ""


def _shown(tree: Any, path: KeyPath, resolved: Resolved[Any]) -> Any:
    """The value of a key, or the interpolation of an environment variable that it comes from."""
    reference = reference_at(resolved.config.references, path)
    return _value(tree, path) if reference is None else reference


def _value(tree: Any, path: KeyPath) -> Any:
    for segment in path:
        try:
            tree = tree[segment]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
