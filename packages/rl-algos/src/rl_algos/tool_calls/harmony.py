"""Turns and tool calls in OpenAI's harmony format, which gpt-oss writes."""

from __future__ import annotations

import re

from rl_algos.tool_calls.objects import named_call, object_before, without_arguments
from rl_algos.tool_calls.parsed import BrokenCall, Parsed, Schemas, at_most, malformed
from rl_core.model_json import after_space
from rl_core.rollouts.environment import ToolCall

_START = "<|start|>"
_MARK = re.compile(r"<\|(start|message|end|return|call)\|>")
_STOP = re.compile(r"<\|(start|end|return|call)\|>")
_RECIPIENT = re.compile(r"\bto=([\w.\-:/]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_ROLES = ("assistant", "user", "all")


def harmony(text: str, schemas: Schemas, opened: str = "") -> Parsed:
    """Messages of a header, `<|message|>` and a body. The final channel is the text; one to `functions.NAME`, or to any
    other recipient that is not a role, is a call.
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
            call, end = _call(text, name, begin, end, schemas)
            calls.append(call)
        elif begin is not None:
            stop = _STOP.search(text, begin)
            end = stop.start() if stop else len(text)
            content.append(text[begin:end] if channel is None or channel[1] == "final" else "")
        start = text.find(_START, end)
        at = start + len(_START) if start >= 0 else -1
    return Parsed("".join(content), tuple(at_most(calls)))


def _call(text: str, name: str, begin: int | None, end: int, schemas: Schemas) -> tuple[ToolCall, int]:
    """The call to a recipient, and the position after it.

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
