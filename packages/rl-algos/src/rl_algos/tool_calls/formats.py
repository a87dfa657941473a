"""The formats of tool calls, chosen by the chat template, and OpenAI's harmony format, which gpt-oss writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rl_algos.tool_calls import parsed
from rl_algos.tool_calls.json_calls import deepseek, hermes, llama, mistral
from rl_algos.tool_calls.marked_calls import glm, qwen_coder
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.model_json import after_space

_START = "<|start|>"
_MARK = re.compile(r"<\|(start|message|end|return|call)\|>")
_STOP = re.compile(r"<\|(start|end|return|call)\|>")
_RECIPIENT = re.compile(r"\bto=([\w.\-:/]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_ROLES = ("assistant", "user", "all")


def harmony(text: str, schemas: parsed.Schemas, opened: str = "") -> parsed.Parsed:
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
    return parsed.Parsed("".join(content), tuple(parsed.at_most(calls)))


def _harmony_call(text: str, name: str, begin: int | None, end: int, schemas: parsed.Schemas) -> tuple[ToolCall, int]:
    """Return the call to a recipient, and the position after it.

    Args:
        text: Whole turn of the policy, special tokens included.
        name: Name of the tool.
        begin: Position of the body, None without one.
        end: Position after the header.
        schemas: Schemas of the parameters of the tools, by tool.
    """
    if begin is None:
        return parsed.malformed("it has no <|message|>", name), end
    begin = after_space(text, begin)
    if begin == len(text) or _STOP.match(text, begin):
        return parsed.without_arguments(name, schemas), begin
    try:
        arguments, end = parsed.object_before(text, begin, name=name)
    except parsed.BrokenCall as broken:
        return parsed.malformed(str(broken), name), broken.end
    rest = after_space(text, end)
    if rest < len(text) and not _STOP.match(text, rest):
        return parsed.malformed(f"there is text after its JSON: {text[rest : rest + 20]!r}", name), rest
    return parsed.named_call(name, arguments), rest


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Args:
        parse: Reads a turn's text, with its special tokens except the one that ended it.
        signs: Strings that a chat template contains if its model writes this format; any of them.
        ends: Special tokens that end a turn with calls, in addition to the template's end of a turn.
        arguments_as_text: True if templates take the arguments of a call as JSON text.
        reads_all: True if turns of models with this format are parsed even if there are no tools.
    """

    parse: parsed.Parser
    signs: tuple[str, ...]
    ends: tuple[str, ...] = ()
    arguments_as_text: bool = False
    reads_all: bool = False


FORMATS = {
    "harmony": ToolFormat(harmony, ("<|call|>",), ends=("<|call|>",), reads_all=True),
    "deepseek": ToolFormat(deepseek, ("<｜tool▁call▁begin｜>",), arguments_as_text=True),
    "qwen_coder": ToolFormat(qwen_coder, ("<function=",)),
    "glm": ToolFormat(glm, ("<arg_key>",), ends=("<|observation|>", "<|user|>")),
    "hermes": ToolFormat(hermes, ("<tool_call>",)),
    "mistral": ToolFormat(mistral, ("[TOOL_CALLS]",)),
    "llama": ToolFormat(llama, ("<|python_tag|>", "ipython"), ends=("<|eom_id|>",)),
}
"""By name, in the order of the search for their signs in a template."""

PLAIN = ToolFormat(lambda text, _schemas, _opened="": parsed.Parsed(text), ())
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
