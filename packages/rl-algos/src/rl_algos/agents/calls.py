"""An agent's calls of the model and the answers to them, in every dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.program import AnswerForm
from rl_core.rollouts.rollout import Completion, Message

FinishReason = Literal["stop", "length", "tool_calls"]
Tools = tuple[Mapping[str, Any], ...]

MAX_MESSAGE = 1000
"""Maximum number of characters of an error's message."""

COMMENT = b": \n\n"
"""Comment in a stream of events."""


class CallRefused(Exception):
    """A call that is answered with an error.

    Args:
        message: Explanation for the author of the agent, cut after `MAX_MESSAGE` characters, because it may repeat
            parts of the request.
        status: HTTP status.
        code: Name of the error, as clients compare it.
        param: Field of the request that is at fault; empty for none.
        retry_after_s: Seconds after which the client may try again, for the header `Retry-After`; None for never.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}...")
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    def again(self) -> CallRefused:
        """Return an equal error, which does not hold the frames that this one was raised in, with their requests."""
        after = self.retry_after_s
        return CallRefused(str(self), status=self.status, code=self.code, param=self.param, retry_after_s=after)


@dataclass(frozen=True)
class ModelCall:
    """A request for completions of a conversation.

    Args:
        messages: The conversation as chat templates take it; the arguments of tool calls are objects. Empty if `text`
            is given.
        text: Text to continue as it is, without a chat template; None for a conversation.
        tools: JSON schemas of the tools that the policy may call, in OpenAI's nested form.
        reads_calls: False if tool calls of the policy are to stay text (`tool_choice: none`).
        max_new_tokens: Maximum number of tokens to sample; None for the configured number.
        stop_strings: Strings that end the completion, in addition to the run's own.
        num_choices: Number of completions.
        wants_logprobs: True if the answer lists the logprobs of the sampled tokens.
        is_streamed: True if the answer is a stream of events.
        wants_usage: True if a stream ends with the numbers of tokens.
        model: Name of the model as the agent wrote it; the answer repeats it.
        ignored: Fields of the request that have no effect, because the run decides how completions are sampled.
        continues: Id of an earlier answer whose conversation comes before `messages`; empty for none.
        num_instructions: Number of messages at the start that belong to this call only: they stay before the
            conversation that is continued, and a call that continues this one does not get them.
        is_stored: True if later calls may continue the answer by its id.
        form: Form that the request asks for; None if it takes any answer.
        form_fields: Fields of the request that ask for it.
        size: Number of bytes of the request, and of the conversation that it continues; decides which thread processes
            the call.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: Tools = ()
    reads_calls: bool = True
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    num_choices: int = 1
    wants_logprobs: bool = False
    is_streamed: bool = False
    wants_usage: bool = False
    model: str = ""
    ignored: tuple[str, ...] = ()
    continues: str = ""
    num_instructions: int = 0
    is_stored: bool = False
    form: AnswerForm | None = None
    form_fields: tuple[str, ...] = ()
    size: int = field(default=0, compare=False)

    @property
    def asked(self) -> tuple[Message, ...]:
        """The conversation; text without a chat template is one message of the user."""
        return self.messages if self.text is None else ({"role": "user", "content": self.text},)


@dataclass(frozen=True)
class ModelChoice:
    """One completion of a call.

    Args:
        text: Text without thoughts, tool calls and special tokens.
        thoughts: Thoughts before it, without their marks; empty for none.
        tool_calls: The calls, each with an id that no other call of the rollout has. Those that could not be read have
            an `error`, and dialects leave them out of the list of calls, as their text is part of `text`.
        finish_reason: Why it ended.
        completion: The sampled tokens.
        pieces: Text of each token, if the call asked for logprobs.
        stop_string: String of `ModelCall.stop_strings` that ended it, which is not part of `text`; empty for none.
        has_invalid_call: True if a tool call of the turn cannot be read.
    """

    text: str
    thoughts: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    completion: Completion
    pieces: tuple[str, ...] = ()
    stop_string: str = ""
    has_invalid_call: bool = False

    @property
    def readable_calls(self) -> list[ToolCall]:
        """The calls without an error."""
        return [call for call in self.tool_calls if not call.error]


@dataclass(frozen=True)
class ModelAnswer:
    """The answer to a call.

    Args:
        id: Identifies the call within the rollout, as `rl-0123456789abcdef`; rewards may be posted for it.
        created: Seconds since the epoch.
        choices: The completions, `ModelCall.num_choices` of them.
        num_prompt_tokens: Number of tokens before the completions.
        num_cached_tokens: Number of prompt tokens that an earlier call of the same branch had or sampled.
    """

    id: str
    created: int
    choices: tuple[ModelChoice, ...]
    num_prompt_tokens: int
    num_cached_tokens: int = 0

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens of all choices."""
        return sum(len(choice.completion.token_ids) for choice in self.choices)


class StreamEvent(NamedTuple):
    """An event of a stream.

    Attributes:
        data: JSON object; None for the mark that ends OpenAI's streams.
        name: Name of the event; empty if the dialect does not name its events.
    """

    data: Mapping[str, Any] | None
    name: str = ""
