"""Environments: what answers and rewards a policy's turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_core.rollout import Message


@dataclass(frozen=True)
class Conversation:
    """What an environment sees of a rollout.

    Args:
        id: stable over the turns of one rollout; a conversation sticks to its environment process.
        messages: prompt, completions and observations so far; the last is the policy's newest turn.
        info: of the prompt (the answer, a seed).
        completion: text of the newest turn.
        truncated: whether the newest turn ran into the token limit.
        turn: number of the policy's turns before the newest.
    """

    id: str
    messages: tuple[Message, ...]
    info: Mapping[str, Any]
    completion: str
    truncated: bool = False
    turn: int = 0


@dataclass(frozen=True)
class StepResult:
    """What an environment answers to one turn.

    Args:
        reward: a float, or rewards by name, of which `reward` is trained on (their sum where it is absent).
        done: whether the rollout ends here.
        observation: messages to append before the next turn; needed unless done.
        state: handed back at the next turn.
        stop_strings: for the next turn, None to keep the configured ones.
        info: reported with the rollout; numbers are averaged into metrics.
    """

    reward: float | Mapping[str, float] = 0.0
    done: bool = True
    observation: tuple[Message, ...] = ()
    state: Any = None
    stop_strings: tuple[str, ...] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def rewards(self) -> dict[str, float]:
        """Rewards by name, `reward` always among them."""
        if not isinstance(self.reward, Mapping):
            return {"reward": float(self.reward)}
        named = {name: float(value) for name, value in self.reward.items()}
        return named if "reward" in named else {**named, "reward": sum(named.values())}


@dataclass(frozen=True)
class EnvironmentFailure:
    """What a conversation gets instead of a `StepResult` where its environment raised, crashed or passed its deadline.

    Args:
        reason: in one line, naming the environment; the rollout fails with it.
    """

    reason: str


class Environment(Protocol):
    """Scores and answers conversations in batches; runs in a process of its own."""

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        """One result per conversation, in order; `states` are None on the first turn."""
        ...

    def close(self, states: Sequence[Any]) -> None:
        """Free what the states of unfinished conversations hold."""
        ...
