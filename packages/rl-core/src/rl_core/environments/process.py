"""The far side of an `EnvironmentPool`: a process with an environment and the states of its conversations."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from rl_core.environment import Conversation, Environment, EnvironmentFailure, StepResult
from rl_core.environments.function import as_environment
from rl_core.errors import WorkerError
from rl_core.registry import resolve

LENGTH = struct.Struct("!Q")
"""Before every message: the number of bytes of its pickle."""


@dataclass(frozen=True)
class Build:
    """Build the environment: answered with None, or a `WorkerError` after which the process ends."""

    environment: str
    config: bytes


@dataclass(frozen=True)
class Step:
    """Step pickled conversations in one call: answered with a list of `Answer`."""

    conversations: Sequence[bytes]


@dataclass(frozen=True)
class Abandon:
    """Close the states of these conversations: answered with None, or a text where closing raised."""

    ids: Sequence[str]


@dataclass(frozen=True)
class Close:
    """Close every state and end: answered by the end of the stream."""


@dataclass(frozen=True)
class Answer:
    """One conversation's outcome.

    Args:
        result: its state is None, the process keeps it.
        has_state: whether the process keeps one for the next turn.
        retry: a failure of the whole batched call, which this conversation may not be to blame for.
    """

    result: StepResult | EnvironmentFailure
    has_state: bool = False
    retry: bool = False


class EnvironmentProcess:
    """An environment and the states of its conversations.

    Args:
        environment: `"package.module:Class"`, for messages.
        built: the environment.
    """

    def __init__(self, environment: str, built: Environment) -> None:
        self._name = environment
        self._environment = built
        self._states: dict[str, Any] = {}

    def step(self, payloads: Sequence[bytes]) -> list[Answer]:
        """One batched call of the environment; an exception in it is everybody's answer."""
        conversations: list[Conversation] = []
        states: list[Any] = [None] * len(payloads)
        try:
            conversations = [pickle.loads(payload) for payload in payloads]
            states = [self._states.get(conversation.id) for conversation in conversations]
            results = self._environment.step(conversations, states)
            _check(results, len(conversations))
        except Exception as error:  # noqa: BLE001  # an environment's failure becomes a report
            shared = f", in a call that {len(payloads)} conversations shared" if len(payloads) > 1 else ""
            failure = EnvironmentFailure(f"environment {self._name} raised {_describe(error)}{shared}")
            self._forget(conversations)
            return [Answer(failure, retry=state is None) for state in states]
        return [self._settle(conversation, result) for conversation, result in zip(conversations, results, strict=True)]

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

    def _forget(self, conversations: Sequence[Conversation]) -> None:
        self.abandon([conversation.id for conversation in conversations])

    def _settle(self, conversation: Conversation, result: StepResult) -> Answer:
        state = result.state
        if state is not None:
            self._states[conversation.id] = state
        else:
            self._states.pop(conversation.id, None)
        try:
            answer = _plain_result(result)
        except (TypeError, ValueError, RecursionError) as error:
            self._forget([conversation])
            return Answer(EnvironmentFailure(f"environment {self._name} returned what cannot be used: {error}"))
        if result.done and state is not None:
            self._forget([conversation])
        return Answer(answer, has_state=state is not None and not result.done)


def serve(connection: socket.socket) -> None:
    """Build the environment, then answer messages until the other side closes the stream."""
    incoming = connection.makefile("rb")
    build = receive(incoming)
    if build is None:
        return
    try:
        process = EnvironmentProcess(build.environment, _built(resolve(build.environment), pickle.loads(build.config)))
    except Exception as error:  # noqa: BLE001  # a worker's failure becomes a report
        send(connection, WorkerError(type(error).__qualname__, str(error), traceback.format_exc()))
        return
    send(connection, None)
    while (message := receive(incoming)) is not None:
        match message:
            case Step(conversations):
                send(connection, process.step(conversations))
            case Abandon(ids):
                send(connection, process.abandon(ids))
            case Close():
                break
    process.close()


def _built(target: Any, config: Any) -> Environment:
    if isinstance(target, type):
        environment: Environment = target(config)
        return environment
    return as_environment(target)


def send(connection: socket.socket, message: Any) -> None:
    """Write one message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(incoming: BinaryIO) -> Any:
    """Read one message; None where the other side closed the stream."""
    header = incoming.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return pickle.loads(incoming.read(*LENGTH.unpack(header)))


def die_with(lifeline: int) -> None:
    """End this process as soon as nobody holds the other end of a pipe.

    The kernel ends it by SIGIO, so neither a hanging environment nor one that holds the interpreter's lock outlives its
    parent (PR_SET_PDEATHSIG would follow the thread that started the process instead).
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):
        sys.exit(1)


def main(connection: int, lifeline: int) -> None:
    """Entry point of the process: descriptors of its stream and of its parent's lifeline."""
    die_with(lifeline)
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


def _plain_result(result: StepResult) -> StepResult:
    return replace(
        result,
        reward=_plain_reward(result.reward),
        done=bool(result.done),
        observation=tuple(_plain(message, "observation") for message in result.observation),
        state=None,
        stop_strings=_plain(result.stop_strings, "stop_strings"),
        info=_plain(result.info, "info") if result.info else {},
    )


def _plain_reward(reward: float | Mapping[str, float]) -> float | dict[str, float]:
    named = reward if isinstance(reward, Mapping) else {"reward": reward}
    plain = {str(name): float(value) for name, value in named.items()}
    if not all(math.isfinite(value) for value in plain.values()):
        raise ValueError(f"reward must be finite, got {plain}")
    return plain if isinstance(reward, Mapping) else plain["reward"]


def _plain(value: Any, where: str) -> Any:
    """The value in types that any process can read; a foreign subclass of a plain type becomes the plain type."""
    if value is None or type(value) in (str, int, float, bool, bytes):
        return value
    match value:
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case np.generic():
            return value.item()
        case np.ndarray() if value.dtype != object:
            return np.array(value)
        case Mapping():
            return {_plain(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        case list():
            return [_plain(item, where) for item in value]
        case tuple():
            return tuple(_plain(item, where) for item in value)
        case _:
            raise TypeError(f"{where} holds a {type(value).__qualname__}, which cannot leave the environment's process")
