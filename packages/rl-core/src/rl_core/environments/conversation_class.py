"""A plain class that plays one conversation, as an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_core.environments.gather_runner import GatherRunner
from rl_core.environments.messages import read_value, write_value
from rl_core.environments.reward_function import Arguments
from rl_core.environments.reward_log import RewardLog, merged_info
from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer


def plays_one(kind: Any) -> bool:
    """Return whether a class has a method `step` that takes one conversation, rather than `conversations` and
    `states`."""
    step = inspect.getattr_static(kind, "step", None)
    if not callable(step):
        return False
    return "conversations" not in inspect.signature(step).parameters


@dataclass(frozen=True)
class _Player:
    """State of a conversation: the object that plays it."""

    step: Callable[..., Any]
    arguments: Arguments
    close: Callable[[], Any] | None
    save: Callable[[], Any] | None
    restore: Callable[[Any], Any] | None


class ConversationEnvironment:
    """An environment that makes an object for every conversation, which keeps the state of that one.

    Its method `step` is given what its parameters name, as a reward function is: `response`, `prompt`, `messages`,
    `truncated`, `tool_calls`, `trainer_state`, `conversation_seed`, `log_metric`, `log_extra`, and the fields of the
    prompt's row. It may be
    `async`, and returns

    - a text: the next message to the policy, with reward 0;
    - a text and a reward: the same with that reward;
    - a number, or numbers by name: the reward, with which the rollout ends;
    - a `StepResult`, for anything else.

    A method `close` without parameters, if there is one, is called when the conversation is over.

    With methods `save` and `restore`, conversations outlive the process. `save` takes nothing and returns what the
    object has to remember: numbers, strings, bytes, arrays, and lists, tuples and dicts of these; None if it cannot be
    saved now. `restore` is called with that on a new object.

    Args:
        make: Makes the object of a conversation.
        name: Name of the class, for messages.
        saves: True if the objects have `save` and `restore`.
    """

    def __init__(self, make: Callable[[], Any], name: str, *, saves: bool = False) -> None:
        self._make = make
        self._name = name
        self._gather = GatherRunner()
        if saves:
            self.save, self.restore = self._save, self._restore

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        """Step the objects; those of `async` classes together."""
        players: list[_Player] = [state or self._begin() for state in states]
        logs = [RewardLog(f"{self._name}.step", 1) for _ in conversations]
        returned = [
            player.step(**player.arguments.of(conversation), **player.arguments.logs_of(log))
            for player, conversation, log in zip(players, conversations, logs, strict=True)
        ]
        if any(inspect.isawaitable(each) for each in returned):
            returned = self._gather(lambda: returned)
        return [
            self._result(each, player, *log.infos()) for each, player, log in zip(returned, players, logs, strict=True)
        ]

    def close(self, states: Sequence[Any]) -> None:
        """Close the objects of conversations that are over."""
        closed = [state.close() for state in states if state is not None and state.close is not None]
        if any(inspect.isawaitable(each) for each in closed):
            self._gather(lambda: closed)

    def _save(self, states: Sequence[_Player]) -> list[bytes | None]:
        values = [player.save() for player in states if player.save is not None]
        return [None if value is None else self._written(value) for value in values]

    def _written(self, value: Any) -> bytes:
        try:
            return write_value(value)
        except (TypeError, ValueError) as error:
            raise UnusableAnswer(f"{self._name}.save returned {value!r:.80}: {error}") from None

    def _restore(self, saved: Sequence[bytes]) -> list[_Player]:
        players = [self._begin() for _ in saved]
        for player, data in zip(players, saved, strict=True):
            assert player.restore is not None, "the class has `restore`"
            player.restore(read_value(data))
        return players

    def _begin(self) -> _Player:
        player = self._make()
        methods = {
            name: getattr(player, name) if callable(inspect.getattr_static(player, name, None)) else None
            for name in ("close", "save", "restore")
        }
        return _Player(player.step, Arguments(player.step, f"{self._name}.step"), **methods)

    def _result(self, returned: Any, player: _Player, info: Mapping[str, Any]) -> StepResult:
        match returned:
            case StepResult():
                found = returned
            case str():
                found = _goes_on(returned, 0.0)
            case (str(text), reward):
                found = _goes_on(text, reward)
            case None | list() | tuple():
                raise UnusableAnswer(
                    f"{self._name}.step returned {returned!r:.80}; return a string to continue, a number to end with "
                    "that reward, a string and a number, or a StepResult"
                )
            case _:
                found = StepResult(reward=returned)
        # the object is kept even if the conversation is over, so that it is closed
        return replace(found, state=player, info=merged_info(info, found.info))


def _goes_on(text: str, reward: float | Mapping[str, float]) -> StepResult:
    return StepResult(reward=reward, done=False, observation=({"role": "user", "content": text},))
