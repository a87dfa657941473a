"""An agent that the environment of its prompt runs, where the policy is served over HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

AGENT_FAILURE = "agent_failure"
"""Name in `StepResult.info` of why an agent failed, a string; its rollout then has no reward."""
AGENT_OUTPUT = "agent_output"
"""Name in `StepResult.info` of what an agent wrote to its stdout and stderr, a string."""


@dataclass(frozen=True)
class AgentRun:
    """An agent that an environment runs instead of answering turns (`EnvironmentPlugin.runs_agents`).

    The environment starts it at the first turn and returns a state. It is asked again, with the same conversation,
    until its answer is done, which has the reward; if it is closed before, the agent ends.

    Args:
        command: Command of the agent.
        files: The agent's own files, by name; an argument of the command that is one of these names stands for the
            file.
        variables: Environment variables that the user sets.
        root_url: URL of the rollout, as Anthropic's clients take it.
        api_key: Key of the rollout.
        network: Identifies the network in which `root_url` is a loopback address (`this_network`).
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes]
    variables: Mapping[str, str]
    root_url: str
    api_key: str = field(repr=False)
    network: str = ""

    @property
    def host(self) -> str:
        """Name or IP address of the server."""
        return urlsplit(self.root_url).hostname or ""

    @property
    def port(self) -> int:
        """TCP port of the server."""
        return urlsplit(self.root_url).port or 80

    def variables_at(self, host: str) -> dict[str, str]:
        """The environment variables of the agent, for a server that it reaches at another host and the same port."""
        root_url = f"http://{host}:{self.port}{urlsplit(self.root_url).path}"
        return {**service_variables(root_url, self.api_key), **self.variables}


def service_variables(root_url: str, api_key: str) -> dict[str, str]:
    """The environment variables in which clients of OpenAI and Anthropic find a rollout.

    Args:
        root_url: URL of the rollout, as Anthropic's clients take it.
        api_key: Key of the rollout.
    """
    return {
        "OPENAI_BASE_URL": f"{root_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": root_url,
        "ANTHROPIC_API_KEY": api_key,
    }


def this_network() -> str:
    """Identify the network of this process: two processes reach the same loopback addresses if it is the same."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""
