"""Settings of the environment `code` and of the dataset `code_problems`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_core.config import Config, PathText, WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_envs.sandbox.config import SandboxConfig

Format = Literal["livecodebench", "apps", "taco", "eurus", "humanevalplus", "mbppplus"]


class CodeConfig(EnvironmentConfig):
    """Run the last block of Python in a response in a sandbox, and score it by the tests of its row."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where and within which limits programs run."""
    reward: Literal["all", "share"] = "all"
    """`all` is 1 if every test passes, and the tests end at the first that fails; `share` is the share that pass."""
    max_tests: int | None = Field(default=None, ge=1)
    """Most tests of a row that are run, the first ones; all if unset."""
    tolerance: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """Relative or absolute difference that a number with a decimal point may have."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=300.0, gt=0)
    """Most seconds of a call, which runs all tests of a response one after the other."""


class CodeProblemsSettings(Config):
    """Problems with tests, from a JSON Lines file in the form of a dataset of the hub."""

    path: PathText
    """A `.jsonl` or `.jsonl.gz` file with one problem per line."""
    format: Format
    """Dataset whose columns the lines have: `livecodebench` (code_generation_lite), `apps`, `taco`, `eurus`
    (Eurus-2-RL-Data, its rows of code), `humanevalplus` or `mbppplus`."""
    max_rows: int | None = Field(default=None, gt=0)
    """Most rows of the file that are read; all if unset."""
