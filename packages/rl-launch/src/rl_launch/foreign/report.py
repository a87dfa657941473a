"""An imported config as text: the recipe, and what became of every key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from rl_core.config import show, tree_to_yaml
from rl_launch.foreign.importing import Imported
from rl_launch.foreign.translation import Answer
from rl_launch.foreign_keys.table import Kind

_WIDTH = 118
_COUNTED = {
    Kind.SAME: "unchanged",
    Kind.RENAMED: "renamed",
    Kind.FOLLOWS: "worked out",
    Kind.NOT_NEEDED: "not needed",
    Kind.REFUSED: "refused",
}


def recipe_text(imported: Imported) -> str:
    """The recipe as YAML, with what was not taken over and what to check as comments at its top."""
    lines = [f"Imported from {imported.system}: {imported.source}", *_checks(imported)]
    refused = _grouped(imported.of(Kind.REFUSED))
    if refused:
        lines += ["Refused and omitted:", *refused]
    unneeded = _grouped(imported.of(Kind.NOT_NEEDED))
    if unneeded:
        lines += ["Not taken over:", *unneeded]
    comments = "".join(f"# {line}\n" for line in lines)
    return f"{comments}{tree_to_yaml(imported.recipe)}"


def report_text(imported: Imported) -> str:
    """Every key of the file and what became of it."""
    counts = imported.count()
    told = ", ".join(f"{counts[kind]} {words}" for kind, words in _COUNTED.items() if counts[kind])
    lines = [f"{imported.source} of {imported.system}: {sum(counts.values())} keys, {told}", *_checks(imported)]
    for kind, title in ((Kind.RENAMED, "Renamed:"), (Kind.FOLLOWS, "Worked out:")):
        answers = list(imported.of(kind))
        lines += [title, *(f"- {each.key} -> {each.text}" for each in answers)] if answers else []
    for kind, title in ((Kind.NOT_NEEDED, "Not taken over:"), (Kind.REFUSED, "Refused:")):
        grouped = _grouped(imported.of(kind))
        lines += [title, *grouped] if grouped else []
    same = ", ".join(each.key for each in imported.of(Kind.SAME))
    lines += textwrap.wrap(f"Taken as they are: {same}", _WIDTH, subsequent_indent="  ") if same else []
    return "\n".join(lines) + "\n"


def refusal_text(imported: Imported) -> str:
    """The features that are not offered, each with its keys."""
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
        lines.append(f"  {feature}: {first.key}={show(first.value)}{more}")
    return "\n".join(lines)


def _checks(imported: Imported) -> list[str]:
    if not imported.notes:
        return []
    lines = ["Check before you train:"]
    for note in imported.notes:
        lines += textwrap.wrap(f"- {note}", _WIDTH - 2, subsequent_indent="  ")
    return lines


def _grouped(answers: Iterable[Answer]) -> list[str]:
    """The keys by their reasons."""
    by_reason: dict[str, list[str]] = {}
    for answer in answers:
        by_reason.setdefault(answer.text, []).append(answer.key)
    return [line for reason, keys in by_reason.items() for line in _wrapped(reason, keys)]


def _wrapped(reason: str, keys: list[str]) -> Iterator[str]:
    text = f"- {', '.join(keys)}: {reason}"
    yield from textwrap.wrap(text, _WIDTH - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
