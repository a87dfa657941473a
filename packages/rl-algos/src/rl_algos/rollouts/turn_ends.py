"""Special tokens at which a turn of the policy ends, read from the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from rl_core.rollout import Message

POLICY_MARK, OTHER_MARK = "ANCHOR_5f1d_POLICY", "ANCHOR_5f1d_OTHER"
"""Stand in a rendered conversation for the text of the policy's turn, and for that of the answer to it."""


@dataclass(frozen=True)
class TurnEnds:
    """Tokens that end a turn of the policy, or stand behind one.

    Args:
        sampled: ids that end a completion; the end of sequence comes first.
        marks: by text, the ids of those and of a token that the template writes behind an earlier turn instead, such
            as `<|end|>` of gpt-oss, which ends a last turn with `<|return|>`.
        open_next: whether these tokens begin the next message, as `<|user|>` of GLM does, rather than end the turn.
    """

    sampled: tuple[int, ...]
    marks: Mapping[str, int]
    open_next: bool = False


def find_turn_ends(tokenizer: Any, further: Sequence[str] = ()) -> TurnEnds:
    """Find the ends of a turn: the end of sequence, and the first special token behind the policy's text.

    Args:
        tokenizer: with or without a chat template.
        further: texts of tokens at which a turn may end as well, such as those behind a tool call.
    """
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    last = _first_special(_behind_the_policy(tokenizer, ()), special)
    earlier = _first_special(_behind_the_policy(tokenizer, ({"role": "user", "content": OTHER_MARK},)), special)
    sampled = [tokenizer.eos_token, last or earlier, *(text for text in further if text in special)]
    marks = {text: special[text] for text in (*sampled, earlier) if text in special}
    ids = (tokenizer.eos_token_id, *(special[text] for text in sampled if text in special))
    return TurnEnds(tuple(dict.fromkeys(ids)), marks, open_next=not last and bool(earlier))


def _behind_the_policy(tokenizer: Any, later: Sequence[Message]) -> str:
    """Text between the policy's and that of the next message, or the end; empty if the template renders neither."""
    if tokenizer.chat_template is None:
        return ""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": POLICY_MARK}, *later]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TemplateError:
        return ""
    return text.partition(POLICY_MARK)[2].partition(OTHER_MARK)[0]


def _first_special(text: str, special: Mapping[str, int]) -> str:
    found = [(text.index(token), -len(token), token) for token in special if token in text]
    return min(found)[2] if found else ""
