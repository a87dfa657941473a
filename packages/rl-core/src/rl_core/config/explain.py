"""Documentation, type, value and origin of a key."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from rl_core.config.keys import Key, all_keys, key_at, value_at
from rl_core.config.messages import did_you_mean
from rl_core.config.resolve import Resolved
from rl_core.config.schema import Config, plain
from rl_core.config.tree import DEFAULT, Origin, format_path, parse_path
from rl_core.errors import ConfigError


@dataclass(frozen=True)
class Explanation:
    """A key, explained.

    Args:
        key: dotted; empty for the root.
        doc: its documentation, of a section that of its type; empty if none was written.
        type: the values that may be written, in words.
        required: whether it must be set.
        default: as plain values; None if it is required.
        value: as plain values; that of the resolved config if there is one, otherwise the default.
        origin: of the value.
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
        ConfigError: if there is no such key, naming the nearest.
    """
    path = parse_path(key) if key else ()
    tree = plain(resolved.config) if resolved is not None else {}
    found = key_at(root, path, tree)
    if found is None:
        raise ConfigError(f"{key}: no such key{did_you_mean(key, all_keys(root, tree))}")
    value = value_at(tree, path) if resolved is not None else found.default
    children = tuple(_explained(child, tree, resolved) for child in found.children(value))
    return _explained(found, tree, resolved, children)


def _explained(
    key: Key, tree: Any, resolved: Resolved[Any] | None, children: tuple[Explanation, ...] = ()
) -> Explanation:
    value, origin = key.default, DEFAULT
    if resolved is not None:
        value, origin = value_at(tree, key.path), resolved.raw.entry.origin_at(key.path)
        # the value of an environment variable, or of one in a section around the key, is not shown
        references, around = resolved.config.references, [key.path[:end] for end in range(len(key.path) + 1)]
        value = next((references[path] for path in around if path in references), value)
    return Explanation(
        key=format_path(key.path),
        doc=_doc(key),
        type=key.allowed,
        required=key.required,
        default=key.default,
        value=value,
        origin=origin,
        children=children,
    )


def _doc(key: Key) -> str:
    if key.field is not None and key.field.description:
        return key.field.description
    section = key.section(None)
    # pydantic gives a class without a docstring its base's
    return inspect.cleandoc(section.__doc__ or "") if section is not None and section.__doc__ != Config.__doc__ else ""
