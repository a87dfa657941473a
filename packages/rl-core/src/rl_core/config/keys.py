"""The keys of a config type, found by one walk over annotations and values."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, MultipleOf
from pydantic.fields import FieldInfo

from rl_core.config.schema import Config, plain
from rl_core.config.tree import KeyPath, format_path, natural

_LISTS = (list, tuple, set, frozenset, Sequence, Iterable, AbstractSet)
_MAPPINGS = (dict, Mapping)
MAX_NAMES = 12
"""Maximum number of names of a listed key: a section may hold itself."""

_BOUNDS = {
    Gt: ("gt", "> {}"),
    Ge: ("ge", ">= {}"),
    Lt: ("lt", "< {}"),
    Le: ("le", "<= {}"),
    MultipleOf: ("multiple_of", "a multiple of {}"),
    MinLen: ("min_length", "at least {} long"),
    MaxLen: ("max_length", "at most {} long"),
}


@dataclass(frozen=True)
class Key:
    """One key of a config type.

    Args:
        path: Path from the root.
        annotation: Its type.
        field: Its field; None for an entry of a list or of a mapping with free keys, and for the root.
    """

    path: KeyPath
    annotation: Any
    field: FieldInfo | None = None

    @cached_property
    def kinds(self) -> list[Any]:
        """Its type, or the members if that is a union."""
        return [kind for kind, _ in members(self.annotation)]

    @property
    def allowed(self) -> str:
        """Description of the values that may be written here: `int > 0`, `one of: float32, bfloat16`."""
        return _described(self.annotation, self.field.metadata if self.field else ())

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that its type lists, as they are written; empty if it lists none."""
        values: list[Any] = []
        for kind in self.kinds:
            if get_origin(kind) is Literal:
                values += get_args(kind)
            elif isinstance(kind, type) and issubclass(kind, Enum):
                values += (member.value for member in kind)
            elif kind is bool:
                values += (True, False)
        if values and types.NoneType in self.kinds:
            values.append(None)
        return tuple(dict.fromkeys(_word(value) for value in values))

    @property
    def marks(self) -> list[Any]:
        """Its annotations in addition to the type, such as bounds, also of the members of a union."""
        of_members = [item for _, constraints in members(self.annotation) for item in constraints]
        return [*(self.field.metadata if self.field else ()), *of_members]

    @property
    def required(self) -> bool:
        """True if it must be set."""
        return self.field is not None and self.field.is_required()

    @property
    def default(self) -> Any:
        """Its default as nested plain values; None if it has none."""
        return plain(self.typed_default)

    @property
    def typed_default(self) -> Any:
        """Its default; None if it has none."""
        if self.field is None or self.field.is_required():
            return None
        return self.field.get_default(call_default_factory=True, validated_data={})

    @property
    def is_empty_at_null(self) -> bool:
        """True if null means its default: it takes a list or a mapping and no null, and its default is empty."""
        kinds = [get_origin(kind) or kind for kind in self.kinds]
        takes_several = any(kind in (*_LISTS, *_MAPPINGS) for kind in kinds)
        return takes_several and types.NoneType not in kinds and not self.required and self.default in ([], {})

    def section(self, value: Any) -> type[Config] | None:
        """Return the section type of `value`; of several, the type with its fixed values and keys."""
        sections = [kind for kind in self.kinds if is_section(kind)]
        if not isinstance(value, Mapping) or len(sections) < 2:
            return sections[0] if sections else None

        def fit(kind: type[Config]) -> tuple[bool, int]:
            fields = kind.model_fields
            fixed = (name for name in value if name in fields and get_origin(fields[name].annotation) is Literal)
            fits = all(natural(value[name]) in get_args(fields[name].annotation) for name in fixed)
            return fits, sum(name in fields for name in value)

        return max(sections, key=fit)

    def children(self, value: Any) -> list[Key]:
        """Return the keys directly below: the fields of a section, the entries of a list or mapping."""
        section = None if isinstance(value, list) else self.section(value)
        segments: Iterable[str | int] = ()
        if section is not None:
            segments = section.model_fields
        elif isinstance(value, Mapping):
            segments = value
        elif isinstance(value, list):
            segments = range(len(value))
        return [child for segment in segments if (child := self.child(segment, value)) is not None]

    def child(self, segment: str | int, value: Any) -> Key | None:
        """Return the key one step below; None if it does not exist. `value` decides among the members of a union."""
        path = (*self.path, segment)
        section = self.section(value) if isinstance(segment, str) else None
        if section is not None and segment in section.model_fields:
            field = section.model_fields[segment]
            return Key(path, field.annotation, field)
        length = len(value) if isinstance(value, list) else 0
        # Tuples of another length come last.
        kinds = sorted(self.kinds, key=lambda kind: _is_fixed(kind) and len(get_args(kind)) != length)
        found = [entry for kind in kinds if (entry := entry_type(kind, segment)) is not None]
        return Key(path, found[0]) if found else Key(path, Any) if Any in kinds else None


def key_at(root: type[Config], path: KeyPath, tree: Any) -> Key | None:
    """Return the key at a path; `tree` (plain nested values) decides among the members of a union."""
    *_, (last, _) = keys_along(root, path, tree)
    return last if last.path == path else None


def keys_along(root: type[Config], path: KeyPath, tree: Any) -> Iterator[tuple[Key, Any]]:
    """Yield the keys from the root to a path, each with its value in `tree`, as far as the type has them."""
    key: Key | None = Key((), root)
    for segment in (*path, None):
        if key is None:
            return
        yield key, tree
        if segment is not None:
            key, tree = key.child(segment, tree), value_at(tree, (segment,))


def value_at(tree: Any, path: KeyPath) -> Any:
    """Return the value at a path of plain nested values; None if there is none."""
    for segment in path:
        try:
            tree = tree[segment]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def all_keys(root: type[Config], tree: Any) -> Iterator[str]:
    """Yield every dotted key, in order; lists and mappings with free keys have the entries in `tree`."""

    def below(key: Key, value: Any) -> Iterator[str]:
        for child in key.children(value):
            if isinstance(child.path[-1], int) or len(child.path) <= MAX_NAMES:
                yield format_path(child.path)
                yield from below(child, value_at(value, child.path[-1:]))

    return below(Key((), root), tree)


def described(section: type[Config]) -> str:
    """Return the documentation of a section's type; empty if it has none."""
    # Pydantic gives a class without a docstring the docstring of its base.
    return inspect.cleandoc(section.__doc__) if section.__doc__ and section.__doc__ != Config.__doc__ else ""


def members(annotation: Any, constraints: Sequence[Any] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the members of a union, each with its constraints; any other type is its only member."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        for item in more:
            constraints = (*constraints, *(item.metadata if isinstance(item, FieldInfo) else (item,)))
        return members(inner, constraints)
    if origin in (Union, types.UnionType):
        return [found for member in get_args(annotation) for found in members(member, constraints)]
    return [(annotation, tuple(constraints))]


def is_section(kind: Any) -> TypeGuard[type[Config]]:
    """Return whether a type is the type of a section."""
    return isinstance(kind, type) and issubclass(kind, Config)


def tuple_types(kind: Any) -> tuple[Any, ...]:
    """Return the types of the entries of a tuple that states each; empty for any other type."""
    return get_args(kind) if _is_fixed(kind) else ()


def _is_fixed(kind: Any) -> bool:
    """Return whether the type is a tuple that states the type of each entry."""
    return get_origin(kind) is tuple and ... not in get_args(kind)


def entry_type(kind: Any, segment: str | int) -> Any:
    """Return the type of an entry of a list (by position) or of a mapping with free keys; None for any other type."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if isinstance(segment, str):
        return (arguments[1] if arguments else Any) if origin in _MAPPINGS else None
    if origin not in _LISTS:
        return None
    if _is_fixed(kind) and segment < len(arguments):
        return arguments[segment]
    return arguments[0] if arguments else Any


def _described(annotation: Any, constraints: Sequence[Any] = ()) -> str:
    parts = members(annotation, constraints)
    texts = [_in_words(kind, bound) for kind, bound in parts if kind is not types.NoneType]
    if len(texts) < len(parts):
        texts.append("null")
    return " or ".join(dict.fromkeys(texts))


def _in_words(kind: Any, constraints: Sequence[Any]) -> str:
    if get_origin(kind) is Literal:
        return _choices(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choices(member.value for member in kind)
    if is_section(kind):
        return "section"
    if kind is Any:
        return "anything"
    if kind is bool:
        return "true or false"
    if (values := entry_type(kind, "")) is not None:
        return "mapping" if values is Any else f"mapping of {_inner(values)}"
    if (items := entry_type(kind, 0)) is not None:
        name = "list of " + " and ".join(map(_inner, get_args(kind) if _is_fixed(kind) else (items,)))
    elif isinstance(kind, type):
        name = "path" if issubclass(kind, PurePath) else kind.__name__
    else:
        return str(kind)
    known = [(item, *_BOUNDS[type(item)]) for item in constraints if type(item) in _BOUNDS]
    bounds = " and ".join(form.format(getattr(item, attribute)) for item, attribute, form in known)
    return f"{name} {bounds}".strip()


def _inner(annotation: Any) -> str:
    text = _described(annotation)
    return f"({text})" if " or " in text or text.startswith("one of") else text


def _word(value: Any) -> str:
    """Return a scalar as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _choices(values: Iterable[Any]) -> str:
    shown = [_word(value) for value in values]
    return shown[0] if len(shown) == 1 else f"one of: {', '.join(shown)}"
