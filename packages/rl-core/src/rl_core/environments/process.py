"""The far side of an `EnvironmentPool`: a process with an environment and the states of its conversations."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import pickle
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, BinaryIO

from rl_core.environment import Conversation, Environment, EnvironmentFailure, StepResult, as_environment
from rl_core.environments.messages import (
    LENGTH,
    STACKS,
    Abandon,
    Answer,
    Build,
    Close,
    Step,
    plain_result,
    write_answers,
    write_built,
    write_problem,
)
from rl_core.errors import WorkerError
from rl_core.plugins import resolve


class EnvironmentProcess:
    """An environment and the states of its conversations.

    Args:
        environment: `"package.module:Class"`, for messages.
        built: the environment.
        memory: the memory limit in words, for messages.
    """

    def __init__(self, environment: str, built: Environment, *, memory: str = "its memory limit") -> None:
        self._name = environment
        self._environment = built
        self._memory = memory
        self._states: dict[str, Any] = {}

    def step(self, payloads: Sequence[bytes]) -> list[Answer]:
        """One batched call of the environment; an exception in it is everybody's answer."""
        conversations: list[Conversation] = []
        states: list[Any] = [None] * len(payloads)
        out_of_memory = False
        try:
            conversations = [pickle.loads(payload) for payload in payloads]
            states = [self._states.get(conversation.id) for conversation in conversations]
            results = self._environment.step(conversations, states)
            _check(results, len(conversations))
            return [self._settle(c, result) for c, result in zip(conversations, results, strict=True)]
        except MemoryError:
            # told below, when the frames that hold the memory are gone
            out_of_memory, what = True, f"needed more than {self._memory}"
        except Exception as error:  # noqa: BLE001  # an environment's failure becomes a report
            what = f"raised {_describe(error)}"
        shared = f", in a call that {len(payloads)} conversations shared" if len(payloads) > 1 else ""
        failure = EnvironmentFailure(f"environment {self._name} {what}{shared}")
        self.abandon([conversation.id for conversation in conversations])
        return [Answer(failure, retry=state is None, out_of_memory=out_of_memory) for state in states]

    def abandon(self, ids: Sequence[str]) -> str | None:
        """Close the states of these conversations, and say what went wrong."""
        states = [state for id in ids if (state := self._states.pop(id, None)) is not None]
        return self._close(states) if states else None

    def close(self) -> str | None:
        """Close every state."""
        return self.abandon(list(self._states))

    def _close(self, states: Sequence[Any]) -> str | None:
        try:
            self._environment.close(states)
        except Exception as error:  # noqa: BLE001  # an environment's failure becomes a report
            return f"environment {self._name} raised {_describe(error)} while closing states"
        return None

    def _settle(self, conversation: Conversation, result: StepResult) -> Answer:
        state = result.state
        if state is not None:
            self._states[conversation.id] = state
        else:
            self._states.pop(conversation.id, None)
        try:
            answer = plain_result(result)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # an environment's failure becomes a report
            self.abandon([conversation.id])
            return Answer(EnvironmentFailure(f"environment {self._name} returned what cannot be used: {error}"))
        if result.done and state is not None:
            self.abandon([conversation.id])
        return Answer(answer, has_state=state is not None and not result.done)


def serve(connection: socket.socket) -> None:
    """Build the environment, then answer messages until the other side closes the stream."""
    incoming = connection.makefile("rb")
    build = receive(incoming)
    if build is None:
        return
    process = _build(connection, build)
    if process is None:
        return
    while (message := receive(incoming)) is not None:
        match message:
            case Step(conversations):
                send(connection, write_answers(process.step(conversations)))
            case Abandon(ids):
                send(connection, write_problem(process.abandon(ids)))
            case Close():
                break
    process.close()


def _build(connection: socket.socket, build: Build) -> EnvironmentProcess | None:
    """The environment, built; None if that failed, which the other side is told."""
    problem: WorkerError | None = None
    try:
        built = _built(build.environment, pickle.loads(build.config))
    except MemoryError:
        problem = WorkerError("MemoryError", f"building the environment needed more than {build.memory}", "")
    except Exception as error:  # noqa: BLE001  # a worker's failure becomes a report
        problem = WorkerError(type(error).__qualname__, str(error), traceback.format_exc())
    send(connection, write_built(problem))
    return None if problem else EnvironmentProcess(build.environment, built, memory=build.memory)


def _built(name: str, config: Any) -> Environment:
    """The class built with its config, or the scoring function wrapped.

    Raises:
        ValueError: if the config has settings of its own, which a function would never see.
    """
    target = resolve(name)
    if isinstance(target, type):
        environment: Environment = target(config)
        return environment
    unseen = _own_settings(config) if config is not None else []
    if unseen:
        raise ValueError(
            f"{name} is a function, which gets no settings, but its config has {', '.join(unseen)}; make it a class "
            "that is built as Class(config), or take these out of its config"
        )
    return as_environment(target)


def _own_settings(config: Any) -> list[str]:
    # imports pydantic, which is here already if there is a config
    from rl_core.environments.config import EnvironmentConfig

    return sorted(set(type(config).model_fields) - set(EnvironmentConfig.model_fields))


def send(connection: socket.socket, data: bytes) -> None:
    """Write one message."""
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(incoming: BinaryIO) -> Any:
    """Read one message of the pool's; None if the other side closed the stream."""
    header = incoming.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return pickle.loads(incoming.read(*LENGTH.unpack(header)))


def end_with_parent(parent_pipe: int) -> None:
    """End this process as soon as nobody holds the other end of a pipe.

    The kernel ends it by SIGIO, so neither a hanging environment nor one that holds the interpreter's lock outlives its
    parent (PR_SET_PDEATHSIG would follow the thread that started the process instead).
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent_pipe, fcntl.F_SETFL, fcntl.fcntl(parent_pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(parent_pipe, 0)
    if poll.poll(0):
        sys.exit(1)


def limit(memory_bytes: int) -> None:
    """Bound what this process and each that it starts may allocate, and have none of them write a core file.

    RLIMIT_DATA counts memory that was allocated, and not, as RLIMIT_AS, the address space that libraries reserve:
    importing torch reserves 3 GiB, allocates 0.7 GiB and touches 0.5 GiB.

    Args:
        memory_bytes: of each process; 0 for no limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if memory_bytes and (most == resource.RLIM_INFINITY or memory_bytes < most):
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def main(connection: int, parent_pipe: int, memory_bytes: int) -> None:
    """Entry point of the process: descriptors of its stream and of its parent's pipe, and its memory limit."""
    end_with_parent(parent_pipe)
    limit(memory_bytes)
    faulthandler.enable()
    # the pool's question for where this process hangs: it writes its stacks and ends
    faulthandler.register(STACKS, all_threads=True, chain=True)
    with socket.socket(fileno=connection) as stream, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(stream)


def _check(results: Any, expected: int) -> None:
    if not isinstance(results, list) or not all(isinstance(result, StepResult) for result in results):
        raise TypeError("step must return a list of StepResult")
    if len(results) != expected:
        raise ValueError(f"step returned {len(results)} results for {expected} conversations")


def _describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{where}"
