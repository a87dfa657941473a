"""Tool calls that are written as JSON: by Hermes and Qwen, Llama 3 and Mistral."""

from __future__ import annotations

import json
import re

from rl_algos.rollouts.tool_calls.parsed import (
    Parsed,
    Schemas,
    behind_thoughts,
    call_of,
    malformed,
    named_call,
    read_call,
)

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_MISTRAL_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]")
_MISTRAL = "[TOOL_CALLS]"
_LLAMA = "<|python_tag|>"


def hermes(text: str, _schemas: Schemas) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    thoughts, said = behind_thoughts(text)
    calls = [
        read_call(content.strip()) if closed else malformed("it is not closed by </tool_call>")
        for content, closed in _HERMES.findall(said)
    ]
    return Parsed(thoughts + said.partition("<tool_call>")[0], tuple(calls))


def llama(text: str, _schemas: Schemas) -> Parsed:
    """`{"name": ..., "parameters": {...}}` as the whole turn, behind `<|python_tag|>` or not; one call a turn."""
    said = text.strip()
    if said.startswith(_LLAMA):
        return Parsed("", (read_call(said.removeprefix(_LLAMA).strip(), arguments="parameters"),))
    if not said.startswith("{") or '"name"' not in said:
        return Parsed(text)
    return Parsed("", (read_call(said, arguments="parameters"),))


def mistral(text: str, _schemas: Schemas) -> Parsed:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each call."""
    content, called, rest = text.partition(_MISTRAL)
    if not called:
        return Parsed(text)
    names = list(_MISTRAL_NAMED.finditer(text))
    if names:
        ends = [*(name.start() for name in names[1:]), len(text)]
        calls = [named_call(name[1], text[name.end() : end].strip()) for name, end in zip(names, ends, strict=True)]
        return Parsed(content, tuple(calls))
    try:
        found = json.loads(rest)
    except ValueError as error:
        return Parsed(content, (malformed(f"it is not valid JSON: {error}"),))
    listed = found if isinstance(found, list) else [found]
    return Parsed(content, tuple(call_of(each) for each in listed) or (malformed("the list of calls is empty"),))
