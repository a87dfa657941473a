"""The `gymnasium` environment; imports gymnasium."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.gymnasium.config import GymnasiumConfig
from rl_envs.gymnasium.game import Game


class GymnasiumEnvironment:
    """Takes an action in every turn until the game is over; prompts come from this package's dataset.

    The state is the game under way. What is saved of it is its start and its actions, which are taken again in the
    process that restores it: a game whose randomness follows from the seed of its `reset`, as gymnasium asks for, is
    then where it was.
    """

    def __init__(self, config: GymnasiumConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._play(turn, state or _start(turn)) for turn, state in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        for game in states:
            if game is not None:
                game.environment.close()

    def save(self, states: Sequence[Game]) -> list[bytes | None]:
        """Starts and actions."""
        return [game.save() for game in states]

    def restore(self, saved: Sequence[bytes]) -> list[Game]:
        """Games whose actions were taken again."""
        return [Game.restore(data) for data in saved]

    def _play(self, turn: Conversation, game: Game) -> StepResult:
        action = game.action(turn.final_text)
        if action is None:
            said = f"That is not a possible action. {game.rules}\n\n{game.text}"
            return _goes_on(game, said, self._config.invalid_reward)
        reward, is_over = game.act(action)
        if not is_over:
            return _goes_on(game, game.text, reward)
        game.environment.close()
        return StepResult(reward=reward, info={"accuracy": float(game.total >= self._config.solved_return)})


def _goes_on(game: Game, said: str, reward: float) -> StepResult:
    message = {"role": "user", "content": said}
    return StepResult(reward=reward, done=False, observation=(message,), state=game, info={"accuracy": 0.0})


def _start(turn: Conversation) -> Game:
    missing = sorted({"id", "config", "seed", "actions", "show"} - set(turn.info))
    if missing:
        raise UnusableAnswer(
            f"the prompt's info lacks {missing}; prompts of gymnasium must come from the dataset gymnasium"
        )
    info = turn.info
    return Game.start(info["id"], info["config"], info["seed"], actions=info["actions"], show=info["show"])
