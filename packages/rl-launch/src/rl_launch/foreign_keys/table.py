"""The answer to each key of another system, as data in `tables/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

SYSTEMS = {"nemo-rl": "NeMo RL", "trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "prime-rl": "prime-rl"}
"""Systems with a table of keys, by the name that commands take."""

IMPORTED = ("nemo-rl", "trl")
"""Systems whose whole files `rl config import --from` converts."""

ALGORITHM = "{algorithm}"
"""Placeholder for the section of the algorithm in a key of this project."""

_TABLES = Path(__file__).parent / "tables"
_MODELS = ("value", "teacher")
_ANY_DEPTH = "**"


class Kind(Enum):
    """The answer to a key of another system."""

    SAME = "taken as it is"
    RENAMED = "renamed"
    FOLLOWS = "computed from this and other keys"
    NOT_NEEDED = "not needed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Rule:
    """The answer to one key.

    Args:
        pattern: The key, with `*` for one name or a part of it and `**` for any number of names.
        kind: The answer.
        text: The new key if it is renamed, the keys it is computed into, the reason if it is not needed, or the
            feature that is not supported.
    """

    pattern: str
    kind: Kind
    text: str

    def answer(self, key: str, algorithm: str) -> str:
        """Return the text for a key that matches, with the sections of models and of the algorithm filled in.

        Args:
            key: The key of the other system.
            algorithm: Name of the section of the algorithm.
        """
        text = self.text.replace(ALGORITHM, algorithm)
        if self.kind is Kind.RENAMED and "*" in text:
            text = text.replace("*", key.split(".")[self.pattern.split(".").index("*")])
        model = key.partition(".")[0]
        if model in _MODELS and self.pattern.startswith("policy."):
            text = text.replace("policy.", f"{model}.")
        return text

    def in_words(self, system: str, key: str, algorithm: str, *, is_off: bool = False) -> str:
        """Return the answer as a noun phrase for a message, such as `a TRL key. Write sft.max_num_epochs`.

        Args:
            system: Name of the other system.
            key: Its key.
            algorithm: Name of the section of the algorithm.
            is_off: True if the value of the key requests nothing.
        """
        text = self.answer(key, algorithm)
        noun = f"{'an' if system[:1] in 'AEIOU' else 'a'} {system} key"
        match self.kind:
            case Kind.NOT_NEEDED:
                return f"{noun} that is not needed here ({text}). Remove it"
            case Kind.REFUSED if is_off:
                return f"{noun} that is off. Remove it"
            case Kind.REFUSED:
                return f"{noun} for an unsupported feature: {text}. Remove it"
            case _:
                return f"{noun}. Write {text}"


@dataclass(frozen=True)
class Table:
    """The keys of one system.

    Args:
        name: Name of the system.
        rules: One per key.
        values: Values that have another name here, by key.
        off: Values, in addition to empty ones, that turn a refused key off, by key.
        defaults: Defaults of the system that matter, by algorithm.
        tables: Further tables, which only the import of whole files reads.
        is_flat: True if its keys are names without sections, which are recognised in any section.
    """

    name: str
    rules: tuple[Rule, ...]
    values: Mapping[str, Mapping[Any, Any]]
    off: Mapping[str, list[Any]]
    defaults: Mapping[str, Mapping[str, Any]]
    tables: Mapping[str, Any]
    is_flat: bool

    @cached_property
    def _exact(self) -> dict[str, Rule]:
        return {rule.pattern: rule for rule in self.rules if "*" not in rule.pattern}

    @cached_property
    def _patterns(self) -> list[Rule]:
        patterns = [rule for rule in self.rules if "*" in rule.pattern]
        return sorted(patterns, key=lambda rule: (_ANY_DEPTH in rule.pattern, -len(rule.pattern)))

    def rule(self, key: str) -> Rule | None:
        """Return the rule for a key; None if the key is not known."""
        for name in _names(key):
            found = self._exact.get(name) or next(
                (rule for rule in self._patterns if _matches(name.split("."), rule.pattern.split("."))), None
            )
            if found is not None:
                return found
        return None

    def value(self, key: str, value: Any) -> Any:
        """Return the name of a value in this project."""
        known = next((self.values[name] for name in _names(key) if name in self.values), {})
        return known.get(value, value) if isinstance(value, str | bool | int | float | None) else value

    def is_off(self, key: str, value: Any) -> bool:
        """Return whether a refused key changes nothing with this value."""
        return value in (None, False, 0, "", [], {}, "None") or value in self.off.get(key, [])


@cache
def table(system: str) -> Table:
    """Return the table of a system.

    Args:
        system: One of `SYSTEMS`.
    """
    data = yaml.safe_load((_TABLES / f"{system}.yaml").read_text(encoding="utf-8"))
    rules = [Rule(key, Kind.RENAMED, destination) for key, destination in data.get("renamed", {}).items()]
    rules += [Rule(key, Kind.FOLLOWS, text) for key, text in data.get("computed", {}).items()]
    for kind, section in ((Kind.NOT_NEEDED, "not needed"), (Kind.REFUSED, "refused")):
        rules += [Rule(key, kind, text) for text, keys in data.get(section, {}).items() for key in keys]
    further = {section: data.get(section, {}) for section in ("values", "off", "defaults", "tables")}
    return Table(data["system"], tuple(rules), is_flat=bool(data.get("flat", False)), **further)


def flattened(values: Any, path: str = "") -> dict[str, Any]:
    """Return the values at the ends of nested mappings by dotted key; a list or an empty mapping is one value."""
    if not isinstance(values, dict) or (not values and path):
        return {path: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flattened(value, f"{path}.{name}" if path else str(name))
    return found


def _names(key: str) -> tuple[str, ...]:
    """Return the key, and for a key in the section of another model also the matching key of `policy`."""
    model, _, rest = key.partition(".")
    return (key, f"policy.{rest}") if model in _MODELS and rest else (key,)


def _matches(names: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == _ANY_DEPTH:
        return any(_matches(names[start:], pattern[1:]) for start in range(1, len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])
