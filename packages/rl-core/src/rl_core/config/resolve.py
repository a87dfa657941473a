"""Resolve the values that the user wrote to a typed config, or raise one error that lists all problems.

No message and no file of a run shows the values of environment variables, or credentials.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from rl_core.config.dump import escaped, with_references
from rl_core.config.keys import Key, all_keys, key_at, value_at
from rl_core.config.load import RawConfig, interpolate, interpolations
from rl_core.config.messages import Hint, left_out_to_go_on, nearest, new_names, problems_in, report, without
from rl_core.config.schema import Config, plain
from rl_core.config.tree import MISSING, KeyPath, Origin, Unquoted, Unset, format_path, leaves, mapped, parse_path
from rl_core.errors import ConfigError, ConfigProblems, Problem, show

C = TypeVar("C", bound=Config)

_VARIABLE = "oc.env"
_KEY = re.compile(r"\$\{\s*(\.*)([^${}:]+?)\s*\}")
_COMPUTED = re.compile(r"\$\{[^{}]*[:$]")
"""A resolver other than a key, or an interpolation inside another."""


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """A valid config and the origins of its values.

    Args:
        config: The typed values.
        raw: Values that the user wrote.
    """

    config: C
    raw: RawConfig

    @property
    def origin(self) -> Callable[[str], Origin]:
        """Function from a key to the origin of its value: a file and line, the command line, or the default."""
        return self.raw.origin


@dataclass(frozen=True)
class Values:
    """The values of a config that may have problems.

    Args:
        tree: Plain nested values, defaults included; None in place of an interpolation that cannot be resolved.
        raw: Values that the user wrote.
        references: Interpolations of environment variables by key path, as they were written.
    """

    tree: Any
    raw: RawConfig
    references: Mapping[KeyPath, str]


def values_of(raw: RawConfig, root: type[Config]) -> Values:
    """Return every value of a config that can be determined, whatever else is wrong with the config.

    Args:
        raw: Result of `load`.
        root: The config type.
    """
    written = raw.entry.plain()
    _, everything = _over_defaults(Key((), root), written, None)
    tree, _ = interpolate(everything, everything)
    tree = mapped(tree, lambda path, value: _read(key_at(root, path, tree), value))
    return Values(tree, raw, _environment_references(written))


def resolve(
    raw: RawConfig,
    root: type[C],
    *,
    checks: Sequence[Callable[[C], Iterable[Problem]]] = (),
    hint: Hint | None = None,
    unused: Collection[str] = (),
) -> Resolved[C]:
    """Interpolate and validate the values that the user wrote, over the defaults of a config type.

    Args:
        raw: Result of `load`.
        root: The config type, mostly from `assemble`.
        checks: Run on the valid config; each yields a `Problem` per key that contradicts others. If all problems are
            unknown keys and nulls, they run on the config without these keys.
        hint: Explains unknown keys that it knows, in place of the nearest ones.
        unused: Sections that are left out of the config and not checked. Interpolations may refer to their values.

    Raises:
        ConfigProblems: Listing every problem: key, origin, given value, allowed values, the nearest key.
    """
    written = raw.entry.plain()
    given, everything = _over_defaults(Key((), root), written, None)
    written, given = ({key: value for key, value in tree.items() if key not in unused} for tree in (written, given))
    tree, unresolved = interpolate(given, everything)
    wrong = {path: Problem(format_path(path), reason) for path, reason in unresolved.items()}
    for path, value in leaves(written).items():
        if isinstance(value, Unset):
            remedy = f"Set it: {format_path(path)}=VALUE"
            wrong[path] = Problem(format_path(path), f"must be set, because it is marked {MISSING}", remedy=remedy)
    values = mapped(tree, lambda path, value: _read(key_at(root, path, tree), value))
    undecoded = {
        path: problem.at(format_path(path))
        for path, value in leaves(values).items()
        if isinstance(value, str) and (problem := locale_problem(value))
    }
    wrong |= undecoded
    values = mapped(values, lambda path, value: None if path in undecoded else value)
    references = _environment_references(written)
    wrong |= literal_credentials(written, references)
    faults = list(wrong.values())
    try:
        config = root.model_validate_json(json.dumps(values))
    except ValidationError as error:
        found = problems_in(error, root, values, with_references(values, references), hint)
        blamed = [each for each in found if not any(_is_below(_path(each), at) for at in wrong)]
        further = [] if wrong else _further_problems(error, root, values, references, checks, hint)
        raise refusal(hide_values([*faults, *blamed, *further], values, references), raw) from None
    problems = faults or [problem for check in checks for problem in check(config)]
    if problems:
        raise refusal(hide_values(problems, values, references), raw)
    return Resolved(config.with_references(references), raw)


def locale_problem(text: str) -> Problem | None:
    """Return the problem of an argument or a path that this process cannot decode in its locale; None if it can. Python
    keeps such bytes as lone surrogates of these numbers (PEP 383)."""
    surrogates = [character for character in text if "\ud800" <= character <= "\udfff"]
    if not surrogates or not all("\udc80" <= character <= "\udcff" for character in surrogates):
        return None
    encoding = sys.getfilesystemencoding()
    return Problem(
        "",
        f"contains characters that this process cannot read, because its locale is {encoding} and not UTF-8",
        got=text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
        remedy="Set the environment variable LC_ALL=C.UTF-8, or PYTHONUTF8=1",
    )


def refusal(problems: Sequence[Problem], raw: RawConfig) -> ConfigProblems:
    """Return the error that lists problems of a config, each with the origin of its key."""
    return ConfigProblems(report(problems, raw.name, raw.entry), problems)


def _further_problems(
    error: ValidationError,
    root: type[C],
    values: Any,
    references: Mapping[KeyPath, str],
    checks: Sequence[Callable[[C], Iterable[Problem]]],
    hint: Hint | None,
) -> list[Problem]:
    """Return the problems of the config without the keys that an error blames, if its meaning is then known. Problems
    of keys that an unknown key most likely means are left out."""
    paths = left_out_to_go_on(error, values)
    if paths is None:
        return []
    rest = without(values, paths)
    try:
        config = root.model_validate_json(json.dumps(rest))
    except ValidationError as further:
        found = list(problems_in(further, root, rest, with_references(rest, references), hint))
    else:
        found = [problem for check in checks for problem in check(config)]
    known = list(all_keys(root, rest)) if found else []
    meant = [near for path in paths if found for near in nearest(format_path(path), known)]
    meant += [now for path in paths for now in new_names(root, path, values)]
    return [each for each in found if not any(_is_about(each, near) for near in meant)]


def _is_about(problem: Problem, key: str) -> bool:
    """Return whether a problem is of a key, of one around or below it, or mentions it as a cause."""
    path, meant = _path(problem), parse_path(key)
    return _is_below(path, meant) or _is_below(meant, path) or key in problem.message


def _path(problem: Problem) -> KeyPath:
    return parse_path(problem.key) if problem.key else ()


def _is_below(path: KeyPath, section: KeyPath) -> bool:
    return path[: len(section)] == section


def _over_defaults(key: Key, written: Any, default: Any) -> tuple[Any, Any]:
    """Lay the values that the user wrote at a key over its default.

    If a field has `policy: Policy = Policy(precision="float32")`, a user who writes another key of `policy` keeps that
    precision, which `Policy` itself does not have.

    Returns:
        The written values, with values that the defaults of sections set beyond the defaults of their types; and the
        same with every default, for interpolations.
    """
    if not isinstance(written, dict | list):
        return written, written
    given: Any = written.copy()
    everything: Any = written.copy()
    # The type must be the same, because another member of a union has other keys.
    default = default if isinstance(written, dict) and type(default) is key.section(written) else None
    for child in key.children(written):
        name = child.path[-1]
        value = child.typed_default if default is None else getattr(default, str(name))
        if isinstance(written, list) or name in written:
            given[name], everything[name] = _over_defaults(child, given[name], value)
        elif default is not None or not child.required:
            everything[name] = escaped(plain(value))
            if default is not None and name in default.model_fields_set:
                given[name] = everything[name]
    return given, everything


def _read(key: Key | None, value: Any) -> Any:
    """Return a scalar as its key reads it: unquoted text if the key takes text, a number or truth value if it takes
    one; an empty list or mapping for null if that is its default and it does not take null."""
    if isinstance(value, Unset):
        return None
    if value is None and key is not None and key.is_empty_at_null:
        return key.default
    if not isinstance(value, Unquoted):
        return value
    kinds = key.kinds if key is not None else [Any]
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    natural = value.value
    if any(type(choice) is type(natural) and choice == natural for choice in choices):
        return natural
    wanted = {float, int} if type(natural) is int else {type(natural)}
    is_text = str(value) in choices or (str in kinds and Any not in kinds and not wanted & set(kinds))
    return str(value) if is_text else natural


def _environment_references(tree: Any) -> dict[KeyPath, str]:
    """Return the interpolations at keys whose values come from environment variables, also by way of other keys.

    If there are any, an interpolation whose keys are only known after it is resolved counts as one of them, because its
    written form is safe to keep.
    """
    written = interpolations(tree)
    found = {path for path, text in written.items() if _VARIABLE in text}
    if found:
        found |= {path for path, text in written.items() if _COMPUTED.search(text)}
    named = {path: _keys(path, text) for path, text in written.items()}

    def meets(key: KeyPath) -> bool:
        """Return whether a key is one of the paths found so far, or around or below one."""
        segments = [str(segment) for segment in key]
        return any(all(one == str(other) for one, other in zip(segments, path, strict=False)) for path in found)

    while more := {path for path in named.keys() - found if any(map(meets, named[path]))}:
        found |= more
    return {path: text for path, text in written.items() if path in found}


def _keys(path: KeyPath, text: str) -> list[KeyPath]:
    """Return the absolute paths of the keys in an interpolation."""
    keys = []
    for dots, name in _KEY.findall(text):
        base = path[: len(path) - len(dots)] if dots else ()
        try:
            keys.append((*base, *parse_path(name)))
        except ConfigError:
            continue
    return keys


_VARIABLES = frozenset({"env_vars", "variables", "headers"})
"""Keys with variables of a process or with headers of requests by name."""
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|AUTHORIZATION|COOKIE)$", re.IGNORECASE)
_SECRET_KEY = re.compile(r"(^|_)(api_?key|secret|password|(access|auth)_(key|token))$", re.IGNORECASE)
_SECRET_ADDRESS = re.compile(r"https?://[^/?#\s]*:[^/?#\s@]+@", re.IGNORECASE)
"""Address with a password."""
_MIN_HIDDEN = 4
"""Minimum number of characters of a value that is hidden from the messages of other keys."""


def literal_credentials(written: Any, references: Mapping[KeyPath, str]) -> Iterator[tuple[KeyPath, Problem]]:
    """Yield the problems with credentials that the user wrote in the config itself, which is stored with the run and
    uploaded, by path.

    Args:
        written: Plain nested values as the user wrote them.
        references: Interpolations of environment variables by key path.
    """
    for path, value in leaves(written).items():
        is_variable = len(path) > 1 and path[-2] in _VARIABLES
        pattern = _SECRET_VARIABLE if is_variable else _SECRET_KEY
        name = str(path[-1])
        if isinstance(value, Unset) or value in (None, "") or path in references:
            continue
        if not pattern.search(name) and not (isinstance(value, str) and _SECRET_ADDRESS.match(value)):
            continue
        reason = "must not contain a credential, because the config is stored with the run"
        variable = name.upper().replace("-", "_")
        remedy = f"Write {name}: ${{oc.env:{variable}}} and set {variable} where you start the run"
        yield path, Problem(format_path(path), reason, remedy=remedy)


def hide_values(problems: Sequence[Problem], values: Any, references: Mapping[KeyPath, str]) -> list[Problem]:
    """Return the problems with the names of environment variables in place of their values."""
    hidden: list[tuple[KeyPath, str, str]] = []
    for at, written in references.items():
        value = value_at(values, at)
        if value is not None and not isinstance(value, dict | list):
            # A message may show a value in each of these forms; `show` cuts it.
            forms = {str(value), repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False), show(value)}
            hidden += [(at, written, form) for form in forms]
    hidden.sort(key=lambda each: -len(each[2]))

    def without_values(problem: Problem) -> Problem:
        path = parse_path(problem.key) if problem.key else ()

        def rewrite(said: str) -> str:
            for other, text, form in hidden:
                is_own = other[: len(path)] == path or path[: len(other)] == other
                if is_own or len(form) >= _MIN_HIDDEN:
                    # Only whole words are hidden: 1 stays in 10.
                    said = text.join(re.split(rf"(?<![\w.]){re.escape(form)}(?![\w.])", said))
            return said

        return problem.rewritten(rewrite)

    return [without_values(problem) for problem in problems]
