"""The way to start an agent for a rollout, in a process of its own, and the errors of agents."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rl_core.agent_processes import host
from rl_core.errors import RLError

MAX_REWARD_BYTES = 2**20
"""Maximum size of a reward file."""

_LAST_LINES, _LAST_BYTES = 3, 4096


class AgentFailed(RLError):
    """An agent that raised, or ended with another status than 0; its message has the last lines of its log."""


class AgentLost(AgentFailed):
    """An agent that was killed from outside, or whose host was; another try may succeed."""


class AgentFunction(Protocol):
    """The function of an agent that is found in the process which others are forked from, such as a `FromFile`."""

    def load(self) -> Callable[..., Any]:
        """Return the function, called as `run(base_url, api_key, prompt)`; may import what it needs."""


class ProcessLauncher:
    """Plays each rollout in a separate process: a user's function, or a command.

    The processes are forked from one that has imported the function's file, is small and has one thread, unlike the
    process of an engine. They are ended if it is killed, and the next rollout starts another.

    Args:
        function: The function, by name or as what is loaded where it is called; None for a command.
        command: The command; empty for a function.
        env: Further environment variables.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self, function: str | AgentFunction | None, command: Sequence[str], env: Mapping[str, str], grace_s: float
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
        pipe = asyncio.subprocess.PIPE
        command, env = (sys.executable, "-m", host.__name__), {**os.environ, **self._env}
        self._host = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=env, start_new_session=True
        )
        function = pickle.dumps(self._function)
        self._requests.write(len(function).to_bytes(8, "big") + function)
        assert self._host.stdout is not None
        first = json.loads(await self._host.stdout.readline() or '{"failure": "its process ended"}')
        if "failure" in first:
            await self.close()
            raise AgentFailed(f"the agent cannot be loaded: {first['failure']}")
        self._reader = asyncio.create_task(self._read(self._host.stdout))

    async def play(self, prompt: Mapping[str, Any], variables: Mapping[str, str], log: Path) -> Any:
        """Play one rollout to its end. Its remaining processes are ended then, or when this is cancelled.

        Args:
            prompt: The prompt as the agent reads it; contents of the file `RL_PROMPT_FILE`.
            variables: Environment variables of this rollout, with the address and the key of the policy.
            log: File for the output of the agent.

        Returns:
            The function's result, or the contents of the reward file; None for nothing.

        Raises:
            AgentFailed: If the agent fails; `AgentLost` if it was killed from outside.
        """
        async with self._starting:
            if self._reader is None or self._reader.done():
                await self.start()
        mark = uuid.uuid4().hex
        ended = self._played[mark] = asyncio.get_running_loop().create_future()
        with tempfile.TemporaryDirectory(prefix="rl-agent-") as scratch:
            given, reward = Path(scratch, "prompt.json"), Path(scratch, "reward.json")
            given.write_text(json.dumps(prompt, default=str), encoding="utf-8")
            env = {host.MARK: mark, **variables, "RL_PROMPT_FILE": str(given), "RL_REWARD_FILE": str(reward)}
            request = {"command": self._command, "env": env, "log": str(log), "grace_s": self._grace_s}
            self._ask({"id": mark, **request})
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
                raise _failed(status, log)
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
        """Pass on the host's reports, until it ends."""
        while line := await answers.readline():
            report = json.loads(line)
            self._played[report["ended"]].set_result(report["status"])
        lost, self._played = self._played, {}
        await asyncio.to_thread(host.kill_all, set(lost))
        for played in lost.values():
            if not played.done():
                played.set_exception(AgentLost("the process that agents are forked from was killed"))


def _read_reward(path: Path) -> Any:
    """Return the contents of a reward file, which an agent may have written as it likes; None if there is none."""
    try:
        # Without these flags a pipe would block this process, and a link could lead to any file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentFailed(f"the agent's reward file cannot be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AgentFailed("the agent's reward file is not a regular file")
        content = os.read(descriptor, MAX_REWARD_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_REWARD_BYTES:
        raise AgentFailed(f"the agent's reward file has more than {MAX_REWARD_BYTES} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AgentFailed(f"the agent's reward file is not valid JSON: {error}") from None


def _failed(status: int, log: Path) -> AgentFailed:
    """Return the error about an agent that ended with a status, with the last lines of its log."""
    how = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
    last = ""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        last = " | ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
    kind = AgentLost if status == -signal.SIGKILL else AgentFailed
    return kind(f"the agent {how}{f' ({last})' if last else ''}; its output is in {log}")
