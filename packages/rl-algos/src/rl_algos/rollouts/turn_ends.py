"""Tokens at which a turn of the policy ends, read from the chat template and the model's generation config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from rl_algos.tokenizer import generation_ends, render
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
        plain: Text that the template writes behind a turn if no token stands there, such as the marks of ChatML in a
            tokenizer that does not have them; empty if a token ends the turn.
    """

    sampled: tuple[int, ...]
    marks: Mapping[str, int]
    open_next: bool = False
    plain: str = ""


def find_turn_ends(tokenizer: Any, further: Sequence[str] = ()) -> TurnEnds:
    """Find the ends of a turn: the end of sequence, the first added token behind the policy's text, and the special
    tokens that the model's generation config lists.

    Args:
        tokenizer: with or without a chat template.
        further: texts of tokens at which a turn may end as well, such as those behind a tool call.
    """
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    behind = _behind_the_policy(tokenizer, ())
    last = _first_token(behind, added)
    earlier = _first_token(_behind_the_policy(tokenizer, ({"role": "user", "content": OTHER_MARK},)), added)
    configured = [str(tokenizer.added_tokens_decoder[index]) for index in generation_ends(tokenizer)]
    sampled = [tokenizer.eos_token, last or earlier, *(text for text in further if text in added), *configured]
    marks = {text: added[text] for text in (*sampled, earlier) if text in added}
    ids = (tokenizer.eos_token_id, *(added[text] for text in sampled if text in added))
    plain = "" if last or earlier else behind.strip()
    return TurnEnds(tuple(dict.fromkeys(ids)), marks, open_next=not last and bool(earlier), plain=plain)


def _behind_the_policy(tokenizer: Any, later: Sequence[Message]) -> str:
    """Text between the policy's and that of the next message, or the end; empty if the template renders neither."""
    if tokenizer.chat_template is None:
        return ""
    messages: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": POLICY_MARK}, *later]
    try:
        text = render(tokenizer, messages, add_generation_prompt=False)
    except TemplateError:
        return ""
    return text.partition(POLICY_MARK)[2].partition(OTHER_MARK)[0]


def _first_token(text: str, tokens: Mapping[str, int]) -> str:
    found = [(text.index(token), -len(token), token) for token in tokens if token in text]
    return min(found)[2] if found else ""
