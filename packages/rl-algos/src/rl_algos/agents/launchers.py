"""The ways in which an agent is started for a rollout."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rl_algos.agents import host
from rl_algos.agents.address import Address
from rl_algos.agents.task_board import TaskBoard
from rl_core.errors import RLError
from rl_core.rollouts.agent_run import AGENT_FAILURE, AGENT_OUTPUT, AgentRun, service_variables, this_network
from rl_core.rollouts.environment import Conversation, StepResult
from rl_core.rollouts.rollout import Prompt
from rl_core.user_code import FromFile

_LAST_LINES = 3
_LAST_BYTES = 4096
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
"""Seconds between questions to an environment whether its agent has ended, at first and at last."""


class AgentFailed(RLError):
    """An agent that raised, or ended with another status than 0; its message has the last lines of its log."""


class AgentLost(AgentFailed):
    """An agent that was killed from outside, or whose host was; another try may succeed."""


@dataclass(frozen=True)
class Task:
    """One rollout to play.

    Args:
        prompt: The prompt.
        address: How the policy is reached.
        log: File for the output of the agent.
        id: Id of the rollout for environments.
        step: The environment's answer to a turn.
    """

    prompt: Prompt
    address: Address
    log: Path
    id: str
    step: Callable[[Conversation], Awaitable[StepResult]]

    @property
    def described(self) -> dict[str, Any]:
        """The prompt as agents read it."""
        prompt = self.prompt
        return {
            "id": prompt.id,
            "messages": [dict(message) for message in prompt.messages],
            "info": dict(prompt.info),
            "tools": [dict(tool) for tool in prompt.tools],
        }

    def env(self, mark: str) -> dict[str, str]:
        """The environment variables of the rollout."""
        address = self.address
        found = {host.MARK: mark, **service_variables(address.root_url, address.api_key)}
        if address.reward_key:
            found["RL_REWARD_KEY"] = address.reward_key
        return found


class Launcher(Protocol):
    """Starts an agent for each rollout."""

    async def start(self) -> None:
        """Prepare; called once."""
        ...

    async def play(self, task: Task) -> Any:
        """Play one rollout and return what the agent says its reward is, None for nothing.

        Raises:
            AgentFailed: If the agent fails.
            AgentLost: If it was killed from outside.
        """
        ...

    async def close(self) -> None:
        """End everything that was started."""
        ...


class ProcessLauncher:
    """Plays each rollout in a process of its own: a user's function, or a command.

    The processes are forked from one that has imported the function's file, is small and has one thread, unlike the
    process of an engine. They are ended if it is killed, and the next rollout starts another.

    Args:
        function: The function; None for a command.
        command: The command; empty for a function.
        env: Further environment variables.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self, function: str | FromFile | None, command: Sequence[str], env: Mapping[str, str], grace_s: float
    ) -> None:
        self._function = function
        self._command = list(command)
        self._env = env
        self._grace_s = grace_s
        self._host: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._played: dict[str, asyncio.Future[int]] = {}
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the process that others are forked from.

        Raises:
            AgentFailed: If the function's file cannot be loaded.
        """
        self._host = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            host.__name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **self._env},
            start_new_session=True,
        )
        function = pickle.dumps(self._function)
        self._requests.write(len(function).to_bytes(8, "big") + function)
        assert self._host.stdout is not None
        first = json.loads(await self._host.stdout.readline() or '{"failure": "its process ended"}')
        if "failure" in first:
            await self.close()
            raise AgentFailed(f"the agent cannot be loaded: {first['failure']}")
        self._reader = asyncio.create_task(self._read(self._host.stdout))

    async def play(self, task: Task) -> Any:
        """Play one rollout to its end; what is left of its processes is ended then, or when this is cancelled."""
        async with self._starting:
            if self._reader is None or self._reader.done():
                await self.start()
        mark = uuid.uuid4().hex
        ended = self._played[mark] = asyncio.get_running_loop().create_future()
        with tempfile.TemporaryDirectory(prefix="rl-agent-") as scratch:
            prompt, reward = Path(scratch, "prompt.json"), Path(scratch, "reward.json")
            prompt.write_text(json.dumps(task.described, default=str), encoding="utf-8")
            asked = {
                "id": mark,
                "command": self._command,
                "env": {**task.env(mark), "RL_PROMPT_FILE": str(prompt), "RL_REWARD_FILE": str(reward)},
                "log": str(task.log),
                "grace_s": self._grace_s,
            }
            self._ask(asked)
            try:
                status = await asyncio.shield(ended)
            except asyncio.CancelledError:
                self._ask({"id": mark, "end": True})
                with suppress(AgentLost):
                    await asyncio.shield(ended)
                raise
            finally:
                self._played.pop(mark, None)
            if status:
                raise _failed(status, task.log)
            return _read_reward(reward)

    async def close(self) -> None:
        """End the host."""
        if self._reader is not None:
            self._reader.cancel()
        if self._host is None:
            return
        self._requests.close()
        with suppress(ProcessLookupError):
            self._host.kill()
        await self._host.wait()

    @property
    def _requests(self) -> asyncio.StreamWriter:
        assert self._host is not None, "not started"
        assert self._host.stdin is not None
        return self._host.stdin

    def _ask(self, task: Mapping[str, Any]) -> None:
        self._requests.write(json.dumps(task).encode() + b"\n")

    async def _read(self, answers: asyncio.StreamReader) -> None:
        """Pass on what the host says, until it ends."""
        while line := await answers.readline():
            said = json.loads(line)
            self._played[said["ended"]].set_result(said["status"])
        lost, self._played = self._played, {}
        await asyncio.to_thread(host.kill_all, set(lost))
        for played in lost.values():
            if not played.done():
                played.set_exception(AgentLost("the process that agents are forked from was killed"))


class ExternalLauncher:
    """Waits for agents that run elsewhere.

    Args:
        board: Where they find rollouts.
    """

    def __init__(self, board: TaskBoard) -> None:
        self._board = board

    async def start(self) -> None:
        """Nothing is prepared."""

    async def play(self, task: Task) -> Any:
        """Wait until an agent has taken the rollout and ended it."""
        await self._board.play(task.described, task.address)

    async def close(self) -> None:
        """Nothing is left."""


class EnvironmentLauncher:
    """Has the environment of each prompt run the agent, and asks it for the end.

    Args:
        command: The command.
        files: The agent's own files, by name.
        env: Its environment variables.
    """

    def __init__(self, command: Sequence[str], files: Mapping[str, bytes], env: Mapping[str, str]) -> None:
        self._command, self._files, self._env = tuple(command), files, env

    async def start(self) -> None:
        """Nothing is prepared."""

    async def play(self, task: Task) -> Any:
        """Wait until the agent has ended and is scored; a cancelled rollout is abandoned, which ends it."""
        address, prompt = task.address, task.prompt
        run = AgentRun(self._command, self._files, self._env, address.root_url, address.api_key, network=this_network())
        asked = Conversation(task.id, prompt.messages, prompt.info, "", agent_run=run)
        pause_s = _FIRST_PAUSE_S
        while not (result := await task.step(asked)).done:
            # a later turn: an environment that has lost the agent must not start it again
            asked = replace(asked, turn=asked.turn + 1)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        if output := result.info.get(AGENT_OUTPUT):
            task.log.write_text(str(output), encoding="utf-8", errors="replace")
        if failure := result.info.get(AGENT_FAILURE):
            raise AgentFailed(f"{failure}; its output is in {task.log}" if output else str(failure))
        return result.rewards()

    async def close(self) -> None:
        """Nothing is left."""


def _failed(status: int, log: Path) -> AgentFailed:
    how = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
    last = _last_lines(log)
    kind = AgentLost if status == -signal.SIGKILL else AgentFailed
    return kind(f"the agent {how}{f' ({last})' if last else ''}; its output is in {log}")


def _last_lines(log: Path) -> str:
    """The last lines of a log in one; empty if there is none."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
    return ""


def _read_reward(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise AgentFailed(f"the agent's reward file is not valid JSON: {error}") from None
