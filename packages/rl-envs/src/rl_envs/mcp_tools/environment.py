"""The environment `mcp_tools`, its tools and its check of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rl_core import ServerFailed, ToolEnvironment, final_text
from rl_core.errors import ConfigError
from rl_envs.math.extraction import extract, known_answers
from rl_envs.math.verdict import is_correct
from rl_envs.mcp_server import MCPServer
from rl_envs.mcp_tools.plugin import MCPToolsConfig

PYTHON = "{python}"
"""Stands for the interpreter of this process in commands."""


class MCPToolsEnvironment(ToolEnvironment):
    """Answers calls with the results of a server's tools, and compares the turn without a call with the answer.

    Args:
        config: Its settings.
    """

    def __init__(self, config: MCPToolsConfig) -> None:
        def score(response: str, opened_thoughts: str, log_metric: Callable[[str, float], None], **row: Any) -> float:
            known, kind = known_answers(row, config.answer_format)
            found = extract(final_text(response, opened_thoughts), kind)
            correct = float(found is not None and any(is_correct(found.text, each, kind) for each in known))
            log_metric("accuracy", correct)
            return correct

        command = [sys.executable if word == PYTHON else word for word in config.command]
        server = MCPServer(
            command or None,
            url=config.url,
            only=config.only,
            variables=config.variables,
            headers=config.headers,
            timeout_s=config.timeout_s,
            is_shared=config.is_shared,
        )
        super().__init__([server], reward=score)


def tools_of(config: MCPToolsConfig) -> list[Mapping[str, Any]]:
    """Return the schemas of the server's tools. Raises `ConfigError` if the server does not answer as it should."""
    try:
        return MCPToolsEnvironment(config).tools
    except (ServerFailed, ValueError) as error:
        raise ConfigError(f"env.mcp_tools: {error}") from None


def check_machine(config: MCPToolsConfig) -> str:
    """Return why the server cannot be used; an empty string if it can."""
    try:
        tools_of(config)
    except ConfigError as error:
        return str(error)
    return ""
