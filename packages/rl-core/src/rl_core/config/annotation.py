"""Field types: their alternatives, what a user may write there, and how a value reads under them."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, MultipleOf
from pydantic.fields import FieldInfo

from rl_core.config.scalar import natural
from rl_core.config.schema import Config

_LISTS = (list, tuple, set, frozenset, Sequence, Iterable, AbstractSet)


def alternatives(annotation: Any, constraints: Sequence[Any] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """The members of a union, each with the constraints that bind it; one for any other type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        for item in more:
            constraints = (*constraints, *(item.metadata if isinstance(item, FieldInfo) else (item,)))
        return alternatives(inner, constraints)
    if origin in (Union, types.UnionType):
        return [found for member in get_args(annotation) for found in alternatives(member, constraints)]
    return [(annotation, tuple(constraints))]


def is_config(kind: Any) -> TypeGuard[type[Config]]:
    """Whether the type is a section."""
    return isinstance(kind, type) and issubclass(kind, Config)


def item_type(kind: Any) -> Any:
    """The type of a list's entries, None where the type is no list."""
    if kind in _LISTS:
        return Any
    if get_origin(kind) not in _LISTS:
        return None
    return next((argument for argument in get_args(kind) if argument is not ...), Any)


def value_type(kind: Any) -> Any:
    """The type of a mapping's values, None where the type is no mapping with free keys."""
    if kind in (dict, Mapping):
        return Any
    return get_args(kind)[1] if get_origin(kind) in (dict, Mapping) else None


def section_type(annotation: Any, value: Any) -> type[Config] | None:
    """The section type that a mapping is meant for: of several, the one whose fixed values and keys it has."""
    sections = [kind for kind, _ in alternatives(annotation) if is_config(kind)]
    if not isinstance(value, Mapping) or len(sections) < 2:
        return sections[0] if sections else None

    def fit(kind: type[Config]) -> tuple[bool, int]:
        fields = kind.model_fields
        fixed = (name for name in value if name in fields and get_origin(fields[name].annotation) is Literal)
        fits = all(natural(value[name]) in get_args(fields[name].annotation) for name in fixed)
        return fits, sum(name in fields for name in value)

    return max(sections, key=fit)


def describe(annotation: Any, constraints: Sequence[Any] = ()) -> str:
    """The type in words: `int > 0`, `one of: float32, bfloat16`, `list of str or null`."""
    members = alternatives(annotation, constraints)
    texts = [_describe(kind, bound) for kind, bound in members if kind is not types.NoneType]
    if len(texts) < len(members):
        texts.append("null")
    return " or ".join(dict.fromkeys(texts))


def _describe(kind: Any, constraints: Sequence[Any]) -> str:
    if get_origin(kind) is Literal:
        return _choices(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choices(member.value for member in kind)
    if is_config(kind):
        return "section"
    if kind is Any:
        return "anything"
    if kind is bool:
        return "true or false"
    if (values := value_type(kind)) is not None:
        return "mapping" if values is Any else f"mapping of {_inner(values)}"
    if (items := item_type(kind)) is not None:
        fixed = get_origin(kind) is tuple and ... not in get_args(kind)
        words = f"list of {' and '.join(map(_inner, get_args(kind)))}" if fixed else f"list of {_inner(items)}"
        return f"{words} {_constraints(constraints)}".strip()
    if isinstance(kind, type):
        name = "path" if issubclass(kind, PurePath) else kind.__name__
        return f"{name} {_constraints(constraints)}".strip()
    return str(kind)


def _inner(annotation: Any) -> str:
    text = describe(annotation)
    return f"({text})" if " or " in text or text.startswith("one of") else text


def _choices(values: Iterable[Any]) -> str:
    shown = ["true" if value is True else "false" if value is False else str(value) for value in values]
    return shown[0] if len(shown) == 1 else f"one of: {', '.join(shown)}"


def _constraints(constraints: Sequence[Any]) -> str:
    return " and ".join(text for item in constraints if (text := _constraint(item)))


def _constraint(item: Any) -> str:
    match item:
        case Gt(gt=bound):
            return f"> {bound}"
        case Ge(ge=bound):
            return f">= {bound}"
        case Lt(lt=bound):
            return f"< {bound}"
        case Le(le=bound):
            return f"<= {bound}"
        case MultipleOf(multiple_of=bound):
            return f"a multiple of {bound}"
        case MinLen(min_length=bound):
            return f"at least {bound} long"
        case MaxLen(max_length=bound):
            return f"at most {bound} long"
        case _:
            return ""
