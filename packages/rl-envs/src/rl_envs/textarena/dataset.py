"""Rows of a game of textarena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError, DataError
from rl_core.install_command import install_command
from rl_envs.draws import draws
from rl_envs.textarena.plugin import TextArenaSettings

if TYPE_CHECKING:
    from rl_envs.textarena.environment import Match


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` and `environment`, each with the seed of a start; the splits draw different
    seeds.

    Raises:
        ConfigError: If the game does not exist or does not start, or textarena is not installed.
        DataError: If the split is unknown.
    """
    config = TextArenaSettings.model_validate(dict(settings))
    if split not in ("train", "validation"):
        raise DataError(f"textarena has the splits train and validation, got {split!r}")
    if config.demonstrations and config.num_players > 1:
        raise ConfigError("textarena: demonstrations are games of one player; set num_players=1")
    if find_spec("textarena") is None:
        raise ConfigError(f"textarena is not installed: {install_command('rl-envs[textarena]')}")
    from rl_envs.textarena.environment import Match

    rows = []
    for index in range(config.size):
        # Both splits draw from all numbers of 31 bits; training has the even ones.
        drawn = next(draws(f"{config.seed}/{split}/{index}")) % 2**30
        info: dict[str, Any] = {
            "id": config.id,
            "config": config.config,
            "num_players": config.num_players,
            "instructions": config.instructions,
            "seed": 2 * drawn + (split == "validation"),
        }
        messages: list[dict[str, Any]] = []
        try:
            match = Match(**info)
            player, said = match.observation()
            if config.demonstrations:
                messages += _random_game(match, said, config.demonstrations, f"{config.seed}/{split}/{index}/moves")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if player != 0:
            raise ConfigError(f"{config.id} begins with player {player}, and rows are the prompts of player 0")
        asked = [{"role": "user", "content": said}]
        rows.append({"messages": messages or asked, "info": info, "environment": "textarena"})
    return rows


def _random_game(match: Match, said: str, moves: Sequence[str], seed: str) -> list[dict[str, Any]]:
    """Return the conversation of a game for one player, who makes moves at random until it is over."""
    drawn, messages, rewards = draws(seed), [], None
    while rewards is None:
        move = moves[next(drawn) % len(moves)]
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": move}]
        rewards = match.move(move)
        if rewards is None:
            _, said = match.observation()
    return messages
