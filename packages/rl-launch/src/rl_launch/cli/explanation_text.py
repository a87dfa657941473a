"""Explanations of keys and choices as text that fits the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.config import Explanation
    from rl_core.plugins import DatasetTask
    from rl_launch.commands.catalog import Choice, Recipe
    from rl_launch.commands.explain import Explained, FoundKey

_MAX_WIDTH, _MIN_WIDTH = 100, 16
_FIRST_PART = re.compile(r"(?<=\w{3}\.) (?=[A-Z])|: ")
_MAX_FOUND, _MAX_ALSO, _MAX_OTHERS = 20, 6, 12
"""Maximum number of keys that a search shows: with their meaning, of the same meaning, and by name only."""


def explained(each: Explained) -> str:
    """Return a key with its value, meaning, allowed values and default; for a section, the keys below."""
    from rl_launch.commands.explain import address_of

    explanation = each.explanation
    name = explanation.key or "config"
    lines = [name if explanation.children else f"{name}: {_short(explanation.value)}  ({explanation.origin})"]
    lines.extend(_wrapped(explanation.doc, "  "))
    if not explanation.children:
        lines.extend(_wrapped(f"allowed: {explanation.type}", "  "))
        lines.append("  must be set" if explanation.required else f"  default: {_short(explanation.default)}")
        if explanation.part_of:
            lines.extend(_wrapped(f"this default applies if no entry of {explanation.part_of} is set", "  "))
        if explanation.when_changed is not None:
            lines.extend(_wrapped(f"once a run has begun: {explanation.when_changed.value}", "  "))
    if each.condition:
        lines.extend(_wrapped(f"only with {each.condition}", "  "))
    lines.extend(_keys(explanation.children, "  ", each.child_conditions))
    if address := address_of(explanation):
        lines.append(f"  documentation: {address}")
    return "\n".join(lines) + "\n"


def found_keys(text: str, best: Sequence[FoundKey], less_fitting: Sequence[FoundKey]) -> str:
    """Return the keys that a search found, the best with their values and meaning, others by name."""
    lines = [f"keys found by {text!r}:"]
    documented = None
    for each in best[:_MAX_FOUND]:
        found = each.explanation
        # a key whose default depends on the algorithm is there several times
        again = documented == (documented := (found.key, found.doc))
        lines.extend(_keys([replace(found, doc="") if again else found], "  ", [each.condition]))
        if each.also:
            lines.extend(_wrapped(f"also {_some(each.also, _MAX_ALSO)}", "      "))
    others = [each.explanation.key for each in (*best[_MAX_FOUND:], *less_fitting)]
    if others:
        lines.extend(_wrapped(f"others with it in name or description: {_some(others, _MAX_OTHERS)}", ""))
    return "\n".join(lines) + "\n"


def _some(names: Sequence[str], most: int) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def settings(heading: str, keys: Sequence[Explanation]) -> str:
    """Return a heading, and below it keys with their values and meaning."""
    return "\n".join([heading, *_keys(keys, "  ")]) + "\n"


def recipes(found: Iterable[Recipe]) -> str:
    """Return the recipes by purpose, each with its algorithm, model, size and the beginning of its summary."""
    lines = []
    for purpose, group in groupby(found, lambda recipe: recipe.purpose):
        lines.append(f"{purpose}:")
        for recipe in group:
            lines.append(f"  {recipe.name}  ({recipe.algorithm}, {recipe.model}, {recipe.size})")
            lines.extend(_wrapped(_FIRST_PART.split(recipe.summary, maxsplit=1)[0].rstrip("."), "    "))
        lines.append("")
    return "\n".join(lines) + "rl recipes NAME prints a recipe, rl recipes WORD searches, rl init NAME copies.\n"


def choice(each: Choice, command: str) -> str:
    """Return an environment or dataset with its settings.

    Args:
        each: Environment or dataset to describe.
        command: The command that lists its tasks.
    """
    from rl_core.install_command import install_command

    lines = [each.name, *_wrapped(each.doc, "  ")]
    if each.missing:
        lines.extend(_wrapped(f"not installed in this environment; install it: {install_command(each.missing)}", "  "))
    lines.extend(_keys(each.settings, "  "))
    if each.tasks:
        lines.extend(_wrapped(f"{len(each.tasks)} tasks; {command} {each.name} lists them", "  "))
    return "\n".join(lines) + "\n"


def hub_datasets(found: Mapping[str, Sequence[str]]) -> str:
    """Return datasets on the hub, each with lines about it."""
    lines: list[str] = []
    for name, about in found.items():
        lines.append(name)
        for each in about:
            lines.extend(_wrapped(each, "  "))
    return "\n".join(lines) + "\n"


def names(found: Mapping[str, str], indent: str = "") -> str:
    """Return names, each with the first sentence about it, a line each."""
    column = max(map(len, found), default=0)
    room = _width() - len(indent) - column - 2
    lines = []
    for name, about in found.items():
        paragraph = " ".join(about.partition("\n\n")[0].split())
        sentence = re.split(r"(?<=[.;]) ", paragraph, maxsplit=1)[0].rstrip(".;")
        # a cell that is too narrow has only the name
        said = textwrap.shorten(sentence, room, placeholder="...") if room >= _MIN_WIDTH else ""
        lines.append(f"{indent}{name:{column}}  {said}".rstrip())
    return "\n".join(lines) + "\n"


def task(one: DatasetTask) -> str:
    """Return a task and its settings."""
    lines = [one.name, *_wrapped(one.doc, "  ")]
    lines.extend(
        f"  config.{name} = {default or '(must be set)'}  {kind}" for name, (kind, default) in one.settings.items()
    )
    return "\n".join(lines) + "\n"


def _keys(children: Sequence[Explanation], indent: str, conditions: Sequence[str] = ()) -> Iterator[str]:
    for place, child in enumerate(children):
        if child.type == "section":
            yield f"{indent}{child.key}"
        elif child.required and child.value is None:
            yield from _lines(f"{child.key}  (must be set)  {child.type}", indent, f"{indent}    ")
        else:
            origin = "" if str(child.origin) == "default" else f"  ({child.origin})"
            text = f"{child.key} = {_short(child.value)}{origin}  {child.type}"
            yield from _lines(text, indent, f"{indent}    ")
        yield from _wrapped(child.doc, f"{indent}    ")
        if conditions and conditions[place]:
            yield from _wrapped(f"only with {conditions[place]}", f"{indent}    ")


def _wrapped(text: str, indent: str) -> list[str]:
    return _lines(" ".join(text.split()), indent, indent)


def _lines(text: str, indent: str, further: str) -> list[str]:
    return textwrap.wrap(
        text, _width(), initial_indent=indent, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )


def _width() -> int:
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH)


def _short(value: Any) -> str:
    from rl_core.config import show

    return show(value)
