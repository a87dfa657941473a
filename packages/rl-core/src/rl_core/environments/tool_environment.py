"""An environment whose policy calls tools, and is rewarded for its last answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_core.environments.gather_runner import GatherRunner
from rl_core.environments.messages import read_value, write_value
from rl_core.environments.observed_images import parts_of
from rl_core.environments.reward_function import as_environment
from rl_core.environments.tools import MalformedCall, Tool, as_text
from rl_core.rollouts.environment import Conversation, Environment, StepResult, ToolCall, UnusableAnswer

MAX_RESULT = 20_000
"""Maximum number of characters of a result that the policy reads."""


@dataclass
class _Play:
    """State of a conversation.

    Args:
        values: The dict that tools and the reward get as `state`.
        num_calls: Calls so far.
        num_errors: Calls so far that were malformed or raised.
    """

    values: dict[str, Any] = field(default_factory=dict)
    num_calls: int = 0
    num_errors: int = 0


class ToolEnvironment:
    """Answers the calls of a turn with their results, and rewards a turn without calls, which ends the rollout.

    A call that is malformed, or whose tool raises, is answered with the error, which the policy may learn from; the
    metrics `environment/tool_calls` and `environment/tool_errors` count them. In a file of one's own::

        environment = ToolEnvironment(tools=[look_up], reward=score)

    The dict of a conversation is saved after every turn, so that the conversation resumes if its process ends and no
    call is made twice. A dict that holds more than numbers, strings, bytes, arrays, and lists, tuples and dicts of
    these is not saved.

    A tool may return images: one of pillow, or a list of strings, images and parts as in messages. The policy sees
    them if it is trained with its vision tower.

    Args:
        tools: Functions, as `rl_core.environments.tools.Tool` takes them. The calls of a turn are made in order.
        reward: Scores the last answer, as a reward function does
            (`rl_core.environments.reward_function.as_environment`); a parameter `state` gets the dict that the tools
            have filled.
        start: Makes the dict of a conversation from the fields of its row; an empty one by default.

    Raises:
        ValueError: If a function cannot be called by name, or two have one name.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        reward: Callable[..., Any],
        start: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        made = [Tool(function) for function in tools]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) < len(made):
            raise ValueError(f"two tools have one name: {', '.join(sorted(tool.name for tool in made))}")
        self._reward: Environment = as_environment(reward)
        self._start = start
        self._waits = any(inspect.iscoroutinefunction(function) for function in tools)
        self._gather = GatherRunner()

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """Schemas of the tools, as a chat template shows them."""
        return [tool.schema for tool in self._tools.values()]

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        """Results of calls, or the reward of the last answer."""
        pairs = list(zip(conversations, states, strict=True))
        answers = iter(self._answers([pair for pair in pairs if _calls(pair[0])]))
        scores = iter(self._scores([pair for pair in pairs if not _calls(pair[0])]))
        return [next(answers) if _calls(conversation) else next(scores) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        """States are plain values."""

    def save(self, states: Sequence[_Play]) -> list[bytes | None]:
        """The dicts with their counts; None for one that holds something else than plain values."""
        return [_saved(play) for play in states]

    def restore(self, saved: Sequence[bytes]) -> list[_Play]:
        """States as they were saved."""
        return [_Play(*read_value(data)) for data in saved]

    def _answers(self, pairs: Sequence[tuple[Conversation, _Play | None]]) -> list[StepResult]:
        if not pairs:
            return []
        if not self._waits:
            return [_at_once(self._answer(conversation, state)) for conversation, state in pairs]
        return self._gather(lambda: [self._answer(conversation, state) for conversation, state in pairs])

    async def _answer(self, conversation: Conversation, state: _Play | None) -> StepResult:
        play = state or self._begin(conversation)
        messages = []
        for call in conversation.tool_calls:
            content, failed = await self._result(call, conversation, play)
            play.num_calls += 1
            play.num_errors += failed
            messages.append({"role": "tool", "name": call.name, "content": content, "tool_call_id": call.id})
        return StepResult(done=False, observation=tuple(messages), state=play, info=_counts(play))

    async def _result(self, call: ToolCall, conversation: Conversation, play: _Play) -> tuple[Any, bool]:
        """The result of a call, as a string or as parts with images, and whether it is an error."""
        if call.error:
            return f"Error: the tool call cannot be read: {call.error}", True
        tool = self._tools.get(call.name)
        if tool is None:
            return f"Error: there is no tool {call.name!r}; the tools are {', '.join(self._tools)}", True
        try:
            offered = {"state": play.values, "row": conversation.info, "conversation_seed": conversation.seed}
            result = tool.call(call.arguments, offered)
            result = await result if inspect.isawaitable(result) else result
            parts = parts_of(result)
            if parts is not None:
                return parts, False
            text = as_text(result)
        except MalformedCall as error:
            return f"Error: {error}", True
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # the policy reads what its call led to
            return as_text(f"Error: {type(error).__name__}: {error}"[:MAX_RESULT]), True
        return text[:MAX_RESULT], False

    def _scores(self, pairs: Sequence[tuple[Conversation, _Play | None]]) -> list[StepResult]:
        plays = [state or self._begin(conversation) for conversation, state in pairs]
        shown = [
            replace(conversation, info={**conversation.info, "state": play.values})
            for (conversation, _), play in zip(pairs, plays, strict=True)
        ]
        results = self._reward.step(shown, [None] * len(shown))
        return [
            replace(result, info={**_counts(play), **result.info}) for result, play in zip(results, plays, strict=True)
        ]

    def _begin(self, conversation: Conversation) -> _Play:
        return _Play(dict(self._start(conversation.info))) if self._start else _Play()


def _at_once(answer: Coroutine[Any, Any, StepResult]) -> StepResult:
    """The result of a coroutine that waits for nothing."""
    try:
        answer.send(None)
    except StopIteration as done:
        result: StepResult = done.value
        return result
    raise UnusableAnswer("a tool returned an awaitable; declare it with `async def`")


def _saved(play: _Play) -> bytes | None:
    try:
        return write_value([play.values, play.num_calls, play.num_errors])
    except (TypeError, ValueError):
        return None


def _calls(conversation: Conversation) -> bool:
    """Return whether the newest turn is one of calls; one that was cut off is scored."""
    return bool(conversation.tool_calls) and not conversation.truncated


def _counts(play: _Play) -> dict[str, Any]:
    return {"tool_calls": play.num_calls, "tool_errors": play.num_errors}
