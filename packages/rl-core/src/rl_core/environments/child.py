"""The near side of an environment process: its start, its requests and answers, and its output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.environments.messages import (
    LENGTH,
    MAX_ASKS,
    STACKS,
    Answer,
    Ask,
    MalformedAnswer,
    Message,
    max_reply_bytes,
    read_reply,
)
from rl_core.environments.rewards import RewardSum
from rl_core.errors import EnvironmentTimeout, RLError, WorkerDied, WorkerError
from rl_core.images import STORE_VARIABLE
from rl_core.rollouts.environment import EnvironmentFailure
from rl_core.rollouts.judging import JudgeBudgetSpent, JudgeClient, JudgeFailed
from rl_core.tracing.stacks import PREFIX_VARIABLE
from rl_core.user_code import FromFile, is_own

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Maximum number of seconds that importing and building an environment may take."""
CLOSE_TIMEOUT_S = 5.0
"""Maximum number of seconds that closing the states may take before a process is killed."""
END_TIMEOUT_S = 5.0
"""Timeout in seconds of the end of a process whose stream has closed, and then of its last output."""
STACKS_TIMEOUT_S = 2.0
"""Maximum number of seconds that a process which hangs has to write its stacks to the log before it is killed."""
MAX_LINE = 2000
"""Maximum number of characters of a line that are logged."""
MAX_BYTES = 2**20
"""Maximum number of bytes of one process that are logged; the rest is read and dropped."""
TAIL_LINES = 200
"""Lines kept to explain the end of a process, its stacks among them."""

_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "Cannot allocate memory", "out of memory", "OutOfMemory")
_FRAME = re.compile(r'\s*File "([^"]*)", line (\d+) in (.*)')

_PATHS_LOCALE_AND_CACHES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP TERM
    VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME
    HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_ASSETS_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE
    HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM
    NLTK_DATA MPLCONFIGDIR RL_HOME
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
PASSED = frozenset([*_PATHS_LOCALE_AND_CACHES.split(), PREFIX_VARIABLE, STORE_VARIABLE])
"""Names that an environment's process sees as its parent does."""

PASSED_PREFIXES = ("LC_", "PYTHON")
"""Prefixes of further such variables."""

DEFAULTS = {
    # Every process computes with one thread, as there is a process per core.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Devices belong to the models.
    "CUDA_VISIBLE_DEVICES": "",
    # A print is in the log even if the process is killed right after it.
    "PYTHONUNBUFFERED": "1",
}
"""Variables of every environment's process."""


@dataclass(frozen=True)
class ChildSpec:
    """Description of how an environment's processes are started.

    Args:
        environment: `"package.module:Class"`, or a class or function in a file of the user's.
        config: Its pickled settings.
        name: Name of the instance (`env.<name>`), for messages; empty if it has none.
        env_vars: Further variables of the process.
        memory_limit_gib: Maximum memory that it may allocate; None for no limit.
        judges: Judges that its reward functions may ask; None for none.
    """

    environment: str | FromFile | RewardSum
    config: bytes
    name: str = ""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    memory_limit_gib: float | None = None
    judges: JudgeClient | None = None

    @property
    def title(self) -> str:
        """The environment in messages: its name, and the file that it is from."""
        if isinstance(self.environment, FromFile) and self.name not in ("", str(self.environment)):
            return f"{self.name} ({self.environment})"
        return self.name or str(self.environment)

    def key(self, setting: str) -> str:
        """Return the setting as a user writes it."""
        if ":" in self.name:
            return f"{setting} beside `type: {self.name}` under env.NAME, with env_name: NAME"
        return f"env.{self.name}.{setting}" if self.name else setting

    @property
    def memory(self) -> str:
        """The memory limit in words."""
        if not self.memory_limit_gib:
            return "the memory of its node"
        return f"its memory limit of {self.memory_limit_gib:g} GiB ({self.key('memory_limit_gib')})"


class Child:
    """A running process of an environment and the streams to it.

    Attributes:
        num_calls: Number of requests since the environment was built.
        saves: True if the environment saves states.
        has_asked: True if it has asked a judge in the call in progress.
    """

    def __init__(
        self,
        spec: ChildSpec,
        popen: subprocess.Popen[bytes],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        output: ProcessOutput,
        parent_pipe: int,
    ) -> None:
        self._spec, self._popen, self._output, self._parent_pipe = spec, popen, output, parent_pipe
        self._reader, self._writer = streams
        self._closed = False
        self.num_calls = 0
        self.saves = False
        self.has_asked = False
        self._num_steps = 0

    @classmethod
    async def start(cls, spec: ChildSpec) -> Child:
        """Start a process and build the environment in it.

        Raises:
            WorkerError: What importing or building the environment raised there.
            WorkerDied: If the process ended or hung before the environment was built.
        """
        near, far = socket.socketpair()
        watched, parent_pipe = os.pipe()
        printed, out = os.pipe()
        memory_bytes = int((spec.memory_limit_gib or 0) * 2**30)
        # A child of multiprocessing would import this process's main module, which it has no use for.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from rl_core.environments.process import main; main({far.fileno()}, {watched}, {memory_bytes})"
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
        streams = await asyncio.open_connection(sock=near, limit=2**20)
        output = await ProcessOutput.read_from(printed, f"{spec.title}, process {popen.pid}")
        child = cls(spec, popen, streams, output, parent_pipe)
        try:
            judges = spec.judges
            gives_scores = {} if judges is None else dict.fromkeys(judges.names, judges.give_scores)
            build = ("build", spec.environment, spec.config, spec.title, spec.memory, gives_scores)
            built = await child.request(build, START_TIMEOUT_S)
            if isinstance(built, WorkerError):
                raise built
        except BaseException as error:
            await child.kill()
            if isinstance(error, EnvironmentTimeout):
                raise WorkerDied(f"environment {spec.title} was not built within {START_TIMEOUT_S:g} s") from None
            raise
        child.saves, child.num_calls = built, 0
        return child

    @property
    def is_running(self) -> bool:
        """Return whether the process has not ended."""
        return self._popen.poll() is None

    async def request(self, message: Message, deadline_s: float) -> Any:
        """Send a message and return the reply. The time in which it waits for judges does not count.

        Raises:
            EnvironmentTimeout: If it does not come within the deadline.
            WorkerDied: If the process ended, or sent something that is not a reply.
        """
        self.num_calls += 1
        title = self._spec.title
        try:
            async with asyncio.timeout(deadline_s) as limit:
                await self._write(message)
                return await self._reply(message, limit)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._popen.pid, STACKS)
            await self._output.ended(STACKS_TIMEOUT_S)
            frame = self._output.innermost_frame
            where = f"; it was in {frame}" if frame else ""
            raise EnvironmentTimeout(
                f"environment {title} gave no answer within its deadline of {deadline_s:g} s "
                f"({self._spec.key('deadline_s')}){where}"
            ) from None
        except MalformedAnswer as error:
            raise WorkerDied(f"the process of environment {title} sent a malformed answer ({error})") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            ending = await self.how_it_ended()
            raise WorkerDied(f"the process of environment {title} ended: {ending}") from None

    async def close(self) -> None:
        """Ask it to close its states and end; kill it if that takes too long."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write(("close",))
                await self._reader.read()
        await self.kill()

    async def kill(self) -> None:
        """End the process and its descendants."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        os.close(self._parent_pipe)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        await asyncio.to_thread(self._popen.wait)
        self._output.close()

    async def how_it_ended(self) -> str:
        """Return the exit code or signal of a process whose stream has closed, and its last words."""
        # The stream closes a moment before the process can be waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._popen.wait, END_TIMEOUT_S)
        code = self._popen.returncode
        if code is None:
            return "it closed its stream"
        await self._output.ended(END_TIMEOUT_S)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        frame, lines = self._output.innermost_frame, self._output.lines
        last_line = next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
        said = f" in {frame}" if frame else f", after it wrote {last_line!r}" if last_line else ""
        if self._spec.memory_limit_gib and any(sign in line for line in lines for sign in _OUT_OF_MEMORY):
            said += f"; it may have needed more than {self._spec.memory}"
        return how + said

    async def _reply(self, message: Message, limit: asyncio.Timeout) -> Any:
        """Return the reply to a message, after the questions to judges that come before it have been answered."""
        self.has_asked = False
        self._num_steps += message[0] == "step"
        num_conversations = len(message[1]) if message[0] == "step" else 0
        loop, asking = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        num_waiting, left_s = 0, 0.0
        spent: list[JudgeBudgetSpent] = []

        async def answer(ask: Ask) -> None:
            nonlocal num_waiting, left_s
            if not num_waiting and (when := limit.when()) is not None:
                left_s = when - loop.time()
                limit.reschedule(None)
            num_waiting += 1
            value, failure, is_cached = None, "", False
            try:
                value, failure, is_cached = await self._verdict(ask)
            except JudgeBudgetSpent as error:
                spent.append(error)
                failure = str(error)
            except RLError as error:
                failure = str(error)
            finally:
                num_waiting -= 1
                if not num_waiting and not is_over:
                    limit.reschedule(loop.time() + left_s)
            # The read below reports a process that has ended.
            with contextlib.suppress(ConnectionError):
                await self._write(("verdict", ask.number, value, failure, is_cached))

        is_over = False
        max_bytes = max_reply_bytes(message)
        try:
            for num_asked in itertools.count():
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if size > max_bytes:
                    raise MalformedAnswer(f"the environment returned {size} bytes; the limit is {max_bytes}")
                reply = read_reply(message, await self._reader.readexactly(size))
                if not isinstance(reply, Ask):
                    break
                if num_asked >= (most := MAX_ASKS * num_conversations):
                    raise MalformedAnswer(f"it asked judges more than {most} questions in one call")
                if reply.call != self._num_steps:
                    # The call that it belongs to is over, so nobody waits for the answer.
                    continue
                self.has_asked = True
                task = asyncio.create_task(answer(reply))
                asking.add(task)
                task.add_done_callback(asking.discard)
        finally:
            is_over = True
            for task in list(asking):
                task.cancel()
        if spent and message[0] == "step":
            return [Answer(EnvironmentFailure(str(spent[0]), "budget")) for _ in message[1]]
        return reply

    async def _verdict(self, ask: Ask) -> tuple[Any, str, bool]:
        """Return the verdict of a judge, or the reason that there is none, and whether nobody had to be asked."""
        judges = self._spec.judges
        if judges is None or ask.judge not in judges.names:
            raise JudgeFailed(f"there is no judge {ask.judge!r:.80}")
        [verdict] = await judges.ask(ask.judge, [ask.question])
        return verdict.value, verdict.failure, verdict.is_cached

    async def _write(self, message: Message) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(LENGTH.pack(len(data)) + data)
        await self._writer.drain()


class ProcessOutput(asyncio.Protocol):
    """Logs each line that a process writes to its standard output or error, up to a bound.

    Args:
        process: Its name, which begins each line in the log.

    Attributes:
        lines: The last lines.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._rest = b""
        self._num_bytes = 0
        self.lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._closed = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def read_from(cls, descriptor: int, process: str) -> ProcessOutput:
        """Read a pipe's end until the process closes the other, or `close`."""
        loop = asyncio.get_running_loop()
        _, output = await loop.connect_read_pipe(lambda: cls(process), os.fdopen(descriptor, "rb", buffering=0))
        return output

    @property
    def innermost_frame(self) -> str:
        """The innermost call of the main thread when the process wrote its stacks: in code that is not installed, or
        else in any; empty if it wrote none.
        """
        # The main thread comes last.
        lines = list(self.lines)
        begins = [index for index, line in enumerate(lines) if "most recent call first" in line]
        calls = [found for line in lines[begins[-1] :] if (found := _FRAME.match(line))] if begins else []
        chosen = next((call for call in calls if is_own(call[1])), calls[0] if calls else None)
        return f"{chosen[3]} ({os.path.basename(chosen[1])}:{chosen[2]})" if chosen else ""

    async def ended(self, timeout_s: float) -> None:
        """Wait until everything has been read; descendants of the process may keep the pipe open for longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._closed)

    def close(self) -> None:
        """Stop reading."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._log(line)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._log(self._rest)
        if not self._closed.done():
            self._closed.set_result(None)

    def _log(self, line: bytes) -> None:
        text = line[: 4 * MAX_LINE].decode(errors="replace")[:MAX_LINE].rstrip()
        self.lines.append(text)
        if self._num_bytes > MAX_BYTES:
            return
        self._num_bytes += len(line)
        if self._num_bytes > MAX_BYTES:
            logger.warning("%s has printed more than %d MiB; the rest is dropped", self._process, MAX_BYTES >> 20)
        elif text:
            logger.info("%s: %s", self._process, text)


def process_variables(inherited: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an environment's process starts with.

    Args:
        inherited: Variables of the process that starts it; only those on the allow-list are kept.
        settings: `env.<name>.env_vars`, which win over everything else.
    """
    kept = {name: value for name, value in inherited.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}
    return kept | DEFAULTS | dict(settings)
