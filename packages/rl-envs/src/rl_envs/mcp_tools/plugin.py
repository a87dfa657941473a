"""Settings and declaration of the environment `mcp_tools`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl_core.config import WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.math.plugin import AnswerFormat


class MCPToolsConfig(EnvironmentConfig):
    """Let a policy call the tools of a server that speaks the Model Context Protocol, in the format of its model.

    A turn without a call is the final answer, which is compared with the row's `answer` as the environment `math` does.
    """

    command: list[str] = []
    """Command of a server that reads and writes messages on its standard input and output, such as
    `[npx, -y, "@modelcontextprotocol/server-memory"]`. `{folder}` in it is an empty folder of the conversation, and
    `{python}` the interpreter of the environment."""
    url: str | None = None
    """URL of a server over HTTP, instead of a command. `${oc.env:NAME}` keeps it out of the run's files."""
    headers: dict[str, str] = {}
    """Headers of requests to `url`, such as `{Authorization: "Bearer ${oc.env:KEY}"}`."""
    variables: dict[str, str] = {}
    """Environment variables of the command, such as `{MEMORY_FILE_PATH: "{folder}/memory.json"}`."""
    only: list[str] | None = None
    """Names of the tools to offer; all of them if unset."""
    is_shared: bool = False
    """True if the conversations of a process share one session, for a server that keeps nothing between calls."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Timeout in seconds of a call, and of a start of the server."""
    answer_format: AnswerFormat = "auto"
    """Place of the final answer, as in the environment `math`."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=120.0, gt=0)
    """Timeout in seconds of a call of the environment."""


PLUGIN = EnvironmentPlugin(
    "mcp_tools",
    MCPToolsConfig,
    "rl_envs.mcp_tools.environment:MCPToolsEnvironment",
    Requirement("rl-envs", extras={"cpu": ("mcp",), "cuda": ("mcp",)}, imports=("mcp",)),
    tools="rl_envs.mcp_tools.environment:tools_of",
    machine_check="rl_envs.mcp_tools.environment:check_machine",
)
