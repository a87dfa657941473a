"""A running environment process, as the pool that started it sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.environments.messages import LENGTH, STACKS, Build, Close, MalformedAnswer, Message
from rl_core.environments.output import Output
from rl_core.environments.variables import process_variables
from rl_core.errors import EnvironmentTimeout, WorkerDied

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Most seconds that importing and building an environment may take."""
CLOSE_TIMEOUT_S = 5.0
"""Most seconds that closing the states may take before a process is killed."""
END_TIMEOUT_S = 5.0
"""Most seconds that a process whose stream has closed is waited for, and then its last output."""
STACKS_TIMEOUT_S = 2.0
"""Most seconds that a process which hangs has to write its stacks to the log before it is killed."""

_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "Cannot allocate memory", "out of memory", "OutOfMemory")


@dataclass(frozen=True)
class ChildSpec:
    """How an environment's processes are started.

    Args:
        environment: `"package.module:Class"` or a scoring function.
        config: its pickled settings.
        name: of the instance (`env.<name>`), for messages; empty if it has none.
        env_vars: further variables of the process.
        memory_limit_gib: most memory that it may allocate; None for no limit.
    """

    environment: str
    config: bytes
    name: str = ""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    memory_limit_gib: float | None = None

    def key(self, setting: str) -> str:
        """The setting as a user writes it."""
        return f"env.{self.name}.{setting}" if self.name else setting

    @property
    def memory(self) -> str:
        """The memory limit in words."""
        return f"its memory limit of {self.memory_limit_gib:g} GiB ({self.key('memory_limit_gib')})"

    @property
    def memory_bytes(self) -> int:
        """The memory limit; 0 for none."""
        return int(self.memory_limit_gib * 2**30) if self.memory_limit_gib else 0


@dataclass(eq=False)
class Child:
    """A running process and the streams to it."""

    spec: ChildSpec
    popen: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: Output
    lifeline: int
    num_calls: int = 0
    closed: bool = False

    @classmethod
    async def start(cls, spec: ChildSpec) -> Child:
        """Start a process and build the environment in it.

        Raises:
            WorkerError: what importing or building the environment raised there.
            WorkerDied: if the process ended or hung before the environment was built.
        """
        child = await cls._open(spec)
        try:
            problem = await child.request(
                Build(spec.environment, spec.config, spec.memory if spec.memory_bytes else "the memory of its node"),
                START_TIMEOUT_S,
            )
        except BaseException as error:
            await child.kill()
            if isinstance(error, EnvironmentTimeout):
                raise WorkerDied(f"environment {spec.environment} was not built within {START_TIMEOUT_S:g} s") from None
            raise
        if problem is not None:
            await child.kill()
            raise problem
        child.num_calls = 0
        return child

    @classmethod
    async def _open(cls, spec: ChildSpec) -> Child:
        near, far = socket.socketpair()
        watched, lifeline = os.pipe()
        printed, out = os.pipe()
        # a plain child rather than multiprocessing's: nothing of this process's main module is imported there
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from rl_core.environments.process import main; main({far.fileno()}, {watched}, {spec.memory_bytes})"
        )
        popen = subprocess.Popen(
            [sys.executable, "-c", code],
            env=process_variables(os.environ, spec.env_vars),
            pass_fds=[far.fileno(), watched],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        far.close()
        os.close(watched)
        os.close(out)
        reader, writer = await asyncio.open_connection(sock=near, limit=2**20)
        output = await Output.read_from(printed, popen.pid)
        return cls(spec, popen, reader, writer, output, lifeline)

    @property
    def returncode(self) -> int | None:
        return self.popen.poll()

    async def request(self, message: Message, deadline_s: float) -> Any:
        """The answer to a message.

        Raises:
            EnvironmentTimeout: if it does not come within the deadline.
            WorkerDied: if the process ended, or sent something that is not an answer.
        """
        self.num_calls += 1
        try:
            async with asyncio.timeout(deadline_s):
                await self._write(message)
                return message.read(await self._answer(message.max_answer_bytes()))
        except TimeoutError:
            raise EnvironmentTimeout(
                f"environment {self.spec.environment} gave no answer within its deadline of {deadline_s:g} s "
                f"({self.spec.key('deadline_s')}){await self._where_it_hangs()}"
            ) from None
        except MalformedAnswer as error:
            raise WorkerDied(
                f"the process of environment {self.spec.environment} sent something that is not an answer ({error})"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerDied(
                f"the process of environment {self.spec.environment} ended: {await self.how_it_ended()}"
            ) from None

    async def close(self) -> None:
        """Let it close its states and end; kill it if that takes too long."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write(Close())
                await self.reader.read()
        await self.kill()

    async def kill(self) -> None:
        """End it and what it started."""
        if self.closed:
            return
        self.closed = True
        self.writer.close()
        os.close(self.lifeline)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        await asyncio.to_thread(self.popen.wait)
        self.output.close()

    async def how_it_ended(self) -> str:
        """The exit code or signal of a process whose stream has closed, and its last words."""
        # the stream closes a moment before the process can be waited for
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.popen.wait, END_TIMEOUT_S)
        code = self.popen.returncode
        if code is None:
            return "it closed its stream"
        await self.output.ended(END_TIMEOUT_S)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        frame, words = self.output.innermost_frame, self.output.last_line
        said = f" in {frame}" if frame else f", after it wrote {words!r}" if words else ""
        if self.spec.memory_bytes and any(sign in self.output.tail for sign in _OUT_OF_MEMORY):
            said += f"; it may have needed more than {self.spec.memory}"
        return how + said

    async def _where_it_hangs(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.popen.pid, STACKS)
        await self.output.ended(STACKS_TIMEOUT_S)
        frame = self.output.innermost_frame
        return f"; it was in {frame}" if frame else ""

    async def _write(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self.writer.write(LENGTH.pack(len(data)) + data)
        await self.writer.drain()

    async def _answer(self, most: int) -> bytes:
        (size,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if size > most:
            raise MalformedAnswer(f"{size} bytes; an answer has at most {most}")
        return await self.reader.readexactly(size)
