"""From what the user wrote to a typed config, or to one error that lists everything wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_core.config.defaults import unwritten, with_section_defaults
from rl_core.config.entry import Entry
from rl_core.config.interpolation import interpolate
from rl_core.config.key_path import KeyPath, format_path, parse_path
from rl_core.config.keys import all_keys, key_at
from rl_core.config.loader import RawConfig
from rl_core.config.nearest import did_you_mean
from rl_core.config.origin import Origin
from rl_core.config.problem import Problem, ProblemError
from rl_core.config.reading import read_section
from rl_core.config.references import environment_references
from rl_core.config.scalar import MISSING, Unset
from rl_core.config.schema import Config
from rl_core.config.verdict import verdict
from rl_core.errors import ConfigError

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """A valid config and where its values come from.

    Args:
        config: the typed values.
        raw: what the user wrote.
    """

    config: C
    raw: RawConfig

    def origin(self, key: str) -> Origin:
        """Where the value of a key comes from: a file and line, the command line, or the default."""
        return self.raw.entry.origin_at(parse_path(key))

    def written(self, key: str) -> str | None:
        """The interpolation that a key's value was written as; None where it was written out, or not at all."""
        entry = self.raw.entry.get(parse_path(key))
        return entry.value if entry is not None and isinstance(entry.value, str) and "${" in entry.value else None


def resolve(raw: RawConfig, root: type[C], *, checks: Sequence[Callable[[C], Iterable[Problem]]] = ()) -> Resolved[C]:
    """Interpolate and validate what the user wrote, over the defaults of a config type.

    Args:
        raw: what `load` returned.
        root: the config type, mostly from `assemble`.
        checks: run on the valid config; each yields a `Problem` per key that does not go with the rest.

    Raises:
        ConfigError: listing every problem: key, where it was written, what was got, what is allowed, the nearest key.
    """
    written = raw.entry.plain()
    completed = with_section_defaults(root, written)
    tree, wrong = interpolate(completed, unwritten(root, completed))
    for path, entry in raw.entry.leaves():
        if isinstance(entry.value, Unset):
            wrong[path] = f"is marked {MISSING}; set it: {format_path(path)}=VALUE"
    values = read_section(root, _without_unset(tree))
    try:
        config = root.model_validate_json(json.dumps(values))
    except ValidationError as error:
        found = [*_listed(wrong), *_problems(error, root, values, wrong)]
        raise ConfigError(_report(found, raw)) from None
    if wrong:
        raise ConfigError(_report(_listed(wrong), raw))
    refused = [problem for check in checks for problem in check(config)]
    if refused:
        raise ConfigError(_report([_located(problem) for problem in refused], raw))
    return Resolved(config.with_references(environment_references(raw.entry)), raw)


def _located(problem: Problem, below: KeyPath = ()) -> tuple[KeyPath, str]:
    return (*below, *(parse_path(problem.key) if problem.key else ())), problem.message


def _listed(wrong: dict[KeyPath, str]) -> list[tuple[KeyPath, str]]:
    return list(wrong.items())


def _without_unset(tree: Any) -> Any:
    match tree:
        case dict():
            return {key: _without_unset(item) for key, item in tree.items()}
        case list():
            return [_without_unset(item) for item in tree]
        case _:
            return None if isinstance(tree, Unset) else tree


def _problems(
    error: ValidationError, root: type[Config], values: Any, wrong: dict[KeyPath, str]
) -> Iterator[tuple[KeyPath, str]]:
    """One (path, message) per key at fault, without those that `wrong` has blamed already."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_path_in(values, details), []).append(details)
    keys: list[str] = []
    for path, group in by_path.items():
        if any(path[: len(bad)] == bad for bad in wrong):
            continue
        deeper = any(len(other) > len(path) and other[: len(path)] == path for other in by_path)
        if deeper and all(details["type"].endswith("_type") for details in group):
            continue  # another member of the union took the value in and found fault inside
        raised = group[0].get("ctx", {}).get("error")
        if isinstance(raised, ProblemError):
            yield from (_located(problem, path) for problem in raised.problems)
        elif group[0]["type"] == "extra_forbidden":
            keys = keys or list(all_keys(root, values))
            yield path, _unknown(path, keys, values)
        else:
            yield path, verdict(group, key_at(root, path, values), format_path(path))


def _path_in(values: Any, details: ErrorDetails) -> KeyPath:
    """The location of an error without the names of union members that pydantic puts into it."""
    path: list[str | int] = []
    current = values
    last = len(details["loc"]) - 1
    for position, segment in enumerate(details["loc"]):
        named = isinstance(current, dict) and segment in current
        indexed = isinstance(current, list) and isinstance(segment, int) and segment < len(current)
        if named or indexed:
            current = current[segment]
            path.append(segment)
        elif position == last and details["type"] == "missing":
            path.append(segment)
    return tuple(path)


def _unknown(path: KeyPath, keys: list[str], values: Any) -> str:
    key = format_path(path)
    if key in keys or any(
        format_path((*path[:-1], *str(path[-1]).split("."))) == known for known in keys if "." in str(path[-1])
    ):
        return f"a key with dots is one name in YAML; nest it, or pass {key}=VALUE on the command line"
    hint = did_you_mean(key, keys)
    inside = values
    for segment in path:
        inside = inside[segment]
    if not hint and isinstance(inside, dict):
        hint = next((found for name in inside if (found := did_you_mean(f"{key}.{name}", keys))), "")
    if hint:
        return f"no such key{hint}"
    section = format_path(path[:-1])
    prefix = f"{section}." if section else ""
    names = sorted({known.removeprefix(prefix).partition(".")[0] for known in keys if known.startswith(prefix)})
    return f"no such key; {section or 'the config'} has {', '.join(names)}"


def _report(problems: Sequence[tuple[KeyPath, str]], raw: RawConfig) -> str:
    lines = [_line(path, message, raw.entry) for path, message in problems]
    if len(lines) == 1:
        return lines[0]
    return "\n".join([f"{len(lines)} problems in {raw.name}:", *(f"  {line}" for line in lines)])


def _line(path: KeyPath, message: str, entry: Entry) -> str:
    written = entry.get(path)
    via = written.value if written is not None and isinstance(written.value, str) and "${" in written.value else ""
    where = (
        f"{entry.nearest_origin(path)}, written as {via}"
        if via and via not in message
        else str(entry.nearest_origin(path))
    )
    return f"{format_path(path) or 'config'} ({where}): {message}"
