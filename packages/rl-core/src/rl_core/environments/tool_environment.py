"""An environment whose policy calls tools, which are plain functions, and is rewarded for its last answer."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from rl_core.environments.messages import read_value, write_value
from rl_core.environments.observed_images import TEXT, parts_of
from rl_core.environments.reward_function import GatherRunner, as_environment
from rl_core.rollouts.environment import (
    Conversation,
    Environment,
    EnvironmentFailure,
    StepResult,
    ToolCall,
    UnusableAnswer,
)

MAX_RESULT = 20_000
"""Maximum number of characters of a result that the policy reads."""
OFFERED = ("state", "row", "conversation_seed")
"""Names of parameters that a tool may have and the policy does not see: the dict of the conversation's state, the
fields of the prompt's row, and the seed of the conversation."""

_MAX_PROBLEMS, _MAX_NAME, _MAX_PROBLEM = 8, 100, 300
"""Limits of a message about arguments: problems, and characters of a name and of a problem."""
_ENTRY = re.compile(r"(\w+)(?: \([^)]*\))?:\s*(.*)")


class MalformedCall(ValueError):
    """Arguments of a call that do not fit the tool; the message is for the policy."""


class ServerFailed(Exception):
    """Raised by a server of tools that cannot be used any more; the rollout fails, and the others continue."""


class ToolSession(Protocol):
    """A server of tools as one conversation has it."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Any, bool]:
        """Return the result of a tool, in a form that a function may return, and whether it is an error.

        Raises:
            ServerFailed: If the server does not answer as it should.
        """

    async def close(self) -> None:
        """End the session and everything that was started for it."""


class ToolServer(Protocol):
    """A server whose tools a `ToolEnvironment` offers beside functions, such as `rl_envs.MCPServer`."""

    async def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Return the schemas of the tools, as a chat template shows them.

        Raises:
            ServerFailed: If the server does not start, or does not answer as it should.
        """

    async def open(self) -> ToolSession:
        """Return a session for a conversation, which calls a tool for the first time. Raises as `schemas` does."""


@dataclass
class _Play:
    """State of a conversation.

    Args:
        values: The dict that tools and the reward get as `state`.
        num_calls: Calls so far.
        num_errors: Calls so far that were malformed or raised.
        sessions: Its sessions with servers, by server.
    """

    values: dict[str, Any] = field(default_factory=dict)
    num_calls: int = 0
    num_errors: int = 0
    sessions: dict[ToolServer, ToolSession] = field(default_factory=dict)

    def counts(self) -> dict[str, Any]:
        return {"tool_calls": self.num_calls, "tool_errors": self.num_errors}


class ToolEnvironment:
    """Answers the calls of a turn with their results, and rewards a turn without calls, which ends the rollout.

    A call that is malformed, or whose tool raises, is answered with the error, so that the policy may learn from it.
    The metrics `environment/tool_calls` and `environment/tool_errors` count them. In a user's file::

        environment = ToolEnvironment(tools=[look_up], reward=score)

    The dict of a conversation is saved after every turn, so that the conversation resumes if its process ends and no
    call is made twice. A dict that holds more than numbers, strings, bytes, arrays, and lists, tuples and dicts of
    these is not saved.

    A tool may return images: one of pillow, or a list of strings, images and parts as in messages. The policy sees
    them if it is trained with its vision tower.

    A conversation has a session of its own with each server whose tools it calls, from the first call to its end. It
    does not resume if its process ends, and its rollout fails if the server does.

    Args:
        tools: Functions, as `Tool` takes them, and servers (`ToolServer`). The calls of a turn are made in order.
        reward: Scores the last answer, as a reward function does
            (`rl_core.environments.reward_function.as_environment`); a parameter `state` gets the dict that the tools
            have filled.
        start: Makes the dict of a conversation from the fields of its row; an empty one by default.

    Raises:
        ValueError: If a function cannot be called by name, or two have one name.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | ToolServer],
        reward: Callable[..., Any],
        start: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._servers: list[Any] = [each for each in tools if hasattr(each, "open") and hasattr(each, "schemas")]
        functions = [each for each in tools if each not in self._servers]
        self._functions = [Tool(function) for function in functions]
        _check_names(tool.name for tool in self._functions)
        self._reward: Environment = as_environment(reward)
        self._start = start
        self._waits = bool(self._servers) or any(inspect.iscoroutinefunction(function) for function in functions)
        self._gather = GatherRunner()

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """Schemas of the tools, as a chat template shows them.

        Raises:
            ServerFailed: If a server does not start, or does not answer as it should.
            ValueError: If two tools have one name.
        """
        return [schema for schema, _ in self._offered.values()]

    @cached_property
    def _offered(self) -> dict[str, tuple[Mapping[str, Any], Tool | ToolServer]]:
        """The schema of each tool, and the function or the server that it is of."""
        offered: list[tuple[Mapping[str, Any], Tool | ToolServer]] = [(tool.schema, tool) for tool in self._functions]
        if self._servers:
            listed = self._gather(lambda: [server.schemas() for server in self._servers])
            offered += [
                (schema, server) for server, found in zip(self._servers, listed, strict=True) for schema in found
            ]
        names = [str(schema["function"]["name"]) for schema, _ in offered]
        _check_names(names)
        return dict(zip(names, offered, strict=True))

    def step(
        self, conversations: Sequence[Conversation], states: Sequence[Any]
    ) -> list[StepResult | EnvironmentFailure]:
        """Answer the calls of each turn with their results, or reward the last answer."""
        offered = self._offered
        plays = [state or self._begin(each) for each, state in zip(conversations, states, strict=True)]
        # A turn of calls that the token limit cut off is scored.
        calls = [bool(each.tool_calls) and not each.truncated for each in conversations]
        calling = [index for index, has_calls in enumerate(calls) if has_calls]
        last = [index for index, has_calls in enumerate(calls) if not has_calls]

        def answers() -> list[Coroutine[Any, Any, StepResult | EnvironmentFailure]]:
            return [self._answer(conversations[index], plays[index], offered) for index in calling]

        results: dict[int, StepResult | EnvironmentFailure] = {}
        if calling:
            # Without waiting tools each answer is made just before it runs: an error leaves none that nobody awaited.
            at_once = (_at_once(self._answer(conversations[index], plays[index], offered)) for index in calling)
            answered = self._gather(answers) if self._waits else list(at_once)
            results |= zip(calling, answered, strict=True)
        shown = [
            replace(conversations[index], info={**conversations[index].info, "state": plays[index].values})
            for index in last
        ]
        for index, result in zip(last, self._reward.step(shown, [None] * len(shown)), strict=True):
            if isinstance(result, StepResult):
                result = replace(result, info={**plays[index].counts(), **result.info})
            results[index] = result
        self.close([plays[index] for index in last])
        return [results[index] for index in range(len(conversations))]

    def close(self, states: Sequence[Any]) -> None:
        """Close the sessions of these conversations with servers."""
        closing = [session for play in states for session in play.sessions.values()]
        for play in states:
            play.sessions = {}
        if closing:
            self._gather(lambda: [session.close() for session in closing])

    def save(self, states: Sequence[_Play]) -> list[bytes | None]:
        """Return the dicts with their counts; None for one that holds something else than plain values, or has sessions
        with servers."""
        saved: list[bytes | None] = []
        for play in states:
            try:
                plain = write_value([play.values, play.num_calls, play.num_errors])
                saved.append(None if play.sessions else plain)
            except (TypeError, ValueError):
                saved.append(None)
        return saved

    def restore(self, saved: Sequence[bytes]) -> list[_Play]:
        """Return states as they were saved."""
        return [_Play(*read_value(data)) for data in saved]

    async def _answer(
        self, conversation: Conversation, play: _Play, offered: Mapping[str, tuple[Any, Tool | ToolServer]]
    ) -> StepResult | EnvironmentFailure:
        messages = []
        for call in conversation.tool_calls:
            try:
                content, failed = await self._result(call, conversation, play, offered)
            except ServerFailed as error:
                sessions, play.sessions = list(play.sessions.values()), {}
                for session in sessions:
                    await session.close()
                return EnvironmentFailure(str(error), "raised")
            play.num_calls += 1
            play.num_errors += failed
            messages.append({"role": "tool", "name": call.name, "content": content, "tool_call_id": call.id})
        return StepResult(done=False, observation=tuple(messages), state=play, info=play.counts())

    async def _result(
        self,
        call: ToolCall,
        conversation: Conversation,
        play: _Play,
        offered: Mapping[str, tuple[Any, Tool | ToolServer]],
    ) -> tuple[Any, bool]:
        """Return the result of a call, as a string or as parts with images, and whether it is an error."""
        if call.error:
            return f"Error: the tool call cannot be read: {call.error}", True
        if call.name not in offered:
            return f"Error: there is no tool {call.name!r}; the tools are {', '.join(offered)}", True
        _, tool = offered[call.name]
        try:
            failed = False
            if isinstance(tool, Tool):
                given = {"state": play.values, "row": conversation.info, "conversation_seed": conversation.seed}
                result = tool.call(call.arguments, given)
                result = await result if inspect.isawaitable(result) else result
            else:
                if tool not in play.sessions:
                    play.sessions[tool] = await tool.open()
                result, failed = await play.sessions[tool].call(call.name, call.arguments)
            parts = parts_of(result)
            return (as_text(result)[:MAX_RESULT] if parts is None else _cut(parts)), failed
        except MalformedCall as error:
            return f"Error: {error}", True
        except (MemoryError, ServerFailed):
            raise
        except Exception as error:  # noqa: BLE001 - the policy reads what its call led to
            return as_text(f"Error: {type(error).__name__}: {error}"[:MAX_RESULT]), True

    def _begin(self, conversation: Conversation) -> _Play:
        return _Play(dict(self._start(conversation.info))) if self._start else _Play()


def _cut(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts of a result with at most `MAX_RESULT` characters of text."""
    kept, left = [], MAX_RESULT
    for part in parts:
        if part["type"] == TEXT:
            part = {**part, TEXT: as_text(part[TEXT])[:left]}
            left -= len(part[TEXT])
        kept.append(part)
    return kept


def _check_names(names: Iterable[str]) -> None:
    listed = sorted(names)
    if len(set(listed)) < len(listed):
        raise ValueError(f"two tools have one name: {', '.join(listed)}")


def _at_once(answer: Coroutine[Any, Any, StepResult | EnvironmentFailure]) -> StepResult | EnvironmentFailure:
    """Return the result of a coroutine that waits for nothing."""
    try:
        answer.send(None)
    except StopIteration as done:
        result: StepResult | EnvironmentFailure = done.value
        return result
    raise UnusableAnswer("a tool returned an awaitable; declare it with `async def`")


class Tool:
    """A function with the schema that a chat template shows to the policy.

    The schema follows from its signature and its docstring: the first paragraph describes the tool, and entries under
    `Args:` describe the parameters. Parameters called `state`, `row` and `conversation_seed` are given by the
    environment (`OFFERED`).

    Args:
        function: Function with a docstring and annotated parameters; it may be `async`.

    Raises:
        ValueError: If it lacks them.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self.name = name = getattr(function, "__name__", "")
        if not name or not callable(function) or isinstance(function, type):
            raise ValueError(f"a tool must be a function, got {function!r:.80}")
        types = get_type_hints(function)
        # The type and the default of each parameter, `...` if it has none, as pydantic takes them.
        fields: dict[str, Any] = {}
        offered = []
        for each in inspect.signature(function).parameters.values():
            if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                raise ValueError(f"the tool {name} takes {each}; name its parameters one by one")
            if each.name in OFFERED:
                offered.append(each.name)
            elif each.name not in types:
                raise ValueError(f"the tool {name} has no type for {each.name}; annotate it, as in {each.name}: str")
            else:
                fields[each.name] = types[each.name], ... if each.default is each.empty else each.default
        self._offered, self._names = tuple(offered), tuple(fields)
        self._arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        description, of_parameters = _documented(function, name)
        schema = _without_titles(self._arguments.model_json_schema())
        schema.pop("additionalProperties", None)
        schema.setdefault("properties", {})
        for parameter, text in of_parameters.items():
            if parameter in schema["properties"]:
                schema["properties"][parameter]["description"] = text
        described = {"name": name, "description": description, "parameters": schema}
        self.schema: dict[str, Any] = {"type": "function", "function": described}

    def call(self, arguments: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
        """Call the function; returns an awaitable if it is `async`.

        Args:
            arguments: Arguments as the policy wrote them.
            offered: Values by `OFFERED`.

        Raises:
            MalformedCall: If the arguments do not fit the tool.
        """
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            # The policy may have written any number of arguments of any length.
            found = error.errors(include_url=False, include_context=False, include_input=False)
            shown = [
                f"{'.'.join(map(str, each['loc']))[:_MAX_NAME] or 'arguments'}: {each['msg'][:_MAX_PROBLEM]}"
                for each in found[:_MAX_PROBLEMS]
            ]
            more = len(found) - len(shown)
            raise MalformedCall("; ".join([*shown, *([f"and {more} more"] if more else [])])) from None
        given = {name: getattr(checked, name) for name in self._names}
        return self._function(**given, **{name: offered[name] for name in self._offered})


def as_text(result: Any) -> str:
    """Return a tool's result as the policy reads it: a string unchanged, anything else as JSON.

    Halves of surrogate pairs, which no tokenizer takes, become question marks.
    """
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return text.encode(errors="replace").decode()


def schemas(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of functions, or schemas unchanged.

    Raises:
        ValueError: If it is not a list of these.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, list | tuple):
        raise ValueError(f"tools must be a list of functions, got {tools!r:.80}")
    return tuple(tool if isinstance(tool, Mapping) else Tool(tool).schema for tool in tools)


def _documented(function: Callable[..., Any], name: str) -> tuple[str, dict[str, str]]:
    """Return the description of a tool, and of each of its parameters that has one."""
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"the tool {name} has no docstring; the policy learns what the tool does from its docstring")
    body, _, rest = text.partition("\nArgs:\n")
    description = " ".join(body.partition("\n\n")[0].split())
    entries: dict[str, str] = {}
    last = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        entry = _ENTRY.fullmatch(line.strip())
        if entry and len(line) - len(line.lstrip()) <= 4:
            last = entry[1]
            entries[last] = entry[2]
        elif last and line.strip():
            entries[last] += f" {line.strip()}"
    return description, entries


def _without_titles(schema: Any) -> Any:
    """Return the schema without the titles that pydantic adds to every field."""
    if isinstance(schema, dict):
        return {
            key: {name: _without_titles(each) for name, each in value.items()}
            if key in ("properties", "$defs")
            else _without_titles(value)
            for key, value in schema.items()
            if key != "title"
        }
    return [_without_titles(each) for each in schema] if isinstance(schema, list) else schema
