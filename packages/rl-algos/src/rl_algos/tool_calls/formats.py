"""The formats of tool calls, chosen by the chat template: OpenAI's harmony format, which gpt-oss writes, and calls
whose arguments are plain text between marks, by Qwen3-Coder and GLM, with the types of their schemas.

Nothing is escaped between marks. A value ends at the first closing mark that is followed by a mark that may follow a
value. A text that leaves another reading open is malformed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from rl_algos.tool_calls.json_calls import broken_block, deepseek, hermes, llama, mistral
from rl_algos.tool_calls.parsed import (
    BrokenCall,
    Parsed,
    Parser,
    ReadCalls,
    Schemas,
    at_most,
    malformed,
    marked_calls,
    named_call,
    object_before,
    without_arguments,
)
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.model_json import MalformedJson, after_space, read_model_json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_QWEN_MARK = re.compile("<tool_call>|</tool_call>|</?function[=>]|</?parameter[=>]")
_GLM_MARK = re.compile("<tool_call>|</tool_call>|</?arg_(?:key|value)>")
_LABEL = re.compile(r"([^<>\s]{1,128})>")
_SURROGATE = re.compile("[\ud800-\udfff]")

_MAX_REFERENCES = 8
"""Maximum depth of references and unions in a schema that are followed."""
_PYTHON = {"True": True, "False": False, "None": None}
"""Values that policies write as Python does."""


def qwen_coder(text: str, schemas: Schemas, opened: str = "") -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`, values as plain text."""
    found = _all_or_none(text, partial(_qwen_call, schemas=schemas), opened)
    return found if found.calls else _all_or_none(text, _bare_function, opened, mark="<function=")


def glm(text: str, schemas: Schemas, opened: str = "") -> Parsed:
    """`<tool_call>NAME` and pairs of `<arg_key>` and `<arg_value>`, then `</tool_call>`; values as plain text."""
    return _all_or_none(text, partial(_glm_call, schemas=schemas), opened)


def _all_or_none(text: str, read: ReadCalls, opened: str, mark: str = _OPEN) -> Parsed:
    """Return the calls of a turn; none is made if one is broken, because another may be a part of its value."""
    first, calls = marked_calls(text, mark, read, opened)
    if any(call.error for call in calls):
        unmade = "it is not made, because another call of the turn cannot be read"
        calls = [call if call.error else replace(call, arguments={}, error=unmade) for call in calls]
    return Parsed(text[:first], tuple(calls))


def _qwen_call(text: str, start: int, *, schemas: Schemas) -> tuple[list[ToolCall], int]:
    begin = after_space(text, start)
    function = _labelled(text, begin, "<function=")
    if function is None:
        raise broken_block(text, begin, "it must be <function=NAME>, parameters and </function>")
    name, end = function
    pairs: list[tuple[str, str]] = []
    while parameter := _labelled(text, end, "<parameter="):
        key, begin = parameter
        value, end = _value(text, begin, "</parameter>", ("<parameter=", "</function>"), name)
        if "<parameter=" in value:
            raise BrokenCall(f"the parameter {key!r} is not closed by </parameter>", end, name=name)
        pairs.append((key, value.removeprefix("\n").removesuffix("\n")))
    for mark in ("</function>", _CLOSE):
        if not text.startswith(mark, end):
            raise _unclosed(text, end, mark, name)
        end = after_space(text, end + len(mark))
    _require_no_marks(text, end, _QWEN_MARK, name)
    return [_typed_call(name, pairs, schemas)], end


def _bare_function(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Refuse a function outside a call, which a policy writes that forgets the mark before it."""
    at = text.find("</function>", start)
    end = len(text) if at < 0 else at + len("</function>")
    raise BrokenCall(f"<function=NAME> must stand between {_OPEN} and {_CLOSE}", end, mention=at < 0)


def _glm_call(text: str, start: int, *, schemas: Schemas) -> tuple[list[ToolCall], int]:
    mark = _GLM_MARK.search(text, start)
    name = text[start : mark.start()].strip() if mark else ""
    if mark is None or mark[0] not in ("<arg_key>", _CLOSE) or not name:
        raise broken_block(text, after_space(text, start), "it must begin with the name of a tool")
    end = mark.start()
    pairs: list[tuple[str, str]] = []
    while text.startswith("<arg_key>", end):
        key, begin = _value(text, end + len("<arg_key>"), "</arg_key>", ("<arg_value>",), name)
        value, end = _value(text, begin + len("<arg_value>"), "</arg_value>", ("<arg_key>", _CLOSE), name)
        if _GLM_MARK.search(key) or "<arg_key>" in value or "<arg_value>" in value:
            raise BrokenCall("an <arg_key> has no <arg_value>, or one of them is not closed", end, name=name)
        pairs.append((key.strip(), value))
    if not text.startswith(_CLOSE, end):
        raise _unclosed(text, end, _CLOSE, name)
    end += len(_CLOSE)
    _require_no_marks(text, end, _GLM_MARK, name)
    return [_typed_call(name, pairs, schemas)], end


def _labelled(text: str, start: int, mark: str) -> tuple[str, int] | None:
    """Return the label of a mark such as `<function=`, and the position after it and white space."""
    if not text.startswith(mark, start):
        return None
    label = _LABEL.match(text, start + len(mark))
    if label is None:
        raise BrokenCall(f"{mark} must be followed by a name and `>`", start + len(mark))
    return label[1], after_space(text, label.end()) if mark == "<function=" else label.end()


def _value(text: str, start: int, close: str, followers: tuple[str, ...], name: str) -> tuple[str, int]:
    """Return the text before the first `close` that one of `followers` follows, and the follower's position."""
    at = text.find(close, start)
    while at >= 0:
        end = after_space(text, at + len(close))
        if text.startswith(followers, end):
            return text[start:at], end
        at = text.find(close, at + len(close))
    raise BrokenCall(f"there is no {close} before {' or '.join(followers)}", len(text), name=name)


def _unclosed(text: str, end: int, mark: str, name: str) -> BrokenCall:
    if end == len(text):
        return BrokenCall(f"it is not closed by {mark}", end, name=name)
    return BrokenCall(f"a parameter or {mark} must follow, got {text[end : end + 20]!r}", end, name=name)


def _require_no_marks(text: str, end: int, marks: re.Pattern[str], name: str) -> None:
    """Require that the next mark after a call, if any, begins another call."""
    mark = marks.search(text, end)
    if mark is not None and mark[0] != _OPEN:
        raise BrokenCall(f"{mark[0]} follows the end of the call, so where it ends is unclear", mark.end(), name=name)


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> ToolCall:
    schema = schemas.get(name, {})
    properties = properties_of(schema)
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        if key in arguments:
            return malformed(f"it has the parameter {key[:60]!r} twice", name)
        if half := _SURROGATE.search(key + value):
            return malformed(f"a text has half of a surrogate pair, \\u{ord(half[0]):04x}", name)
        try:
            arguments[key] = typed(value, properties.get(key), schema)
        except MalformedJson as error:
            return malformed(f"the argument {key[:60]!r} cannot be read: {error}", name)
    return named_call(name, arguments)


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value of an argument.

    A text that is the JSON of a value of one of the schema's types is that value; the string type comes last, so with
    `["string", "null"]` the text `null` is None. Any other text stays as it is, and the tool reports its expectation.

    Args:
        text: As the policy wrote it.
        schema: JSON schema of the argument; one without types, such as None, asks for a string.
        root: Schema of all arguments, for references.

    Raises:
        MalformedJson: If it must be a list or an object, begins like one and cannot be read.
    """
    types = types_of(schema, root)
    is_choice = isinstance(schema, Mapping) and text in _choices(schema, "enum")
    if types <= {"string"} or is_choice:
        return text
    try:
        value = read_model_json(text)
    except MalformedJson:
        if "string" in types:
            return text
        if types & {"array", "object"} and text.lstrip().startswith(("[", "{")):
            raise
        value = _PYTHON.get(text.strip(), text)
    return value if _type_names(value) & (types - {"string"}) else text


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows; none if it has no type."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return frozenset()
    types = _own_types(schema) or types_of(_referred(schema, root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        types = types or frozenset().union(*(types_of(each, root, depth + 1) for each in _choices(schema, key)))
    for each in _choices(schema, "allOf"):
        further = types_of(each, root, depth + 1)
        types = (types & further) or types or further
    return types | {"null"} if types and schema.get("nullable") is True else types


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of a schema without the schemas that it combines or refers to."""
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else _choices(schema, "type")
    if types := frozenset(each for each in listed if isinstance(each, str)):
        return types
    if "const" in schema:
        return _type_names(schema["const"])
    if "properties" in schema or "additionalProperties" in schema:
        return frozenset({"object"})
    if "items" in schema or "prefixItems" in schema:
        return frozenset({"array"})
    return frozenset().union(*map(_type_names, _choices(schema, "enum")))


def properties_of(schema: Any, depth: int = 0, root: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the schemas of arguments by name, including the ones of references and of `allOf`."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return {}
    root = schema if root is None else root
    found = dict(properties_of(_referred(schema, root), depth + 1, root))
    for part in _choices(schema, "allOf"):
        found.update(properties_of(part, depth + 1, root))
    own = schema.get("properties")
    return {**found, **own} if isinstance(own, Mapping) else found


def _referred(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return the schema of `$ref`, as in `#/$defs/Name`; None if it does not exist."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _choices(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return the list under a key, an empty one if it is not a list."""
    found = schema.get(key)
    return found if isinstance(found, list | tuple) else ()


_TYPE_NAMES: Mapping[type, frozenset[str]] = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    tuple: frozenset({"array"}),
    Mapping: frozenset({"object"}),
}
"""Types of JSON by types of Python; bool comes before int, which it is one of."""


def _type_names(value: Any) -> frozenset[str]:
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    return next((names for kind, names in _TYPE_NAMES.items() if isinstance(value, kind)), frozenset())


_START = "<|start|>"
_MARK = re.compile(r"<\|(start|message|end|return|call)\|>")
_STOP = re.compile(r"<\|(start|end|return|call)\|>")
_RECIPIENT = re.compile(r"\bto=([\w.\-:/]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_ROLES = ("assistant", "user", "all")


def harmony(text: str, schemas: Schemas, opened: str = "") -> Parsed:
    """Read messages of a header, `<|message|>` and a body. The final channel is the text. A message to
    `functions.NAME`, or to any other recipient that is not a role, is a call.
    """
    content, calls, at = list[str](), list[ToolCall](), 0
    while at >= 0:
        mark = _MARK.search(text, at)
        header = text[at : mark.start() if mark else len(text)]
        begin = mark.end() if mark and mark[1] == "message" else None
        end = mark.start() if mark else len(text)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if name and name not in _ROLES and (begin is not None or "functions." in header):
            call, end = _harmony_call(text, name, begin, end, schemas)
            calls.append(call)
        elif begin is not None:
            stop = _STOP.search(text, begin)
            end = stop.start() if stop else len(text)
            content.append(text[begin:end] if channel is None or channel[1] == "final" else "")
        start = text.find(_START, end)
        at = start + len(_START) if start >= 0 else -1
    return Parsed("".join(content), tuple(at_most(calls)))


def _harmony_call(text: str, name: str, begin: int | None, end: int, schemas: Schemas) -> tuple[ToolCall, int]:
    """Return the call to a recipient, and the position after it.

    Args:
        text: Whole turn of the policy, special tokens included.
        name: Name of the tool.
        begin: Position of the body, None without one.
        end: Position after the header.
        schemas: Schemas of the parameters of the tools, by tool.
    """
    if begin is None:
        return malformed("it has no <|message|>", name), end
    begin = after_space(text, begin)
    if begin == len(text) or _STOP.match(text, begin):
        return without_arguments(name, schemas), begin
    try:
        arguments, end = object_before(text, begin, name=name)
    except BrokenCall as broken:
        return malformed(str(broken), name), broken.end
    rest = after_space(text, end)
    if rest < len(text) and not _STOP.match(text, rest):
        return malformed(f"there is text after its JSON: {text[rest : rest + 20]!r}", name), rest
    return named_call(name, arguments), rest


MAX_WHITESPACE = 32
"""Maximum number of white space characters in a row in constrained JSON. Without a limit, a policy could write white
space up to its token limit, which the grammar always allows."""


class WrittenCall(NamedTuple):
    """How a model writes a call of the tool NAME.

    Args:
        begin: Text before the arguments.
        end: Text after them.
        trigger: Beginning of `begin` that no other text has; empty if a text may begin like a call.
        style: How the arguments are written, as xgrammar names it.
    """

    begin: str
    end: str
    trigger: str = ""
    style: str = "json"

    def tag(self, function: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return xgrammar's tag of a call.

        Args:
            function: Name and parameters of the tool.

        Raises:
            ValueError: If the parameters are not an object.
        """
        if not isinstance(function["parameters"], Mapping):
            raise ValueError(f"the parameters of the tool {function['name']} are not an object")
        # Arguments are an object, also those of a tool whose schema has no type.
        content = json_format({"type": "object", **function["parameters"]}, style=self.style)
        begin = self.begin.replace("NAME", function["name"])
        return {"type": "tag", "begin": begin, "content": content, "end": self.end}


def json_format(schema: Any, *, style: str = "json") -> Mapping[str, Any]:
    """Return xgrammar's format of a text that matches a JSON schema."""
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": MAX_WHITESPACE}


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Args:
        parse: Reads a turn's text, with its special tokens except the one that ended it.
        signs: Strings that a chat template contains if its model writes this format; any of them.
        ends: Special tokens that end a turn with calls, in addition to the template's end of a turn.
        arguments_as_text: True if templates take the arguments of a call as JSON text.
        reads_all: True if turns of models with this format are parsed even if there are no tools.
        written: How a call is written, for grammars; None if no grammar is offered for the format.
    """

    parse: Parser
    signs: tuple[str, ...]
    ends: tuple[str, ...] = ()
    arguments_as_text: bool = False
    reads_all: bool = False
    written: WrittenCall | None = None


FORMATS = {
    "harmony": ToolFormat(harmony, ("<|call|>",), ends=("<|call|>",), reads_all=True),
    "deepseek": ToolFormat(deepseek, ("<｜tool▁call▁begin｜>",), arguments_as_text=True),
    "qwen_coder": ToolFormat(
        qwen_coder,
        ("<function=",),
        written=WrittenCall("<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", _OPEN, style="qwen_xml"),
    ),
    "glm": ToolFormat(
        glm,
        ("<arg_key>",),
        ends=("<|observation|>", "<|user|>"),
        written=WrittenCall("<tool_call>NAME\n", "\n</tool_call>", _OPEN, style="glm_xml"),
    ),
    "hermes": ToolFormat(
        hermes,
        ("<tool_call>",),
        written=WrittenCall('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", _OPEN),
    ),
    "mistral": ToolFormat(
        mistral,
        ("[TOOL_CALLS]",),
        written=WrittenCall('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]", "[TOOL_CALLS]"),
    ),
    "llama": ToolFormat(
        llama,
        ("<|python_tag|>", "ipython"),
        ends=("<|eom_id|>",),
        written=WrittenCall('{"name": "NAME", "parameters": ', "}"),
    ),
}
"""By name, in the order of the search for their signs in a template."""

PLAIN = ToolFormat(lambda text, _schemas, _opened="": Parsed(text), ())
"""The format of a template without tools: a turn has no calls."""


def format_of(chat_template: Any, name: str | None = None) -> ToolFormat:
    """Return the format with a name, or the one of a chat template.

    Args:
        chat_template: A template, several by name, or None.
        name: One of `FORMATS`; None to read it from the template.
    """
    if name is not None:
        return FORMATS[name]
    text = "\n".join(chat_template.values()) if isinstance(chat_template, dict) else str(chat_template or "")
    return next((found for found in FORMATS.values() if any(sign in text for sign in found.signs)), PLAIN)
