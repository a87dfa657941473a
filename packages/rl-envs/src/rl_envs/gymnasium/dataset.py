"""Rows of a gymnasium environment."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rl_core.errors import ConfigError, DataError
from rl_core.install_command import install_command
from rl_envs.draws import draws
from rl_envs.gymnasium.plugin import GymnasiumSettings


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` and `environment`, each with the seed of a start; the splits draw different
    seeds.

    Raises:
        ConfigError: If the environment does not exist, cannot be played in text, or gymnasium is not installed.
        DataError: If the split is unknown.
    """
    config = GymnasiumSettings.model_validate(dict(settings))
    if split not in ("train", "validation"):
        raise DataError(f"gymnasium has the splits train and validation, got {split!r}")
    if find_spec("gymnasium") is None:
        raise ConfigError(f"gymnasium is not installed: {install_command('rl-envs[gymnasium]')}")
    seeds = (next(draws(f"{config.seed}/{split}/{index}")) % 2**31 for index in range(config.size))
    try:
        from rl_envs.gymnasium.environment import Game

        rows, shown = [], config.show
        for seed in seeds:
            game = Game.start(config.id, config.config, seed, actions=config.actions, show=shown)
            game.environment.close()
            shown = game.shown
            asked = "\n\n".join(part for part in (config.instructions, game.rules, game.text) if part)
            info = {"id": config.id, "config": config.config, "seed": seed, "actions": config.actions, "show": shown}
            rows.append({"messages": [{"role": "user", "content": asked}], "info": info, "environment": "gymnasium"})
        return rows
    except ValueError as error:
        raise ConfigError(str(error)) from None
