"""Environment variables of workers."""

from __future__ import annotations

from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind


def take_variable(config: Translation, key: str, here: str) -> None:
    """Take an environment variable over, as text."""
    name, value = key.rpartition(".")[2], config.get(key)
    if name.startswith("NRL_"):
        config.unneeded(key, "only NeMo RL reads it")
    elif value is not None and not isinstance(value, dict):
        config.put(f"{here}.{name}", str(value))
        config.answer(key, Kind.RENAMED, f"{here}.{name}")
