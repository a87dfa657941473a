"""YAML text as a tree of values, each with its origin.

An unquoted scalar keeps its text: `model_name=1e5` must reach a text field as `1e5` and a number field as 100000.0,
also through an interpolation. Only the schema can tell which of the two is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from rl_core.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""A key's segments: names, and positions in lists."""

MISSING: Final = "???"
"""An unquoted value that marks a key which the user of the file must set."""

MAX_DEPTH = 64
"""Maximum number of levels of nested lists and mappings, each alias (`*name`) written out."""
MAX_VALUES = 50_000
"""Maximum number of values of a file, each alias (`*name`) written out."""

DATASET = ("dataset_name", "data_path")
"""Keys of a mapping that name a dataset."""

_PART = re.compile(r"([^.\[\]]+)((?:\[\d+\])*)")
_INT = re.compile(r"[-+]?(?:0|[1-9]\d*(?:_\d+)*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*)?(?:\d\.|\.\d)[\d_]*(?:[eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_NULL = ("", "~", "null", "Null", "NULL")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} levels deep"
_CLOSING = {"{": "}", "[": "]"}
_TEXT, _LIST, _MAPPING = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


def parse_path(key: str) -> KeyPath:
    """The segments of a dotted key such as `data.train[0].split`; `[n]` addresses an entry of a list.

    Raises:
        ConfigError: If a segment is empty or malformed.
    """
    path: list[str | int] = []
    for part in key.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(f"{key!r} is not a key: write names joined by dots, list entries as [0]")
        path.append(match[1])
        path.extend(int(index) for index in re.findall(r"\d+", match[2]))
    return tuple(path)


def format_path(path: Iterable[str | int]) -> str:
    """The dotted key of a path; inverse of `parse_path`."""
    text = ""
    for segment in path:
        text += f"[{segment}]" if isinstance(segment, int) else f".{segment}"
    return text.removeprefix(".")


def mapped(tree: Any, change: Callable[[KeyPath, Any], Any], path: KeyPath = ()) -> Any:
    """Nested dicts and lists with every scalar in them replaced by `change(path, scalar)`."""
    match tree:
        case dict():
            return {key: mapped(item, change, (*path, key)) for key, item in tree.items()}
        case list():
            return [mapped(item, change, (*path, index)) for index, item in enumerate(tree)]
        case _:
            return change(path, tree)


def leaves(tree: Any) -> dict[KeyPath, Any]:
    """Every scalar of nested dicts and lists by its path."""
    found: dict[KeyPath, Any] = {}
    mapped(tree, found.__setitem__)
    return found


@dataclass(frozen=True)
class Origin:
    """Place at which a value was written.

    Args:
        source: A file as the user would type it, `command line`, `default`, or the name of a mapping made in code.
        line: Line in the file, from 1.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


COMMAND_LINE = Origin("command line")
PYTHON = Origin("overrides")
given_in: ContextVar[Origin] = ContextVar("given_in", default=COMMAND_LINE)
"""Origin of overrides: `PYTHON` for those of a function call."""


def option(flag: str, argument: str) -> str:
    """Return how the user writes an option, for messages.

    Args:
        flag: On the command line, such as `--fresh`.
        argument: In a call from Python, such as `fresh=True`.
    """
    return argument if given_in.get() is PYTHON else flag


DEFAULT = Origin("default")


class Unset:
    """The value of a key marked `???`."""

    def __repr__(self) -> str:
        return MISSING


class Unquoted(str):
    """The text of an unquoted number or truth value."""

    @property
    def value(self) -> bool | int | float:
        """The number or truth value by YAML 1.2's rules."""
        if self in _BOOL:
            return _BOOL[self]
        if _INT.fullmatch(self):
            return int(self.replace("_", ""), 0)
        return float(_SPECIAL.get(self.lower(), self.replace("_", "")))


def read_scalar(text: str) -> Any:
    """The value of an unquoted scalar by YAML 1.2's rules: `1e5` is a float, `no`, `010` and `3:30:00` are text."""
    if text in _NULL:
        return None
    if text in _BOOL or _INT.fullmatch(text) or text.lower() in _SPECIAL or _FLOAT.fullmatch(text):
        return Unquoted(text)
    return Unset() if text == MISSING else text


def natural(tree: Any) -> Any:
    """Nested values with numbers and truth values in place of their strings."""
    return mapped(tree, lambda _, value: value.value if isinstance(value, Unquoted) else value)


@dataclass(frozen=True)
class Entry:
    """A value and its origin.

    Args:
        value: A `dict[str, Entry]`, a `list[Entry]` or a scalar.
        origin: The place at which it was written; that of a mapping is the first place of its key.
    """

    value: Any
    origin: Origin

    @classmethod
    def of(cls, value: Any, origin: Origin) -> Entry:
        """The tree of plain nested values that all have one origin."""
        match value:
            case dict():
                return cls({str(key): cls.of(item, origin) for key, item in value.items()}, origin)
            case list() | tuple():
                return cls([cls.of(item, origin) for item in value], origin)
            case _:
                return cls(value, origin)

    def plain(self) -> Any:
        """Only the values, as nested dicts and lists."""
        match self.value:
            case dict():
                return {key: entry.plain() for key, entry in self.value.items()}
            case list():
                return [entry.plain() for entry in self.value]
            case _:
                return self.value

    def under(self, over: Entry) -> Entry:
        """This tree with another laid over it: mappings merge, everything else is replaced. A mapping that chooses
        another function or class by its `name`, or another dataset, is replaced too: the settings below it belong to
        the earlier one. Text under a mapping is the short form of its `name`.
        """
        below = self._as_mapping() if isinstance(over.value, dict) else self
        if not (isinstance(below.value, dict) and isinstance(over.value, dict)) or _chooses_another(below, over):
            return over
        merged = dict(below.value)
        for key, entry in over.value.items():
            merged[key] = merged[key].under(entry) if key in merged else entry
        return Entry(merged, self.origin)

    def with_entry(self, path: KeyPath, entry: Entry) -> Entry:
        """This tree with one entry put at a path; mappings on the way are made, list entries must exist.

        Raises:
            ConfigError: If the path leads to a list entry that does not exist.
        """
        if not path:
            return entry
        head, *rest = path
        if isinstance(self.value, list):
            if not str(head).isdecimal() or int(head) >= len(self.value):
                raise ConfigError(f"{format_path([head])} is not a valid index: the list has {len(self.value)} entries")
            items = list(self.value)
            items[int(head)] = items[int(head)].with_entry(tuple(rest), entry)
            return Entry(items, self.origin)
        if isinstance(head, int):
            raise ConfigError(f"[{head}] addresses a list entry, but there is no list to change; write the whole list")
        mapping = self._as_mapping().value
        known = mapping if isinstance(mapping, dict) else {}
        child = known.get(head, Entry({}, entry.origin))
        return Entry({**known, head: child.with_entry(tuple(rest), entry)}, self.origin)

    def _as_mapping(self) -> Entry:
        """The long form of a name that stands for a section; anything else as it is."""
        is_name = type(self.value) is str and "${" not in self.value
        return Entry({"name": self}, self.origin) if is_name else self

    def along(self, path: KeyPath) -> list[Entry]:
        """The entries from the root to the one at a path, as far as anything was written."""
        found = [self]
        for segment in path:
            match found[-1].value:
                case dict(known) if segment in known:
                    found.append(known[segment])
                case list(known) if isinstance(segment, int) and segment < len(known):
                    found.append(known[segment])
                case _:
                    break
        return found

    def get(self, path: KeyPath) -> Entry | None:
        """The entry at a path, None if nothing was written there."""
        found = self.along(path)
        return found[-1] if len(found) > len(path) else None

    def origin_at(self, path: KeyPath) -> Origin:
        """The origin of the value at a path; of one that an interpolation brought in, that of the interpolation."""
        *around, last = self.along(path)
        is_written = len(around) == len(path) or not isinstance(last.value, dict | list)
        return last.origin if is_written else DEFAULT

    def nearest_origin(self, path: KeyPath) -> Origin:
        """The origin of the value at a path, or else of the innermost section around it."""
        return self.along(path)[-1].origin


class _Composer(yaml.SafeLoader):
    """Composes nodes without giving scalars a type: `read_scalar` does, by YAML 1.2's rules."""

    yaml_implicit_resolvers = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, self.peek_event().start_mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _chooses_another(below: Entry, over: Entry) -> bool:
    """Return whether two mappings name different datasets, or different things, one of them by `module:name`."""
    datasets = [
        {key: mapping.value[key].value for key in DATASET if key in mapping.value and mapping.value[key].value}
        for mapping in (over, below)
    ]
    if all(datasets) and datasets[0] != datasets[1]:
        return True
    names = [mapping.value["name"].value if "name" in mapping.value else None for mapping in (over, below)]
    return names[0] not in (None, names[1]) and any(isinstance(name, str) and ":" in name for name in names)


def read_file(path: Path, name: str) -> Entry:
    """The tree of a YAML file.

    Args:
        path: Path of the YAML file.
        name: Name of the file in origins and messages.

    Raises:
        ConfigError: If it cannot be read, is not YAML, has more than `MAX_VALUES` values or `MAX_DEPTH` levels, or uses
            what is refused: duplicated keys, tags and merge keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    root = _compose(text, name)
    if root is None:
        return Entry({}, Origin(name, 1))
    return _read(root, _Reader(name, is_numbered=True))


def read_value(text: str, origin: Origin) -> Entry:
    """The value of a command-line override: quoted text, a list or mapping in flow syntax, or a scalar as it stands.

    Raises:
        ConfigError: If a quoted text, list or mapping is not complete YAML.
    """
    text = text.strip()
    if text[:1] not in ("[", "{", "'", '"'):
        return Entry(read_scalar(text) if text else "", origin)
    root = _compose(text, None)
    assert root is not None
    return _read(root, _Reader(origin.source, is_numbered=False))


def _read(root: yaml.Node, reader: _Reader) -> Entry:
    entry = reader.entry(root)
    if reader.is_numbered and not isinstance(entry.value, dict):
        reader.refuse(root, "the file must hold `key: value` lines")
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    return entry


def _compose(text: str, source: str | None) -> yaml.Node | None:
    """The root node; the source is named in messages with a line, None if the text is not a file's."""
    try:
        return _composed(text)
    except yaml.MarkedYAMLError as error:
        what = ", ".join(part for part in (error.context, error.problem) if part)
        if source is None:
            raise ConfigError(f"not valid YAML: {what}; quote the value to pass it as a string") from None
        line, remedy = _fault(error, text.splitlines())
        raise ConfigError(f"{Origin(source, line)}: not valid YAML: {what}{remedy}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        before = f"{Origin(source, line)}: " if source else ""
        raise ConfigError(f"{before}not valid YAML: {error.reason} ({error.character!r})") from None


@lru_cache(maxsize=64)
def _composed(text: str) -> yaml.Node | None:
    """The root node; nodes are only read, and the same recipes are read again and again."""
    loader = _Composer(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _fault(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[int | None, str]:
    """Return the line that most likely has to be changed, and how. YAML notices a mistake where the text after it no
    longer fits."""
    problem, begun = error.problem or "", error.context_mark
    mark = error.problem_mark or begun
    line = mark.line + 1 if mark else None
    if r"'\t'" in problem:
        return line, "; indent with spaces"
    if problem == "could not find expected ':'" and begun is not None:
        return begun.line + 1, f"; write a colon and a space after the key, as in {lines[begun.line].strip()}: VALUE"
    if begun is not None and ("flow" in (error.context or "") or "quoted" in (error.context or "")):
        opened = lines[begun.line][begun.column : begun.column + 1]
        return begun.line + 1, f"; close the {opened} of this line with {_CLOSING.get(opened, opened)}"
    if "mapping values are not allowed" in problem and mark is not None:
        before = next((at for at in range(mark.line - 1, -1, -1) if lines[at].strip(" -#")), None)
        written = "" if before is None else lines[before].partition(" #")[0].strip()
        if before is not None and written[:1] != "#" and ": " not in written and not written.endswith(":"):
            key, colon, value = written.partition(":")
            key, _, rest = (key, "", value) if colon else written.partition(" ")
            return before + 1, f"; write a colon and a space after the key, as in {key}: {rest}".rstrip()
        return line, "; quote a value that contains `: `, and indent all keys of a section equally"
    return line, "; indent all keys of a section equally" if "block mapping" in (error.context or "") else ""


class _Reader:
    """Turns composed nodes into entries and gathers what is refused.

    Args:
        is_numbered: True if the nodes are a file's, so that origins have lines.
    """

    def __init__(self, source: str, *, is_numbered: bool) -> None:
        self._source = source
        self.is_numbered = is_numbered
        self._open: list[yaml.Node] = []
        self._num_values = 0
        self._path: list[str | int] = []
        self.problems: list[str] = []

    def refuse(self, node: yaml.Node, problem: str) -> Entry:
        self.problems.append(f"{self._origin(node)}: {problem}")
        return Entry(None, self._origin(node))

    def entry(self, node: yaml.Node) -> Entry:
        if any(node is parent for parent in self._open):
            return self.refuse(node, "an alias (`*name`) inside its own anchor is endless")
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            # at once: a few lines of aliases to aliases stand for any number of values
            what = f"more than {MAX_VALUES:,} values, each alias (`*name`) written out"
            raise ConfigError(f"{self._origin(node)}: {what}")
        if len(self._open) == MAX_DEPTH:
            raise ConfigError(f"{self._origin(node)}: {_TOO_DEEP}")
        self._open.append(node)
        try:
            return self._entry(node)
        finally:
            self._open.pop()

    def _entry(self, node: yaml.Node) -> Entry:
        origin = self._origin(node)
        match node:
            case yaml.ScalarNode(tag=tag) if tag == _TEXT:
                return Entry(read_scalar(node.value) if node.style is None else node.value, origin)
            case yaml.SequenceNode(tag=tag) if tag == _LIST:
                return Entry([self._child(index, item) for index, item in enumerate(node.value)], origin)
            case yaml.MappingNode(tag=tag) if tag == _MAPPING:
                return Entry(self._mapping(node), origin)
            case _:
                tag = node.tag.replace("tag:yaml.org,2002:", "!!")
                return self.refuse(node, f"the tag {tag} is not allowed: write the plain value")

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.value:
                self.refuse(key, "a key must be a name")
                continue
            if key.value == "<<" and key.style is None:
                self.refuse(key, "merge keys (`<<`) are not allowed: use `defaults:` or an interpolation")
                continue
            entry = self._child(key.value, value)
            if key.value in entries:
                name = format_path((*self._path, key.value))
                self.refuse(key, f"the key {name} is there twice, first in line {lines[key.value]}; keep one")
            else:
                lines[key.value] = key.start_mark.line + 1
                entries[key.value] = Entry(entry.value, self._origin(key))
        return entries

    def _child(self, segment: str | int, node: yaml.Node) -> Entry:
        self._path.append(segment)
        entry = self.entry(node)
        self._path.pop()
        return entry

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self._source, node.start_mark.line + 1 if self.is_numbered else None)
