"""The token that ends a turn of the assistant in a rendered conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl_algos.rollouts.worker.turn_ends import find_turn_ends
from rl_algos.sft.marked_template import Span
from rl_algos.tool_calls.formats import format_of


@dataclass(frozen=True)
class TurnClosing:
    """Finds the end of a turn.

    Args:
        turn: Tokens at which the policy stops, the end of sequence first.
        special: All special tokens, the longest first, if the template does not show which of them ends a turn;
            otherwise none.
    """

    turn: tuple[str, ...]
    special: tuple[str, ...]

    def closed(self, text: str, span: Span) -> tuple[Span, str]:
        """Return a span up to the token that ends its turn, and that token; it is empty if there is none.

        Whatever a template writes after the token is left out.
        """
        start, end = span
        end = start + len(self.without(text[start:end]))
        rest = text[end:]
        gap = len(rest) - len(rest.lstrip())
        if follows := beginning(rest[gap:], self.turn):
            return (start, end + gap + len(follows)), follows
        said = text[start:end].rstrip()
        if inside := next((token for token in self.special if said.endswith(token)), ""):
            return (start, start + len(said)), inside
        if follows := beginning(rest, self.special):
            return (start, end + len(follows)), follows
        return span, ""

    def without(self, turn: str) -> str:
        """Return a turn without the token that ends it, and without what follows that."""
        found = [turn.index(end) for end in self.turn if end in turn]
        return turn[: min(found)] if found else turn


@lru_cache(maxsize=8)
def ends_of(tokenizer: Any, template: str) -> TurnClosing:
    """Return how turns of a tokenizer with a chat template end."""
    found = find_turn_ends(tokenizer, format_of(template).ends)
    turn = tuple(str(token) for token in tokenizer.convert_ids_to_tokens(list(found.sampled)))
    if len(turn) > 1 or turn[0] in template:
        return TurnClosing(turn, ())
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return TurnClosing(turn, tuple(sorted(special, key=len, reverse=True)))


def beginning(text: str, tokens: Sequence[str]) -> str:
    """Return the token at the start of a string; empty if there is none."""
    return next((token for token in tokens if text.startswith(token)), "")
