"""The maker of one rollout: a program that talks with a generator and an environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rl_core.rollouts.environment import Conversation, StepResult, ToolCall
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Completion, Message, Prompt, Rollout


@dataclass(frozen=True)
class Reply:
    """A parsed turn of the policy.

    Args:
        text: Text of the turn, without special tokens except the marks of thoughts.
        message: As a chat template takes it, tool calls apart from the text.
        tool_calls: Tool calls of the turn.
    """

    text: str
    message: Message
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def has_invalid_call(self) -> bool:
        """Return whether a tool call of the turn cannot be read."""
        return any(call.error for call in self.tool_calls)


@dataclass(frozen=True)
class AnswerForm:
    """A form that a turn of the policy must have, after its thoughts: a text that matches a schema, a call of a tool,
    or either of them.

    Args:
        schema: JSON schema of the text, as JSON; empty for any text.
        tools: JSON schemas of tools in OpenAI's nested form, as JSON. The arguments of a call match the tool's schema.
        must_call: True if the turn is a call.
    """

    schema: str = ""
    tools: str = "[]"
    must_call: bool = False


def requested_schema(response_format: Any) -> str:
    """Return the JSON schema that an answer must match, as JSON; empty for any text.

    Args:
        response_format: Field of this name of OpenAI's chat completions, or the flat form of other services; None for
            any text.

    Raises:
        ValueError: If it asks for another format.
    """
    given = {"type": response_format} if isinstance(response_format, str) else response_format
    kind = None if given is None else given.get("type") if isinstance(given, Mapping) else given
    if kind in (None, "text"):
        return ""
    if kind == "json_object":
        return json.dumps({"type": "object"})
    # Chat completions nest the fields that other services have next to the type.
    nested = given.get("json_schema", given) if isinstance(given, Mapping) else None
    if kind != "json_schema" or not isinstance(nested, Mapping) or not isinstance(nested.get("schema"), Mapping):
        shown = json.dumps(response_format, default=str)[:100]
        raise ValueError(f"{shown} is not offered; pass json_schema with a schema, json_object or text")
    return json.dumps(nested["schema"])


class GenerationClient(Protocol):
    """The services of a rollout program: the replica next to it, the environment of its prompt, and the tokenizer."""

    @property
    def sampling(self) -> SamplingParams:
        """How this rollout's completions are drawn."""

    @property
    def characters_per_token(self) -> float:
        """Maximum number of characters of one token; infinity if there is no bound."""

    async def generate(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams | None = None,
        *,
        draw: int | None = None,
        agent: str = "",
        images: Sequence[str] = (),
    ) -> Completion:
        """Continue the tokens; seeds follow from the run's seed, the prompt and the rollout.

        Args:
            token_ids: int32 `[tokens]`, with all tokens of each image.
            sampling: How to draw; None for `sampling`.
            draw: For a program that has several requests in flight: the number of earlier requests that are equal to
                this one. The seed then follows from the request and this number, so that it does not depend on the
                order of requests. None numbers the requests in order.
            agent: Name of the agent whose turn it is, in a play of several: other weights than the policy's answer for
                one that is an opponent. Empty for the policy.
            images: Digests of the images among the tokens, in order (`rl_core.images`).

        Raises:
            ValueError: If the policy sampled an image token.
        """

    def grammar(self, form: AnswerForm, token_ids: np.ndarray) -> str:
        """Return `SamplingParams.grammar` for a turn of this form.

        It is empty if the form only limits the arguments of calls, and the format of the policy has no grammar for text
        and calls.

        Args:
            form: Form of the turn.
            token_ids: int32 `[tokens]`, to continue; they may open thoughts.

        Raises:
            ValueError: If there is no grammar for the form, such as for calls in the format of this policy.
        """

    async def step(self, conversation: Conversation) -> StepResult:
        """Return the environment's answer to the newest turn; raises `EnvironmentFailed` if it gives none."""

    def read(self, token_ids: np.ndarray, tools: Sequence[Mapping[str, Any]] | None = None) -> Reply:
        """Return the turn of these sampled tokens; tool calls are read if there are tools (by default the prompt's)."""

    def continuation(self, turn: Message, observation: Sequence[Message], sampled: np.ndarray) -> np.ndarray:
        """int32 tokens to append after `sampled`, the newest turn, so that the policy can answer `observation`.

        `turn` is the message of the newest turn. Images of the observation are among the tokens with all of theirs.
        Raises `ValueError` if the chat template cannot render that.
        """

    def rendered(
        self, messages: Sequence[Message], so_far: np.ndarray, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> np.ndarray:
        """int32 tokens of the conversation, up to the start of the policy's next turn, as the chat template renders it.

        They begin with `so_far`, the tokens that the engine consumed and sampled last, if the rendered text begins with
        the text of these: nothing is tokenised again then. Otherwise the template has rewritten what it had rendered
        before, and all of them are of the new text. The tools are those of the prompt by default. Images of the
        messages are among the tokens with all of theirs.
        """

    def encoded(self, text: str) -> np.ndarray:
        """int32 `[tokens]` of a string as it is; special tokens in it are recognised."""

    def shown(self, token_ids: np.ndarray) -> str:
        """Return the text of tokens, with special tokens."""

    def pieces(self, token_ids: np.ndarray) -> list[str]:
        """Return the text of each token."""

    def on_failure(self, played: Callable[[], Sequence[Rollout]]) -> None:
        """Set a function that returns what was played so far. If the play fails, its record has these turns."""


class RolloutProgram(Protocol):
    """The course of one play. The default is the multi-turn loop over an environment; an agent is another program."""

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        """Play once; an exception makes the play one failed rollout.

        Returns:
            The rollout of the policy, or several: one per agent or per sub-task, each with its `Rollout.agent` and
            `Rollout.peers`.
        """


@runtime_checkable
class OfferingProgram(RolloutProgram, Protocol):
    """A program whose rollouts are taken by programs elsewhere, which may never come."""

    @property
    def num_untaken(self) -> int:
        """Number of rollouts that nobody has taken."""


@runtime_checkable
class PreparedProgram(RolloutProgram, Protocol):
    """A program that needs something before its first rollout, and frees it after the last."""

    async def start(self, logs: Path) -> None:
        """Prepare; called once, with the engine loaded.

        Args:
            logs: Folder of the run's logs.
        """

    async def close(self) -> None:
        """Free what `start` took."""
