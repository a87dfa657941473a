"""Defaults beside what the user wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from rl_core.config.annotation import alternatives, section_type, value_type
from rl_core.config.interpolation import escaped
from rl_core.config.keys import plain, plain_default
from rl_core.config.schema import Config


def unwritten(kind: type[Config], written: Mapping[str, Any]) -> dict[str, Any]:
    """Plain defaults of the keys of a section, and of the sections in it, that `written` does not give."""
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if name not in written:
            if not field.is_required():
                found[name] = plain_default(field)
        elif isinstance(value := written[name], Mapping):
            found[name] = _unwritten_in(field.annotation, value)
    return found


def _unwritten_in(annotation: Any, written: Mapping[str, Any]) -> dict[str, Any]:
    section = section_type(annotation, written)
    if section is not None:
        return unwritten(section, written)
    values = next((v for kind, _ in alternatives(annotation) if (v := value_type(kind)) is not None), None)
    return {key: _unwritten_in(values, item) for key, item in written.items() if isinstance(item, Mapping)}


def with_section_defaults(kind: type[Config], written: Mapping[str, Any]) -> dict[str, Any]:
    """The written values of a section, with what the defaults of the sections in it set beyond those of their types.

    Where a field says `policy: Policy = Policy(precision="float32")`, a user who writes another key of `policy` keeps
    that precision.
    """
    return {
        name: _completed(kind.model_fields[name], value)
        if name in kind.model_fields and isinstance(value, Mapping)
        else value
        for name, value in written.items()
    }


def _completed(field: FieldInfo, written: Mapping[str, Any]) -> dict[str, Any]:
    section = section_type(field.annotation, written)
    if section is None:
        return dict(written)
    default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
    # exactly the type: another member of a union has other keys
    if type(default) is section:
        return _onto(default, written)
    return with_section_defaults(section, written)


def _onto(default: Config, written: Mapping[str, Any]) -> dict[str, Any]:
    """A section as its default has it, with the written values in their places."""
    completed = dict(written)
    for name in type(default).model_fields:
        value = getattr(default, name)
        if name not in written:
            if name in default.model_fields_set:
                completed[name] = escaped(plain(value))
        elif isinstance(value, Config) and isinstance(written[name], Mapping):
            completed[name] = _onto(value, written[name])
    return completed
