"""From recipe files and command-line overrides to one tree of values, each with its origin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_core.config.keys import value_at
from rl_core.config.messages import did_you_mean
from rl_core.config.renames import Upgrade, upgraded
from rl_core.config.schema import Config
from rl_core.config.tree import (
    DATASET,
    DEFAULT,
    MAX_DEPTH,
    MISSING,
    Entry,
    KeyPath,
    Origin,
    Unset,
    format_path,
    given_in,
    leaves,
    mapped,
    natural,
    parse_path,
    read_file,
    read_value,
)
from rl_core.errors import ConfigError
from rl_core.user_code import beside

Search = Callable[[str], Path | None] | Sequence[Path]
"""Folders that hold recipes as `NAME.yaml`, or a function from a name to the file or None."""

_MAX_QUOTED = 300
_MAX_EXPANSIONS = 1000
"""Maximum number of interpolations that one value needs, directly and through others."""

_SUFFIXES = (".yaml", ".yml")
_REFERENCE = re.compile(r"\$\{(\.*)([^\s${}:]+)\}")
_NOT_FOUND = re.compile(r"Interpolation key '([^']+)' not found")
_VARIABLE = re.compile(r"Environment variable '([^']+)' not found")


@dataclass(frozen=True)
class RawConfig:
    """The merged values that the user wrote, before a schema has read them.

    Args:
        name: Name of the recipe or file, for messages.
        entry: The tree.
        files: Every file read; inherited files come first.
    """

    name: str
    entry: Entry
    files: tuple[Path, ...] = ()

    def select(self, key: str, default: Any = None) -> Any:
        """Return the value that the user wrote at a key, interpolated with the written values; `default` if there is
        none.

        Raises:
            ConfigError: If an interpolation in it is wrong.
        """
        path = parse_path(key)
        if self.entry.get(path) is None:
            return default
        written = self.entry.plain()
        tree, wrong = interpolate(written, written)
        for at, message in wrong.items():
            if at[: len(path)] == path:
                raise ConfigError(f"{format_path(at)} ({self.entry.origin_at(at)}): {message}")
        return natural(value_at(tree, path))

    def plain(self) -> dict[str, Any]:
        """Return everything as nested plain values, with interpolations as they were written."""
        values: dict[str, Any] = natural(self.entry.plain())
        return values

    def is_written(self, key: str) -> bool:
        """Return whether the user wrote a value at a key, null included."""
        return self.entry.get(parse_path(key)) is not None

    def origin(self, key: str) -> Origin:
        """Return the place where a key was written; `default` if it was not."""
        return self.entry.origin_at(parse_path(key))

    def layer(self, key: str) -> int:
        """Return the place of a key's origin in the order of the layers: 0 for a default,
        then every file, then values that are given with the command or in code."""
        origin = self.origin(key)
        if origin == DEFAULT:
            return 0
        source = Path(origin.source).resolve()
        return next((place for place, file in enumerate(self.files, start=1) if file == source), len(self.files) + 1)

    def with_values(self, values: Mapping[str, Any], source: str) -> RawConfig:
        """Return the config with plain nested values laid over it, whose origin is called `source`."""
        return RawConfig(self.name, self.entry.under(Entry.of(dict(values), Origin(source))), self.files)

    def upgraded(self, root: type[Config], *, is_whole: bool = True) -> tuple[RawConfig, Upgrade]:
        """Return the config under the keys of this version, and the changes; see `rl_core.config.renames`."""
        entry, upgrade = upgraded(self.entry, root, is_whole=is_whole)
        return replace(self, entry=entry), upgrade


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, search: Search = ()) -> RawConfig:
    """Read a recipe and the files that it inherits from, and lay overrides over it.

    `defaults:` in a file lists one or several others (a recipe name, or a file relative to it, which may be in any
    folder that the user can read). Later ones take precedence, and the file itself over all of them. Mappings merge,
    lists and scalars are replaced. `file.py:Name` is relative to the folder of its file.

    Args:
        source: A recipe name, a YAML file, or plain nested values, which may have `defaults:` as well.
        overrides: `key.path=value` with the value as in YAML; text needs no quotes. `key=null` clears,
            `data.train[0].split=x` changes a list entry. `data.train.data_path=x` replaces a dataset that is given by
            `dataset_name`, with its settings, and the other way round; another `dataset_name` replaces its `settings`.
        search: The places that hold recipes.

    Raises:
        ConfigError: If a file does not exist or is not valid, `defaults:` form a circle, or an override cannot be read.
    """
    reader = _FileReader(search)
    if isinstance(source, Mapping):
        name, entry = "config", reader.over_parents(Entry.of(dict(source), Origin("config")), None, ())
    else:
        path = reader.find(str(source), None, None)
        name, entry = shown(path), reader.read(path, ())
    return RawConfig(name, _with_file_paths(_with_overrides(entry, overrides, reader)), tuple(reader.files))


def _with_overrides(entry: Entry, overrides: Sequence[str], reader: _FileReader) -> Entry:
    for place, text in enumerate(overrides):
        before = overrides[place - 1] if place else ""
        if text.strip() == "=" and before and place + 1 < len(overrides):
            raise ConfigError(f"write an override without spaces: {before}={overrides[place + 1]}")
    problems = []
    parsed: list[tuple[str, KeyPath, Entry]] = []
    for text in overrides:
        try:
            parsed.append((text, *_override(text, reader)))
        except ConfigError as error:
            problems.append(f"{_quoted(text)} ({given_in.get()}): {error}")
    # Datasets are replaced before any override is set, so that the order of overrides does not matter.
    for _, path, value in parsed:
        entry = _without_replaced_dataset(entry, path, value)
    for text, path, value in parsed:
        try:
            entry = entry.with_entry(path, value)
        except ConfigError as error:
            problems.append(f"{_quoted(text)} ({given_in.get()}): {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return entry


def _quoted(text: str) -> str:
    """Return a string of a user for messages, cut if it is long."""
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")


def _without_replaced_dataset(entry: Entry, path: KeyPath, value: Entry) -> Entry:
    """Remove the dataset, or the list of datasets, that an override replaces by one of the other kind: a file for a
    name or a name for a file. Its settings belong to it, as in a file with another dataset. Another name replaces only
    the name and `settings`.
    """
    *above, key = path
    section = entry.get(tuple(above))
    if key not in DATASET or value.value is None or section is None:
        return entry
    several = section.value if isinstance(section.value, list) else [section]
    named = [
        [name for name in DATASET if name in each.value and each.value[name].value is not None]
        if isinstance(each.value, dict)
        else []
        for each in several
    ]
    if not all(named):
        return entry
    if not isinstance(section.value, list) and key in named[0]:
        is_other = key == "dataset_name" and section.value[key].value != value.value
        kept = {name: item for name, item in section.value.items() if name != "settings"}
        return entry.with_entry(tuple(above), Entry(kept, section.origin)) if is_other else entry
    return entry.with_entry(tuple(above), Entry({}, value.origin))


def _with_file_paths(entry: Entry) -> Entry:
    """Make every `file.py:Name` absolute, from the folder of its file."""
    match entry.value:
        case dict():
            return Entry({key: _with_file_paths(item) for key, item in entry.value.items()}, entry.origin)
        case list():
            return Entry([_with_file_paths(item) for item in entry.value], entry.origin)
        case str():
            folder = Path() if entry.origin.line is None else Path(entry.origin.source).parent
            return Entry(beside(entry.value, folder), entry.origin)
        case _:
            return entry


def shown(path: Path) -> str:
    """Return a file as the user would type it: relative if it is below the current folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _override(text: str, reader: _FileReader) -> tuple[KeyPath, Entry]:
    """Return the path and the value of an override.

    Raises:
        ConfigError: If it cannot be read.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        if reader.is_config(key):
            both = "To combine both, write a file with defaults: [A, B]"
            raise ConfigError(f"is a recipe, but one recipe was given already. {both}")
        match = re.fullmatch(r"([\w.\[\]]+): *(.+)", key)
        example = f": {match[1]}={match[2]}" if match else f": {key}=VALUE" if key else ""
        raise ConfigError(f"an override is written key=value{example}")
    if key[:1] in ("+", "~", "-"):
        raise ConfigError(f"write key=value without {key[0]!r}: new keys need no prefix, and key=null clears one")
    path = parse_path(key)
    if path == ("defaults",):
        raise ConfigError("`defaults` belongs in a file: name another recipe instead")
    return path, read_value(value, given_in.get())


class _FileReader:
    """Finds and reads files, and lays each over the files that it inherits from."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self.files: list[Path] = []
        self._merged: dict[Path, Entry] = {}

    def read(self, path: Path, chain: tuple[Path, ...]) -> Entry:
        resolved = path.resolve()
        if len(chain) == MAX_DEPTH:
            raise ConfigError(f"{shown(path)}: `defaults` form a chain of more than {MAX_DEPTH} files. Remove some")
        if resolved in chain:
            circle = " -> ".join(shown(file) for file in (*chain[chain.index(resolved) :], resolved))
            raise ConfigError(f"circular `defaults`: {circle}. Remove one")
        # Several files may inherit from the same one.
        if path in self._merged:
            return self._merged[path]
        merged = self._merged[path] = self.over_parents(read_file(path, shown(path)), path, (*chain, resolved))
        if resolved not in self.files:
            self.files.append(resolved)
        return merged

    def over_parents(self, entry: Entry, path: Path | None, chain: tuple[Path, ...]) -> Entry:
        """Lay an entry over its `defaults`: recipes, or files relative to its own, `path`."""
        values = dict(entry.value)
        merged = Entry({}, entry.origin)
        for parent in _names(values.pop("defaults", None)):
            merged = merged.under(self.read(self.find(parent.value, path, parent.origin), chain))
        return merged.under(Entry(values, entry.origin))

    def find(self, name: str, beside: Path | None, origin: Origin | None) -> Path:
        place = f"{origin}: " if origin else ""
        if name.endswith(_SUFFIXES) or "/" in name:
            path = beside.parent / name if beside else Path(name)
            if path.is_file():
                return path
            others = [str(path.with_name(file.name)) for s in _SUFFIXES for file in path.parent.glob(f"*{s}")]
            raise ConfigError(f"{place}there is no file {shown(path)}{did_you_mean(str(path), others)}")
        sibling = beside.with_name(f"{name}.yaml") if beside else None
        found = sibling if sibling and sibling.is_file() else self._recipe(name)
        if found is None:
            raise ConfigError(f"{place}there is no recipe {name!r}{self._meant(name)}")
        return found

    def is_config(self, name: str) -> bool:
        """Return whether a string is a recipe or an existing YAML file."""
        return Path(name).is_file() if name.endswith(_SUFFIXES) else self._recipe(name) is not None

    def _meant(self, name: str) -> str:
        """Return the advice for a name that is not a recipe."""
        folders = () if callable(self._search) else self._search
        known = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
        files = [f"{name}{suffix}" for suffix in _SUFFIXES if Path(f"{name}{suffix}").is_file()]
        if near := (f"; did you mean {files[0]}?" if files else did_you_mean(name, known)):
            return near
        if Path(name).is_file():
            return f". It is a file, but its name does not end in {' or '.join(_SUFFIXES)}"
        listed = f"; rl recipes lists the {len(known)} recipes" if known else ""
        return f"{listed}; a file is named with its .yaml ending"

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


def interpolations(tree: Any) -> dict[KeyPath, str]:
    """Return every string in nested values that contains `${`, by path."""
    return {path: value for path, value in leaves(tree).items() if isinstance(value, str) and "${" in value}


def interpolate(tree: dict[str, Any], everything: dict[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Replace every `${...}` in a tree by its value, or by None if it is wrong.

    OmegaConf resolves one value at a time, so that every wrong one is reported with its own key.

    Args:
        tree: Plain nested values as the user wrote them.
        everything: The same over the defaults of keys that the user did not write, for interpolations.

    Returns:
        The tree, and the problems by path.
    """
    written = interpolations(tree)
    if not written:
        return tree, {}
    # OmegaConf and its grammar take 60 ms to import, which a config without interpolations need not wait for.
    from omegaconf import OmegaConf

    wrong = {path: message for path, text in written.items() if (message := _malformed(text))}
    wrong |= _too_many(written)
    resolvable = mapped(
        everything, lambda path, value: None if path in wrong else MISSING if isinstance(value, Unset) else value
    )
    container = OmegaConf.create(resolvable, flags={"allow_objects": True})
    values: dict[KeyPath, Any] = {}
    for path in written.keys() - wrong.keys():
        found, problem = _resolved(container, path)
        if problem is None:
            values[path] = found
        else:
            wrong[path] = _message(written[path], problem, map(format_path, leaves(everything)))
    return mapped(tree, lambda path, value: values.get(path) if path in written else value), wrong


def _too_many(written: Mapping[KeyPath, str]) -> dict[KeyPath, str]:
    """Return the problems of values whose interpolations need too many others: each level of `${a}${a}` doubles
    them."""
    counts: dict[KeyPath, int] = {}

    def count(path: KeyPath) -> int:
        if path not in counts:
            counts[path] = 0
            # A circle or a chain that is too long is reported when it is resolved.
            with suppress(RecursionError):
                counts[path] = sum(1 + sum(map(count, led)) for led in _references(path, written))
        return counts[path]

    return {
        path: f"{_quoted(text)} leads to more than {_MAX_EXPANSIONS:,} interpolations; write the value"
        for path, text in written.items()
        if count(path) > _MAX_EXPANSIONS
    }


def _references(path: KeyPath, written: Mapping[KeyPath, str]) -> Iterable[list[KeyPath]]:
    """Yield the interpolations at, below and above each key in a value."""
    for dots, key in _REFERENCE.findall(written[path]):
        try:
            target = (*(path[: -len(dots)] if dots else ()), *parse_path(key))
        except ConfigError:
            continue
        if target in written:
            yield [target]
        else:
            yield [each for each in written if each[: len(target)] == target or target[: len(each)] == each]


def _malformed(text: str) -> str | None:
    from omegaconf.errors import GrammarParseError
    from omegaconf.grammar_parser import parse

    try:
        parse(text)
    except GrammarParseError:
        remedy = "write ${section.key}, or \\${ for the characters themselves"
        return f"{_quoted(text)} is not a valid interpolation; {remedy}"
    return None


def _resolved(container: Any, path: KeyPath) -> tuple[Any, Exception | None]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    found = container
    try:
        for segment in path:
            found = found[segment]
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        return None, error
    return found, None


def _message(text: str, error: Exception, known: Iterable[str]) -> str:
    reason = str(error).partition("\n")[0]
    if isinstance(error, RecursionError) or "Recursive interpolation" in reason:
        return f"{_quoted(text)} leads back to itself; set one of the keys in the circle to a value"
    if (match := _NOT_FOUND.search(reason)) and match[1].lstrip(".") in text:
        return f"{_quoted(text)} names {match[1]}, which is not a key here{did_you_mean(match[1].lstrip('.'), known)}"
    if match := _VARIABLE.search(reason):
        name = match[1]
        remedy = f"set it, or write ${{oc.env:{name},VALUE}} for a default"
        return f"{_quoted(text)} needs the environment variable {name}: {remedy}"
    if "Unsupported interpolation type" in reason:
        name = reason.rpartition(" ")[2]
        remedy = "write the value, or a key as ${section.key}"
        return f"{_quoted(text)} asks for {name!r}, which is not available here; {remedy}"
    if "MissingMandatoryValue" in reason or "MissingValue" in type(error).__name__:
        return f"{_quoted(text)} names a key marked {MISSING}: set that key"
    if "oc.env" in text or text.count("${") > 1:
        # The message of OmegaConf would show the value of the variable.
        return f"{_quoted(text)} cannot be resolved with the current values of the keys and variables in it"
    return f"{_quoted(text)} cannot be resolved: {reason[:_MAX_QUOTED]}"
