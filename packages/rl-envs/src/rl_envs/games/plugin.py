"""The games and their datasets, found by their entry points."""

from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement
from rl_envs.games.config import (
    GuessNumberConfig,
    GuessNumberSettings,
    NimConfig,
    NimSettings,
    ProposedSumsConfig,
    ProposedSumsSettings,
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
    name="guess_number", load="rl_envs.games.dataset:numbers", requirement=_REQUIREMENT, settings=GuessNumberSettings
)
NIM = EnvironmentPlugin(name="nim", config=NimConfig, environment="rl_envs.games.nim:Nim", requirement=_REQUIREMENT)
PILES = DatasetPlugin(name="nim", load="rl_envs.games.dataset:piles", requirement=_REQUIREMENT, settings=NimSettings)
PROPOSED_SUMS = EnvironmentPlugin(
    name="proposed_sums",
    config=ProposedSumsConfig,
    environment="rl_envs.games.proposed_sums:ProposedSums",
    requirement=_REQUIREMENT,
)
SUMS = DatasetPlugin(
    name="proposed_sums",
    load="rl_envs.games.dataset:proposed_sums",
    requirement=_REQUIREMENT,
    settings=ProposedSumsSettings,
)
