"""The games and their datasets, found by their entry points."""

from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement
from rl_envs.games.config import (
    GuessNumberConfig,
    GuessNumberSettings,
    SlidingPuzzleConfig,
    SlidingPuzzleSettings,
)

_REQUIREMENT = Requirement("rl-envs")

SLIDING_PUZZLE = EnvironmentPlugin(
    name="sliding_puzzle",
    config=SlidingPuzzleConfig,
    environment="rl_envs.games.sliding_puzzle:SlidingPuzzle",
    requirement=_REQUIREMENT,
)
SLIDING_PUZZLES = DatasetPlugin(
    name="sliding_puzzle",
    load="rl_envs.games.dataset:sliding_puzzles",
    requirement=_REQUIREMENT,
    settings=SlidingPuzzleSettings,
)
GUESS_NUMBER = EnvironmentPlugin(
    name="guess_number",
    config=GuessNumberConfig,
    environment="rl_envs.games.guess_number:GuessNumber",
    requirement=_REQUIREMENT,
)
NUMBERS = DatasetPlugin(
    name="guess_number",
    load="rl_envs.games.dataset:numbers",
    requirement=_REQUIREMENT,
    settings=GuessNumberSettings,
)
