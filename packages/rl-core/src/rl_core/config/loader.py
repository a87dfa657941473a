"""From recipe files and command-line overrides to one tree of values, each with its origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.config.document import read_file, read_value
from rl_core.config.entry import Entry, entry_of
from rl_core.config.interpolation import interpolate
from rl_core.config.key_path import KeyPath, format_path, parse_path
from rl_core.config.nearest import did_you_mean
from rl_core.config.origin import COMMAND_LINE, Origin
from rl_core.config.scalar import natural
from rl_core.errors import ConfigError

Search = Callable[[str], Path | None] | Sequence[Path]
"""How a recipe name becomes a file: folders that hold `NAME.yaml`, or a function that returns the file or None."""

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class RawConfig:
    """What the user wrote, merged, before a schema has read it.

    Args:
        name: of the recipe or file, for messages.
        entry: the tree.
        files: every file read, the ones inherited from first.
    """

    name: str
    entry: Entry
    files: tuple[Path, ...] = ()

    def select(self, key: str, default: Any = None) -> Any:
        """The value that the user wrote at a key, interpolated among what was written; `default` where there is none.

        Raises:
            ConfigError: where an interpolation in it is wrong.
        """
        path = parse_path(key)
        if self.entry.get(path) is None:
            return default
        tree, wrong = interpolate(self.entry.plain(), {})
        for at, message in wrong.items():
            if at[: len(path)] == path:
                raise ConfigError(f"{format_path(at)} ({self.entry.origin_at(at)}): {message}")
        value: Any = tree
        for segment in path:
            value = value[segment]
        return natural(value)

    def origin(self, key: str) -> Origin:
        """Where a key was written; `default` where it was not."""
        return self.entry.origin_at(parse_path(key))

    def with_values(self, values: Mapping[str, Any], source: str) -> RawConfig:
        """The same with plain nested values laid over it, whose origin is named `source`."""
        return RawConfig(self.name, self.entry.under(entry_of(dict(values), Origin(source))), self.files)


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, search: Search = ()) -> RawConfig:
    """Read a recipe and what it inherits from, and lay overrides over it.

    `defaults:` in a file names one or several others (a recipe name, or a file relative to it); later ones win, the
    file itself wins over them. Mappings merge, lists and scalars are replaced.

    Args:
        source: a recipe name, a YAML file, or plain nested values.
        overrides: `key.path=value` with the value as in YAML; text needs no quotes. `key=null` clears,
            `data.train[0].split=x` changes a list entry.
        search: where recipes are.

    Raises:
        ConfigError: where a file is not there or not valid, `defaults:` go in a circle, or an override cannot be read.
    """
    if isinstance(source, Mapping):
        raw = RawConfig("config", entry_of(dict(source), Origin("config")))
    else:
        reader = _Reader(search)
        path = reader.find(str(source), None, None)
        entry = reader.read(path, ())
        raw = RawConfig(shown(path), entry, tuple(reader.files))
    entry = raw.entry
    problems = []
    for text in overrides:
        try:
            entry = _override(entry, text)
        except ValueError as error:
            problems.append(f"{text!r} (command line): {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return RawConfig(raw.name, entry, raw.files)


def shown(path: Path) -> str:
    """A file as the user would type it: relative where it lies below the current folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _override(entry: Entry, text: str) -> Entry:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise ValueError("an override is written key=value, for example grpo.seed=1")
    if key[:1] in ("+", "~", "-"):
        raise ValueError(f"write key=value without {key[0]!r}: new keys need no mark, and key=null clears one")
    path = parse_path(key)
    if path == ("defaults",):
        raise ValueError("`defaults` belongs in a file: name another recipe instead")
    return entry.with_entry(path, read_value(value, COMMAND_LINE))


class _Reader:
    """Finds and reads files, each laid over those it inherits from."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self.files: list[Path] = []

    def read(self, path: Path, chain: tuple[Path, ...]) -> Entry:
        resolved = path.resolve()
        if resolved in chain:
            circle = " -> ".join(shown(file) for file in (*chain[chain.index(resolved) :], resolved))
            raise ConfigError(f"`defaults` go in a circle: {circle}; take one of them out")
        entry = read_file(path, shown(path))
        values = dict(entry.value)
        parents = values.pop("defaults", None)
        below = Entry({}, entry.origin)
        for parent in _names(parents):
            found = self.find(parent.value, path, parent.origin)
            below = below.under(self.read(found, (*chain, resolved)))
        if resolved not in self.files:
            self.files.append(resolved)
        return Entry({}, entry.origin).under(below).under(Entry(values, entry.origin))

    def find(self, name: str, beside: Path | None, origin: Origin | None) -> Path:
        where = f"{origin}: " if origin else ""
        if name.endswith(_SUFFIXES) or "/" in name:
            path = beside.parent / name if beside else Path(name)
            if path.is_file():
                return path
            others = [str(path.with_name(file.name)) for s in _SUFFIXES for file in path.parent.glob(f"*{s}")]
            raise ConfigError(f"{where}there is no file {shown(path)}{did_you_mean(str(path), others)}")
        sibling = beside.with_name(f"{name}.yaml") if beside else None
        found = sibling if sibling and sibling.is_file() else self._recipe(name)
        if found is None:
            known = sorted({file.stem for folder in self._folders() for file in folder.glob("*.yaml")})
            listing = f"; recipes: {', '.join(known)}" if known else ""
            raise ConfigError(
                f"{where}there is no recipe {name!r}{did_you_mean(name, known)}{listing}"
                "; a file is named with its .yaml ending"
            )
        return found

    def _folders(self) -> Sequence[Path]:
        return () if callable(self._search) else self._search

    def _recipe(self, name: str) -> Path | None:
        if callable(self._search):
            return self._search(name)
        return next((path for folder in self._search if (path := folder / f"{name}.yaml").is_file()), None)


def _names(parents: Entry | None) -> list[Entry]:
    if parents is None or parents.value is None:
        return []
    names = parents.value if isinstance(parents.value, list) else [parents]
    for name in names:
        if not isinstance(name.value, str) or name.value == "_self_":
            raise ConfigError(
                f"defaults ({name.origin}): got {name.plain()!r}; allowed: a recipe name or file, or a list of them "
                "(the file itself always comes last)"
            )
    return names


def path_of(key: str) -> KeyPath:
    """The path of a key that a user typed.

    Raises:
        ConfigError: where it is no key.
    """
    try:
        return parse_path(key)
    except ValueError as error:
        raise ConfigError(str(error)) from None
