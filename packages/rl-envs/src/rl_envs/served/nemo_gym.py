"""The environment `nemo_gym`, its dataset, its tools and its check: resources servers of NeMo Gym.

A server is one of two kinds (https://github.com/NVIDIA-NeMo/Gym). Most have `/seed_session`, a path for every tool, and
`/verify`, which grades all that the policy did. Others have `/reset` and `/step`, which takes each turn of the policy
with its calls. Both know a session by its cookies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from urllib.parse import quote

from rl_core.errors import ConfigError, DataError
from rl_core.http_client import MAX_REASON, HTTPAnswer, ServerUnreachable, WrongAnswer, patiently
from rl_core.rollouts.environment import Conversation, StepResult, ToolCall
from rl_core.rollouts.rollout import Message
from rl_envs.served.client import EnvironmentServer, as_shown, read_reward
from rl_envs.served.environment import PATIENCE_SHARE, ServedEnvironment
from rl_envs.served.openenv import CHECK_S, STARTS_AT_ONCE, require_aiohttp
from rl_envs.served.plugin import NeMoGymConfig, NeMoGymTasksSettings
from rl_envs.served.tasks import TASK, call_id, items_of, messages_of, response_of, tasks_in, tools_in

MAX_COMPONENTS = 100
"""Maximum number of components of a reward that are reported, and of characters of their names."""
RETRIED = (429, 502, 503, 504)
"""Status codes of a server that is busy or begins."""


@dataclass
class NeMoGymPlay:
    """A conversation in progress. Its session is at the server, so any process can continue it.

    Args:
        server: The server.
        takes_steps: True if the server takes steps, instead of calls and a grading.
        cookies: Cookies of the session.
        items: Turns and results so far, as items of the Responses API.
        closes: True if the server asks for the end of the session.
        start: First observation of the server, until the first turn has been answered.
    """

    server: EnvironmentServer
    takes_steps: bool
    cookies: dict[str, str]
    items: list[dict[str, Any]] = field(default_factory=list)
    closes: bool = False
    start: str = ""

    def save(self) -> bytes:
        """Return all of it but the server and the first observation."""
        return json.dumps([self.takes_steps, self.cookies, self.items, self.closes]).encode()

    async def close(self) -> None:
        """End the session, if the server asks for that."""
        if self.closes:
            self.closes = False
            await self.server.post("/close", {}, self.cookies)

    async def post(self, path: str, body: Any) -> HTTPAnswer:
        """Return the answer to a request of the session, whatever its status."""
        answer = await self.server.post(path, body, self.cookies)
        self.cookies.update(answer.cookies)
        return answer

    async def asked(self, path: str, body: Any) -> dict[str, Any]:
        """Return the answer to a request of the session, which must succeed."""
        return succeeded(await self.post(path, body), path, self.server).json()


class NeMoGymEnvironment(ServedEnvironment[NeMoGymConfig, NeMoGymPlay]):
    """Calls a server's tools for the policy and has it grade the last turn, or hands each turn to the server."""

    async def begin(self, conversation: Conversation) -> NeMoGymPlay:
        """Begin a session for the task of the row, and compare its first observation with the row's."""
        task = conversation.info[TASK]
        play = await patiently(lambda: begun(self.server, task), PATIENCE_SHARE * self._config.deadline_s)
        shown = conversation.info.get("start")
        if shown is not None and shown != play.start:
            await play.close()
            raise WrongAnswer(
                f"{self.server} begins otherwise than in the row; if its start does not follow from the task, leave "
                "data.train.settings.url unset"
            )
        play.start = "" if shown is not None else play.start
        return play

    async def turn(self, conversation: Conversation, play: NeMoGymPlay) -> StepResult:
        """Answer a turn with results or an observation, or have it graded."""
        task = conversation.info[TASK]
        start, play.start = play.start, ""
        if start:
            return StepResult(done=False, observation=({"role": "user", "content": start},), state=play)
        items = items_of(conversation)
        play.items += items
        if play.takes_steps:
            return await self._stepped(conversation, play, items)
        if conversation.tool_calls and not conversation.truncated:
            messages = []
            for index, call in enumerate(conversation.tool_calls):
                output = await self._called(call, task, play)
                _add_output(play, call_id(conversation.turn, index), output)
                messages.append(_result(call, output))
            return StepResult(done=False, observation=tuple(messages), state=play)
        response = response_of(conversation, task, play.items)
        graded = await play.asked("/verify", {**task, "response": response})
        if graded.get("mask_sample"):
            reason = graded.get("failure_reason") or graded.get("failure_kind") or "no reason given"
            raise ServerUnreachable(f"{self.server} could not grade a rollout: {str(reason)[:MAX_REASON]}")
        if "reward" not in graded:
            raise WrongAnswer(f"{self.server} graded a rollout without a reward: {repr(graded)[:MAX_REASON]}")
        components = graded.get("reward_components")
        named = islice(components.items(), MAX_COMPONENTS) if isinstance(components, dict) else ()
        rewards = {name[:MAX_COMPONENTS]: read_reward(each) for name, each in named}
        return StepResult({**rewards, "reward": read_reward(graded["reward"])})

    def read(self, saved: bytes) -> NeMoGymPlay:
        """Return a conversation with its session."""
        takes_steps, cookies, items, closes = json.loads(saved)
        return NeMoGymPlay(self.server, takes_steps, cookies, items, closes)

    async def _stepped(
        self, conversation: Conversation, play: NeMoGymPlay, items: Sequence[Mapping[str, Any]]
    ) -> StepResult:
        """Hand a turn to a server that takes steps."""
        task = conversation.info[TASK]
        answer = await play.asked("/step", {**task, "response": response_of(conversation, task, items)})
        reward = read_reward(answer.get("reward"))
        if answer.get("terminated") is True or answer.get("truncated") is True:
            return StepResult(reward)
        match answer.get("info"):
            case {"tool_outputs": [*outputs]}:
                found = {each.get("call_id"): each.get("output") for each in outputs if isinstance(each, dict)}
            case _:
                found = {}
        messages: list[Message] = []
        for index, call in enumerate(conversation.tool_calls):
            id = call_id(conversation.turn, index)
            output = as_shown(found.get(id, "error: the server has no result"))
            _add_output(play, id, output)
            messages.append(_result(call, output))
        observation = answer.get("observation")
        if observation or not messages:
            messages.append({"role": "user", "content": as_shown(observation or "Go on.")})
        return StepResult(reward, done=False, observation=tuple(messages), state=play)

    async def _called(self, call: ToolCall, task: Mapping[str, Any], play: NeMoGymPlay) -> str:
        """Return the result of a call, or its error, as the policy reads it."""
        if call.error:
            return json.dumps({"error": f"Invalid tool call arguments: {call.error}"})
        # A policy must not call anything else, such as the grading.
        names = [tool["function"]["name"] for tool in tools_in(iter([task]))]
        if call.name not in names:
            return json.dumps({"error": f"there is no tool {call.name!r}; the tools are {', '.join(names)}"})
        answer = await play.post(f"/{quote(call.name, safe='')}", dict(call.arguments))
        return as_shown(answer.body.decode("utf-8", "replace"))


def _add_output(play: NeMoGymPlay, id: str, output: str) -> None:
    play.items.append({"type": "function_call_output", "call_id": id, "output": output})


def _result(call: ToolCall, output: str) -> Message:
    return {"role": "tool", "name": call.name, "content": output, "tool_call_id": call.id}


def succeeded(answer: HTTPAnswer, path: str, server: EnvironmentServer) -> HTTPAnswer:
    """Return an answer with the status of a success.

    Raises:
        ServerUnreachable: If the server is busy.
        WrongAnswer: If it refuses the request.
    """
    if answer.status == 200:
        return answer
    said = " ".join(answer.body[:MAX_REASON].decode("utf-8", "replace").split())
    raise (ServerUnreachable if answer.status in RETRIED else WrongAnswer)(
        f"{server} answered {path} with HTTP {answer.status}: {said}"
    )


async def begun(server: EnvironmentServer, task: Mapping[str, Any]) -> NeMoGymPlay:
    """Begin a session for a task. Raises `ServerUnreachable` and `WrongAnswer`."""
    answer = await server.post("/seed_session", task, {})
    if answer.status != 404:
        cookies = dict(succeeded(answer, "/seed_session", server).cookies)
        return NeMoGymPlay(server, takes_steps=False, cookies=cookies)
    answer = succeeded(await server.post("/reset", task, {}), "/reset", server)
    found = answer.json()
    info, start = found.get("info"), found.get("observation")
    closes = isinstance(info, dict) and info.get("supports_explicit_close") is True
    return NeMoGymPlay(
        server, takes_steps=True, cookies=dict(answer.cookies), closes=closes, start=as_shown(start) if start else ""
    )


def tools_of(config: NeMoGymConfig) -> list[Mapping[str, Any]]:
    """Return schemas of the tools that the policy may call.

    Raises:
        ConfigError: If the server cannot be reached.
        DataError: If the file with the tools cannot be read.
    """
    if problem := check_machine(config):
        raise ConfigError(problem)
    return tools_in(tasks_in(config.tools)) if config.tools else []


def check_machine(config: NeMoGymConfig) -> str:
    """Return why the server cannot be used, and what to do; an empty string if it can."""
    require_aiohttp()

    async def asked() -> None:
        server = EnvironmentServer(config.address, config.headers)
        try:
            async with asyncio.timeout(CHECK_S):
                answer = await patiently(lambda: server.get("/openapi.json"), 1.0)
                paths = answer.json().get("paths") if answer.status == 200 else None
                if not isinstance(paths, dict) or "/aggregate_metrics" not in paths:
                    raise WrongAnswer(f"{server} is not a resources server of NeMo Gym (HTTP {answer.status})")
        finally:
            await server.close()

    try:
        asyncio.run(asked())
    except TimeoutError:
        return f"env.nemo_gym: the server has not answered within {CHECK_S:g} s; start it before the run"
    except (ConfigError, ServerUnreachable, WrongAnswer) as error:
        return f"env.nemo_gym: {error}. Start the server before the run, and check env.nemo_gym.url"
    return ""


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` and `environment`, one for every task of the file.

    Raises:
        ConfigError: If the server cannot be reached, or begins differently with the same task.
        DataError: If the file or a task cannot be read.
    """
    require_aiohttp()
    config = NeMoGymTasksSettings.model_validate(dict(settings))
    rows: list[dict[str, Any]] = []
    for number, task in enumerate(tasks_in(config.data_path), 1):
        try:
            messages = messages_of(task)
        except ValueError as error:
            raise DataError(f"{config.data_path}: task {number}: {error}") from None
        rows.append({"messages": messages, "info": {TASK: task}, "environment": "nemo_gym"})
    if config.url is None or not rows:
        return rows
    try:
        tasks = [row["info"][TASK] for row in rows]
        # The first start is made twice, to see whether it follows from the task.
        first, *starts = asyncio.run(_starts(config.url, config.headers, [tasks[0], *tasks]))
    except (ServerUnreachable, WrongAnswer) as error:
        raise ConfigError(f"data: nemo_gym: {error}. Start the server before the run, and check the url") from None
    if first != starts[0]:
        raise ConfigError(
            "data: nemo_gym: the first task begins differently each time, so a prompt cannot show the start; leave "
            "settings.url unset"
        )
    for row, start in zip(rows, starts, strict=True):
        row["info"]["start"] = start
        if start:
            row["messages"].append({"role": "user", "content": start})
    return rows


async def _starts(url: str, headers: Mapping[str, str], tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the first observations of these tasks, each in a session of its own."""
    server = EnvironmentServer(url, headers)
    room = asyncio.Semaphore(STARTS_AT_ONCE)

    async def start(task: Mapping[str, Any]) -> str:
        async with room:
            try:
                async with asyncio.timeout(CHECK_S):
                    play = await begun(server, task)
                    await play.close()
            except TimeoutError:
                raise ServerUnreachable(f"{server} has not begun a task within {CHECK_S:g} s") from None
            return play.start

    try:
        return list(await asyncio.gather(*map(start, tasks)))
    finally:
        await server.close()
