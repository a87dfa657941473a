"""Settings and declarations of textarena's environment and dataset."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rl_core.config import Config
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement


class TextArenaConfig(EnvironmentConfig):
    """Play a game of textarena. A player's reward is the game's, when it is over; a move that is not possible is
    answered by the game, which ends if it is repeated."""

    solved_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Minimum reward of a game for one player to count as solved, for `accuracy`."""


class TextArenaSettings(Config):
    """Starts of a game of textarena."""

    id: str
    """Id of the game, such as `GuessTheNumber-v0` or `TicTacToe-v0`."""
    config: dict[str, Any] = {}
    """Keyword arguments of the game, such as `max_turns: 5`; grpo.max_rollout_turns must allow the turns of all players
    together."""
    num_players: int = Field(default=1, ge=1)
    """Number of players, all of them the policy: the agents `player_0`, `player_1` and so on."""
    instructions: str = ""
    """Text before the first observation of every player."""
    demonstrations: list[str] = []
    """Moves for supervised fine-tuning, such as `["[1]", "[2]"]`: rows are then whole games of one player, who makes
    these moves at random."""
    size: int = Field(default=1000, gt=0, le=10**6)
    """Number of rows in the split."""
    seed: int = Field(default=0, ge=0)
    """Seed of the starts."""


_REQUIREMENT = Requirement("rl-envs", extras={"cpu": ("textarena",), "cuda": ("textarena",)}, imports=("textarena",))

PLUGIN = EnvironmentPlugin(
    "textarena", TextArenaConfig, "rl_envs.textarena.environment:TextArenaEnvironment", _REQUIREMENT
)

DATASET = DatasetPlugin("textarena", "rl_envs.textarena.dataset:load", _REQUIREMENT, settings=TextArenaSettings)
