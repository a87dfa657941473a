"""The dataset `calculations`, found by its entry point."""

from rl_core.plugins import DatasetPlugin, Requirement
from rl_envs.calculations.config import CalculationsSettings

DATASET = DatasetPlugin(
    name="calculations",
    load="rl_envs.calculations.dataset:load",
    requirement=Requirement("rl-envs"),
    settings=CalculationsSettings,
)
