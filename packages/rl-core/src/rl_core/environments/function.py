"""A plain scoring function as an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.environment import Conversation, Environment, StepResult


class FunctionEnvironment:
    """A single-turn environment around a plain scoring function."""

    def __init__(self, score: Callable[..., float | Mapping[str, float]]) -> None:
        self._score = score
        parameters = inspect.signature(score).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        self._takes = frozenset(p.name for p in named)
        self._needs = frozenset(p.name for p in named if p.default is p.empty)

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [StepResult(reward=self._score(**self._arguments(c)), done=True) for c in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _arguments(self, conversation: Conversation) -> dict[str, Any]:
        offered = {**conversation.info, "completion": conversation.completion, "messages": conversation.messages}
        missing = self._needs - set(offered)
        if missing:
            raise ValueError(
                f"reward function {self._score.__name__!r} asks for {sorted(missing)}; "
                f"a conversation offers {sorted(offered)}"
            )
        return {name: value for name, value in offered.items() if self._takes_all or name in self._takes}


def as_environment(score: Callable[..., float | Mapping[str, float]]) -> Environment:
    """Make a scoring function an environment.

    The function takes any of `completion` (text), `messages`, and the prompt's `info` keys (such as `answer`) by name,
    and returns a reward or rewards by name. A parameter with a default may be missing; `**rest` takes all there is.
    """
    return FunctionEnvironment(score)
