"""What a name that other systems have as a key is here, without a config that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_launch.foreign_keys.table import SYSTEMS, Kind, Rule, Table, table

PLACEHOLDER = "ALGORITHM"
"""Stands for the section of an algorithm that is not known."""

_MOST = 4


@dataclass(frozen=True)
class Meaning:
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
    found: dict[tuple[str, str], list[tuple[str, Rule]]] = {}
    for system in SYSTEMS:
        known = table(system)
        for key, rule in _rules(known, name):
            found.setdefault((key, rule.answer(key, algorithm or PLACEHOLDER)), []).append((known.name, rule))
    return [
        _meaning(key, [system for system, _ in alike], alike[0][1], algorithm)
        for (key, _), alike in list(found.items())[:_MOST]
    ]


def _meaning(key: str, systems: list[str], rule: Rule, algorithm: str) -> Meaning:
    text = f"{key} is {rule.in_words(' and '.join(systems), key, algorithm or PLACEHOLDER)}"
    if f"{PLACEHOLDER}." in text:
        text += f", where {PLACEHOLDER} is the section of the algorithm, such as grpo or sft"
    answer = rule.answer(key, algorithm) if algorithm or "{" not in rule.text else ""
    return Meaning(text, answer if rule.kind in (Kind.RENAMED, Kind.SAME) and " " not in answer else "")


def _rules(known: Table, name: str) -> Iterator[tuple[str, Rule]]:
    """Yield the rules of a system for a key, or for the keys that end in a name."""
    if (rule := known.rule(name)) is not None:
        yield name, rule
    elif "." not in name:
        yield from ((rule.pattern, rule) for rule in known.rules if rule.pattern.rpartition(".")[2] == name)
    elif known.is_flat and (rule := known.rule(last := name.rpartition(".")[2])) is not None:
        yield last, rule
