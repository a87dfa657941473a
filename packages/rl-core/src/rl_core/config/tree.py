"""YAML as a tree of values, each with its origin.

An unquoted scalar keeps its text: `model_name=1e5` must reach a string field as `1e5` and a number field as 100000.0,
also through an interpolation. Only the schema knows the type of the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import yaml

from rl_core.errors import ConfigError

T = TypeVar("T")

KeyPath = tuple[str | int, ...]
"""A key's segments: names, and positions in lists."""

MISSING: Final = "???"
"""An unquoted value that marks a key which the user of the file must set."""

MAX_BYTES = 4 << 20
"""Maximum size of a file."""
MAX_DEPTH = 64
"""Maximum number of levels of nested lists and mappings, each alias (`*name`) written out."""
MAX_DIGITS = 300
"""Maximum length of a number; a number of 309 digits is larger than any float."""
MAX_VALUES = 50_000
"""Maximum number of keys and values of a file, each alias (`*name`) written out."""

DATASET = ("dataset_name", "data_path")
"""Keys of a mapping that select a dataset."""

_PART = re.compile(r"([^.\[\]]+)((?:\[\d{1,9}\])*)")
_INT = re.compile(r"[-+]?(?:0|[1-9]\d*(?:_\d+)*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*)?(?:\d\.|\.\d)[\d_]*(?:[eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_NULL = ("", "~", "null", "Null", "NULL")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Characters that a file in UTF-8 cannot have; YAML and JSON can write them as escapes."""
TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} levels deep"
"""Message about a file whose nesting exceeds `MAX_DEPTH`."""
_TOO_MANY = f"more than {MAX_VALUES:,} keys and values, each alias (`*name`) written out"
TOO_LONG = f"a number has more than {MAX_DIGITS:,} digits; quote it to pass it as a string"
_CLOSING = {"{": "}", "[": "]"}
_TEXT, _LIST, _MAPPING = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


def parse_path(key: str) -> KeyPath:
    """Return the segments of a dotted key such as `data.train[0].split`; `[n]` addresses an entry of a list.

    Raises:
        ConfigError: If a segment is empty or malformed.
    """
    path: list[str | int] = []
    for part in key.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(f"{key[:300]!r} is not a key: write names joined by dots, list entries as [0]")
        path.append(match[1])
        path.extend(int(index) for index in re.findall(r"\d+", match[2]))
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{key[:40]!r}... is not a key: it has more than {MAX_DEPTH} levels")
    return tuple(path)


def format_path(path: Iterable[str | int]) -> str:
    """Return the dotted key of a path; inverse of `parse_path`."""
    text = ""
    for segment in path:
        text += f"[{segment}]" if isinstance(segment, int) else f".{segment}"
    return text.removeprefix(".")


def mapped(tree: Any, change: Callable[[KeyPath, Any], Any], path: KeyPath = ()) -> Any:
    """Replace every scalar in nested dicts and lists by `change(path, scalar)`."""
    match tree:
        case dict():
            return {key: mapped(item, change, (*path, key)) for key, item in tree.items()}
        case list():
            return [mapped(item, change, (*path, index)) for index, item in enumerate(tree)]
        case _:
            return change(path, tree)


def leaves(tree: Any) -> dict[KeyPath, Any]:
    """Return every scalar of nested dicts and lists by its path."""
    found: dict[KeyPath, Any] = {}
    mapped(tree, found.__setitem__)
    return found


@dataclass(frozen=True)
class Origin:
    """Place of a value in what was written.

    Args:
        source: A file as the user would type it, `command line`, `default`, or the name of a mapping made in code.
        line: Line in the file, from 1.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


COMMAND_LINE = Origin("command line")
"""Origin of a value on the command line."""
PYTHON = Origin("overrides")
"""Origin of a value that a Python call passed."""
given_in: ContextVar[Origin] = ContextVar("given_in", default=COMMAND_LINE)
"""Origin of overrides: `PYTHON` for overrides of a function call."""


def option(flag: str, argument: str) -> str:
    """Return how the user writes an option, for messages.

    Args:
        flag: Form on the command line, such as `--fresh`.
        argument: Form in a call from Python, such as `fresh=True`.
    """
    return argument if given_in.get() is PYTHON else flag


DEFAULT = Origin("default")
"""Origin of a value that nobody wrote."""


class Unset:
    """The value of a key marked `???`."""

    def __repr__(self) -> str:
        return MISSING


class Unquoted(str):
    """The text of an unquoted number or truth value."""

    @property
    def value(self) -> bool | int | float:
        """Number or truth value by the rules of YAML 1.2."""
        if self in _BOOL:
            return _BOOL[self]
        if _INT.fullmatch(self):
            return int(self.replace("_", ""), 0)
        return float(_SPECIAL.get(self.lower(), self.replace("_", "")))


def read_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar by the rules of YAML 1.2: `1e5` is a float, `no` and `3:30:00` are
    text."""
    if text in _NULL:
        return None
    if text in _BOOL or _INT.fullmatch(text) or text.lower() in _SPECIAL or _FLOAT.fullmatch(text):
        return Unquoted(text)
    return Unset() if text == MISSING else text


def is_too_long(text: str) -> bool:
    """Return whether an unquoted scalar is a number with more than `MAX_DIGITS` digits, which no key can take."""
    return len(text) > MAX_DIGITS and isinstance(read_scalar(text), Unquoted)


def natural(tree: Any) -> Any:
    """Return nested values with numbers and truth values in place of their strings."""
    return mapped(tree, lambda _, value: value.value if isinstance(value, Unquoted) else value)


@dataclass(frozen=True)
class Entry:
    """A value and its origin.

    Args:
        value: A `dict[str, Entry]`, a `list[Entry]` or a scalar.
        origin: The place where it was written; for a mapping, the first place of its key.
    """

    value: Any
    origin: Origin

    @classmethod
    def of(cls, value: Any, origin: Origin) -> Entry:
        """Return the tree of plain nested values that all have one origin."""
        match value:
            case dict():
                return cls({str(key): cls.of(item, origin) for key, item in value.items()}, origin)
            case list() | tuple():
                return cls([cls.of(item, origin) for item in value], origin)
            case _:
                return cls(value, origin)

    def plain(self) -> Any:
        """Return the values only, as nested dicts and lists."""
        match self.value:
            case dict():
                return {key: entry.plain() for key, entry in self.value.items()}
            case list():
                return [entry.plain() for entry in self.value]
            case _:
                return self.value

    def under(self, over: Entry) -> Entry:
        """Return this tree with another laid over it: mappings merge, everything else is replaced. A mapping that
        chooses another function or class by its `name`, or another dataset, is replaced too, because its settings
        belong to the earlier one. A string under a mapping is the short form of its `name`.
        """
        below = self._as_mapping() if isinstance(over.value, dict) else self
        if not (isinstance(below.value, dict) and isinstance(over.value, dict)) or _chooses_another(below, over):
            return over
        merged = dict(below.value)
        for key, entry in over.value.items():
            merged[key] = merged[key].under(entry) if key in merged else entry
        return Entry(merged, self.origin)

    def with_entry(self, path: KeyPath, entry: Entry) -> Entry:
        """Return this tree with one entry put at a path; mappings on the way are created, list entries must exist.

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
        """Return the long form of a name in the place of a section; anything else as it is."""
        is_name = type(self.value) is str and "${" not in self.value
        return Entry({"name": self}, self.origin) if is_name else self

    def along(self, path: KeyPath) -> list[Entry]:
        """Return the entries from the root to the entry at a path, as far as anything was written."""
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
        """Return the entry at a path; None if nothing was written there."""
        found = self.along(path)
        return found[-1] if len(found) > len(path) else None

    def origin_at(self, path: KeyPath) -> Origin:
        """Return the origin of the value at a path; a value from an interpolation has the origin of the
        interpolation."""
        *around, last = self.along(path)
        is_written = len(around) == len(path) or not isinstance(last.value, dict | list)
        return last.origin if is_written else DEFAULT

    def nearest_origin(self, path: KeyPath) -> Origin:
        """Return the origin of the value at a path, or else of the innermost section around it."""
        return self.along(path)[-1].origin


class BoundedLoader(yaml.SafeLoader):
    """Composes nodes within `MAX_DEPTH` and `MAX_VALUES`. The bounds hold for the tree with each alias written out,
    because a few lines of aliases to aliases could produce any number of values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._num_nodes = 0
        self._extents: dict[yaml.Node, tuple[int, int]] = {}
        """Numbers of nodes and of levels of each node that is complete."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self._num_nodes += 1
        self._depth += 1
        self._check(self._num_nodes, self._depth, event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._complete(node)
        elif node not in self._extents:
            _refuse("an alias (`*name`) inside its own anchor is endless", event.start_mark)
        return node

    def _complete(self, node: Any) -> None:
        inner: list[yaml.Node] = []
        match node:
            case yaml.ScalarNode() if found := _SURROGATE.search(node.value):
                _refuse(_half(found), node.start_mark)
            case yaml.ScalarNode(style=None) if is_too_long(node.value):
                _refuse(TOO_LONG, node.start_mark)
            case yaml.SequenceNode():
                inner = node.value
            case yaml.MappingNode():
                inner = [each for pair in node.value for each in pair]
        extents = [self._extents[each] for each in inner]
        num_nodes, depth = 1 + sum(each for each, _ in extents), 1 + max((each for _, each in extents), default=0)
        self._check(num_nodes, depth, node.start_mark)
        self._extents[node] = (num_nodes, depth)

    def _check(self, num_nodes: int, depth: int, mark: Any) -> None:
        if depth > MAX_DEPTH:
            _refuse(TOO_DEEP, mark)
        if num_nodes > MAX_VALUES:
            _refuse(_TOO_MANY, mark)


class OutOfBounds(yaml.MarkedYAMLError):
    """Raised for YAML that is valid and is not accepted."""


def _refuse(problem: str, mark: Any) -> NoReturn:
    raise OutOfBounds(problem=problem, problem_mark=mark)


def _half(found: re.Match[str]) -> str:
    return f"a string has half of a surrogate pair (\\u{ord(found[0]):04x}); write the character itself"


class _Composer(BoundedLoader):
    """Composes nodes without giving scalars a type: `read_scalar` does, by YAML 1.2's rules."""

    yaml_implicit_resolvers = {}


def _chooses_another(below: Entry, over: Entry) -> bool:
    """Return whether two mappings have different datasets, or different names, one of them as `module:name`."""
    datasets = [
        {key: mapping.value[key].value for key in DATASET if key in mapping.value and mapping.value[key].value}
        for mapping in (over, below)
    ]
    if all(datasets) and datasets[0] != datasets[1]:
        return True
    names = [mapping.value["name"].value if "name" in mapping.value else None for mapping in (over, below)]
    return names[0] not in (None, names[1]) and any(isinstance(name, str) and ":" in name for name in names)


def read_file(path: Path, name: str) -> Entry:
    """Read the tree of a YAML file.

    Args:
        path: Path of the YAML file.
        name: Name of the file in origins and messages.

    Raises:
        ConfigError: If it cannot be read, is not YAML, has more than `MAX_VALUES` values or `MAX_DEPTH` levels, or has
            duplicated keys, tags or merge keys.
    """
    text = read_text(path, name)
    root = parsed(text, name, lambda: _composed(text))
    if root is None:
        return Entry({}, Origin(name, 1))
    return _read(root, _NodeReader(name, is_numbered=True))


def read_text(path: Path, name: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file in UTF-8, without a mark of the byte order.

    Args:
        path: Path of the file.
        name: Name of the file in messages.
        max_bytes: Maximum size.

    Raises:
        ConfigError: If it cannot be read, is not text in UTF-8, or is larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(data) <= max_bytes:
            raise ConfigError(f"{name}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{name}: larger than {max_bytes:,} bytes, which is too large for a config or a script")
    return text.replace("\r\n", "\n")


def reason(error: Exception) -> str:
    """Return the message of an error for a user: Python's message about a long number mentions a function of `sys`."""
    return TOO_LONG if "set_int_max_str_digits" in str(error) else str(error)


def bounded(tree: Any, name: str) -> Any:
    """Return nested values of JSON or TOML, which have the bounds of a YAML file.

    Args:
        tree: Nested values.
        name: Name of their file in messages.

    Raises:
        ConfigError: If there are too many, or they are nested too deeply; if a number has too many digits, or a value
            is not one of YAML.
    """
    num_values = 0

    def checked(value: Any, path: KeyPath) -> Any:
        nonlocal num_values
        num_values += 1
        problem = TOO_DEEP if len(path) >= MAX_DEPTH else _TOO_MANY if num_values > MAX_VALUES else ""
        match value:
            case _ if problem:
                pass
            case dict():
                return {checked(str(key), path): checked(item, (*path, str(key))) for key, item in value.items()}
            case list():
                return [checked(item, (*path, index)) for index, item in enumerate(value)]
            case str() if found := _SURROGATE.search(value):
                problem = _half(found)
            case int() if abs(value) >= 10**MAX_DIGITS:
                problem = TOO_LONG
            case str() | int() | float() | None:
                return value
            case _:
                problem = f"{type(value).__name__} is not supported. Write the value as a string, a number or a list"
        raise ConfigError(f"{name}: {format_path(path)[:80]}: {problem}")

    return checked(tree, ())


def read_value(text: str, origin: Origin) -> Entry:
    """Return the value of a command-line override: a quoted string, a list or mapping in flow syntax, or a scalar.

    Raises:
        ConfigError: If a quoted string, list or mapping is not complete YAML.
    """
    text = text.strip()
    if text[:1] not in ("[", "{", "'", '"'):
        if is_too_long(text):
            raise ConfigError(TOO_LONG)
        return Entry(read_scalar(text) if text else "", origin)
    root = parsed(text, None, lambda: _composed(text))
    assert root is not None
    return _read(root, _NodeReader(origin.source, is_numbered=False))


def _read(root: yaml.Node, reader: _NodeReader) -> Entry:
    entry = reader.entry(root)
    if reader.is_numbered and not isinstance(entry.value, dict):
        reader.refuse(root, "the file must hold `key: value` lines")
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    return entry


def parsed(text: str, source: str | None, parse: Callable[[], T]) -> T:
    """Return the result of a function that parses YAML.

    Args:
        text: The YAML.
        source: Name of its file, which messages show with a line; None if it is not from a file.
        parse: Parses the text.

    Raises:
        ConfigError: If the text is not valid, or is out of bounds.
    """
    try:
        return parse()
    except yaml.MarkedYAMLError as error:
        parts = [part for part in (error.context, error.problem) if part]
        problem = f"{'' if isinstance(error, OutOfBounds) else 'not valid YAML: '}{', '.join(parts)}"
        if source is None:
            raise ConfigError(f"{problem}; quote the value to pass it as a string") from None
        line, remedy = _fault(error, text.splitlines())
        raise ConfigError(f"{Origin(source, line)}: {problem}{remedy}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        before = f"{Origin(source, line)}: " if source else ""
        raise ConfigError(f"{before}not valid YAML: {error.reason} ({error.character!r})") from None


@lru_cache(maxsize=64)
def _composed(text: str) -> yaml.Node | None:
    """Return the root node. It is cached, because nodes are only read and the same recipes are read repeatedly."""
    loader = _Composer(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _fault(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[int | None, str]:
    """Return the line that most likely has to be changed, and how. YAML reports a mistake at the text after it that no
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


class _NodeReader:
    """Turns composed nodes into entries and gathers problems.

    Args:
        is_numbered: True if the nodes are from a file, so that origins have lines.
    """

    def __init__(self, source: str, *, is_numbered: bool) -> None:
        self._source = source
        self.is_numbered = is_numbered
        self._path: list[str | int] = []
        self.problems: list[str] = []

    def refuse(self, node: yaml.Node, problem: str) -> Entry:
        self.problems.append(f"{self._origin(node)}: {problem}")
        return Entry(None, self._origin(node))

    def entry(self, node: yaml.Node) -> Entry:
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
