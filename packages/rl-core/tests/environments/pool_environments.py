"""Environments that misbehave on request, imported by the processes of the pool under test."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult

MEBIBYTE = 2**20
_kept: list[bytearray] = []


class Obedient:
    """Does what a completion says; the config is a folder for notes, or None."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._step(c, state, len(conversations)) for c, state in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        self._note("closed", *states)

    def _note(self, name: str, *notes: Any) -> None:
        if self._folder is not None:
            with (Path(self._folder) / name).open("a") as file:
                file.writelines(f"{note}\n" for note in notes)

    def _step(self, conversation: Conversation, state: Any, size: int) -> StepResult:
        verb, _, text = conversation.completion.partition(" ")
        info = {"pid": os.getpid(), "size": size}
        match verb:
            case "raise":
                raise ValueError(text)
            case "fail":
                # so many times, and then no more
                self._note("failed", conversation.id)
                if len((Path(self._folder or "") / "failed").read_text().splitlines()) <= int(text):
                    raise ValueError("not yet")
            case "hang":
                self._note("hung", conversation.id)
                threading.Event().wait()
            case "spin":
                return StepResult(reward=float(3 ** int(text) > 0), info=info)
            case "exit":
                os._exit(7)
            case "abort":
                os.abort()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "await":
                self._note("waits", conversation.id)
                while not Path(text).exists():
                    time.sleep(0.01)
            case "print":
                print(text)  # noqa: T201 - what the pool logs
            case "shout":
                os.write(2, text.encode())
                os._exit(7)
            case "count":
                count = (state or 0) + 1
                observation = ({"role": "user", "content": str(count)},)
                return StepResult(reward=count, done=False, observation=observation, state=count, info=info)
            case "foreign":
                return StepResult(info={"oops": object()})
            case "nan":
                return StepResult(reward=float("nan"))
            case "end":
                return StepResult(reward=float(state or 0), done=True, info=info)
            case "need":
                bytearray(int(text) * MEBIBYTE)
            case "keep":
                _kept.append(bytearray(int(text) * MEBIBYTE))
            case "variables":
                info["variables"] = dict(os.environ)
            case "limits":
                info["core"] = resource.getrlimit(resource.RLIMIT_CORE)
                info["data"] = resource.getrlimit(resource.RLIMIT_DATA)
        return StepResult(reward=float(len(text)), info=info)


class Forger(Obedient):
    """Writes bytes of its own to the pool: the completion in hexadecimal, with a length before it."""

    def _step(self, conversation: Conversation, state: Any, size: int) -> StepResult:
        verb, _, text = conversation.completion.partition(" ")
        if verb == "forge":
            data = bytes.fromhex(text)
            _stream_to_the_pool().sendall(struct.pack("!Q", len(data)) + data)
            threading.Event().wait()
        if verb == "promise":
            _stream_to_the_pool().sendall(struct.pack("!Q", int(text)))
            threading.Event().wait()
        return super()._step(conversation, state, size)


def _stream_to_the_pool() -> socket.socket:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                return socket.socket(fileno=os.dup(int(descriptor)))
        except FileNotFoundError:
            continue
    raise RuntimeError("no socket")


class Unbuildable:
    def __init__(self, config: Any) -> None:
        raise OSError("no such verifier")


class EndsWhileBuilt:
    def __init__(self, config: Any) -> None:
        os._exit(9)


class HungryWhileBuilt:
    def __init__(self, config: Any) -> None:
        bytearray(2**40)


class Short:
    """Answers one conversation too few."""

    def __init__(self, config: Any) -> None:
        pass

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [StepResult()] * (len(conversations) - 1)

    def close(self, states: Sequence[Any]) -> None:
        pass


def length(completion: str, scale: float = 1.0) -> float:
    return scale * len(completion)


class Tally:
    """Counts the conversations that are under way in all processes, by files; the config is a folder.

    The reward of a turn is their number. A conversation ends with the completion `end`.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        for conversation in conversations:
            (self._folder / conversation.id).touch()
        count = float(len(list(self._folder.iterdir())))
        return [
            StepResult(
                reward=count,
                done=conversation.completion == "end",
                observation=({"role": "user", "content": "?"},),
                state=conversation.id,
            )
            for conversation in conversations
        ]

    def close(self, states: Sequence[Any]) -> None:
        for name in states:
            (self._folder / name).unlink()
