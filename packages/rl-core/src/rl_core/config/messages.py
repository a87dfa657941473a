"""Messages about values that a config type refuses, and suggestions for mistyped keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_core.config.keys import Key, all_keys, key_at, value_at
from rl_core.config.renames import new_keys, replacement
from rl_core.config.schema import Config, ProblemError
from rl_core.config.tree import Entry, KeyPath, format_path, parse_path
from rl_core.errors import Problem, show

Hint = Callable[[str, Any], str]
"""Explains an unknown key, given with its value; returns an empty string for a key that it does not know either."""

_GOOD = 0.7
_TIE = 0.04
_STATED = {"literal_error", "enum", "greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of"}
_STATED |= {"too_short", "too_long", "string_too_short", "string_too_long", "none_required"}
_BOOLS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def nearest(key: str, candidates: Iterable[str], *, most: int = 3) -> list[str]:
    """Return candidates close to a dotted key, best first: mainly by its last name, then by the whole path.

    So a typo (`grpo.num_promts_per_step`), a wrong section (`policy.num_prompts_per_step`), a missing prefix
    (`num_prompts_per_step`) and a name cut short or with its words in another order (`policy.max_sequence_length`) are
    all found. Candidates as good as the best are included, up to `most`. If some of them are in the section that was
    written (for a key without a section: at the root), only those are returned.
    """
    scored = sorted(((_score(key, candidate), candidate) for candidate in set(candidates)), key=lambda s: (-s[0], s[1]))
    if not scored or scored[0][0] < _GOOD:
        return []
    best = scored[0][0]
    near = [candidate for score, candidate in scored[:most] if score >= max(_GOOD, best - _TIE)]
    section, _, _ = key.rpartition(".")
    return [candidate for candidate in near if candidate.rpartition(".")[0] == section] or near


def did_you_mean(key: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing if no candidate is close."""
    meant = nearest_as_remedy(key, candidates)
    return f"; d{meant[1:]}" if meant else ""


def nearest_as_remedy(key: str, candidates: Iterable[str]) -> str:
    """Return `Did you mean X?`, or nothing if no candidate is close."""
    near = nearest(key, candidates)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def problems_in(
    error: ValidationError, root: type[Config], values: Any, shown: Any, hint: Hint | None = None
) -> Iterator[Problem]:
    """Yield a problem per key that pydantic refuses in `values`, with keys from the root.

    Args:
        error: Error of validating `values`.
        root: Type of the whole config.
        values: Nested plain values that were validated, from the root.
        shown: The same values, in the form for messages.
        hint: Explains unknown keys that it knows.
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_path_in(values, details), []).append(details)
    for path, group in by_path.items():
        deeper = any(len(other) > len(path) and other[: len(path)] == path for other in by_path)
        if deeper and all(details["type"].endswith("_type") for details in group):
            continue  # another member of the union accepted the value and found problems inside
        raised = group[0].get("ctx", {}).get("error")
        if isinstance(raised, ProblemError):
            for problem in raised.problems:
                own = parse_path(problem.key) if problem.key else ()
                yield problem.at(format_path((*path, *own)))
        elif group[0]["type"] == "extra_forbidden":
            if found := by_another_name(root, path, values):
                yield found
            else:
                yield _unknown(path, list(all_keys(root, values)), values, hint)
        else:
            value = value_at(shown, path)
            is_hidden = value != value_at(values, path)
            given = value if is_hidden else group[0]["input"]
            yield _refused_value(group, key_at(root, path, values), format_path(path), given, is_hidden=is_hidden)


def left_out_to_go_on(error: ValidationError, values: Any) -> list[KeyPath] | None:
    """Return the paths without which the values keep their meaning: unknown keys, and nulls in the place of defaults.

    Returns:
        None if there are other problems.
    """
    found = []
    for details in error.errors(include_url=False):
        path = _path_in(values, details)
        is_null = bool(path) and value_at(values, path) is None and details["type"] != "missing"
        is_in_list = any(isinstance(segment, int) for segment in path)
        if is_in_list or (details["type"] != "extra_forbidden" and not is_null):
            return None
        found.append(path)
    return found


def without(values: Any, paths: Collection[KeyPath], at: KeyPath = ()) -> Any:
    """Return nested values without some of their keys."""
    if not isinstance(values, dict):
        return values
    return {key: without(value, paths, (*at, key)) for key, value in values.items() if (*at, key) not in paths}


def report(problems: Sequence[Problem], name: str, written: Entry) -> str:
    """Return all problems of the config `name`, each with the origin of its key, as one string."""
    lines = [_line(problem, written) for problem in problems]
    if len(lines) == 1:
        return lines[0]
    return "\n".join([f"{len(lines)} problems in {name}:", *(f"  {line}" for line in lines)])


def _line(problem: Problem, written: Entry) -> str:
    path, message = parse_path(problem.key) if problem.key else (), problem.message
    entry = written.get(path) or written.get((problem.key,))
    # A section that must be set is shown with the place around it; other keys that were not written have a default.
    is_missing = "must be set" in problem.reason or not path
    origin = written.nearest_origin(path) if is_missing else written.origin_at(path) if entry is None else entry.origin
    via = entry.value if entry is not None and isinstance(entry.value, str) and "${" in entry.value else ""
    place = f"{origin}, written as {via}" if via and via not in message else str(origin)
    return f"{format_path(path) or 'config'} ({place}): {message}"


def _path_in(values: Any, details: ErrorDetails) -> KeyPath:
    """Return the location of an error without the union members that pydantic adds to it."""
    path: list[str | int] = []
    last = len(details["loc"]) - 1
    for position, segment in enumerate(details["loc"]):
        named = isinstance(values, dict) and segment in values
        indexed = isinstance(values, list) and isinstance(segment, int) and segment < len(values)
        if named or indexed:
            values = values[segment]
            path.append(segment)
        elif position == last and details["type"] == "missing":
            path.append(segment)
    return tuple(path)


def by_another_name(root: type[Config], path: KeyPath, values: Any) -> Problem | None:
    """Return the problem of another or an earlier name of a key of the same section; None for any other name."""
    *above, last = path
    name, section = str(last), _section_around(root, path, values)
    if section is None:
        return None
    if name in section.renamed:
        reason, remedy = replacement(section, path, value_at(values, path[:-1]))
        return Problem(format_path(path), reason, remedy=remedy)
    if (key := section.also_called.get(name)) is None:
        return None
    meaning, _, _ = (section.model_fields[key].description or "").partition("\n\n")
    reason = f"no such key; here it is {format_path((*above, key))}: {' '.join(meaning.split())}".rstrip(": ")
    return Problem(format_path(path), reason)


def new_names(root: type[Config], path: KeyPath, values: Any) -> list[str]:
    """Return the keys that replace a key of an earlier version; empty for any other key."""
    section = _section_around(root, path, values)
    if section is None or str(path[-1]) not in section.renamed:
        return []
    return new_keys(section, path, value_at(values, path[:-1]))


def _section_around(root: type[Config], path: KeyPath, values: Any) -> type[Config] | None:
    around = key_at(root, path[:-1], values)
    return around.section(value_at(values, path[:-1])) if around is not None else None


def _unknown(path: KeyPath, keys: list[str], values: Any, hint: Hint | None) -> Problem:
    key = format_path(path)
    nested = format_path((*path[:-1], *str(path[-1]).split(".")))
    if key in keys or ("." in str(path[-1]) and nested in keys):
        reason = "a key with dots is one name in YAML"
        return Problem(key, reason, remedy=f"Nest it, or write it as an override, {key}=VALUE")
    inside = value_at(values, path)
    if hint is not None and (explained := hint(key, inside)):
        return Problem(key, f"no such key: {explained}")
    names = [key, *(f"{key}.{name}" for name in inside)] if isinstance(inside, dict) else [key]
    if near := next((found for name in names if (found := nearest_as_remedy(name, keys))), ""):
        return Problem(key, "no such key", remedy=near)
    section = format_path(path[:-1])
    prefix = f"{section}." if section else ""
    known = sorted({known.removeprefix(prefix).partition(".")[0] for known in keys if known.startswith(prefix)})
    return Problem(key, "no such key", allowed=", ".join(known))


def _refused_value(
    errors: Sequence[ErrorDetails], key: Key | None, name: str, given: Any, *, is_hidden: bool
) -> Problem:
    """Return the problem with the value of one key.

    Args:
        errors: Pydantic's errors about the key, one per member of a union.
        key: The key; None if the type has none there.
        name: Its dotted name.
        given: The value, in the form for messages.
        is_hidden: True if that is not the value itself.
    """
    first = errors[0]
    allowed = key.allowed if key is not None else ""
    if first["type"] == "missing":
        is_section = allowed == "section"
        return Problem(name, f"{'this section ' * is_section}must be set", allowed="" if is_section else allowed)
    if first["type"] in ("value_error", "assertion_error"):
        return Problem(name, str(first["ctx"]["error"]) or first["msg"])
    if key is None or not all(e["type"].endswith(("_type", "_parsing")) or e["type"] in _STATED for e in errors):
        reasons = dict.fromkeys(e["msg"][:1].lower() + e["msg"][1:] for e in errors)
        return Problem(name, "; ".join(reasons), got=given)
    return Problem(name, got=given, allowed=allowed, remedy="" if is_hidden else _remedy(first["input"], key, name))


def _remedy(value: Any, key: Key, name: str) -> str:
    kinds = key.kinds
    if key.allowed == "section":
        if value is None:
            return "The section is empty: remove its line, or put keys below it"
        if isinstance(value, str) and (match := re.fullmatch(r"(\w+):(\S.*)", value)):
            return f"Write a space after the colon: {match[1]}: {match[2]}"
        return f"Set the keys below it, {name}.KEY"
    if value is None and not key.required:
        return f"Remove the key to use its default, {show(key.default)}"
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"Write {int(value)}"
    if isinstance(value, str) and bool in kinds:
        wanted = _BOOLS.get(value.lower(), value.lower())
        return f"Write {wanted} without quotes" if wanted in ("true", "false") else ""
    if isinstance(value, str) and {int, float} & set(kinds) and re.fullmatch(r"[-+]?[\d._]+(e[-+]?\d+)?", value, re.I):
        return "Write the number without quotes or leading zeros"
    if isinstance(value, list | dict) and str in kinds:
        return f"To pass it as a string, quote it: {name}: '...'"
    if not isinstance(value, list) and (key.allowed.startswith("list of") or "list of str" in key.allowed):
        return f"Write a list: [{show(value)}]"
    return ""


def _score(key: str, candidate: str) -> float:
    name, other = key.rpartition(".")[2], candidate.rpartition(".")[2]
    last = max(_ratio(name, other), _words(name, other))
    if last < 0.5:
        return 0.0
    return 0.8 * last + 0.2 * _ratio(key, candidate)


def _ratio(a: str, b: str) -> float:
    matcher = SequenceMatcher(None, a.lower(), b.lower(), autojunk=False)
    return matcher.ratio() if matcher.real_quick_ratio() > 0.5 else 0.0


def _words(name: str, other: str) -> float:
    """Return the similarity of two keys by their words: 0.95 for the same words in any order, less if some differ."""
    mine, theirs = (set(re.split(r"[_\W]+", text.lower())) - {""} for text in (name, other))
    shared = len(mine & theirs)
    if not shared or shared < min(len(mine), len(theirs)):
        return 0.0
    return 0.75 + 0.2 * shared / max(len(mine), len(theirs))
