"""A recipe from the config of another system, with an answer to each of its keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.config import did_you_mean, load
from rl_core.config.keys import Key, key_at, value_at
from rl_core.config.tree import parse_path
from rl_core.errors import ConfigError, ConfigProblems
from rl_core.plugins import algorithm_named
from rl_launch.foreign import nemo_rl
from rl_launch.foreign.source import flattened, interpolated, read
from rl_launch.foreign.table import SYSTEMS, Kind, table
from rl_launch.foreign.translation import Answer, Translation
from rl_launch.root import read_config, root_type

_ROUNDS = 8


@dataclass(frozen=True)
class Imported:
    """A recipe made from the config of another system.

    Args:
        system: Name of the system.
        source: The file.
        recipe: Nested plain values.
        answers: One for each key of the file, in its order.
        notes: What the user has to know besides.
    """

    system: str
    source: str
    recipe: dict[str, Any]
    answers: tuple[Answer, ...]
    notes: tuple[str, ...]

    @property
    def features(self) -> dict[str, list[str]]:
        """The features that are not offered, each with the keys that ask for it."""
        found: dict[str, list[str]] = {}
        for answer in self.answers:
            if answer.kind is Kind.REFUSED:
                found.setdefault(answer.text, []).append(answer.key)
        return found

    def of(self, kind: Kind) -> Iterator[Answer]:
        """The answers of one kind."""
        return (answer for answer in self.answers if answer.kind is kind)

    def count(self) -> Counter[Kind]:
        """Number of keys by kind."""
        return Counter(answer.kind for answer in self.answers)


def import_config(path: Path, system: str, *, algorithm: str = "", gpus: int | None = None) -> Imported:
    """Make a recipe of the config of another system.

    Args:
        path: The file; files that it inherits from lie beside it.
        system: One of `SYSTEMS`.
        algorithm: Name of the algorithm, if the file does not say it.
        gpus: Number of GPUs, if the file does not say it.

    Raises:
        ConfigError: If the file cannot be read, or its algorithm is not known.
    """
    if system not in SYSTEMS:
        near = did_you_mean(system, SYSTEMS)
        raise ConfigError(f"--from: got {system!r}{near}; allowed: {', '.join(SYSTEMS)}")
    config = _TRANSLATORS[system](path, algorithm, gpus)
    features = _made_valid(config)
    return Imported(SYSTEMS[system], str(path), config.recipe, tuple(config.answers), tuple([*config.notes, *features]))


def _of_nemo_rl(path: Path, algorithm: str, gpus: int | None) -> Translation:
    values = interpolated(read(path), str(path))
    config = _started(values, "nemo-rl", algorithm or nemo_rl.algorithm_of(values), path)
    nemo_rl.translate(config)
    return config


_TRANSLATORS = {"nemo-rl": _of_nemo_rl}


def _started(values: dict[str, Any], system: str, algorithm: str, path: Path) -> Translation:
    if not algorithm:
        raise ConfigError(f"{path}: its keys do not say the algorithm; give it by --algorithm, such as --algorithm grpo")
    root = root_type(algorithm_named(algorithm), load({"algorithm": algorithm}))

    def key_here(name: str) -> Key | None:
        try:
            return key_at(root, parse_path(name), {})
        except ConfigError:
            return None

    config = Translation(values, table(system), key_here)
    config.algorithm = algorithm
    return config


_NO_EFFECT = re.compile(r"has no effect|remove this key|; remove it|no effect")


def _made_valid(config: Translation) -> list[str]:
    """Take settings out that have no effect here, and refuse what the recipe cannot be with; returns notes."""
    notes: list[str] = []
    for _ in range(_ROUNDS):
        problems = _problems(config.recipe)
        idle = [(key, message) for key, message in problems if _NO_EFFECT.search(message) and _is_written(config, key)]
        if not idle:
            _refuse(config, problems)
            break
        for key, message in idle:
            config.remove(key)
            for answer in config.answers:
                if answer.text.partition(":")[0].partition(",")[0] == key and answer.kind is not Kind.REFUSED:
                    config.answer_anew(answer.key, Kind.NOT_NEEDED, message.partition(";")[0])
    return notes


def _is_written(config: Translation, key: str) -> bool:
    return value_at(config.recipe, parse_path(key)) is not None


def _problems(recipe: dict[str, Any]) -> list[tuple[str, str]]:
    try:
        read_config(recipe)
    except ConfigProblems as error:
        return list(error.problems)
    except ConfigError as error:
        return [("", str(error))]
    return []


def _refuse(config: Translation, problems: list[tuple[str, str]]) -> None:
    """Refuse the keys from which problems of the recipe stem."""
    for key, message in problems:
        if any(answer.kind is Kind.REFUSED for answer in config.answers) and not _is_written(config, key):
            continue  # what is missing is missing because it is refused
        sources = [answer for answer in config.answers if _leads_to(answer, key)]
        for answer in sources:
            config.answer_anew(answer.key, Kind.REFUSED, f"{key}: {message}")
        if not sources:
            config.answer_anew(key or "config", Kind.REFUSED, f"{key}: {message}" if key else message)


def _leads_to(answer: Answer, key: str) -> bool:
    here = answer.text.partition(":")[0].partition(",")[0]
    return answer.kind is not Kind.REFUSED and bool(key) and here == key
