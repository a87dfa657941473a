"""Tool calls whose parts stand between marks: by Qwen3-Coder, GLM and DeepSeek."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rl_algos.rollouts.tool_calls.parsed import Parsed, Schemas, behind_thoughts, malformed, named_call, typed
from rl_core.environment import ToolCall

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(<｜tool▁call▁end｜>|$)", re.DOTALL)
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)


def qwen_coder(text: str, schemas: Schemas) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`, values as plain text."""
    thoughts, said = behind_thoughts(text)
    calls = [_qwen_call(content, closed, schemas) for content, closed in _CALL.findall(said)]
    return Parsed(thoughts + said.partition("<tool_call>")[0], tuple(calls))


def glm(text: str, schemas: Schemas) -> Parsed:
    """`<tool_call>NAME` and pairs of `<arg_key>` and `<arg_value>`, then `</tool_call>`; values as plain text."""
    thoughts, said = behind_thoughts(text)
    calls = [_glm_call(content, closed, schemas) for content, closed in _CALL.findall(said)]
    return Parsed(thoughts + said.partition("<tool_call>")[0], tuple(calls))


def deepseek(text: str, _schemas: Schemas) -> Parsed:
    """`<｜tool▁call▁begin｜>...<｜tool▁call▁end｜>` around `function<｜tool▁sep｜>NAME` and fenced JSON (V3, R1), or
    `NAME<｜tool▁sep｜>{...}` (V3.1).
    """
    thoughts, said = behind_thoughts(text)
    calls = [_deepseek_call(content, closed) for content, closed in _DEEPSEEK.findall(said)]
    said = said.partition("<｜tool▁calls▁begin｜>")[0].partition("<｜tool▁call▁begin｜>")[0]
    return Parsed(thoughts + said, tuple(calls))


def _qwen_call(content: str, closed: str, schemas: Schemas) -> ToolCall:
    if not closed:
        return malformed("it is not closed by </tool_call>")
    function = _FUNCTION.fullmatch(content)
    if function is None:
        return malformed("it must be <function=NAME>, parameters and </function>")
    if function[2].count("<parameter=") != len(_PARAMETER.findall(function[2])):
        return malformed("a parameter is not closed by </parameter>", function[1])
    return ToolCall(function[1], _typed(function[1], _PARAMETER.findall(function[2]), schemas))


def _glm_call(content: str, closed: str, schemas: Schemas) -> ToolCall:
    if not closed:
        return malformed("it is not closed by </tool_call>")
    name = content.partition("<arg_key>")[0].strip()
    if not name:
        return malformed("it must begin with the name of a tool")
    if content.count("<arg_key>") != len(_ARGUMENT.findall(content)):
        return malformed("an <arg_key> has no <arg_value> behind it", name)
    return ToolCall(name, _typed(name, _ARGUMENT.findall(content), schemas))


def _deepseek_call(content: str, closed: str) -> ToolCall:
    if not closed:
        return malformed("it is not closed by <｜tool▁call▁end｜>")
    name, separated, rest = content.partition("<｜tool▁sep｜>")
    if not separated:
        return malformed("it has no <｜tool▁sep｜>")
    fenced = _FENCED.fullmatch(rest)
    if name.strip() == "function" and fenced is not None:
        return named_call(fenced[1].strip(), fenced[2])
    return named_call(name.strip(), rest.strip())


def _typed(name: str, pairs: Iterable[tuple[str, str]], schemas: Schemas) -> dict[str, Any]:
    properties = schemas.get(name, {}).get("properties", {})
    return {key.strip(): typed(value, properties.get(key.strip(), {})) for key, value in pairs}
