"""Settings and declarations of the environment `code` and of the dataset `code_problems`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_core.config import Config, PathText, WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement
from rl_envs.sandbox.config import SandboxConfig

Format = Literal["livecodebench", "apps", "taco", "eurus", "humanevalplus", "mbppplus"]


class CodeConfig(EnvironmentConfig):
    """Run the last block of Python in a response in a sandbox, and score it by the tests of its row."""

    sandbox: SandboxConfig = SandboxConfig()
    """Sandbox of the programs, and its limits."""
    reward: Literal["all", "share"] = "all"
    """Reward of a response: `all` is 1 if every test passes, and the tests end at the first that fails; `share` is the
    fraction that pass."""
    max_tests: int | None = Field(default=None, ge=1)
    """Maximum number of tests of a row to run, taken from the first; all if unset."""
    tolerance: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """Relative or absolute difference that is allowed in a number with a decimal point."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=300.0, gt=0)
    """Timeout in seconds of a call, which runs all tests of a response one after the other."""


class CodeProblemsSettings(Config):
    """Problems with tests, from a JSON Lines file in the form of a dataset of the hub."""

    path: PathText
    """A `.jsonl` or `.jsonl.gz` file with one problem per line."""
    format: Format
    """Dataset whose columns the lines have: `livecodebench` (code_generation_lite), `apps`, `taco`, `eurus` (the code
    rows of Eurus-2-RL-Data), `humanevalplus` or `mbppplus`."""
    max_rows: int | None = Field(default=None, gt=0)
    """Maximum number of rows to read from the file; all if unset."""


PLUGIN = EnvironmentPlugin(
    "code",
    CodeConfig,
    "rl_envs.code.environment:CodeEnvironment",
    Requirement("rl-envs"),
    row_check="rl_envs.code.environment:check_row",
    machine_check="rl_envs.code.environment:check_machine",
)

DATASET = DatasetPlugin(
    "code_problems", "rl_envs.code.dataset:load", Requirement("rl-envs"), settings=CodeProblemsSettings
)
