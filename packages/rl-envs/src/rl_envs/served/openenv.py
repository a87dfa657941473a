"""The environment `openenv`, its dataset of starts, its tools and its check: the protocol of OpenEnv's servers.

A session is a WebSocket connection at `/ws`, whose messages `reset` and `step` are answered with an observation, a
reward and whether the episode is over: https://github.com/meta-pytorch/OpenEnv.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from rl_core import resolve
from rl_core.errors import ConfigError, DataError
from rl_core.http_client import MAX_REASON, ServerUnreachable, WrongAnswer, patiently
from rl_core.install_command import install_command
from rl_core.rollouts.environment import Conversation, StepResult, ToolCall
from rl_core.rollouts.model_json import MalformedJson, read_model_json_at
from rl_core.rollouts.rollout import Message
from rl_envs.draws import draws
from rl_envs.served.client import EnvironmentServer, ServerSocket, as_shown, read_reward
from rl_envs.served.environment import PATIENCE_SHARE, ServedEnvironment, called
from rl_envs.served.plugin import OpenEnvConfig, OpenEnvSettings

ACT = "act"
"""Name of the tool that takes the fields of an action."""
CHECK_S = 30.0
"""Timeout in seconds of a check of the server before a run."""
STARTS_AT_ONCE = 8
"""Maximum number of sessions while rows are made."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class RefusedAction(WrongAnswer):
    """Raised if an environment does not take an action; the policy reads the message."""


@dataclass(frozen=True)
class ActionForm:
    """The form of an environment's actions.

    Args:
        kind: `tools` of the environment, the only `string` or `number` of an action, or its whole `object`.
        name: Name of the only field.
        schema: JSON schema of an action.
    """

    kind: Literal["tools", "string", "number", "object"]
    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Observed:
    """An answer of an environment.

    Args:
        observation: Its fields.
        reward: Reward of the step.
        done: True if the episode is over.
    """

    observation: Mapping[str, Any]
    reward: float
    done: bool

    @property
    def digest(self) -> str:
        """Digest of the text that the policy reads by default, of the reward and of the end."""
        content = [default_text(self.observation), self.reward, self.done]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass
class OpenEnvPlay:
    """An episode in progress.

    Args:
        reset: Arguments of its reset.
        actions: Actions so far.
        digests: Digests of the observations so far, the first of the reset.
        started: Answer to the reset, in the process that began the episode.
        socket: Its session; None until its actions are taken again in this process.
    """

    reset: Mapping[str, Any]
    actions: list[Mapping[str, Any]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    started: Observed | None = None
    socket: ServerSocket | None = None

    def save(self) -> bytes:
        """Return the reset, the actions and the digests."""
        return json.dumps([self.reset, self.actions, self.digests]).encode()

    async def close(self) -> None:
        """End the session."""
        if self.socket is not None:
            socket, self.socket = self.socket, None
            await socket.close()


class OpenEnvEnvironment(ServedEnvironment[OpenEnvConfig, OpenEnvPlay]):
    """Takes a step in an environment for the text of a turn, or for each of its calls.

    A conversation that is restored in another process takes its actions again in a new session. If that answers
    otherwise than the first one did, its rollout begins again.
    """

    def __init__(self, config: OpenEnvConfig) -> None:
        super().__init__(config)
        self._form: ActionForm | None = None
        self._read_action: Callable[[str], Any] | None = resolve(config.action) if config.action else None
        self._read_observation: Callable[[Any], Any] | None = resolve(config.message) if config.message else None

    async def begin(self, conversation: Conversation) -> OpenEnvPlay:
        """Reset a new session with the arguments of the row, and compare the observation with the row's."""
        reset = conversation.info.get("reset", {})
        if not isinstance(reset, Mapping):
            raise WrongAnswer(f"the field `reset` of a row holds the arguments of the reset, got {reset!r:.100}")
        play = OpenEnvPlay({"seed": conversation.seed % 2**31, **reset})
        play.started = await self._open(play)
        shown = conversation.info.get("start")
        try:
            if shown is not None and shown != self._text(play.started.observation):
                raise WrongAnswer(
                    f"{self.server} begins otherwise than in the row after reset({play.reset}); if its start does not "
                    "follow from the seed, set data.train.settings.show_start=false"
                )
        except WrongAnswer:
            await play.close()
            raise
        return play

    async def turn(self, conversation: Conversation, play: OpenEnvPlay) -> StepResult:
        """Take the steps of a turn."""
        if play.socket is None:
            await self._repeat(play)
        started, play.started = play.started, None
        if started is not None and started.done:
            return StepResult(started.reward, info={"steps": 0})
        if started is not None and conversation.info.get("show_start"):
            message = {"role": "user", "content": self._text(started.observation)}
            return StepResult(done=False, observation=(message,), state=play, info={"steps": 0})
        assert play.socket is not None
        form = await self.form()
        uses_calls = form.kind == "tools" or self._config.call_format == "model"
        if uses_calls and (not conversation.tool_calls or conversation.truncated):
            return StepResult(info={"steps": len(play.actions)})
        messages: list[Message] = []
        total, done = 0.0, False
        for call in conversation.tool_calls if uses_calls else (None,):
            try:
                action = called_action(call, form) if call else self._action(conversation.final_text, form)
                answer = await play.socket.ask({"type": "step", "data": action})
                observed = observed_in(answer, self.server)
                play.actions.append(action)
                play.digests.append(observed.digest)
                total, done = total + observed.reward, observed.done
                said = self._text(observed.observation)
            except RefusedAction as error:
                said = f"Error: {error}"
            message = {"role": "user", "content": said}
            if call is not None:
                message = {"role": "tool", "name": call.name, "content": said, "tool_call_id": call.id}
            messages.append(message)
            if done:
                break
        info = {"steps": len(play.actions)}
        return StepResult(total, done, () if done else tuple(messages), None if done else play, info=info)

    def read(self, saved: bytes) -> OpenEnvPlay:
        """Return an episode whose actions are taken again at its next turn."""
        return OpenEnvPlay(*json.loads(saved))

    async def form(self) -> ActionForm:
        """Return the form of actions, which is asked for once."""
        if self._form is None:
            self._form = await patiently(lambda: action_form(self.server), PATIENCE_SHARE * self._config.deadline_s)
        return self._form

    async def _open(self, play: OpenEnvPlay) -> Observed:
        """Connect a session and reset it; a server that is out of reach or has no room is tried again."""

        async def attempt() -> Observed:
            play.socket = await self.server.connect("/ws")
            try:
                return observed_in(await play.socket.ask({"type": "reset", "data": play.reset}), self.server)
            except BaseException:
                await play.close()
                raise

        started = await patiently(attempt, PATIENCE_SHARE * self._config.deadline_s)
        self._check_repeated(play, 0, started)
        return started

    async def _repeat(self, play: OpenEnvPlay) -> None:
        """Take the actions of a restored episode again."""
        await self._open(play)
        assert play.socket is not None
        for index, action in enumerate(play.actions, 1):
            answer = await play.socket.ask({"type": "step", "data": action})
            self._check_repeated(play, index, observed_in(answer, self.server))

    def _check_repeated(self, play: OpenEnvPlay, index: int, observed: Observed) -> None:
        """Compare an answer with the one that was given before the episode was restored, if it was."""
        if index == len(play.digests):
            play.digests.append(observed.digest)
        elif play.digests[index] != observed.digest:
            raise ServerUnreachable(f"{self.server} answers otherwise than it did before the conversation was restored")

    def _action(self, text: str, form: ActionForm) -> Mapping[str, Any]:
        """Return the action of a text. Raises `RefusedAction`."""
        if self._read_action is not None:
            try:
                action = called(self._read_action, text)
            except ValueError as error:
                raise RefusedAction(str(error)[:MAX_REASON]) from None
            try:
                written: Mapping[str, Any] = json.loads(json.dumps(dict(action)))
            except (TypeError, ValueError):
                problem = f"{self._config.action} returns an action as a dict of JSON values, got {action!r:.100}"
                raise WrongAnswer(problem) from None
            return written
        match form.kind:
            case "string":
                return {form.name: text.strip()}
            case "number":
                if not (found := _NUMBER.findall(text)):
                    raise RefusedAction(f"write a number as {form.name}")
                number = float(found[-1])
                return {form.name: int(number) if number.is_integer() else number}
        return last_object(text)

    def _text(self, observation: Mapping[str, Any]) -> str:
        return text_of(observation, self._read_observation)


def observed_in(answer: Mapping[str, Any], server: EnvironmentServer) -> Observed:
    """Return the observation in an answer.

    Raises:
        RefusedAction: If the environment does not take the action.
        ServerUnreachable: If the server has no room for another session.
        WrongAnswer: If it is none.
    """
    data = answer.get("data")
    if not isinstance(data, dict):
        data = {}
    match answer.get("type"), data:
        case "error", {"code": "VALIDATION_ERROR"}:
            problems = data.get("errors")
            said = [_problem(each) for each in problems] if isinstance(problems, list) else []
            raise RefusedAction("; ".join(said[:4]) or "the action is not valid")
        case "error", {"code": "CAPACITY_REACHED"}:
            room = (
                f"; set env.openenv.max_concurrent={most}" if isinstance(most := data.get("max_sessions"), int) else ""
            )
            raise ServerUnreachable(f"{server} has no room for another session{room}")
        case "error", {"message": message}:
            raise WrongAnswer(f"{server} reports {str(data.get('code'))[:40]}: {str(message)[:MAX_REASON]}")
        case "observation", {"observation": dict() as observation, "done": bool() as done}:
            return Observed(observation, read_reward(data.get("reward")), done)
    raise WrongAnswer(f"{server} sent an answer without an observation: {repr(answer)[:MAX_REASON]}")


def _problem(problem: Any) -> str:
    """Return what is wrong with a field of an action, in words."""
    match problem:
        case {"loc": [*place], "msg": str(said)}:
            return f"{'.'.join(map(str, place))}: {said}"[:MAX_REASON]
    return str(problem)[:MAX_REASON]


def default_text(observation: Mapping[str, Any]) -> str:
    """Return the result of a tool, the only string of an observation, or all of it as JSON."""
    match observation:
        case {"tool_name": _, "error": {"message": message}}:
            return as_shown(f"Error: {message}")
        case {"tool_name": _, "result": {"content": [*parts]}}:
            said = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
            return as_shown("\n".join(said))
        case {"tool_name": _, "result": result}:
            return as_shown(result)
    given = {name: value for name, value in observation.items() if value not in (None, "", {}, [])}
    shown = {name: value for name, value in given.items() if name != "metadata"} or given.get("metadata", "")
    if isinstance(shown, Mapping) and len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return as_shown(only)
    return as_shown(shown)


def text_of(observation: Mapping[str, Any], function: Callable[[Any], Any] | None) -> str:
    """Return an observation as the policy reads it.

    Args:
        observation: Its fields.
        function: The user's function of it; None for `default_text`.

    Raises:
        WrongAnswer: If the function raises, or returns no string.
    """
    if function is None:
        return default_text(observation)
    try:
        said = called(function, observation)
    except ValueError as error:
        raise WrongAnswer(f"{function.__qualname__} raised ValueError: {str(error)[:MAX_REASON]}") from error
    if not isinstance(said, str):
        raise WrongAnswer(f"{function.__qualname__} returns an observation as a string, got {said!r:.100}")
    return as_shown(said)


def called_action(call: ToolCall, form: ActionForm) -> Mapping[str, Any]:
    """Return the action of a call. Raises `RefusedAction`."""
    if call.error:
        raise RefusedAction(f"the tool call cannot be read: {call.error}")
    if form.kind == "tools":
        return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
    if call.name != ACT:
        raise RefusedAction(f"there is no tool {call.name!r}; the tool is {ACT}")
    return dict(call.arguments)


def last_object(text: str) -> Mapping[str, Any]:
    """Return the last JSON object in a text that is in no other. Raises `RefusedAction` if there is none."""
    found, place = None, text.find("{")
    # Each failed attempt begins one brace later, so their number is limited.
    for _ in range(100):
        if place < 0:
            break
        try:
            found, end = read_model_json_at(text, place)
            place = text.find("{", end)
        except MalformedJson:
            place = text.find("{", place + 1)
    if not isinstance(found, dict):
        raise RefusedAction("write the action as a JSON object")
    return found


async def action_form(server: EnvironmentServer) -> ActionForm:
    """Ask a server for the form of its actions. Raises `ServerUnreachable` and `WrongAnswer`."""
    answer = await server.get("/schema")
    schema = answer.json().get("action") if answer.status == 200 else None
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        raise WrongAnswer(f"{server} is not a server of OpenEnv: it has no schema of actions (HTTP {answer.status})")
    fields = {name: each for name, each in schema["properties"].items() if name != "metadata"}
    schema = {**schema, "properties": fields}
    if "tool_name" in fields:
        return ActionForm("tools", "", schema)
    required = schema.get("required")
    required = [name for name in required if name in fields] if isinstance(required, list) else []
    names = required if len(required) == 1 else list(fields)
    kind = fields[names[0]].get("type") if len(names) == 1 and isinstance(fields[names[0]], dict) else None
    match kind:
        case "string":
            return ActionForm("string", names[0], schema)
        case "integer" | "number":
            return ActionForm("number", names[0], schema)
    return ActionForm("object", "", schema)


async def _tools(config: OpenEnvConfig) -> list[Mapping[str, Any]]:
    """Ask a server for the tools that the policy may call. Raises `ServerUnreachable` and `WrongAnswer`."""
    server = EnvironmentServer(config.address, config.headers)
    try:
        async with asyncio.timeout(CHECK_S):
            form = await action_form(server)
            if form.kind != "tools":
                if config.call_format == "text":
                    return []
                described = str(form.schema.get("description") or "Take an action.")
                parameters = {
                    "type": "object",
                    **{key: form.schema[key] for key in ("properties", "required", "$defs") if key in form.schema},
                }
                return [_tool(ACT, described, parameters)]
            socket = await patiently(lambda: server.connect("/ws"), CHECK_S / 2)
            try:
                listed = observed_in(await socket.ask({"type": "step", "data": {"type": "list_tools"}}), server)
            finally:
                await socket.close()
            match listed.observation.get("tools"):
                case [*tools] if all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in tools):
                    return [
                        _tool(each["name"], str(each.get("description", "")), each.get("input_schema"))
                        for each in tools
                    ]
            raise WrongAnswer(f"{server} does not list its tools")
    except TimeoutError:
        raise ServerUnreachable(f"{server} has not answered within {CHECK_S:g} s") from None
    finally:
        await server.close()


def _tool(name: str, description: str, parameters: Any) -> Mapping[str, Any]:
    parameters = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tools_of(config: OpenEnvConfig) -> list[Mapping[str, Any]]:
    """Return schemas of the tools of a server's environment; none if actions are texts.

    Raises:
        ConfigError: If the server cannot be reached, or is not one of OpenEnv.
    """
    require_aiohttp()
    try:
        return asyncio.run(_tools(config))
    except (ConfigError, ServerUnreachable, WrongAnswer) as error:
        raise ConfigError(f"env.openenv: {error}. Start the server before the run, and check env.openenv.url") from None


def check_machine(config: OpenEnvConfig) -> str:
    """Return why the server cannot be used, and what to do; an empty string if it can."""
    try:
        tools_of(config)
    except ConfigError as error:
        return str(error)
    return ""


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` and `environment`, each with the arguments of a reset; the splits have
    different seeds.

    Raises:
        ConfigError: If the server cannot be reached, or begins differently with the same seed.
        DataError: If the split is unknown.
    """
    require_aiohttp()
    config = OpenEnvSettings.model_validate(dict(settings))
    if split not in ("train", "validation"):
        raise DataError(f"openenv has the splits train and validation, got {split!r}")
    resets = []
    for index in range(config.size):
        # Both splits draw from all numbers of 31 bits; training has the even ones.
        drawn = next(draws(f"{config.seed}/{split}/{index}")) % 2**30
        resets.append({"seed": 2 * drawn + (split == "validation"), **config.reset})
    shown = [""] * len(resets)
    if config.show_start:
        function = resolve(config.message) if config.message else None
        # The first start is made twice, to see whether it follows from the seed.
        try:
            starts = asyncio.run(_starts(config, [resets[0], *resets]))
            first, *shown = [text_of(start.observation, function) for start in starts]
        except (ServerUnreachable, WrongAnswer) as error:
            raise ConfigError(f"data: openenv: {error}. Start the server before the run, and check the url") from None
        if first != shown[0]:
            raise ConfigError(
                f"data: openenv: two resets with the seed {resets[0]['seed']} begin differently, so a prompt cannot "
                "show the start; set show_start=false"
            )
    rows = []
    for reset, start in zip(resets, shown, strict=True):
        said = "\n\n".join(part for part in (config.instructions, start) if part) or "Begin."
        beginning = {"start": start} if config.show_start else {"show_start": True}
        info = {"reset": reset, **beginning}
        rows.append({"messages": [{"role": "user", "content": said}], "info": info, "environment": "openenv"})
    return rows


async def _starts(config: OpenEnvSettings, resets: Sequence[Mapping[str, Any]]) -> list[Observed]:
    """Return the answers to these resets, each in a session of its own."""
    server = EnvironmentServer(config.url, config.headers)
    room = asyncio.Semaphore(STARTS_AT_ONCE)

    async def attempt(reset: Mapping[str, Any]) -> Observed:
        socket = await server.connect("/ws")
        try:
            async with asyncio.timeout(CHECK_S):
                return observed_in(await socket.ask({"type": "reset", "data": reset}), server)
        except TimeoutError:
            raise WrongAnswer(f"{server} has not answered a reset within {CHECK_S:g} s") from None
        finally:
            await socket.close()

    async def start(reset: Mapping[str, Any]) -> Observed:
        async with room:
            return await patiently(lambda: attempt(reset), CHECK_S)

    try:
        # A server that is not there is found at once; afterwards only one without room is waited for.
        await action_form(server)
        return list(await asyncio.gather(*map(start, resets)))
    finally:
        await server.close()


def require_aiohttp() -> None:
    """Raise a `ConfigError` if aiohttp is not installed."""
    if find_spec("aiohttp") is None:
        raise ConfigError(f"aiohttp is not installed: {install_command('rl-envs[http]')}")
