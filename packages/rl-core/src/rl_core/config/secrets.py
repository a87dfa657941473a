"""Values that no message and no file of a run shows: those of environment variables, and credentials."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_core.config.keys import value_at
from rl_core.config.tree import KeyPath, Unset, format_path, leaves, parse_path
from rl_core.problems import Problem, show

_VARIABLES = "env_vars"
_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)
_KEY = re.compile(r"(^|_)(api_?key|secret|password|(access|auth)_(key|token))$", re.IGNORECASE)
_SHORTEST = 4
"""Characters of the shortest value that is hidden from the messages of other keys."""


def literal_credentials(written: Any, references: Mapping[KeyPath, str]) -> Iterator[tuple[KeyPath, Problem]]:
    """Yield the problems with credentials that the user wrote in the config itself, which is stored with the run and
    uploaded, by path.

    Args:
        written: Plain nested values as the user wrote them.
        references: Interpolations of environment variables by key path.
    """
    for path, value in leaves(written).items():
        is_variable = len(path) > 1 and path[-2] == _VARIABLES
        pattern = _VARIABLE if is_variable else _KEY
        name = str(path[-1])
        if isinstance(value, Unset) or value in (None, "") or path in references or not pattern.search(name):
            continue
        yield (
            path,
            Problem(
                format_path(path),
                "must not contain a credential, because the config is stored with the run",
                remedy=f"Write {name}: ${{oc.env:{name.upper()}}} and set {name.upper()} where you start the run",
            ),
        )


def with_references(values: Any, references: Mapping[KeyPath, str], path: KeyPath = ()) -> Any:
    """Nested values with the interpolations of environment variables as they were written."""
    if path in references:
        return references[path]
    match values:
        case dict():
            return {key: with_references(item, references, (*path, key)) for key, item in values.items()}
        case list():
            return [with_references(item, references, (*path, index)) for index, item in enumerate(values)]
        case _:
            return values


def hide_values(problems: Sequence[Problem], values: Any, references: Mapping[KeyPath, str]) -> list[Problem]:
    """Return the problems with the names of environment variables in place of their values."""
    hidden = [(path, text, form) for path, text in references.items() for form in _forms(value_at(values, path))]
    hidden.sort(key=lambda each: -len(each[2]))

    def without_values(problem: Problem) -> Problem:
        path = parse_path(problem.key) if problem.key else ()

        def rewrite(said: str) -> str:
            for other, text, form in hidden:
                is_own = other[: len(path)] == path or path[: len(other)] == other
                if is_own or len(form) >= _SHORTEST:
                    # a word of its own: 1 is not hidden in 10
                    said = text.join(re.split(rf"(?<![\w.]){re.escape(form)}(?![\w.])", said))
            return said

        return problem.rewritten(rewrite)

    return [without_values(problem) for problem in problems]


def _forms(value: Any) -> set[str]:
    """The ways in which a message may show a value, also cut."""
    if value is None or isinstance(value, dict | list):
        return set()
    return {str(value), repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False), show(value)}
