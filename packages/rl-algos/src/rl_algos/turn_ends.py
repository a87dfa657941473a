"""Tokens that end a turn of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rl_algos.tokenizer import generation_ends
from rl_core.facts.template_ends import template_ends
from rl_core.tokenizer import Tokenizer


class TurnEnds(NamedTuple):
    """Tokens that end a turn of the policy, or follow one.

    Args:
        sampled: Ids that end a completion; the end of sequence comes first.
        marks: Ids by text of these tokens, and of a token that the template writes after an earlier turn instead, such
            as `<|end|>` of gpt-oss, which ends a last turn with `<|return|>`.
        open_next: True if these tokens begin the next message, as `<|user|>` of GLM does, rather than end the turn.
        plain: Text that the template writes after a turn if there is no token, such as the marks of ChatML in a
            tokenizer that does not have them; empty if a token ends the turn.
    """

    sampled: tuple[int, ...]
    marks: Mapping[str, int]
    open_next: bool = False
    plain: str = ""


def find_turn_ends(tokenizer: Tokenizer, further: Sequence[str] = ()) -> TurnEnds:
    """Find the ends of a turn: the end of sequence, the first added token after the policy's text, and the special
    tokens that the model's generation config lists.

    Args:
        tokenizer: Tokenizer with or without a chat template.
        further: Strings of tokens that may also end a turn, such as those after a tool call.
    """
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    written = template_ends(tokenizer)
    configured = [str(tokenizer.added_tokens_decoder[index]) for index in generation_ends(tokenizer)]
    sampled = [tokenizer.eos_token, written.token, *(text for text in further if text in added), *configured]
    marks = {text: added[text] for text in (*sampled, written.earlier) if text in added}
    ids = (tokenizer.eos_token_id, *(added[text] for text in sampled if text in added))
    plain = "" if written.token else written.behind.strip()
    open_next = not written.last and bool(written.earlier)
    return TurnEnds(tuple(dict.fromkeys(ids)), marks, open_next=open_next, plain=plain)
