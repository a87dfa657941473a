"""The formats in which models write tool calls, and the choice among them by the chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_algos.tool_calls.harmony import harmony
from rl_algos.tool_calls.json_calls import deepseek, hermes, llama, mistral
from rl_algos.tool_calls.marked_calls import glm, qwen_coder
from rl_algos.tool_calls.parsed import Parsed, Parser


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

    parse: Parser
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
"""By name, in the order in which a template is searched for their signs."""

PLAIN = ToolFormat(lambda text, _schemas, _opened="": Parsed(text), ())
"""Of a template that says nothing about tools: a turn has no calls."""


def format_of(chat_template: Any, name: str | None = None) -> ToolFormat:
    """The format with a name, or the one of a chat template.

    Args:
        chat_template: A template, several by name, or None.
        name: One of `FORMATS`; None to read it from the template.
    """
    if name is not None:
        return FORMATS[name]
    text = "\n".join(chat_template.values()) if isinstance(chat_template, dict) else str(chat_template or "")
    return next((found for found in FORMATS.values() if any(sign in text for sign in found.signs)), PLAIN)
