"""Plain functions as tools that a policy may call."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

OFFERED = ("state", "row", "conversation_seed")
"""Names of parameters that a tool may have and the policy does not see: the dict of the conversation's state, the
fields of the prompt's row, and the seed of the conversation."""

_MAX_PROBLEMS, _MAX_NAME, _MAX_PROBLEM = 8, 100, 300
"""Limits of a message about arguments: problems, and characters of a name and of a problem."""

_ENTRY = re.compile(r"(\w+)(?: \([^)]*\))?:\s*(.*)")


class MalformedCall(ValueError):
    """Arguments of a call that are not those of the tool; the message is for the policy."""


class Tool:
    """A function with the schema that a chat template shows to the policy.

    The schema follows from its signature and its docstring: the first paragraph describes the tool, and entries under
    `Args:` describe the parameters. Parameters called `state`, `row` and `conversation_seed` are given by the
    environment (`OFFERED`).

    Args:
        function: Function with a docstring and annotated parameters; it may be `async`.

    Raises:
        ValueError: If it lacks them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", "")
        parameters = _parameters(function, self.name)
        self.offered = tuple(name for name in parameters if name in OFFERED)
        fields: dict[str, Any] = {name: found for name, found in parameters.items() if name not in OFFERED}
        self._arguments = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
        self._names = tuple(fields)
        description, of_parameters = _documented(function, self.name)
        schema = _without_titles(self._arguments.model_json_schema())
        schema.pop("additionalProperties", None)
        schema.setdefault("properties", {})
        for name, text in of_parameters.items():
            if name in schema["properties"]:
                schema["properties"][name]["description"] = text
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": schema},
        }

    def call(self, arguments: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
        """Call the function; an awaitable if it is `async`.

        Args:
            arguments: As the policy wrote them.
            offered: Values by `OFFERED`.

        Raises:
            MalformedCall: If the arguments are not those of the tool.
        """
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            shown = [
                f"{'.'.join(map(str, each['loc']))[:_MAX_NAME] or 'arguments'}: {each['msg'][:_MAX_PROBLEM]}"
                for each in found[:_MAX_PROBLEMS]
            ]
            more = len(found) - len(shown)
            raise MalformedCall("; ".join([*shown, *([f"and {more} more"] if more else [])])) from None
        given = {name: getattr(checked, name) for name in self._names}
        return self.function(**given, **{name: offered[name] for name in self.offered})


def as_text(result: Any) -> str:
    """Return a tool's result as the policy reads it: a string unchanged, anything else as JSON.

    Halves of surrogate pairs, which no tokenizer takes, become question marks.
    """
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return text.encode(errors="replace").decode()


def schemas(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """The schemas of functions, or of schemas as they are.

    Raises:
        ValueError: If it is not a list of these.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, list | tuple):
        raise ValueError(f"tools must be a list of functions, got {tools!r:.80}")
    return tuple(tool if isinstance(tool, Mapping) else Tool(tool).schema for tool in tools)


def _parameters(function: Any, name: str) -> dict[str, tuple[Any, Any]]:
    """Type and default of each parameter; `...` for none."""
    if not name or not callable(function) or isinstance(function, type):
        raise ValueError(f"a tool must be a function, got {function!r:.80}")
    types = get_type_hints(function)
    found: dict[str, tuple[Any, Any]] = {}
    for each in inspect.signature(function).parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise ValueError(f"the tool {name} takes {each}; name its parameters one by one")
        if each.name not in types and each.name not in OFFERED:
            raise ValueError(f"the tool {name} has no type for {each.name}; annotate it, as in {each.name}: str")
        found[each.name] = (types.get(each.name, Any), ... if each.default is each.empty else each.default)
    return found


def _documented(function: Callable[..., Any], name: str) -> tuple[str, dict[str, str]]:
    """The description of a tool, and of each of its parameters that has one."""
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"the tool {name} has no docstring; the policy learns what the tool does from its docstring")
    body, _, rest = text.partition("\nArgs:\n")
    description = " ".join(body.partition("\n\n")[0].split())
    entries: dict[str, str] = {}
    last = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        entry = _ENTRY.fullmatch(line.strip())
        if entry and len(line) - len(line.lstrip()) <= 4:
            last = entry[1]
            entries[last] = entry[2]
        elif last and line.strip():
            entries[last] += f" {line.strip()}"
    return description, entries


def _without_titles(schema: Any) -> Any:
    """The schema without the titles that pydantic makes of names."""
    if isinstance(schema, dict):
        return {
            key: {name: _without_titles(each) for name, each in value.items()}
            if key in ("properties", "$defs")
            else _without_titles(value)
            for key, value in schema.items()
            if key != "title"
        }
    return [_without_titles(each) for each in schema] if isinstance(schema, list) else schema
