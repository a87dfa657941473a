"""A tree of values in which each knows where it was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_core.config.key_path import KeyPath, format_path
from rl_core.config.origin import DEFAULT, Origin


@dataclass(frozen=True)
class Entry:
    """A value and its origin.

    Args:
        value: a `dict[str, Entry]`, a `list[Entry]` or a scalar.
        origin: where it was written; that of a mapping is where its key first stood.
    """

    value: Any
    origin: Origin

    def plain(self) -> Any:
        """The values alone, as nested dicts and lists."""
        match self.value:
            case dict():
                return {key: entry.plain() for key, entry in self.value.items()}
            case list():
                return [entry.plain() for entry in self.value]
            case _:
                return self.value

    def under(self, over: Entry) -> Entry:
        """This tree with another laid over it: mappings merge, everything else is replaced."""
        if not (isinstance(self.value, dict) and isinstance(over.value, dict)):
            return over
        merged = dict(self.value)
        for key, entry in over.value.items():
            merged[key] = merged[key].under(entry) if key in merged else entry
        return Entry(merged, self.origin)

    def with_entry(self, path: KeyPath, entry: Entry) -> Entry:
        """This tree with one entry put at a path; mappings on the way are made, list entries must exist.

        Raises:
            ValueError: where the path leads to a list entry that is not there.
        """
        if not path:
            return entry
        head, *rest = path
        if isinstance(self.value, list):
            index = _index(head, len(self.value))
            items = list(self.value)
            items[index] = items[index].with_entry(tuple(rest), entry)
            return Entry(items, self.origin)
        if isinstance(head, int):
            raise ValueError(f"[{head}] addresses a list entry, but there is no list to change; write the whole list")
        known = self.value if isinstance(self.value, dict) else {}
        child = known.get(head, Entry({}, entry.origin))
        return Entry({**known, head: child.with_entry(tuple(rest), entry)}, self.origin)

    def get(self, path: KeyPath) -> Entry | None:
        """The entry at a path, None where nothing was written there."""
        current = self
        for segment in path:
            match current.value:
                case dict() if segment in current.value:
                    current = current.value[segment]
                case list() if isinstance(segment, int) and segment < len(current.value):
                    current = current.value[segment]
                case _:
                    return None
        return current

    def origin_at(self, path: KeyPath) -> Origin:
        """Where the value at a path comes from; one that an interpolation brought in, from where that stands."""
        for length in range(len(path), -1, -1):
            found = self.get(path[:length])
            if found is not None:
                whole = length == len(path) or not isinstance(found.value, dict | list)
                return found.origin if whole else DEFAULT
        raise AssertionError("the root is always there")

    def nearest_origin(self, path: KeyPath) -> Origin:
        """Where the value at a path, or else the innermost section around it, was written."""
        found = next(e for n in range(len(path), -1, -1) if (e := self.get(path[:n])) is not None)
        return found.origin

    def leaves(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Entry]]:
        """Every scalar, empty mapping and empty list with its path."""
        match self.value:
            case dict() if self.value:
                for key, entry in self.value.items():
                    yield from entry.leaves((*path, key))
            case list() if self.value:
                for index, entry in enumerate(self.value):
                    yield from entry.leaves((*path, index))
            case _:
                yield path, self


def entry_of(value: Any, origin: Origin) -> Entry:
    """The tree of plain nested values that all have one origin."""
    match value:
        case dict():
            return Entry({str(key): entry_of(item, origin) for key, item in value.items()}, origin)
        case list() | tuple():
            return Entry([entry_of(item, origin) for item in value], origin)
        case _:
            return Entry(value, origin)


def _index(segment: str | int, length: int) -> int:
    text = str(segment)
    if not text.isdecimal() or int(text) >= length:
        raise ValueError(f"{format_path([segment])} is not an entry of a list of {length}")
    return int(text)
