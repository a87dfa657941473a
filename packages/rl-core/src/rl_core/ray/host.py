"""The only actor classes: they hold a worker that is built in its own environment, and make its answers plain."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray

from rl_core.data.batch import Batch
from rl_core.data.shuffle import Chunk, Pick, Shard, pick
from rl_core.devices.device import NODE_ADDRESS, hold_port, node_address
from rl_core.devices.kinds import hide_real_gpus
from rl_core.errors import RLError, WorkerError
from rl_core.plugins import plugin_packages, resolve
from rl_core.ray.calls import write_stacks_on_signal
from rl_core.tracing import spans
from rl_core.tracing.profiling import Profile, ProfileOrder, ProfileReport
from rl_core.tracing.spans import SpanReport
from rl_core.tracing.stacks import FOLDER as STACKS_FOLDER
from rl_core.tracing.stacks import write_stacks_of
from rl_core.usage.garbage import without_collections
from rl_core.usage.meter import Meter, Usage

_log = logging.getLogger(__name__)

CONCURRENCY_GROUPS = {"health": 1, "monitoring": 1}
"""Concurrency groups that an actor of `WorkerHost` is made with, with the threads of each: their calls are answered
while another call runs, and a GPU that does not answer holds up monitoring only."""

CALLS = "calls"
"""Track of the spans of the calls of a worker that has one call at a time."""


@dataclass(frozen=True)
class Place:
    """The place of a worker's process.

    Args:
        address: Address of its node, as others reach it.
        port: Kept free there for this process, so that ranks can meet.
        node: Ray's id of the node.
        gpus: The GPUs that Ray gave it, as `CUDA_VISIBLE_DEVICES` lists them: indices, or UUIDs.
    """

    address: str
    port: int
    node: str
    gpus: tuple[str, ...]

    @classmethod
    def here(cls, port: int) -> Place:
        """Return the place of this process."""
        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", []))
        return cls(node_address(), port, context.get_node_id(), gpus)


def _prepare_process() -> None:
    """Tell this process and its children the address of its node, unless the launcher has, and hide real GPUs from a
    rehearsal.
    """
    os.environ.setdefault(NODE_ADDRESS, ray.util.get_node_ip_address())
    hide_real_gpus()


class WorkerHost:
    """Hosts a worker whose methods are synchronous; health answers during a running call."""

    def __init__(self) -> None:
        _prepare_process()
        self._worker: Any = None
        self._port: socket.socket | None = None
        self._meter = Meter()
        self._profile = Profile()

    def place(self) -> Place:
        """Return the place of this process. Each call reserves a new port, which stays free until the next call."""
        self._port = hold_port()
        return Place.here(self._port.getsockname()[1])

    def log_to(self, path: str) -> None:
        """Write this process's log records and output to a file."""
        log_to(path)
        redirect_output(path)

    def build(self, target: str, *args: Any, **kwargs: Any) -> None:
        """Build the worker `"package.module:Class"`, imported in this process."""
        with spans.span(CALLS, "start"):
            self._worker = _plainly(lambda: _imported(target)(*args, **kwargs))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker, or of a part of it (`part.method`)."""
        with spans.span(CALLS, method):
            return _plainly(lambda: attrgetter(method)(self._worker)(*args, **kwargs))

    def call_on(self, method: str, shard: Shard, args: Sequence[Any], kwargs: Mapping[str, Any], *chunks: Chunk) -> Any:
        """Call a method of the worker, or of a part of it, on the rows of a shard."""
        with spans.span(CALLS, method):
            return _plainly(lambda: attrgetter(method)(self._worker)(shard.assemble(chunks), *args, **kwargs))

    def infer(
        self, shard: Shard, args: Sequence[Any], kwargs: Mapping[str, Any], *chunks: Chunk
    ) -> tuple[int, Batch | None]:
        """Return the number of rows of the answer of the worker's `infer`, and the answer, which stays on its node."""
        answer = self.call_on("infer", shard, args, kwargs, *chunks)
        return (0 if answer is None else len(answer)), answer

    def pick(self, picks: Sequence[Pick], *stores: Batch) -> Any:
        """Return rows for every shard of a model, a result for each."""
        with spans.span(CALLS, "pick"):
            chunks = _plainly(lambda: pick(picks, stores))
        # A call with one result returns it bare.
        return chunks if len(chunks) > 1 else chunks[0]

    def start_profile(self, order: ProfileOrder) -> ProfileReport:
        """Begin to record this process."""
        return self._profile.start(order)

    def stop_profile(self) -> ProfileReport:
        """End the recording, and write its files."""
        return self._profile.stop()

    @ray.method(concurrency_group="health")
    def take_spans(self) -> SpanReport:
        """Return the spans of this process since the last call, while another call may be running."""
        return spans.take()

    @ray.method(concurrency_group="health")
    def health(self) -> Any:
        """Return the worker's own report, while another call may be running."""
        return _plainly(lambda: self._worker.health())

    @ray.method(concurrency_group="monitoring")
    def usage(self, with_machine: bool) -> Usage:
        """Return the use of resources since the last call, while other calls may be running; see `Meter.read`."""
        return self._meter.read(with_machine=with_machine)

    @ray.method(concurrency_group="health")
    def interrupt(self, transport: Any, reason: str) -> None:
        """Make the worker end a send of weights that another call runs, or is about to."""
        _plainly(lambda: self._worker.interrupt(transport, reason))


class AsyncWorkerHost:
    """Hosts a worker whose methods are coroutines; all calls interleave on one event loop."""

    def __init__(self) -> None:
        _prepare_process()
        self._worker: Any = None
        self._port: socket.socket | None = None
        self._meter = Meter()

    async def place(self) -> Place:
        """Return the place of this process. Each call reserves a new port, which stays free until the next call."""
        self._port = hold_port()
        return Place.here(self._port.getsockname()[1])

    async def log_to(self, path: str) -> None:
        """Write this process's log records and output to a file."""
        log_to(path)
        redirect_output(path)

    async def start(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Build the worker `"package.module:Class"`, imported in this process, and await its `start`."""
        with spans.span(CALLS, "start"):
            self._worker = _plainly(lambda: _imported(target)(*args, **kwargs))
            return await AsyncWorkerHost.call(self, "start")

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Await a method of the worker."""
        try:
            return await getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a worker's failure becomes a report that any process can read
            raise plain(error) from None

    async def usage(self, with_machine: bool) -> Usage:
        """Return the use of resources since the last call; see `Meter.read`."""
        return await asyncio.to_thread(self._meter.read, with_machine=with_machine)

    async def take_spans(self) -> SpanReport:
        """Return the spans of this process since the last call."""
        return spans.take()


class RestartingHost(AsyncWorkerHost):
    """An `AsyncWorkerHost` that Ray can start again if its process dies: its worker is built by the first call.

    Args:
        log: File that this process's log records go to.
        name: Name of the worker, for that log.
        target: `"package.module:Class"` of the worker, then its arguments.
    """

    def __init__(self, log: str, name: str, target: str, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        log_to(log)
        redirect_output(log)
        self._recipe = (target, args, kwargs)
        self._starting = asyncio.Lock()
        self._has_started = False
        if ray.get_runtime_context().was_current_actor_reconstructed:
            _log.warning("%s: the process died and was started again; calls under way are made again", name)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Await a method of the worker; builds and starts the worker first if that has not been done."""
        async with self._starting:
            if not self._has_started:
                target, arguments, named = self._recipe
                await self.start(target, *arguments, **named)
                self._has_started = True
        return await super().call(method, *args, **kwargs)


def log_to(path: str) -> None:
    """Send log records of this process to a file, from INFO for packages with plugins and from WARNING for others.

    On the signal of `rl_core.ray.calls` the stacks of its threads are appended to it; on the signal of
    `rl_core.tracing.stacks` they go to their own file.
    """
    write_stacks_on_signal(path)
    log = Path(path)
    write_stacks_of(
        log.stem,
        log.parent / STACKS_FOLDER,
        node=ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
    )
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    for package in ("rl_core", *plugin_packages()):
        logging.getLogger(package).setLevel(logging.INFO)


def redirect_output(path: str) -> None:
    """Append this process's standard output and error, also from native code and child processes, to a file instead of
    one in Ray's temporary folder. The file stays below about `MAX_LOG_BYTES`, see `rl_core.ray.host`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for fd in (1, 2):
        os.dup2(file, fd)
    os.close(file)
    bound_size(path)
    threading.Thread(target=_keep_bounded, args=(path,), name="log-size", daemon=True).start()


def plain(error: BaseException) -> RLError:
    """Return the error itself if any process can unpickle it, else a `WorkerError` with its text."""
    if isinstance(error, RLError) and type(error).__module__.split(".")[0] == "rl_core":
        return error
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return WorkerError(kind, str(error), "".join(traceback.format_exception(error)))


def _imported(target: str) -> Any:
    with without_collections():
        return resolve(target)


def _plainly(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a worker's failure becomes a report that any process can read
        raise plain(error) from None


MAX_LOG_BYTES = 2**26
"""Maximum size of a log, which then starts over; the last one is kept as `NAME.1`."""

CHECK_PERIOD_S = 30.0


def bound_size(path: str, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move the contents of a larger log to `NAME.1` and empty the log in place.

    Renaming would not do: standard output, children and native code hold descriptors of the file. They append
    (O_APPEND), so they continue at the start of the emptied file. A line written between the copy and the truncation is
    lost, as with `copytruncate` of logrotate.
    """
    log = Path(path)
    # Another process with the same log may have been first.
    if not log.exists() or log.stat().st_size <= max_bytes:
        return
    aside = log.with_name(f".{log.name}.{os.getpid()}.part")
    shutil.copyfile(log, aside)
    os.truncate(log, 0)
    aside.replace(log.with_name(f"{log.name}.1"))


def _keep_bounded(path: str) -> None:
    """Bound the size of a log for as long as this process lives."""
    wait = threading.Event().wait
    while not wait(CHECK_PERIOD_S):
        # The disk may be full, or the run directory removed; the worker does not depend on its log.
        with suppress(OSError):
            bound_size(path)
