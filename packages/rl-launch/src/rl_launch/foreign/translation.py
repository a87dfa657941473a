"""A recipe that is built from the config of another system, with the fate of each key, and of each line of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from types import NoneType
from typing import Any

from rl_algos.losses.surrogates import SURROGATES
from rl_core.config import show
from rl_core.config.keys import Key, value_at
from rl_core.errors import ConfigError
from rl_launch.foreign_keys.table import Kind, Table, flattened

_OFF = "its section is off ({section}.enabled is false)"
_EMPTY = "not known here, and empty or off"
_UNKNOWN = "{system} keys that are not known here"
_ALWAYS = ("colocated",)
"""Sections that matter even if they are not enabled."""


class Fate(IntEnum):
    """The result for a statement; the larger one counts."""

    UNRELATED = 0
    CONVERTED = 1
    CHECK = 2
    REFUSED = 3


@dataclass(frozen=True)
class ScriptLine:
    """A statement of a script.

    Args:
        number: Its line.
        text: The line.
        fate: The result.
        reason: The keys it is converted to, or why it is listed, refused or not needed.
        file: Name of the file, if a command starts the script.
    """

    number: int
    text: str
    fate: Fate
    reason: str
    file: str = ""

    @property
    def place(self) -> str:
        """The line in words."""
        return f"{self.file} line {self.number}".strip()


@dataclass(frozen=True)
class KeyAnswer:
    """The answer to one key.

    Args:
        key: Dotted key of the other system, or the place of a line of a script.
        value: Its value, or the code.
        kind: The answer.
        text: The new key, the reason or the feature.
        is_line: True for a line of a script.
    """

    key: str
    value: Any
    kind: Kind
    text: str
    is_line: bool = False


class Translation:
    """The values of one foreign config, and the recipe that is built from them.

    Args:
        values: Nested plain values with interpolations computed.
        table: The keys of the system.
        key_here: Returns the key of this project for a dotted name; None if it does not exist.
    """

    def __init__(self, values: dict[str, Any], table: Table, key_here: Callable[[str], Key | None]) -> None:
        self.values = values
        self.table = table
        self.algorithm = "grpo"
        self.recipe: dict[str, Any] = {}
        self.notes: list[str] = []
        self.behaviour: list[str] = []
        self.lines: tuple[ScriptLine, ...] = ()
        self.asked = ""
        """The last key whose value was asked for, for messages about its type."""
        self._key_here = key_here
        self._keys = flattened(values)
        self._answers: dict[str, KeyAnswer] = {}

    @property
    def answers(self) -> list[KeyAnswer]:
        """Answers so far, in the order of the keys."""
        order = {key: place for place, key in enumerate(self._keys)}
        return sorted(self._answers.values(), key=lambda answer: order.get(answer.key, len(order)))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the other system; the default if it is missing or null."""
        self.asked = key
        found = value_at(self.values, tuple(key.split(".")))
        return default if found is None else found

    def has(self, key: str) -> bool:
        """Return whether a key, or one below it, was given."""
        return any(known == key or known.startswith(f"{key}.") for known in self._keys)

    def is_known(self, key: str) -> bool:
        """Return whether the table has a key, or the key exists in this project under the same name."""
        return self.table.rule(key) is not None or self._key_here(key) is not None

    def keys(self, section: str = "") -> list[str]:
        """Return the keys of a section that have no answer."""
        return [
            key
            for key in self._keys
            if key not in self._answers and (not section or key == section or key.startswith(f"{section}."))
        ]

    def put(self, key: str, value: Any) -> None:
        """Set a key of the recipe, replacing its value."""
        *sections, last = key.split(".")
        at = self.recipe
        for name in sections:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{key}: {name} is a section here, and the file gives it the value {show(at)}")
        at[last] = value

    def compute(self, key: str, here: str, value: Any, text: str = "") -> None:
        """Set a key of the recipe to a value that follows from a key of the other system, which is answered."""
        self.put(here, value)
        self.answer(key, Kind.FOLLOWS, text or here)

    def written(self, key: str) -> Any:
        """Return the value of a key of the recipe; None if it is not set."""
        return value_at(self.recipe, tuple(key.split(".")))

    def remove(self, key: str) -> None:
        """Remove a key from the recipe."""
        *sections, last = key.split(".")
        at = self.recipe
        for name in sections:
            at = at.get(name, {})
        at.pop(last, None)

    def answer(self, key: str, kind: Kind, text: str) -> None:
        """Answer a key, or all keys below it that have no answer."""
        for each in self.keys(key):
            self._answers[each] = KeyAnswer(each, self._keys[each], kind, text)

    def answer_anew(self, key: str, kind: Kind, text: str) -> None:
        """Replace the answer of a key."""
        self._answers[key] = KeyAnswer(key, self._keys.get(key), kind, text)

    def refuse_line(self, line: ScriptLine) -> None:
        """Answer a line of a script that requests an unsupported feature; a line may request several."""
        self._answers[f"{line.place}: {line.reason}"] = KeyAnswer(
            line.place, line.text, Kind.REFUSED, line.reason, is_line=True
        )

    def follows(self, keys: Iterable[str], text: str) -> None:
        """Answer keys whose values are in the recipe in another form."""
        for key in keys:
            self.answer(key, Kind.FOLLOWS, text)

    def unneeded(self, key: str, reason: str) -> None:
        """Answer a key that is not needed."""
        self.answer(key, Kind.NOT_NEEDED, reason)

    def refuse(self, key: str, feature: str) -> None:
        """Answer a key that requests an unsupported feature."""
        self.answer(key, Kind.REFUSED, feature)

    def rename(self, key: str, here: str) -> None:
        """Copy a value to another key."""
        if key in self.keys(key):
            self.put(here, self.table.value(key, self._keys[key]))
            self.answer(key, Kind.SAME if key == here else Kind.RENAMED, here)

    def finish(self) -> None:
        """Answer all remaining keys, by the table or by the keys that exist in this project."""
        for switch in [key for key in self._keys if key.endswith(".enabled") and self._keys[key] is False]:
            section = switch.removesuffix(".enabled")
            for key in self.keys(section) if section.rpartition(".")[2] not in _ALWAYS else ():
                if key != switch:
                    self.unneeded(key, _OFF.format(section=section))
        for key in self.keys():
            self._answer_by_table(key)

    def _answer_by_table(self, key: str) -> None:
        value = self._keys[key]
        rule = self.table.rule(key)
        if rule is None:
            if not self.table.is_flat and self._key_here(key) is not None:
                self._take(key, key, value)
            elif value in (None, False, [], {}) or key.endswith(".enabled"):
                if value is True:
                    self.refuse(key, f"{key.removesuffix('.enabled')}, which is not known here")
                else:
                    self.unneeded(key, _EMPTY)
            else:
                self.refuse(key, _UNKNOWN.format(system=self.table.name))
            return
        text = rule.answer(key, self.algorithm)
        if rule.kind is Kind.RENAMED:
            self._take(key, text, value)
        elif rule.kind is Kind.REFUSED and self.table.is_off(key, value):
            self.unneeded(key, f"off: {rule.text}")
        elif rule.kind is Kind.FOLLOWS and value in (None, {}, []):
            self.unneeded(key, "unset")
        else:
            self.answer(key, rule.kind, text)

    def _take(self, key: str, here: str, value: Any) -> None:
        found = self._key_here(here)
        if value is None and (found is None or NoneType not in found.kinds):
            self.unneeded(key, f"null; the default of {here} is used")
        else:
            self.rename(key, here)


def put_surrogate(config: Translation, name: str, keys: dict[str, str], **settings: Any) -> None:
    """Replace the surrogate of the recipe by another one with its settings, and answer the keys of the settings.

    Args:
        config: Translation that receives the surrogate and the answers.
        name: Name of the surrogate here.
        keys: Setting of a surrogate by the key of the other system. Keys of settings that this surrogate does not have
            are answered as not needed; keys of settings that are not given here are left to the table.
        settings: Values of settings; None leaves the default. Those that the surrogate does not have are left out.
    """
    fields = SURROGATES[name].model_fields
    given = {setting: value for setting, value in settings.items() if setting in fields and value is not None}
    config.remove("loss_fn.surrogate")
    if section := ({} if name == "clip" else {"name": name}) | given:
        config.put("loss_fn.surrogate", section)
    for key, setting in keys.items():
        if setting in fields and setting in settings:
            config.follows([key], f"loss_fn.surrogate.{setting}")
        elif setting not in fields:
            config.unneeded(key, f"the surrogate {name} has no {setting}")
