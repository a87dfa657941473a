"""Tokens between two turns of the policy, without re-tokenising what it sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rl_algos.images.image_tokens import check_images, with_images
from rl_algos.special_tokens import special_tokens, splits_observations
from rl_algos.tokenizer import render
from rl_algos.turn_ends import TurnEnds
from rl_core.facts.template_ends import OTHER_MARK, POLICY_MARK
from rl_core.rollouts.rollout import Message
from rl_core.tokenizer import Tokenizer

_KINDS = 256
"""Maximum number of kinds of turn and answer whose seams are kept."""


class Continuation:
    """Renders the text that the chat template puts between a turn of the policy and its next one.

    A short conversation is rendered twice: with marks instead of the texts, to find the end of the policy's turn, and
    with the real answer, whose text after that place is used. So it does not matter how the template would write the
    policy's turn: its tokens stay as they were sampled, thoughts and tool calls included.
    Special tokens in the content of an answer are tokenised as text unless the tokenizer's settings say otherwise, and
    its images have all their tokens.

    Args:
        tokenizer: Tokenizer with a chat template.
        ends: Ends of turns in the chat template.
        arguments_as_text: True if the template takes the arguments of a tool call as JSON text.
    """

    def __init__(self, tokenizer: Tokenizer, ends: TurnEnds, *, arguments_as_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._arguments: Any = "{}" if arguments_as_text else {}
        self._seam = lru_cache(_KINDS)(self._find_seam)

    def tokens(self, turn: Message, observation: Sequence[Message], sampled: np.ndarray) -> np.ndarray:
        """Return the tokens to append after a sampled turn.

        Args:
            turn: The policy's message.
            observation: The answer to it.
            sampled: int32 `[tokens]`, the turn as sampled; a missing end of turn is supplied.

        Returns:
            int32 `[tokens]`.

        Raises:
            ValueError: If the template does not render the observation after the turn.
            DataError: If the model cannot read the images of the observation.
        """
        calls = [call.get("id", "") for call in turn.get("tool_calls", ())]
        kinds = [{key: value for key, value in message.items() if key != "content"} for message in observation]
        before, end = self._seam(json.dumps([calls, kinds], sort_keys=True, default=str))
        special = special_tokens(self._tokenizer)
        told = special.hidden(observation) if splits_observations(self._tokenizer) else observation
        check_images(self._tokenizer, told)
        text = render(self._tokenizer, [*self._opening(calls), *told], add_generation_prompt=True)
        if not text.startswith(before):
            raise ValueError(
                "the chat template renders an assistant turn differently depending on the next message, so a rollout "
                "cannot be continued; set policy.tokenizer.chat_template to a template that does not"
            )
        missing = "" if self._has_ended(sampled, end) else end
        following, _ = with_images(self._tokenizer, told, text[len(before) :])
        return np.asarray(special.encode(missing + following), dtype=np.int32)

    def _has_ended(self, sampled: np.ndarray, end: str) -> bool:
        """Return whether the sampled turn ends such that the text after `end` can follow."""
        if not end:
            return True
        last = int(sampled[-1]) if len(sampled) else None
        if self._ends.open_next:
            return last == self._ends.marks[end]
        return last in self._ends.sampled or last in self._ends.marks.values()

    def _find_seam(self, kind: str) -> tuple[str, str]:
        """Return the text up to and with the end of the policy's turn, and that end; an empty end if there is none.

        Args:
            kind: JSON of the ids of the turn's tool calls, and of the observation without its texts.
        """
        calls, kinds = json.loads(kind)
        contents = [OTHER_MARK, *("x" for _ in kinds[1:])]
        observation = [{**each, "content": content} for each, content in zip(kinds, contents, strict=True)]
        text = render(self._tokenizer, [*self._opening(calls), *observation], add_generation_prompt=True)
        begin, other = text.find(POLICY_MARK), text.rfind(OTHER_MARK)
        if begin < 0 or other < begin:
            roles = ", ".join(str(each.get("role")) for each in kinds)
            raise ValueError(
                f"the chat template does not render an observation ({roles}) after an assistant turn, so a multi-turn "
                "rollout cannot be continued; set policy.tokenizer.chat_template to a template that does"
            )
        between = text[begin:other]
        found = [(between.rfind(mark) + len(mark), mark) for mark in self._ends.marks if mark in between]
        if found:
            length, end = max(found)
            return text[: begin + length], end
        if calls:
            raise ValueError(
                "the chat template does not write a special token after a tool call, so the end of the call cannot be "
                "found; set policy.tokenizer.chat_template to a template that does"
            )
        return text[: begin + len(POLICY_MARK)], ""

    def _opening(self, calls: Sequence[str]) -> list[dict[str, Any]]:
        """Return the shortest conversation that ends with a turn of the policy with these calls."""
        turn: dict[str, Any] = {"role": "assistant", "content": POLICY_MARK}
        if calls:
            # A template may leave out the text of a turn with calls, but not the names.
            function = {"name": POLICY_MARK, "arguments": self._arguments}
            turn["tool_calls"] = [{"type": "function", "id": call, "function": function} for call in calls]
        return [{"role": "user", "content": "x"}, turn]


def rewrites_history(tokenizer: Tokenizer, ends: TurnEnds) -> bool:
    """Return whether the template renders an earlier turn in a form that the engine did not see: it renders the last
    turn and the same turn before others differently, or not after the start of the policy's text.
    """

    def shown(*messages: Message, begins: bool = False) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=begins))

    thinks = "</think>" in str(tokenizer.chat_template)
    for text in ("An answer.", *(["<think>\nA thought.\n</think>\n\nAn answer."] if thinks else [])):
        asked, said = {"role": "user", "content": "A question."}, {"role": "assistant", "content": text}
        as_last, as_earlier = shown(asked, said), shown(asked, said, {"role": "user", "content": "Another."})
        cut = max((as_last.rfind(mark) for mark in ends.marks), default=-1)
        # The tokens after the last turn may differ, so they are cut off.
        turn = as_last[:cut] if cut > as_last.rfind("An answer.") else as_last.rstrip()
        if not (as_earlier.startswith(turn) and turn.startswith(shown(asked, begins=True))):
            return True
    return False
