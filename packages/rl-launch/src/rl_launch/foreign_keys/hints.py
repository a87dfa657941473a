"""Explanations of keys that exist in another system: unknown keys of a recipe, and names that a user asks for."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from rl_launch.foreign_keys.table import IMPORTED, SYSTEMS, Kind, Rule, Table, flattened, table

PLACEHOLDER = "ALGORITHM"
"""Stands for the section of an algorithm that is not known."""

_ENOUGH = 3
"""Minimum number of keys of one system for a file to count as a config of that system."""
_MAX_MEANINGS = 4
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
        for system in SYSTEMS:
            if text := self._explained(table(system), key, value):
                self._found[system] += 1
                return text
        return ""

    def remarks(self, source: str) -> list[str]:
        """Return the command to use for the whole file, if the file is most likely a config of another system.

        Args:
            source: Name of the file.
        """
        [(system, count)] = self._found.most_common(1) or [("", 0)]
        if count < _ENOUGH:
            return []
        said = f"{_REMARK}{count} of these keys are {SYSTEMS[system]} keys. "
        if system in IMPORTED:
            return [f"{said}To import the whole file, run `rl config import {source} --from {system}`"]
        return [f"{said}`rl config explain KEY` shows the matching key of each"]

    @staticmethod
    def remarks_in(message: str) -> list[str]:
        """Return the remarks at the end of an error message."""
        return [line for line in message.splitlines() if line.startswith(_REMARK)]

    def _explained(self, table: Table, key: str, value: Any) -> str:
        for name in [key, key.rpartition(".")[2]] if table.is_flat else [key]:
            if (rule := table.rule(name)) is not None:
                is_off = table.is_off(name, value) or _are_all_off(table, name, value)
                return rule.in_words(table.name, name, self._algorithm, is_off=is_off)
        if table.is_flat or not isinstance(value, dict) or not value:
            return ""
        below = [f"{key}.{name}" for name in flattened(value)]
        rules = {name: rule for name in below if (rule := table.rule(name)) is not None}
        if len(rules) < len(below):
            return ""
        is_off = _are_all_off(table, key, value)
        texts = {rule.in_words(table.name, name, self._algorithm, is_off=is_off) for name, rule in rules.items()}
        if len(texts) == 1:
            return texts.pop()
        shown = list(rules.items())[:_NAMED]
        listed = "; ".join(
            f"{name.removeprefix(f'{key}.')}: {rule.answer(name, self._algorithm)}" for name, rule in shown
        )
        more = f"; and {len(rules) - _NAMED} more" if len(rules) > _NAMED else ""
        return f"a section of {table.name}. {listed}{more}"


def _are_all_off(table: Table, key: str, value: Any) -> bool:
    """Return whether a section requests nothing: it is not enabled, or all its keys are off."""
    if not isinstance(value, dict):
        return False
    if value.get("enabled") is False:
        return True
    return all(table.is_off(f"{key}.{name}", each) for name, each in flattened(value).items())


class Meaning(NamedTuple):
    """A key of another system, and its explanation.

    Args:
        text: Sentence about it, such as `learning_rate is a TRL key. Write policy.optimizer.kwargs.lr`.
        key: The matching key of this project; empty unless there is exactly one.
    """

    text: str
    key: str = ""


def meanings(name: str, algorithm: str = "") -> list[Meaning]:
    """Return the explanations of a key by the tables of other systems, one for each different answer; empty if no
    system has the key.

    Args:
        name: Dotted key, or its last name.
        algorithm: Name of the section of the algorithm; empty if it is not known.
    """
    section = algorithm or PLACEHOLDER
    found: dict[tuple[str, str], tuple[list[str], Rule]] = {}
    for system in SYSTEMS:
        known = table(system)
        last = name.rpartition(".")[2]
        rules: list[tuple[str, Rule]] = []
        if (rule := known.rule(name)) is not None:
            rules = [(name, rule)]
        elif "." not in name:
            rules = [(rule.pattern, rule) for rule in known.rules if rule.pattern.rpartition(".")[2] == name]
        elif known.is_flat and (rule := known.rule(last)) is not None:
            rules = [(last, rule)]
        for key, rule in rules:
            found.setdefault((key, rule.answer(key, section)), ([], rule))[0].append(known.name)
    made = []
    for (key, _), (systems, rule) in list(found.items())[:_MAX_MEANINGS]:
        text = f"{key} is {rule.in_words(' and '.join(systems), key, section)}"
        if f"{PLACEHOLDER}." in text:
            text += f", where {PLACEHOLDER} is the section of the algorithm, such as grpo or sft"
        answer = rule.answer(key, algorithm) if algorithm or "{" not in rule.text else ""
        is_key = rule.kind in (Kind.RENAMED, Kind.SAME) and " " not in answer
        made.append(Meaning(text, answer if is_key else ""))
    return made
