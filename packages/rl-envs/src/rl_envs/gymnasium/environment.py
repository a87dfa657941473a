"""The environment `gymnasium`, whose games are played in text; imports gymnasium."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import gymnasium
from gymnasium.spaces import Discrete, Text

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.grader import TurnEnvironment
from rl_envs.gymnasium.plugin import GymnasiumConfig, Shown


class GymnasiumEnvironment(TurnEnvironment[GymnasiumConfig]):
    """Takes an action in every turn until the game is over; prompts come from this package's dataset.

    The state is the game under way. What is saved of it is its start and its actions, which are taken again in the
    process that restores it: a game whose randomness follows from the seed of its `reset`, as gymnasium asks for, is
    then where it was.
    """

    def close(self, states: Sequence[Any]) -> None:
        for game in states:
            if game is not None:
                game.environment.close()

    def save(self, states: Sequence[Game]) -> list[bytes | None]:
        """Return starts and actions."""
        return [game.save() for game in states]

    def restore(self, saved: Sequence[bytes]) -> list[Game]:
        """Return games whose actions were taken again."""
        return [Game.restore(data) for data in saved]

    def turn(self, conversation: Conversation, state: Game | None) -> StepResult:
        game = state or _start(conversation)
        action = game.action(conversation.final_text)
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


_HIGHLIGHTED = re.compile(r"\x1b\[(?:\d+;)*(?:4[0-7]|10[0-7])(?:;\d+)*m(.*?)\x1b\[0?m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass
class Game:
    """A game under way.

    Args:
        environment: Reset to the start.
        actions: Words for the actions of a `Discrete` space, in order; its numbers if empty.
        shown: What `text` is.
        text: Text of the state as the policy sees it.
        total: Rewards of the game's own so far.
    """

    environment: gymnasium.Env[Any, Any]
    actions: Sequence[str]
    shown: Shown
    text: str = ""
    total: float = field(default=0.0, init=False)
    _start: Mapping[str, Any] = field(default_factory=dict, init=False)
    _taken: list[Any] = field(default_factory=list, init=False)

    @classmethod
    def start(
        cls, id: str, config: Mapping[str, Any], seed: int, *, actions: Sequence[str], show: Shown | None
    ) -> Self:
        """Return the game at the start that follows from a seed.

        Args:
            id: ID of the environment in gymnasium, such as `FrozenLake-v1`.
            config: Keyword arguments of `gymnasium.make`.
            seed: Seed of the environment's `reset`.
            actions: Words for the actions of a `Discrete` space, in order; its numbers if empty.
            show: The rendering if the game has one and this is None.

        Raises:
            ValueError: If gymnasium has no such environment, or it cannot be played in text.
        """
        try:
            shown = show or _shown_by(gymnasium.make(id, disable_env_checker=True, **config))
            mode: dict[str, Any] = {"render_mode": "ansi"} if shown == "rendering" else {}
            environment = gymnasium.make(id, disable_env_checker=True, **mode, **config)
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            raise ValueError(f"gymnasium cannot make {id}: {_COLOUR.sub('', str(error))}") from None
        space = environment.action_space
        if not isinstance(space, Discrete | Text):
            raise ValueError(f"{id} has actions of {space}; only Discrete and Text ones can be written")
        if actions and not (isinstance(space, Discrete) and space.n == len(actions)):
            raise ValueError(f"{id} has the actions {space}, and `actions` has {len(actions)} words for them")
        observation, _ = environment.reset(seed=seed)
        game = cls(environment, actions or _numbers(space), shown)
        game.text = game._text(observation)
        game._start = {"id": id, "config": config, "seed": seed, "actions": actions, "show": show}
        return game

    @classmethod
    def restore(cls, saved: bytes) -> Self:
        """Return the game of `save`, whose actions are taken again."""
        state = json.loads(saved)
        game = cls.start(**state["start"])
        for action in state["actions"]:
            game.act(action)
        return game

    def save(self) -> bytes:
        """Return the start and the actions so far as bytes."""
        state = {"start": self._start, "actions": self._taken}
        return json.dumps(state).encode()

    @property
    def rules(self) -> str:
        """A sentence on what a turn has to be."""
        if not self.actions:
            return "Each turn, write what you do."
        return f"Each turn, write one of these actions: {', '.join(self.actions)}."

    def action(self, completion: str) -> Any:
        """Return the action of a turn: the last one in it, or all of it if actions are strings; None if it is none."""
        if not self.actions:
            text = completion.strip()
            return text if self.environment.action_space.contains(text) else None
        either = "|".join(re.escape(word) for word in sorted(self.actions, key=len, reverse=True))
        named = re.findall(rf"(?<!\w)({either})(?!\w)", completion, re.IGNORECASE)
        if not named:
            return None
        words = [word.lower() for word in self.actions]
        return int(getattr(self.environment.action_space, "start", 0)) + words.index(named[-1].lower())

    def act(self, action: Any) -> tuple[float, bool]:
        """Take an action; returns its reward and whether the game is over."""
        self._taken.append(action)
        observation, reward, terminated, truncated, _ = self.environment.step(action)
        self.total += float(reward)
        self.text = self._text(observation)
        return float(reward), terminated or truncated

    def _text(self, observation: Any) -> str:
        shown = self.environment.render() if self.shown == "rendering" else observation
        return _COLOUR.sub("", _HIGHLIGHTED.sub(r"[\1]", str(shown))).strip()


def _shown_by(environment: gymnasium.Env[Any, Any]) -> Shown:
    environment.close()
    return "rendering" if "ansi" in environment.metadata.get("render_modes", ()) else "observation"


def _numbers(space: gymnasium.Space[Any]) -> list[str]:
    if not isinstance(space, Discrete):
        return []
    return [str(int(space.start) + number) for number in range(int(space.n))]
