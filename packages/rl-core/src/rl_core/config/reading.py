"""Plain values as a schema reads them: unquoted text where text is due, numbers and truth values where they are."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from rl_core.config.annotation import alternatives, is_config, item_type, section_type, value_type
from rl_core.config.scalar import PlainBool, PlainFloat, PlainInt, natural
from rl_core.config.schema import Config


def read_section(kind: type[Config], values: dict[str, Any]) -> dict[str, Any]:
    """The values of a section, each in the reading that its field asks for; unknown keys as they are."""
    fields = kind.model_fields
    return {
        key: read_as(fields[key].annotation, value) if key in fields else natural(value)
        for key, value in values.items()
    }


def read_as(annotation: Any, value: Any) -> Any:
    """A value in the reading that a type asks for; one that the type has no place for stays what it naturally is."""
    kinds = [kind for kind, _ in alternatives(annotation)]
    match value:
        case PlainInt() | PlainFloat() | PlainBool():
            return _scalar(kinds, value)
        case dict():
            section = section_type(annotation, value)
            if section is not None:
                return read_section(section, value)
            values = _first(value_type, kinds)
            return {key: read_as(values, item) for key, item in value.items()}
        case list():
            return [read_as(kind, item) for kind, item in zip(_entry_types(kinds, len(value)), value, strict=True)]
        case _:
            return value


def _scalar(kinds: list[Any], value: PlainInt | PlainFloat | PlainBool) -> Any:
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    plain = natural(value)
    if any(type(choice) is type(plain) and choice == plain for choice in choices):
        return plain
    if value.text in choices:
        return value.text
    wanted = {float, int} if isinstance(value, PlainInt) else {type(plain)}
    if str not in kinds or Any in kinds or wanted & set(kinds):
        return plain
    return value.text


def _entry_types(kinds: list[Any], length: int) -> list[Any]:
    for kind in kinds:
        if get_origin(kind) is tuple and ... not in get_args(kind) and len(get_args(kind)) == length:
            return list(get_args(kind))
    return [_first(item_type, kinds)] * length


def _first(part: Any, kinds: list[Any]) -> Any:
    return next((found for kind in kinds if not is_config(kind) and (found := part(kind)) is not None), Any)
