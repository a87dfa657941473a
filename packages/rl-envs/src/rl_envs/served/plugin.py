"""Settings and declarations of the environments and datasets `openenv` and `nemo_gym`."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from rl_core.config import Config, PathText, WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_core.errors import ConfigError
from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement


def _is_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an address begins with http:// or https:// and has a host, such as http://localhost:8000")
    if parts.username or parts.password:
        raise ValueError("an address has no user and password; give keys as `headers`, from environment variables")
    return url


ServerAddress = Annotated[str, AfterValidator(_is_address)]


class ServedConfig(EnvironmentConfig):
    """Base of the settings of environments behind a server."""

    url: ServerAddress | None = None
    """Address of the server, such as `http://localhost:8000`; it must be set. `${oc.env:NAME}` keeps it out of the
    run's files."""
    headers: dict[str, str] = {}
    """Headers of requests, such as `{Authorization: "Bearer ${oc.env:KEY}"}`."""
    max_batch: Annotated[int, WhenChanged.RESUME] = Field(default=32, ge=1)
    """Maximum number of conversations in one call, which ask the server side by side. Together with `num_workers` it
    limits the requests at a time; `max_concurrent` limits the sessions."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=120.0, gt=0)
    """Timeout in seconds of a turn. A turn whose server does not answer in nine tenths of it fails its rollout. A
    server that cannot be reached, or has no room, is tried again for half of it when a conversation begins."""

    @property
    def address(self) -> str:
        """Return the address of the server.

        Raises:
            ConfigError: If it is not set.
        """
        if self.url is None:
            raise ConfigError("`url` must be set to the address of the server, such as http://localhost:8000")
        return self.url


class OpenEnvConfig(ServedConfig):
    """Play an environment on a server of OpenEnv, with a session for every conversation. The reward of a turn is the
    sum of the rewards of its steps."""

    call_format: Literal["text", "model"] = "text"
    """Form of an action if the environment has no tools of its own: the `text` of a turn, or, in the `model`'s own
    format, a call of the tool `act` with the action's fields as parameters."""
    action: PathText | None = None
    """Function of the text of a turn that returns the action as a dict (`file.py:function`); the policy reads the
    message of a `ValueError` that it raises. If unset, the text is the action's only string, its last number is the
    action's only number, or its last JSON object is the action."""
    message: PathText | None = None
    """Function of an observation as a dict that returns the text for the policy (`file.py:function`). If unset, it is
    the observation's only string or a tool's result, and otherwise the observation as JSON."""


class OpenEnvSettings(Config):
    """Starts of an environment on a server of OpenEnv."""

    url: ServerAddress
    """Address of the server, as in the environment."""
    headers: dict[str, str] = {}
    """Headers of requests, as in the environment."""
    reset: dict[str, Any] = {}
    """Arguments of the environment's reset, beside the seed of the row."""
    instructions: str = ""
    """Text before the first observation that explains the environment."""
    show_start: bool = True
    """Whether the prompt has the observation of the reset, which must then follow from its seed. If false, the first
    turn of the policy is no action: it is answered with the observation."""
    message: PathText | None = None
    """Function of an observation, as in the environment."""
    size: int = Field(default=256, gt=0, le=10**6)
    """Number of rows in the split."""
    seed: int = Field(default=0, ge=0)
    """Seed of the starts."""


class NeMoGymConfig(ServedConfig):
    """Solve the tasks of a resources server of NeMo Gym, with a session for every conversation. The reward is the
    server's."""

    tools: PathText | None = None
    """JSON Lines file with tasks whose tools the policy may call, usually the file of the dataset. A task can only be
    solved with its own tools."""


class NeMoGymTasksSettings(Config):
    """Tasks of NeMo Gym."""

    data_path: PathText
    """JSON Lines file with tasks, as NeMo Gym has them: `responses_create_params` and the fields of the server."""
    url: ServerAddress | None = None
    """Address of a server with `reset` and `step` whose first observation the prompts are to show, which must follow
    from the task. If unset, a server that has one answers the first turn with it."""
    headers: dict[str, str] = {}
    """Headers of requests to the server."""


_REQUIREMENT = Requirement("rl-envs", extras={"cpu": ("http",), "cuda": ("http",)}, imports=("aiohttp",))

OPENENV = EnvironmentPlugin(
    "openenv",
    OpenEnvConfig,
    "rl_envs.served.openenv:OpenEnvEnvironment",
    _REQUIREMENT,
    tools="rl_envs.served.openenv:tools_of",
    machine_check="rl_envs.served.openenv:check_machine",
)

NEMO_GYM = EnvironmentPlugin(
    "nemo_gym",
    NeMoGymConfig,
    "rl_envs.served.nemo_gym:NeMoGymEnvironment",
    _REQUIREMENT,
    tools="rl_envs.served.nemo_gym:tools_of",
    row_check="rl_envs.served.tasks:check_row",
    machine_check="rl_envs.served.nemo_gym:check_machine",
)

STARTS = DatasetPlugin("openenv", "rl_envs.served.openenv:load", _REQUIREMENT, settings=OpenEnvSettings)

TASKS = DatasetPlugin("nemo_gym", "rl_envs.served.nemo_gym:load", _REQUIREMENT, settings=NeMoGymTasksSettings)
