"""The plugin of generation by servers."""

from __future__ import annotations

from rl_algos.servers.config import ServerConfig, server_problems
from rl_core.plugins import BackendPlugin, Requirement


def _ranks(config: ServerConfig) -> int:
    """Return the number of processes of the run that a replica needs: the one that calls the server."""
    return 1


def _servers(config: ServerConfig) -> int:
    return len(config.urls)


PLUGIN = BackendPlugin(
    name="server",
    key="server_cfg",
    config=ServerConfig,
    worker="rl_algos.torch.server_generator:ServerGenerator",
    requirement=Requirement("rl-algos", {"cpu": ("torch",), "cuda": ("torch",)}, ("rl_algos", "torch")),
    ranks=_ranks,
    servers=_servers,
    checks=(server_problems,),
    preflight="rl_algos.servers.preflight:problems",
)
"""The generator, found by the entry point `rl.generators:server`."""
