"""Settings and declarations of the games and of their datasets."""

from __future__ import annotations

from pydantic import Field

from rl_core.config import Config
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement


class SlidingPuzzleConfig(EnvironmentConfig):
    """Slide tiles into the gap until they are in order, one move per turn."""

    max_moves: int = Field(default=20, ge=1)
    """Maximum number of moves in a game; grpo.max_rollout_turns must allow as many."""
    solved_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Reward for a solved puzzle, at the move that solves it."""
    invalid_reward: float = Field(default=0.0, le=0, allow_inf_nan=False)
    """Reward for a turn without a valid move, which counts as a move and leaves the tiles unchanged."""


class SlidingPuzzleSettings(Config):
    """Generated puzzles, each some random moves away from the solved one."""

    rows: int = Field(default=2, ge=2, le=5)
    """Number of rows of the board."""
    columns: int = Field(default=2, ge=2, le=5)
    """Number of columns of the board."""
    min_moves: int = Field(default=1, ge=1)
    """Minimum number of random moves from the solved board; none undoes the one before it."""
    max_moves: int = Field(default=4, ge=1, le=1000)
    """Maximum number of random moves from the solved board."""
    size: int = Field(default=1000, gt=0, le=10**6)
    """Number of rows in the split. Small boards have few starts, which then repeat."""
    seed: int = Field(default=0, ge=0)
    """Seed of the boards."""
    instructions: bool = True
    """Explain the game in each prompt. Otherwise a prompt is only the board, which is enough for a policy that has
    learned the game from `demonstrations`."""
    demonstrations: bool = False
    """Play random valid moves in each row, until it is solved or `max_moves` are made. Supervised fine-tuning on these
    rows teaches the rules and leaves choosing good moves to reinforcement learning."""


class GuessNumberConfig(EnvironmentConfig):
    """Guess a number; each wrong guess is answered with higher or lower."""

    max_guesses: int = Field(default=8, ge=1)
    """Maximum number of guesses in a game; grpo.max_rollout_turns must allow as many."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor of the reward for each guess before the right one."""


class GuessNumberSettings(Config):
    """Generated numbers to guess."""

    low: int = 1
    """Smallest number."""
    high: int = 100
    """Largest number."""
    size: int = Field(default=1000, gt=0, le=10**6)
    """Number of rows in the split."""
    seed: int = Field(default=0, ge=0)
    """Seed of the numbers."""


class NimConfig(EnvironmentConfig):
    """Nim for two players, each an agent: take stones from a pile; who takes the last one wins."""

    won_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Reward of the player who takes the last stone."""
    lost_reward: float = Field(default=-1.0, allow_inf_nan=False)
    """Reward of the other player."""
    invalid_reward: float = Field(default=-2.0, le=0, allow_inf_nan=False)
    """Reward of a player whose turn is not a possible move, which ends the game; the other player gets nothing. It is
    less than `lost_reward`, so that a player who is about to lose still makes a move."""


class NimSettings(Config):
    """Generated piles of stones."""

    min_pile: int = Field(default=2, ge=1)
    """Smallest number of stones."""
    max_pile: int = Field(default=12, ge=1, le=10**5)
    """Largest number of stones."""
    max_take: int = Field(default=3, ge=1)
    """Maximum number of stones that a player takes in a turn; the minimum is 1."""
    size: int = Field(default=1000, gt=0, le=10**6)
    """Number of rows in the split."""
    seed: int = Field(default=0, ge=0)
    """Seed of the piles."""
    instructions: bool = True
    """Explain the game to each player before the first turn. Otherwise players see only the number of stones, which is
    enough for a policy that has learned the game from `demonstrations`."""
    demonstrations: bool = False
    """Add the turns of one player to each row, random possible moves against random possible moves. Supervised
    fine-tuning on these rows teaches the rules and leaves choosing good moves to self-play."""


class ProposedSumsConfig(EnvironmentConfig):
    """Sums that one agent, the proposer, poses and another, the solver, solves."""

    invalid_reward: float = Field(default=-1.0, le=0, allow_inf_nan=False)
    """Reward of a proposer whose turn is not a sum of two numbers that the row allows."""


class ProposedSumsSettings(Config):
    """Requests for sums in training, given sums in validation."""

    max_operand: int = Field(default=49, ge=2, le=9999)
    """Largest operand of a sum."""
    size: int = Field(default=1000, gt=0, le=10**6)
    """Number of rows in the split."""
    seed: int = Field(default=0, ge=0)
    """Seed of the sums."""
    demonstrations: bool = False
    """Answer the rows: every second one proposes a random sum, and the others solve one. Supervised fine-tuning on
    these rows teaches both roles."""


_OWN = Requirement("rl-envs")

SLIDING_PUZZLE = EnvironmentPlugin(
    "sliding_puzzle", SlidingPuzzleConfig, "rl_envs.games.sliding_puzzle:SlidingPuzzle", _OWN
)
SLIDING_PUZZLES = DatasetPlugin(
    "sliding_puzzle", "rl_envs.games.dataset:sliding_puzzles", _OWN, settings=SlidingPuzzleSettings
)
GUESS_NUMBER = EnvironmentPlugin("guess_number", GuessNumberConfig, "rl_envs.games.number_games:GuessNumber", _OWN)
NUMBERS = DatasetPlugin("guess_number", "rl_envs.games.dataset:numbers", _OWN, settings=GuessNumberSettings)
NIM = EnvironmentPlugin("nim", NimConfig, "rl_envs.games.number_games:Nim", _OWN)
PILES = DatasetPlugin("nim", "rl_envs.games.dataset:piles", _OWN, settings=NimSettings)
PROPOSED_SUMS = EnvironmentPlugin("proposed_sums", ProposedSumsConfig, "rl_envs.games.number_games:ProposedSums", _OWN)
SUMS = DatasetPlugin("proposed_sums", "rl_envs.games.dataset:proposed_sums", _OWN, settings=ProposedSumsSettings)
