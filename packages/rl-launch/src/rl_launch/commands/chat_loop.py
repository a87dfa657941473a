"""The lines of `rl chat`: what a person types, and what the model answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jinja2 import TemplateError

from rl_algos.rollouts.worker.dialogue import Dialogue
from rl_core.errors import ConfigError, DataError
from rl_core.rollouts.rollout import Message
from rl_launch.commands.chat import AnswerFailed

COMMANDS = {
    "/reset": "forget the conversation",
    "/system": "TEXT: replace the system message and clear the conversation; without TEXT, show it",
    "/raw": "show the conversation as the model reads it, with special tokens",
    "/help": "list the commands",
    "/quit": "end (or Ctrl-D)",
}


class Answerer(Protocol):
    """Answers a conversation."""

    def __call__(self, tokens: np.ndarray, messages: Sequence[Message]) -> tuple[np.ndarray, bool]:
        """Return int32 `[tokens]` that follow, and whether they were cut off.

        Raises:
            AnswerFailed: If there is no answer.
        """
        ...


@dataclass
class ChatLoop:
    """A conversation line by line.

    Args:
        dialogue: The conversation.
        answer: The model.
        say: Shows the model's text.
        note: Shows remarks of this program.
        waiting: Shown while the model answers.
        max_tokens: Maximum number of tokens of a conversation; None if it is not limited.
    """

    dialogue: Dialogue
    answer: Answerer
    say: Callable[[str], None]
    note: Callable[[str], None]
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    max_tokens: int | None = None

    def run(self, lines: Iterable[str]) -> None:
        """Answer lines until they end, or one of them is `/quit`. An interruption (Ctrl-C) of an answer drops it."""
        for line in lines:
            text = line.strip()
            if text == "/quit":
                return
            if not text:
                continue
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
                continue
            try:
                self.ask(text.removeprefix("/") if text.startswith("//") else text)
            except KeyboardInterrupt:
                self.note("(interrupted; the conversation is unchanged)")
            except AnswerFailed as error:
                self.note(f"no answer: {error}. Use /reset to start over")

    def ask(self, text: str) -> None:
        """Ask, and show the answer.

        Raises:
            AnswerFailed: If there is none, or the chat template cannot render what was asked.
        """
        try:
            tokens = self.dialogue.ask(text)
        except (ConfigError, DataError, ValueError, TemplateError) as error:
            raise AnswerFailed(f"the chat template cannot render it: {error}") from None
        with self.waiting():
            sampled, is_cut = self.answer(tokens, self.dialogue.messages)
        text = self.dialogue.answer(sampled).text
        self.say(text)
        if not text and not is_cut:
            self.note("(the model ended its turn without text; use /raw to show the tokens)")
        if is_cut and self.max_tokens is not None and self.dialogue.num_tokens >= self.max_tokens:
            self.note(
                f"(cut off: the conversation has the {self.max_tokens} tokens that policy.max_total_sequence_length "
                "allows; use /reset to start over)"
            )
        elif is_cut:
            self.note(f"(cut off after {len(sampled)} tokens; increase --max-new-tokens to allow more)")

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        match name:
            case "/reset":
                self.dialogue.reset()
                self.note("(the conversation is empty)")
            case "/system" if argument:
                self.dialogue.system = argument.strip()
                self.dialogue.reset()
                self.note("(the system message was replaced, and the conversation is empty)")
            case "/system":
                self.note(self.dialogue.system or "(no system message)")
            case "/raw":
                self.note(f"{self.dialogue.raw}\n({self.dialogue.num_tokens} tokens)")
            case "/help":
                self.note("\n".join(f"{command:8} {what}" for command, what in COMMANDS.items()))
            case _:
                self.note(
                    f"{name} is not a command; commands: {', '.join(COMMANDS)}. A message that begins with / is "
                    "written with two"
                )
