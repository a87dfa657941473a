"""Tokens that a chat template writes after a turn of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

POLICY_MARK, OTHER_MARK = "ANCHOR_5f1d_POLICY", "ANCHOR_5f1d_OTHER"
"""Placeholders in a rendered conversation: the text of the policy's turn, and the text of the answer to it."""


@dataclass(frozen=True)
class TemplateEnds:
    """Text after a turn.

    Args:
        behind: Text after the last turn of a conversation.
        last: First added token in `behind`; empty if there is none.
        earlier: First added token after a turn that is answered, which may open the answer; empty if there is none.
    """

    behind: str = ""
    last: str = ""
    earlier: str = ""

    @property
    def token(self) -> str:
        """The policy's stop token; empty if the template writes none."""
        return self.last or self.earlier


def template_ends(tokenizer: Any) -> TemplateEnds:
    """Read the ends of a turn from a tokenizer's chat template; nothing is known of one that cannot render two turns.

    Args:
        tokenizer: Fast, with or without a chat template.
    """
    if tokenizer.chat_template is None:
        return TemplateEnds()
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    behind = _behind_the_policy(tokenizer, ())
    answered = _behind_the_policy(tokenizer, ({"role": "user", "content": OTHER_MARK},))
    return TemplateEnds(behind, _first_token(behind, added), _first_token(answered, added))


def _behind_the_policy(tokenizer: Any, later: Sequence[Mapping[str, str]]) -> str:
    """Text between the policy's text and the next message's, or the end; empty if the template renders neither."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": POLICY_MARK}, *later]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # noqa: BLE001 - a template is code, and may fail with anything on what it does not take
        return ""
    return text.partition(POLICY_MARK)[2].partition(OTHER_MARK)[0]


def _first_token(text: str, tokens: Sequence[str]) -> str:
    found = [(text.index(token), -len(token), token) for token in tokens if token in text]
    return min(found)[2] if found else ""
