"""Explanations of unknown keys of a recipe that exist in another system."""

from __future__ import annotations

from collections import Counter
from typing import Any

_ENOUGH = 3
"""Minimum number of keys of one system for a file to count as a config of that system."""

_REMARK = "note: "
_NAMED = 3


class ForeignHints:
    """Explain the unknown keys of one config that exist in another system.

    Args:
        algorithm: Name of the algorithm's section.
    """

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._found: Counter[str] = Counter()

    def __call__(self, key: str, value: Any) -> str:
        """Return the explanation of a key; empty if no other system has it.

        Args:
            key: Dotted key.
            value: Its value. For a section, the keys below it are explained too.
        """
        # the tables are read only for a config with an unknown key
        from rl_launch.foreign_keys.table import SYSTEMS, table

        for system in SYSTEMS:
            if text := self._explained(table(system), key, value):
                self._found[system] += 1
                return text
        return ""

    def remarks(self, source: str) -> list[str]:
        """Return the command that imports the whole file, if the file is most likely a config of another system.

        Args:
            source: Name of the file.
        """
        from rl_launch.foreign_keys.table import SYSTEMS

        return [
            f"{_REMARK}{count} of these keys are {SYSTEMS[system]} keys. To import the whole file, run "
            f"`rl config import {source} --from {system}`"
            for system, count in self._found.most_common(1)
            if count >= _ENOUGH
        ]

    @staticmethod
    def remarks_in(message: str) -> list[str]:
        """Return the remarks at the end of an error message."""
        return [line for line in message.splitlines() if line.startswith(_REMARK)]

    def _explained(self, table: Any, key: str, value: Any) -> str:
        names = [key, key.rpartition(".")[2]] if table.is_flat else [key]
        for name in names:
            if (rule := table.rule(name)) is not None:
                is_off = table.is_off(name, value) or _are_all_off(table, name, value)
                return str(rule.in_words(table.name, name, self._algorithm, is_off=is_off))
        if table.is_flat or not isinstance(value, dict) or not value:
            return ""
        return self._section(table, key, value)

    def _section(self, table: Any, key: str, value: dict[str, Any]) -> str:
        from rl_launch.foreign_keys.flat import flattened

        below = [f"{key}.{name}" for name in flattened(value)]
        rules = {name: rule for name in below if (rule := table.rule(name)) is not None}
        if len(rules) < len(below):
            return ""
        is_off = _are_all_off(table, key, value)
        texts = {name: rule.in_words(table.name, name, self._algorithm, is_off=is_off) for name, rule in rules.items()}
        if len(set(texts.values())) == 1:
            return next(iter(texts.values()))
        listed = "; ".join(
            f"{name.removeprefix(f'{key}.')}: {rule.answer(name, self._algorithm)}"
            for name, rule in list(rules.items())[:_NAMED]
        )
        more = f"; and {len(rules) - _NAMED} more" if len(rules) > _NAMED else ""
        return f"a section of {table.name}. {listed}{more}"


def _are_all_off(table: Any, key: str, value: Any) -> bool:
    """Return whether a section requests nothing: it is not enabled, or all its keys are off."""
    from rl_launch.foreign_keys.flat import flattened

    if not isinstance(value, dict):
        return False
    if value.get("enabled") is False:
        return True
    return all(table.is_off(f"{key}.{name}", each) for name, each in flattened(value).items())
