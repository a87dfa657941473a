"""The thoughts in a turn of a policy, and the answer after them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

THOUGHTS: Mapping[str, str] = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "<longcat_think>": "</longcat_think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|channel>": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
}
"""Marks that begin thoughts, and the marks that end them."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that chat templates read thoughts from."""
MARKS = frozenset(THOUGHTS) | frozenset(THOUGHTS.values())
"""All of these marks."""

PROMPT_END = 32
"""Number of tokens at the end of a prompt that are searched for a mark of thoughts."""

_HARMONY = "<|channel|>analysis<|message|>"
_HARMONY_END = "<|end|><|start|>assistant<|channel|>final<|message|>"
"""The final channel of gpt-oss is a message of its own."""
_QUOTES = frozenset("`'\"")
_MARK = re.compile("|".join(map(re.escape, sorted(MARKS))))
_OPENED = re.compile(rf"({'|'.join(map(re.escape, THOUGHTS))})\w*\s*\Z")
_MAX_END = 128
"""Number of characters at the end of a prompt that are searched for an opening mark."""


def final_text(text: str, opened: str = "") -> str:
    """Return the part of a turn that follows its last thoughts; empty if they do not end.

    Thoughts end at the closing mark of the mark that opened them. A closing mark without an opening one ends thoughts
    that the prompt opened. Outside of thoughts, a mark between quotation marks or backticks is only mentioned. A turn
    without marks is returned unchanged.

    Args:
        text: Text of the turn, with the marks of thoughts.
        opened: Mark of the prompt that opened thoughts; empty if there is none, or it is not known.
    """
    end, is_open = last_thoughts(text, opened)
    if is_open:
        return ""
    return text[end:].lstrip() if end else text


def last_thoughts(text: str, opened: str = "") -> tuple[int, str]:
    """Return the end of the last mark in a turn, 0 without marks, and the mark whose thoughts have not ended; empty if
    none are open.

    Args:
        text: See `final_text`.
        opened: See `final_text`.
    """
    *_, last = (None, *_marks(text, opened))
    if last is None:
        return 0, opened
    return last.end(), last[0] if last[0] in THOUGHTS else ""


def closing_text(opened: str) -> str:
    """Return the text that ends thoughts, as models write it before an answer.

    Args:
        opened: Mark that opened them.
    """
    return _HARMONY_END if opened == _HARMONY else f"\n{THOUGHTS[opened]}\n\n"


def only_thoughts(text: str, opened: str = "") -> tuple[str, str] | None:
    """Return the thoughts of a turn and the text after them; None unless it has thoughts once, which are closed.

    Args:
        text: See `final_text`.
        opened: See `final_text`. Without it, a turn may have only the closing mark.
    """
    whole = opened + text
    marks = list(_marks(whole))
    if not 1 <= len(marks) <= 2 or marks[-1][0] != THOUGHTS.get(marks[0][0], marks[0][0]) or marks[-1][0] in THOUGHTS:
        return None
    begin = marks[0].end() if len(marks) == 2 else 0
    return whole[begin : marks[-1].start()], whole[marks[-1].end() :]


def opened_by(prompt: str) -> str:
    """Return the mark at a prompt's end that opens thoughts; empty if there is none.

    Args:
        prompt: Text of the prompt, or its end, with special tokens.
    """
    found = _OPENED.search(prompt[-_MAX_END:])
    return found[1] if found else ""


def _marks(text: str, opened: str = "") -> Iterator[re.Match[str]]:
    """Yield the marks in a text, except marks of another kind in thoughts and those that are only mentioned."""
    for mark in _MARK.finditer(text):
        if mark[0] in (opened, THOUGHTS[opened]) if opened else not _is_mentioned(mark):
            yield mark
            opened = mark[0] if mark[0] in THOUGHTS else ""


def _is_mentioned(mark: re.Match[str]) -> bool:
    before, after = mark.string[mark.start() - 1 : mark.start()], mark.string[mark.end() : mark.end() + 1]
    return before == after and before in _QUOTES
