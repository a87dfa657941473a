"""Advice for config keys that are written as options, such as `--grpo.seed=7`."""

from __future__ import annotations

from collections.abc import Sequence


def advice(option: str, words: Sequence[str]) -> str:
    """Return how to write an unknown option as a config key; empty if no key has a name like it.

    Args:
        option: The option, such as `--max_num_steps`.
        words: The command line after `rl`.
    """
    from rl_core.config import nearest

    if not option.startswith("--"):
        # one letter, for which the shell's convention takes the begin of a word with one dash
        option = next((word.partition("=")[0] for word in words if word.startswith(option)), option)
    key = option.lstrip("-").replace("-", "_")
    known = _keys(words)
    near = [key] if key in known else nearest(key, known, most=1)
    value = _value(option, words)
    if not near or value is None:
        return ""
    return f". Config keys are written without dashes: {near[0]}={value}"


def _value(option: str, words: Sequence[str]) -> str | None:
    """Return the value of an option; None if it has none."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following if following and following[:1] != "-" else None
    return None


def _keys(words: Sequence[str]) -> list[str]:
    """Return the keys of the recipe that is named on the command line; none without a recipe."""
    from rl_core.config import all_keys
    from rl_core.errors import ConfigError
    from rl_launch.commands.explain import names_config
    from rl_launch.run_config.reading import read_raw
    from rl_launch.run_config.root_types import type_of

    recipe = next((word for word in words if names_config(word)), "")
    try:
        raw = read_raw(recipe)
        return list(all_keys(type_of(raw), raw.plain()))
    except ConfigError:
        return []
