"""An agent's calls of the model and the answers to them, whatever dialect the agent speaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.rollout import Completion, Message

FinishReason = Literal["stop", "length", "tool_calls"]


MAX_MESSAGE = 1000
"""Maximum number of characters of an error's message."""


class CallRefused(Exception):
    """A call that is answered with an error.

    Args:
        message: What is wrong with it, for the person who wrote the agent. It is cut after `MAX_MESSAGE` characters,
            because it may repeat a part of the request.
        status: HTTP status.
        code: Name of the error, as clients compare it.
        param: Field of the request that is at fault; empty for none.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str = "") -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}...")
        self.status = status
        self.code = code
        self.param = param

    def again(self) -> CallRefused:
        """Return an equal error, which does not hold the frames that this one was raised in, with their requests."""
        return CallRefused(str(self), status=self.status, code=self.code, param=self.param)


@dataclass(frozen=True)
class Call:
    """A request for completions of a conversation.

    Args:
        messages: The conversation as chat templates take it; the arguments of tool calls are objects. Empty if `text`
            is given.
        text: Text to continue as it is, without a chat template; None for a conversation.
        tools: JSON schemas of the tools that the policy may call, in OpenAI's nested form.
        reads_calls: False if tool calls of the policy are to stay text (`tool_choice: none`).
        max_new_tokens: Maximum number of tokens to sample; None for the configured number.
        stop_strings: Strings that end the completion, in addition to those of the run.
        num_choices: Number of completions.
        wants_logprobs: Whether the answer lists the logprobs of the sampled tokens.
        is_streamed: Whether the answer is a stream of events.
        wants_usage: Whether a stream ends with the numbers of tokens.
        model: Name of the model as the agent wrote it; the answer repeats it.
        ignored: Fields of the request that have no effect, because the run decides how completions are sampled.
        continues: Id of an earlier answer whose conversation comes before `messages`; empty for none.
        num_instructions: Number of messages at the start that belong to this call only: they stay before the
            conversation that is continued, and a call that continues this one does not get them.
        is_stored: Whether later calls may continue the answer by its id.
        size: Number of bytes of the request, and of the conversation that it continues; decides in which thread the
            call is processed.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
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
    size: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Choice:
    """One completion of a call.

    Args:
        text: Text without thoughts, tool calls and special tokens.
        thoughts: Thoughts before it, without their marks; empty for none.
        tool_calls: The calls, each with an id that no other call of the rollout has. Those that could not be read have
            an `error`, and dialects leave them out of the list of calls, as their text is part of `text`.
        finish_reason: Why it ended.
        completion: The sampled tokens.
        pieces: Text of each token, if the call asked for logprobs.
        stop_string: String of `Call.stop_strings` that ended it, which is not part of `text`; empty for none.
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


@dataclass(frozen=True)
class Answer:
    """The answer to a call.

    Args:
        id: Identifies the call within the rollout, as `rl-0123456789abcdef`; rewards may be posted for it.
        created: Seconds since the epoch.
        choices: The completions, `Call.num_choices` of them.
        num_prompt_tokens: Number of tokens before the completions.
        num_cached_tokens: Number of those that an earlier call of the same branch had or sampled.
    """

    id: str
    created: int
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_cached_tokens: int = 0

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens of all choices."""
        return sum(len(choice.completion.token_ids) for choice in self.choices)


@dataclass(frozen=True)
class Event:
    """An event of a stream.

    Args:
        data: JSON object; None for the mark that ends OpenAI's streams.
        name: Name of the event; empty if the dialect does not name its events.
    """

    data: Mapping[str, Any] | None
    name: str = ""


COMMENT = b": \n\n"
"""Comment in a stream of events."""


class Dialect(Protocol):
    """A wire format: what a request means, and how answers and errors are written.

    Attributes:
        heartbeat: Part of a stream that clients ignore, sent while they wait for the first event.
    """

    heartbeat: bytes

    def read(self, body: Mapping[str, Any]) -> Call:
        """Return the call that a request's JSON body asks for; raise `CallRefused` if it cannot be served."""
        ...

    def answer(self, call: Call, answer: Answer) -> Mapping[str, Any]:
        """Return the JSON body of an answer."""
        ...

    def events(self, call: Call, answer: Answer) -> Iterator[Event]:
        """Yield the events of a streamed answer."""
        ...

    def error(self, refused: CallRefused) -> Mapping[str, Any]:
        """Return the JSON body of an error."""
        ...


@dataclass(frozen=True)
class Limits:
    """Limits of one rollout of an agent.

    Args:
        max_tokens: Maximum number of tokens of a conversation, what is sampled included.
        max_calls: Maximum number of completions that are sampled.
    """

    max_tokens: int
    max_calls: int = 256
