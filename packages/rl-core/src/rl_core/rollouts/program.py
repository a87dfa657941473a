"""What makes one rollout: a program that talks with a generator and an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_core.rollouts.environment import Conversation, StepResult, ToolCall
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Completion, Message, Prompt, Rollout


@dataclass(frozen=True)
class Reply:
    """A parsed turn of the policy.

    Args:
        text: Text of the turn, without special tokens.
        message: As a chat template takes it, tool calls apart from the text.
        tool_calls: Tool calls of the turn.
    """

    text: str
    message: Message
    tool_calls: tuple[ToolCall, ...] = ()


class GenerationClient(Protocol):
    """The services of a rollout program: the replica next to it, the environment of its prompt, and the tokenizer."""

    @property
    def sampling(self) -> SamplingParams:
        """How this rollout's completions are drawn."""
        ...

    async def generate(self, token_ids: np.ndarray, sampling: SamplingParams | None = None) -> Completion:
        """Continue the tokens; seeds follow from the run's seed, the prompt and the rollout."""
        ...

    async def step(self, conversation: Conversation) -> StepResult:
        """The environment's answer to the newest turn; raises `EnvironmentFailed` if it gives none."""
        ...

    def read(self, token_ids: np.ndarray) -> Reply:
        """The turn of these sampled tokens; tool calls are read if the prompt has tools."""
        ...

    def continuation(self, turn: Message, observation: Sequence[Message], sampled: np.ndarray) -> np.ndarray:
        """int32 tokens to append after `sampled`, the newest turn, so that the policy can answer `observation`.

        `turn` is the message of the newest turn. Raises `ValueError` if the chat template cannot render that.
        """
        ...

    def rendered(self, messages: Sequence[Message], so_far: np.ndarray) -> np.ndarray:
        """int32 tokens of the conversation, up to the start of the policy's next turn, as the chat template renders it.

        They begin with `so_far`, the tokens that the engine consumed and sampled last, if the rendered text begins with
        the text of these: nothing is tokenised again then. Otherwise the template has rewritten what it had rendered
        before, and all of them are of the new text.
        """
        ...


class RolloutProgram(Protocol):
    """The course of one rollout. The default is the multi-turn loop over an environment; an agent is another
    program.
    """

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout:
        """Play one rollout; an exception makes it a failed one."""
        ...
