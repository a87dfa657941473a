"""A conversation of a person with a policy, as the tokens that rollouts would have."""

from __future__ import annotations

import numpy as np

from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.continuation import rewrites_history
from rl_algos.tokenizer import encode_prompt
from rl_core.rollouts.program import Reply
from rl_core.rollouts.rollout import Message
from rl_core.tokenizer import Tokenizer


class Dialogue:
    """Renders the messages of a person, and reads the policy's replies.

    The first turn is encoded as a prompt of the data, later ones as the observations of a multi-turn rollout: the turns
    of the policy are not tokenised again, unless the chat template rewrites earlier turns. The usage loop::

        dialogue = Dialogue(tokenizer, chat, system="Be brief.")
        tokens = dialogue.ask("What is 1 + 1?")
        reply = dialogue.answer(sampled)        # tokens that the policy sampled after these

    Args:
        tokenizer: Tokenizer with a chat template.
        chat: Reads turns of the policy.
        system: System message; empty for none.
    """

    def __init__(self, tokenizer: Tokenizer, chat: Chat, *, system: str = "") -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._rewrites: bool | None = None
        self._asked: list[Message] = []
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self._messages: list[Message] = []
        self._sampled = self._tokens = np.zeros(0, np.int32)

    @property
    def raw(self) -> str:
        """The whole conversation as the policy reads and writes it, with special tokens."""
        return str(self._tokenizer.decode(self._tokens.tolist(), skip_special_tokens=False))

    @property
    def num_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return len(self._tokens)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, with the last question."""
        return tuple(self._asked or self._messages)

    def ask(self, text: str) -> np.ndarray:
        """Return int32 `[tokens]` up to the start of the policy's turn. The conversation changes with the answer only,
        so that a question whose answer does not come is as if it had not been asked.

        Raises:
            ConfigError, DataError, ValueError, jinja2.TemplateError: If the chat template cannot render it.
        """
        said: Message = {"role": "user", "content": text}
        if self._messages:
            messages = [*self._messages, said]
            if self._rewrites is None:
                self._rewrites = rewrites_history(self._tokenizer, self._chat.ends)
            if self._rewrites:
                tokens = self._chat.rendered(messages, self._tokens)
            else:
                continuation = self._chat.continuation(messages[-2], messages[-1:], self._sampled)
                tokens = np.concatenate([self._tokens, continuation])
        else:
            messages = [{"role": "system", "content": self.system}, said] if self.system else [said]
            tokens = encode_prompt(self._tokenizer, messages)
        self._asked, self._asked_tokens = messages, tokens
        return tokens

    def answer(self, sampled: np.ndarray) -> Reply:
        """Add the policy's answer to the last question.

        Args:
            sampled: int32 `[tokens]`.
        """
        assert self._asked, "nothing was asked"
        reply = self._chat.read(sampled)
        self._messages, self._asked = [*self._asked, reply.message], []
        self._sampled = sampled
        self._tokens = np.concatenate([self._asked_tokens, sampled])
        return reply
