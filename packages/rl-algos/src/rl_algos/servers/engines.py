"""The servers that a config names."""

from __future__ import annotations

from rl_algos.servers.config import ServerConfig
from rl_algos.servers.engine_server import EngineServer
from rl_algos.servers.sglang_server import SglangServer
from rl_algos.servers.vllm_server import VllmServer
from rl_core.model_config import ModelConfig

ENGINES: dict[str, type[EngineServer]] = {"sglang": SglangServer, "vllm": VllmServer}


def server_of(config: ServerConfig, place: int, model: ModelConfig, vocab_size: int) -> EngineServer:
    """Return a server that is not connected yet.

    Args:
        config: Settings.
        place: Its position among the addresses.
        model: Model that it serves.
        vocab_size: Number of tokens of the model.
    """
    return ENGINES[config.engine](config.urls[place], config.api_key_env, model, vocab_size)
