"""The environment `textarena`, whose games are played in text by one player or several; imports textarena."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import textarena
from textarena.envs.registration import ENV_REGISTRY

from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult, UnusableAnswer
from rl_envs.textarena.plugin import TextArenaConfig


class TextArenaEnvironment:
    """Hands every turn to the game until it is over; prompts come from this package's dataset.

    The state is the game in progress. What is saved of it is its start and its moves, which are made again in the
    process that restores it. A game that raises fails its own rollout.

    Args:
        config: Its settings.
    """

    def __init__(self, config: TextArenaConfig) -> None:
        self._config = config

    def step(
        self, conversations: Sequence[Conversation], states: Sequence[Any]
    ) -> list[StepResult | EnvironmentFailure]:
        """Make a move in each game."""
        return [self._turn(*each) for each in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        """Do nothing: games hold nothing but memory."""

    def save(self, states: Sequence[Match]) -> list[bytes | None]:
        """Return starts and moves."""
        return [json.dumps({"start": match.start, "moves": match.moves}).encode() for match in states]

    def restore(self, saved: Sequence[bytes]) -> list[Match]:
        """Return games whose moves were made again."""
        return [_replayed(**json.loads(data)) for data in saved]

    def _turn(self, conversation: Conversation, state: Match | None) -> StepResult | EnvironmentFailure:
        if state is None and (missing := sorted(Match.FIELDS - set(conversation.info))):
            raise UnusableAnswer(
                f"the prompt's info lacks {missing}; prompts of textarena must come from the dataset textarena"
            )
        try:
            match = state or _replayed({name: conversation.info[name] for name in Match.FIELDS}, ())
            mover = match.player
            rewards = match.move(conversation.final_text)
            if rewards is None:
                player, said = match.observation()
            elif mover not in rewards:
                raise ValueError(f"{match.start['id']} gave no reward to player {mover}, who ended it")
        except ValueError as error:
            return EnvironmentFailure(str(error), "raised")
        if rewards is None:
            message = {"role": "user", "content": said}
            agent, following = (match.name(mover), match.name(player)) if match.is_shared else ("", "")
            return StepResult(done=False, observation=(message,), state=match, agent=agent, next_agent=following)
        others = {match.name(player): reward for player, reward in rewards.items() if player != mover}
        info = {"moves": float(len(match.moves))}
        if match.is_shared:
            return StepResult(rewards[mover], agent=match.name(mover), agent_rewards=others, info=info)
        return StepResult(
            rewards[mover], info={**info, "accuracy": float(rewards[mover] >= self._config.solved_reward)}
        )


class Match:
    """A game in progress, with random numbers of its own.

    Args:
        id: Id of the game.
        config: Its keyword arguments.
        num_players: Number of players.
        instructions: Text before each player's first observation.
        seed: Seed of the start.

    Raises:
        ValueError: If textarena has no such game, or it does not start.
    """

    FIELDS = frozenset({"id", "config", "num_players", "instructions", "seed"})

    def __init__(self, id: str, config: Mapping[str, Any], num_players: int, instructions: str, seed: int) -> None:
        if id not in ENV_REGISTRY:
            near = difflib.get_close_matches(id, ENV_REGISTRY, n=3)
            raise ValueError(f"textarena has no game {id}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        self.start: dict[str, Any] = {"id": id, "config": dict(config), "num_players": num_players}
        self.start |= {"instructions": instructions, "seed": seed}
        self.moves: list[str] = []
        self.is_shared = num_players > 1
        self._seen: set[int] = set()
        self._random: Any = None
        self._seed = seed
        with self._playing():
            self._game = textarena.make(id, **config)
            # Wrappers repeat all that a player has seen in each observation, which conversations have already.
            while isinstance(self._game, textarena.Wrapper):
                self._game = self._game.env
            self._game.reset(num_players=num_players, seed=seed)

    @staticmethod
    def name(player: int) -> str:
        """Return the name of the agent that a player is."""
        return f"player_{player}"

    @property
    def player(self) -> int:
        """Number of the player who moves next."""
        return int(self._game.state.current_player_id)

    def observation(self) -> tuple[int, str]:
        """Return who moves next, and what that player has not seen yet."""
        with self._playing():
            player, messages = self._game.get_observation()
        said = [] if player in self._seen else [self.start["instructions"]]
        self._seen.add(player)
        for source, text, _ in messages:
            if source == textarena.GAME_ID:
                said.append(text)
            elif source != player:
                said.append(f"[Player {source}] {text}")
        return player, "\n\n".join(part.strip() for part in said if part.strip()) or "It is your turn."

    def move(self, text: str) -> dict[int, float] | None:
        """Make the move of the next player; returns the rewards of all players if the game is over."""
        self.moves.append(text)
        with self._playing():
            is_over, _ = self._game.step(action=text)
            if not is_over:
                return None
            rewards, _ = self._game.close()
            return {int(player): float(reward) for player, reward in rewards.items()}

    @contextmanager
    def _playing(self) -> Iterator[None]:
        """Enter a context where the shared random numbers come from this game."""
        outside = random.getstate(), np.random.get_state()
        if self._random is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
        else:
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
        try:
            yield
        except Exception as error:  # games are other people's code
            reason = " ".join(str(error).split())[:500]
            raise ValueError(f"{self.start['id']} raised {type(error).__name__}: {reason}") from error
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def _replayed(start: Mapping[str, Any], moves: Sequence[str]) -> Match:
    """Return a game at the observation before its next move."""
    match = Match(**start)
    match.observation()
    for move in moves:
        match.move(move)
        match.observation()
    return match
