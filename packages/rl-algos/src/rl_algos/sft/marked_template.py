"""Parts of a conversation that a chat template marks by `{% generation %}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from rl_algos.tokenizer import render
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message
from rl_core.tokenizer import Tokenizer

Span = tuple[int, int]

_BLOCK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_PRIVATE = range(0xE000, 0xF900)
"""Private characters of Unicode; two that a conversation does not have replace the marks in its rendered text."""


def has_marks(template: str) -> bool:
    """Return whether a chat template marks the assistant's text."""
    return _BLOCK.search(template) is not None


def template_of(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the chat template; a tokenizer may have another one for conversations with tools."""
    return str(tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] or None))


def render_marked(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, list[Span]]:
    """Render a conversation, and find the parts that the template marks, wherever the marks stand: in macros, filters
    and assignments as well.

    Returns:
        The text without marks, and the marked parts of it in order; empty parts are included.

    Raises:
        DataError: If the marks do not survive the template, or are nested.
    """
    plain = render(tokenizer, messages, add_generation_prompt=False, tools=tools)
    opens, closes = islice((mark for mark in map(chr, _PRIVATE) if mark not in plain), 2)
    template = _with_characters(template_of(tokenizer, tools), opens, closes)
    text = render(tokenizer, messages, add_generation_prompt=False, tools=tools, template=template)
    spans, opened, position = [], -1, 0
    for piece in re.split(f"([{opens}{closes}])", text):
        if piece == opens and opened < 0:
            opened = position
        elif piece == closes and opened >= 0:
            spans.append((opened, position))
            opened = -1
        elif piece in (opens, closes):
            raise _unreadable("nests the blocks or leaves one open")
        else:
            position += len(piece)
    if opened >= 0:
        raise _unreadable("leaves a block open")
    if plain != text.replace(opens, "").replace(closes, ""):
        raise _unreadable("changes its output inside them, as a filter over a whole block does")
    return plain, spans


@lru_cache(maxsize=8)
def _with_characters(template: str, opens: str, closes: str) -> str:
    """Return the template with a character in place of each mark; white space around the marks is controlled as
    before."""

    def character(match: re.Match[str]) -> str:
        left, ends, right = match.groups()
        return f"{{%{left} if true +%}}{closes if ends else opens}{{%+ endif {right}%}}"

    return _BLOCK.sub(character, template)


def _unreadable(reason: str) -> DataError:
    return DataError(
        f"the {{% generation %}} blocks of the chat template cannot be read: it {reason}; set "
        "policy.tokenizer.chat_template to a template with one plain block around what the assistant says"
    )
