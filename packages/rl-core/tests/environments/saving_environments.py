"""Environments that save their states, imported by the processes of the pool under test."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_core.environments.tool_environment import ToolEnvironment
from rl_core.rollouts.environment import Conversation, StepResult


class Dice:
    """Rolls a die every turn, from its seed; the reward is the roll. Notes every step in a folder.

    `end` ends the game, `die` kills the process the first time, `die always` every time.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._roll(c, state or random.Random(c.seed)) for c, state in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def save(self, states: Sequence[random.Random]) -> list[bytes | None]:
        return [json.dumps(state.getstate()).encode() for state in states]

    def restore(self, saved: Sequence[bytes]) -> list[random.Random]:
        games = []
        for data in saved:
            version, words, gauss = json.loads(data)
            games.append(random.Random())
            games[-1].setstate((version, tuple(words), gauss))
        return games

    def _roll(self, conversation: Conversation, game: random.Random) -> StepResult:
        with (self._folder / "steps").open("a") as notes:
            notes.write(f"{conversation.id} {conversation.turn}\n")
        verb, _, how = conversation.completion.partition(" ")
        if verb == "die" and (how == "always" or not (self._folder / "died").exists()):
            (self._folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "raise":
            raise ValueError("no")
        rolled = game.randrange(10**6)
        observation = ({"role": "user", "content": str(rolled)},)
        return StepResult(float(rolled), verb == "end", observation, game, info={"pid": os.getpid()})


class Forgetful(Dice):
    """Cannot save."""

    save = restore = None  # type: ignore[assignment]


class Huge(Dice):
    """Saves too much."""

    def save(self, states: Sequence[random.Random]) -> list[bytes | None]:
        return [bytes(5 * 2**20)] * len(states)


class Half:
    """Saves and cannot restore."""

    def step(self, conversations: Any, states: Any) -> list[StepResult]:
        return []

    def close(self, states: Any) -> None:
        pass

    def save(self, states: Any) -> list[bytes]:
        return []


class Remembering:
    """Plays one conversation and remembers what was said."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def step(self, response: str, conversation_seed: int) -> Any:
        self.said.append((response, conversation_seed))
        return float(len(self.said)) if response == "end" else repr(self.said)

    def save(self) -> Any:
        return self.said

    def restore(self, saved: Any) -> None:
        self.said = saved


def note(text: str, state: dict[str, Any]) -> str:
    """Note a text.

    Args:
        text: Any text.
    """
    state.setdefault("notes", []).append(text)
    return " ".join(state["notes"])


def count(state: dict[str, Any]) -> float:
    return float(len(state["notes"]))


notebook = ToolEnvironment(tools=[note], reward=count)
