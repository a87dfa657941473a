"""Documentation, type, value and origin of a key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rl_core.config.changes import rule_of
from rl_core.config.keys import Key, all_keys, described, key_at, value_at
from rl_core.config.messages import did_you_mean
from rl_core.config.resolve import Resolved, Values
from rl_core.config.schema import Config, WhenChanged, plain
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
        when_changed: what a run may do with another value; None of a child.
    """

    key: str
    doc: str
    type: str
    required: bool
    default: Any
    value: Any
    origin: Origin
    children: tuple[Explanation, ...] = ()
    when_changed: WhenChanged | None = None


def explain(root: type[Config], key: str, config: Resolved[Any] | Values | None = None) -> Explanation:
    """Explain a key of a config type.

    Args:
        root: the config type.
        key: dotted; empty for the root.
        config: one of that type, for the present value and its origin; `Values` of one that need not be valid.

    Raises:
        ConfigError: if there is no such key, naming the nearest.
    """
    path = parse_path(key) if key else ()
    values = _values(config) if isinstance(config, Resolved) else config
    tree = values.tree if values is not None else {}
    found = key_at(root, path, tree)
    if found is None:
        raise ConfigError(f"{key}: no such key{did_you_mean(key, all_keys(root, tree))}")
    value = value_at(tree, path) if values is not None else found.default
    children = tuple(_explained(child, values) for child in found.children(value))
    return replace(_explained(found, values, children), when_changed=rule_of(root, path, tree))


def _values(resolved: Resolved[Any]) -> Values:
    return Values(plain(resolved.config), resolved.raw, resolved.config.references)


def _explained(key: Key, values: Values | None, children: tuple[Explanation, ...] = ()) -> Explanation:
    value, origin = key.default, DEFAULT
    if values is not None:
        value, origin = value_at(values.tree, key.path), values.raw.entry.origin_at(key.path)
        # the value of an environment variable, or of one in a section around the key, is not shown
        references, around = values.references, [key.path[:end] for end in range(len(key.path) + 1)]
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
    return described(section) if section is not None else ""
