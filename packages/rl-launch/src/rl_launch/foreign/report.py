"""An imported config as text: the recipe, a summary, and the result for every key and line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rl_core.config import show, to_override
from rl_launch.foreign.importing import ImportedRecipe
from rl_launch.foreign_keys.table import Kind

_WIDTH = 118
_MAX_COMMENTS = 10
_COUNTED = {
    Kind.SAME: "unchanged",
    Kind.RENAMED: "renamed",
    Kind.FOLLOWS: "worked out",
    Kind.NOT_NEEDED: "not needed",
    Kind.REFUSED: "refused",
}


def recipe_text(imported: ImportedRecipe, report: str = "") -> str:
    """Return the recipe as YAML, with at most ten lines of comments at its top.

    Args:
        imported: The recipe and its report.
        report: Name of the file with the whole report, if there is one.
    """
    lines = [f"Imported from {imported.system}: {imported.source}"]
    if report:
        lines.append(f"The result for each key is in {report}")
    checks = [f"- {note}" for note in (*_refused(imported), *imported.notes)]
    if checks:
        lines.append("Check before you train:")
        room = _MAX_COMMENTS - len(lines)
        shown = checks if len(checks) <= room else checks[: room - 1]
        lines += [textwrap.shorten(check, _WIDTH - 2, placeholder=" ...") for check in shown]
        if len(shown) < len(checks):
            lines.append(f"- and {len(checks) - len(shown)} more")
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + "".join(f"{line}\n" for line in _yaml(imported.recipe, 0))


def summary_text(imported: ImportedRecipe) -> str:
    """Return the number of keys by result, and everything that the user has to check."""
    return "\n".join([_counts(imported), *_checks(imported)]) + "\n"


def report_text(imported: ImportedRecipe) -> str:
    """Return the result for every key of a config, and for every line of a script."""
    lines = [_counts(imported), *_checks(imported)]
    if imported.behaviour:
        lines.append(f"Without a setting, {imported.system} differs from rl here:")
        lines += [line for text in imported.behaviour for line in _wrapped("", [text])]
    for kind, title in ((Kind.RENAMED, "Renamed:"), (Kind.FOLLOWS, "Worked out:")):
        answers = list(imported.of(kind))
        lines += [title, *(f"- {each.key} -> {each.text}" for each in answers)] if answers else []
    for kind, title in ((Kind.NOT_NEEDED, "Not taken over:"), (Kind.REFUSED, "Refused:")):
        by_reason: dict[str, list[str]] = {}
        for answer in imported.of(kind):
            by_reason.setdefault(answer.text, []).append(answer.key)
        grouped = [line for reason, keys in by_reason.items() for line in _wrapped(reason, keys)]
        lines += [title, *grouped] if grouped else []
    same = ", ".join(each.key for each in imported.of(Kind.SAME))
    lines += textwrap.wrap(f"Taken as they are: {same}", _WIDTH, subsequent_indent="  ") if same else []
    if imported.lines:
        lines.append("Lines of the script:")
        lines += [f"- {each.place}: {each.fate.name.lower()}: {each.text}: {each.reason}" for each in imported.lines]
    return "\n".join(lines) + "\n"


def refusal_text(imported: ImportedRecipe) -> str:
    """Return the features that are not offered, each with its keys."""
    features = imported.features
    counted = "1 feature" if len(features) == 1 else f"{len(features)} features"
    head = (
        f"{imported.source}: {counted} of {imported.system} not offered here, so nothing was written. Change these "
        "keys, or leave them out with --keep-going:"
    )
    lines = [head]
    for feature, keys in features.items():
        first = next(each for each in imported.of(Kind.REFUSED) if each.text == feature)
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        given = f"{first.key}: {first.value}" if first.is_line else f"{first.key}={show(first.value)}"
        lines.append(f"  {feature}: {given}{more}")
    return "\n".join(lines)


def _counts(imported: ImportedRecipe) -> str:
    counts = imported.count()
    told = ", ".join(f"{counts[kind]} {words}" for kind, words in _COUNTED.items() if counts[kind])
    return f"{imported.source} of {imported.system}: {sum(counts.values())} keys, {told}"


def _refused(imported: ImportedRecipe) -> list[str]:
    return [f"{', '.join(keys)}: refused and omitted: {feature}" for feature, keys in imported.features.items()]


def _checks(imported: ImportedRecipe) -> list[str]:
    notes = [*_refused(imported), *imported.notes]
    lines = ["Check before you train:"] if notes else []
    for note in notes:
        lines += textwrap.wrap(f"- {note}", _WIDTH - 2, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _yaml(tree: dict[str, Any], indent: int) -> Iterator[str]:
    """Yield the lines of nested values; a section that fits is on one line, at the top only if it has no others."""
    pad = " " * indent
    for key, value in tree.items():
        line = f"{pad}{key}: {_flow(value)}"
        inner = value.values() if isinstance(value, dict) else ()
        is_deep = indent == 0 and len(inner) > 1 and any(isinstance(each, dict | list) for each in inner)
        if isinstance(value, dict) and (is_deep or len(line) > _WIDTH):
            yield f"{pad}{key}:"
            yield from _yaml(value, indent + 2)
        elif isinstance(value, list) and len(line) > _WIDTH:
            yield f"{pad}{key}:"
            yield from (f"{pad}- {_flow(each)}" for each in value)
        else:
            yield line


def _flow(value: Any) -> str:
    return to_override("", value)[1:]


def _wrapped(reason: str, keys: list[str]) -> Iterator[str]:
    text = f"- {', '.join(keys)}{f': {reason}' if reason else ''}"
    yield from textwrap.wrap(text, _WIDTH - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
