"""Environments that misbehave on request, imported by the processes of the pool under test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_core.environment import Conversation, StepResult


class Obedient:
    """Does what a completion says; the config is a folder for notes, or None."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._step(c, state, len(conversations)) for c, state in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        if self._folder is not None:
            with (Path(self._folder) / "closed").open("a") as notes:
                notes.writelines(f"{state}\n" for state in states)

    def _step(self, conversation: Conversation, state: Any, size: int) -> StepResult:
        verb, _, text = conversation.completion.partition(" ")
        info = {"pid": os.getpid(), "size": size}
        match verb:
            case "raise":
                raise ValueError(text)
            case "hang":
                time.sleep(60)
            case "spin":
                return StepResult(reward=float(3 ** int(text) > 0), info=info)
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(float(text))
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
        return StepResult(reward=float(len(text)), info=info)


class Unbuildable:
    def __init__(self, config: Any) -> None:
        raise OSError("no such verifier")


class EndsWhileBuilt:
    def __init__(self, config: Any) -> None:
        os._exit(9)


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
