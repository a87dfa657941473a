"""Settings and declaration of the environment `code`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_core.config import WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.sandbox.config import SandboxConfig


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


PLUGIN = EnvironmentPlugin(
    "code",
    CodeConfig,
    "rl_envs.code.environment:CodeEnvironment",
    Requirement("rl-envs"),
    row_check="rl_envs.code.environment:check_row",
    machine_check="rl_envs.code.environment:check_machine",
)
