"""The keys that a config type has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rl_core.config.annotation import alternatives, describe, is_config, item_type, section_type, value_type
from rl_core.config.key_path import KeyPath, format_path
from rl_core.config.schema import Config


@dataclass(frozen=True)
class Key:
    """One key of a config type.

    Args:
        path: from the root.
        annotation: its type.
        field: the field behind it; None for an entry of a list or of a mapping with free keys, and for the root.
    """

    path: KeyPath
    annotation: Any
    field: FieldInfo | None = None

    @property
    def allowed(self) -> str:
        """What may be written here, in words."""
        return describe(self.annotation, self.field.metadata if self.field else ())

    @property
    def required(self) -> bool:
        """Whether it must be set."""
        return self.field is not None and self.field.is_required()

    @property
    def default(self) -> Any:
        """Its default as nested plain values; None where it has none."""
        return None if self.field is None or self.field.is_required() else plain_default(self.field)

    def section(self, value: Any) -> type[Config] | None:
        """The section type that `value` is read as, None where it is no section."""
        return section_type(self.annotation, value)


def plain_default(field: FieldInfo) -> Any:
    """The default of a field as nested plain values."""
    return plain(field.get_default(call_default_factory=True, validated_data={}))


def plain(value: Any) -> Any:
    """A value of a config as nested dicts, lists and scalars, as YAML can hold it."""
    return to_jsonable_python(value, inf_nan_mode="constants")


def key_at(root: type[Config], path: KeyPath, tree: Any) -> Key | None:
    """The key at a path; `tree` (plain nested values) decides among alternatives of a union."""
    key, value = Key((), root), tree
    for segment in path:
        found = _step(key, segment, value)
        if found is None:
            return None
        key, value = found, _child(value, segment)
    return key


def all_keys(root: type[Config], tree: Any) -> Iterator[str]:
    """Every dotted key, in order; below lists and mappings with free keys, those of the entries in `tree`."""
    return (format_path(key.path) for key in _below(Key((), root), tree))


def _below(key: Key, value: Any) -> Iterator[Key]:
    for segment in child_segments(key, value):
        found = _step(key, segment, value)
        # a section inside itself is listed as deep as it is used
        if found is None or (isinstance(segment, str) and len(found.path) > 12):
            continue
        yield found
        yield from _below(found, _child(value, segment))


def child_segments(key: Key, value: Any) -> list[str | int]:
    """What stands directly below a key: the fields of a section, the entries of a list or mapping."""
    section = None if isinstance(value, list) else key.section(value)
    if section is not None:
        return list(section.model_fields)
    match value:
        case Mapping():
            return list(value)
        case list():
            return list(range(len(value)))
        case _:
            return []


def _step(key: Key, segment: str | int, value: Any) -> Key | None:
    path = (*key.path, segment)
    kinds = [kind for kind, _ in alternatives(key.annotation)]
    if isinstance(segment, int):
        items = [found for kind in kinds if (found := item_type(kind)) is not None]
        return Key(path, items[0]) if items else Key(path, Any) if Any in kinds else None
    section = section_type(key.annotation, value)
    if section is not None and segment in section.model_fields:
        field = section.model_fields[segment]
        return Key(path, field.annotation, field)
    values = [found for kind in kinds if not is_config(kind) and (found := value_type(kind)) is not None]
    return Key(path, values[0]) if values else Key(path, Any) if Any in kinds else None


def _child(value: Any, segment: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(segment)
    if isinstance(value, list) and isinstance(segment, int) and segment < len(value):
        return value[segment]
    return None
