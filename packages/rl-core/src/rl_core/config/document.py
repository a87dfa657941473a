"""YAML text as a tree of entries: duplicated keys, tags and merge keys are refused, every problem with its line."""

from __future__ import annotations

from pathlib import Path

import yaml

from rl_core.config.entry import Entry
from rl_core.config.key_path import format_path
from rl_core.config.origin import Origin
from rl_core.config.scalar import read_scalar
from rl_core.errors import ConfigError

_TEXT, _LIST, _MAPPING = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


class _Composer(yaml.SafeLoader):
    """Composes nodes without giving scalars a type: `read_scalar` does, by YAML 1.2's rules."""

    yaml_implicit_resolvers = {}


def read_document(text: str, source: str) -> Entry:
    """The tree of a YAML document.

    Args:
        source: name of the file, for origins and messages.

    Raises:
        ConfigError: naming file and line, where the text is not YAML or uses what is refused here.
    """
    root = _compose(text, source)
    if root is None:
        return Entry({}, Origin(source, 1))
    reader = _Reader(source, numbered=True)
    entry = reader.entry(root)
    if not isinstance(entry.value, dict):
        reader.refuse(root, "the file must hold `key: value` lines")
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    return entry


def read_file(path: Path, name: str) -> Entry:
    """The tree of a YAML file.

    Raises:
        ConfigError: where it cannot be read, or as `read_document`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    return read_document(text, name)


def read_value(text: str, origin: Origin) -> Entry:
    """The value of a command-line override: quoted text, a list or mapping in flow syntax, or a scalar as it stands.

    Raises:
        ConfigError: where a quoted text, list or mapping is not complete YAML.
    """
    text = text.strip()
    if text[:1] not in ("[", "{", "'", '"'):
        return Entry(read_scalar(text) if text else "", origin)
    root = _compose(text, None)
    assert root is not None
    reader = _Reader(origin.source, numbered=False)
    entry = reader.entry(root)
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    return entry


def _compose(text: str, source: str | None) -> yaml.Node | None:
    """The root node; the source is named in messages with a line, None where the text is no file's."""
    loader = None
    try:
        loader = _Composer(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        if source is None:
            raise ConfigError(f"not valid YAML: {what}; quote the value to pass it as text") from None
        where = Origin(source, mark.line + 1 if mark else None)
        raise ConfigError(f"{where}: not valid YAML: {what}{_remedy(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        place = f"{Origin(source, line)}: " if source else ""
        raise ConfigError(f"{place}not valid YAML: {error.reason} ({error.character!r})") from None
    finally:
        if loader is not None:
            loader.dispose()


def _remedy(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if r"'\t'" in problem:
        return "; indent with spaces"
    if "mapping values are not allowed" in problem:
        return "; quote a value that holds `: `, and indent keys of a section alike"
    return ""


class _Reader:
    """Turns composed nodes into entries and gathers what is refused."""

    def __init__(self, source: str, *, numbered: bool) -> None:
        self._source = source
        self._numbered = numbered
        self._open: list[yaml.Node] = []
        self._path: list[str | int] = []
        self.problems: list[str] = []

    def refuse(self, node: yaml.Node, what: str) -> Entry:
        self.problems.append(f"{self._origin(node)}: {what}")
        return Entry(None, self._origin(node))

    def entry(self, node: yaml.Node) -> Entry:
        if any(node is parent for parent in self._open):
            return self.refuse(node, "an alias (`*name`) inside its own anchor never ends")
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
                return self.refuse(node, f"the tag {_short(node.tag)} is not allowed: write the plain value")

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
        return Origin(self._source, node.start_mark.line + 1 if self._numbered else None)


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")
