"""`${...}` by OmegaConf, one value at a time, so that every wrong one is named with its own key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from rl_core.config.key_path import KeyPath, format_path
from rl_core.config.nearest import did_you_mean
from rl_core.config.scalar import MISSING, Unset

_OPENING = re.compile(r"(\\*)\$\{")
_NOT_FOUND = re.compile(r"Interpolation key '(.+?)' not found")
_VARIABLE = re.compile(r"Environment variable '(.+?)' not found")


def escape(text: str) -> str:
    r"""The text in a form that is read back as it is: `${` as `\${`."""
    return _OPENING.sub(r"\1\1\\${", text)


def escaped(tree: Any) -> Any:
    """Nested values with every text in them escaped."""
    return _mapped(tree, lambda _, value: escape(value) if isinstance(value, str) else value)


def interpolate(tree: dict[str, Any], defaults: dict[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """The tree with every `${...}` replaced by what it stands for, and by None where it is wrong.

    Args:
        tree: plain nested values as the user wrote them.
        defaults: values of keys that the user did not write; interpolations may name them too.

    Returns:
        The tree, and what is wrong by path.
    """
    written = {path: value for path, value in _leaves(tree) if isinstance(value, str) and "${" in value}
    if not written:
        return tree, {}
    wrong = {path: message for path, text in written.items() if (message := _malformed(text))}
    everything = _overlay(escaped(defaults), tree)
    container = _container(_mapped(everything, lambda path, value: None if path in wrong else value))
    known = [format_path(path) for path, _ in _leaves(everything)]
    values: dict[KeyPath, Any] = {}
    for path in written.keys() - wrong.keys():
        found, problem = _resolved(container, path)
        if problem is None:
            values[path] = found
        else:
            wrong[path] = _message(written[path], problem, known)
    return _mapped(tree, lambda path, value: values.get(path) if path in written else value), wrong


def _malformed(text: str) -> str | None:
    # OmegaConf and its grammar take 60 ms to import, which a config without interpolations need not wait for
    from omegaconf.errors import GrammarParseError
    from omegaconf.grammar_parser import parse

    try:
        parse(text)
    except GrammarParseError:
        return (
            f"{text!r} is no well-formed interpolation; write ${{section.key}}, or \\${{ for the characters themselves"
        )
    return None


def _container(tree: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    marked = _mapped(tree, lambda _, value: MISSING if isinstance(value, Unset) else value)
    return OmegaConf.create(marked, flags={"allow_objects": True})


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


def _message(text: str, error: Exception, known: list[str]) -> str:
    said = str(error).partition("\n")[0]
    if isinstance(error, RecursionError) or "Recursive interpolation" in said:
        return f"{text!r} leads back to itself; give one of the keys in the circle a value"
    if match := _NOT_FOUND.search(said):
        return f"{text!r} names {match[1]}, which is not a key here{did_you_mean(match[1].lstrip('.'), known)}"
    if match := _VARIABLE.search(said):
        name = match[1]
        return (
            f"{text!r} needs the environment variable {name}: set it, or write ${{oc.env:{name},VALUE}} for a default"
        )
    if "Unsupported interpolation type" in said:
        name = said.rpartition(" ")[2]
        return (
            f"{text!r} asks for {name!r}, which computes nothing here; keys are written with dots, as ${{section.key}}"
        )
    if "MissingMandatoryValue" in said or "MissingValue" in type(error).__name__:
        return f"{text!r} names a key marked {MISSING}: set that key"
    return f"{text!r} cannot be worked out: {said}"


def _mapped(tree: Any, change: Callable[[KeyPath, Any], Any], path: KeyPath = ()) -> Any:
    match tree:
        case dict():
            return {key: _mapped(item, change, (*path, key)) for key, item in tree.items()}
        case list():
            return [_mapped(item, change, (*path, index)) for index, item in enumerate(tree)]
        case _:
            return change(path, tree)


def _overlay(base: Any, over: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: _overlay(base[key], item) if key in base else item for key, item in over.items()}}


def _leaves(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    match tree:
        case dict():
            for key, item in tree.items():
                yield from _leaves(item, (*path, key))
        case list():
            for index, item in enumerate(tree):
                yield from _leaves(item, (*path, index))
        case _:
            yield path, tree
