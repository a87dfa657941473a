"""Conversations as one text in which a mark begins every turn, as Anthropic's hh-rlhf has them."""

from __future__ import annotations

import re

from rl_core.rollouts.rollout import Message

_ROLES = {"Human": "user", "Assistant": "assistant"}
_MARK = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


def marked_turns(text: str) -> tuple[Message, ...] | None:
    r"""Read a conversation such as `"\n\nHuman: Hi\n\nAssistant: Hello"`. White space around a turn is left out.

    Returns:
        The messages; None if the text is not such a conversation: it begins with another text, or the assistant says
        nothing.
    """
    marks = list(_MARK.finditer(text))
    if not marks or marks[0][1] != "Human" or marks[0].start() or all(mark[1] == "Human" for mark in marks):
        return None
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return tuple(
        {"role": _ROLES[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    )
