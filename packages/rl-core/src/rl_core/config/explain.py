"""Documentation, type, value and origin of a key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rl_core.config.dump import rule_of, with_references
from rl_core.config.keys import MAX_NAMES, Key, all_keys, described, value_at
from rl_core.config.messages import by_another_name, did_you_mean
from rl_core.config.resolve import Resolved, Values
from rl_core.config.schema import Config, WhenChanged, plain
from rl_core.config.tree import DEFAULT, Origin, format_path, parse_path
from rl_core.errors import ConfigError


@dataclass(frozen=True)
class Explanation:
    """A key, explained.

    Args:
        key: Dotted; empty for the root.
        doc: Its documentation, from its field, the type of its section or else the mapping with free keys around it;
            empty if none was written.
        type: The values that may be written, in words.
        choices: Values that the type lists, as they are written; empty if it lists none.
        required: True if it must be set.
        default: As plain values; None if it is required.
        value: As plain values, from the resolved config if there is one, otherwise the default.
        origin: Origin of the value.
        children: The keys directly below, each explained without its own children.
        when_changed: A run's use of another value; None of a child.
        part_of: Key of the list or mapping that has the default as an entry, and is replaced as a whole if any entry is
            set; empty for any other key.
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
    part_of: str = ""
    choices: tuple[str, ...] = ()


def explain(root: type[Config], key: str, config: Resolved[Any] | Values | None = None) -> Explanation:
    """Explain a key of a config type.

    Args:
        root: The config type.
        key: Dotted; empty for the root.
        config: One of that type, for the present value and its origin; `Values` of one that need not be valid.

    Raises:
        ConfigError: If there is no such key; the message has the nearest.
    """
    path = parse_path(key) if key else ()
    if isinstance(config, Resolved):
        values: Values | None = Values(plain(config.config), config.raw, config.config.references)
    else:
        values = config
    tree = values.tree if values is not None else {}
    found = Key((), root)
    explained = _explained(found, values, None)
    for segment in path:
        below = found.child(segment, value_at(tree, found.path))
        if below is None:
            known = by_another_name(root, (*found.path, segment), tree)
            reason = known.message if known else f"no such key{did_you_mean(key, all_keys(root, tree))}"
            raise ConfigError(f"{key}: {reason}")
        found, explained = below, _explained(below, values, explained)
    value = value_at(tree, path) if values is not None else explained.default
    children = tuple(_explained(child, values, explained) for child in found.children(value))
    return replace(explained, children=children, when_changed=rule_of(root, path, tree))


def explain_all(root: type[Config], config: Values | None = None) -> Iterator[Explanation]:
    """Explain every key of a config type, in order, without `children`: sections, fields, and the entries of lists and
    mappings that the values have.

    Args:
        root: The config type.
        config: Values of that type; the defaults if None.
    """
    found = Key((), root)
    yield from _explained_below(found, _explained(found, config, None), config)


def _explained_below(key: Key, around: Explanation, values: Values | None) -> Iterator[Explanation]:
    for child in key.children(value_at(values.tree, key.path) if values is not None else around.default):
        if isinstance(child.path[-1], int) or len(child.path) <= MAX_NAMES:
            explained = _explained(child, values, around)
            yield explained
            yield from _explained_below(child, explained, values)


def _explained(key: Key, values: Values | None, around: Explanation | None) -> Explanation:
    """Explain a key, given the explanation of the key directly above; None for the root."""
    default, part_of, section = key.default, "", key.section(None)
    doc = described(section) if section is not None else ""
    if key.field is not None and key.field.description:
        doc = key.field.description
    if key.field is None and around is not None:
        default, doc = value_at(around.default, key.path[-1:]), doc or around.doc
        part_of = "" if default is None else around.part_of or around.key
    value, origin = default, DEFAULT
    if values is not None:
        value, origin = value_at(values.tree, key.path), values.raw.entry.origin_at(key.path)
        # The value of an environment variable at, around or below the key is not shown.
        around_key = [key.path[:end] for end in range(len(key.path))]
        value = with_references(value, values.references, key.path)
        value = next((values.references[path] for path in around_key if path in values.references), value)
    return Explanation(
        key=format_path(key.path),
        doc=doc,
        type=key.allowed,
        required=key.required,
        default=default,
        value=value,
        origin=origin,
        part_of=part_of,
        choices=key.choices,
    )
