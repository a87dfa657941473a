"""Rows of data as text for a terminal, and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text as Line

if TYPE_CHECKING:
    from rl_algos.data.contamination import Overlap
    from rl_algos.data.examples import OpenDataset
    from rl_algos.data.preview import Text
    from rl_algos.data.rows.example import Example
    from rl_launch.commands.data_rows import Counts, GivenRows, ShownRow

_INDENT = "    "
_PURPOSE = {"train": "training", "validation": "validation"}
_MAX_VALUE = 100
"""Maximum number of characters of the value of a column."""
_MAX_REASONS = 3
_MARKS = (("«", "»"), ("⟦", "⟧"), ("⟪", "⟫"))
"""Pairs that mark the learned parts without colours; the first pair that does not occur in a string is used."""
_LEARNED = "bold green"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that would steer the terminal."""


def print_rows(
    source: str, given: GivenRows, shown: Sequence[tuple[OpenDataset, Sequence[ShownRow], Counts]], console: Console
) -> None:
    """Print the source and how it is read, then rows, and counts of the first rows of each dataset."""
    model = given.config.policy.model_name if given.tokenizer is not None else ""
    how = f"read as {given.config.algorithm} does" + (f", with the tokenizer of {model}" if model else "")
    _print(console, Line(f"{source}: {_PURPOSE[given.purpose]} data, {how}", "bold"))
    for dataset, rows, _ in shown:
        for row in rows:
            _print_row(given, dataset, row, console)
    for dataset, _, counted in shown:
        _print_counts(given, dataset, counted, console)


def _print_row(given: GivenRows, dataset: OpenDataset, row: ShownRow, console: Console) -> None:
    """Print a row and its use."""
    from rl_algos.data.encoding import with_section

    console.print()
    _print(console, Line(f"row {row.number} of {len(dataset.numbers)}: {row.place}", "bold"))
    if row.columns is not None:
        _print(console, Line("  columns", "dim"))
        _print_values(row.columns, console)
    if row.example is not None and row.example.columns:
        _print(console, Line(f"  read from {', '.join(row.example.columns)}", "dim"))
    if row.example is not None and not row.texts:
        _print_example(row.example, console)
    for text, is_too_long in zip(row.texts, row.too_long, strict=True):
        _print_text(given, text, console, is_too_long=is_too_long)
    _print_scoring(given, row, console)
    if row.example is not None and given.tokenizer is not None:
        # imports transformers, which has been done for the tokenizer
        from rl_algos.special_tokens import special_tokens

        if token := special_tokens(given.tokenizer).first_in(row.example.messages):
            _print(console, Line(f"  note: the content holds the text of the special token {token}", "yellow"))
    if row.refusal is not None:
        reason = with_section(row.refusal.reason, f"data.{given.purpose}")
        fate = f"refused; {_ends('malformed', given)}" if given.is_run else "refused"
        if not row.refusal.is_fault:
            fate = "left out"
        elif given.config.data.malformed == "skip":
            fate = "left out (data.malformed: skip)"
        _print(console, Line(f"  {fate}: {_printable(reason)}", "red"))


def _print_counts(given: GivenRows, dataset: OpenDataset, found: Counts, console: Console) -> None:
    """Print lengths and refusals of the first rows of a dataset."""
    console.print()
    which = "all" if found.num_read == len(dataset.numbers) else "the first"
    parts = []
    if found.lengths:
        lengths = found.lengths
        parts.append(f"{lengths[0]} to {lengths[-1]} tokens, median {median(lengths):g}")
        if found.num_learned:
            parts.append(f"{found.num_learned / sum(lengths):.0%} of them learned")
        parts.append(f"{found.num_too_long} too long (more than {given.reader.limit})")
    num_refused = sum(found.refusals.values())
    parts.append(f"{num_refused} not used" if num_refused else "none refused")
    if given.is_run and found.num_ending:
        parts.append(f"{found.num_ending} {'ends' if found.num_ending == 1 else 'end'} the run")
    _print(console, Line(f"{dataset.name}, {which} {found.num_read} rows: {', '.join(parts)}", "bold"))
    reasons = list(found.refusals.items())
    for reason, count in reasons[:_MAX_REASONS]:
        _print(console, Line(f"  {count}: {_printable(reason)}"))
    if len(reasons) > _MAX_REASONS:
        _print(console, Line(f"  and {len(reasons) - _MAX_REASONS} other reasons"))
    if given.tokenizer is None:
        _print(console, Line("--model MODEL shows the text and the tokens that a model reads", "dim"))


def as_json(
    given: GivenRows,
    shown: Sequence[tuple[OpenDataset, Sequence[ShownRow], Counts]],
    contained: Mapping[str, tuple[int, Mapping[str, Overlap]]],
) -> dict[str, Any]:
    """Return the rows, the counts and the prompts that training rows contain as plain values."""
    return {
        "schema": 1,
        "algorithm": given.config.algorithm,
        "model": given.config.policy.model_name if given.tokenizer is not None else None,
        "limit": given.reader.limit if given.tokenizer is not None else None,
        "datasets": [
            {
                "name": dataset.name,
                "num_rows": len(dataset.numbers),
                "rows": [_row(given, row) for row in rows],
                "counts": {
                    "num_read": found.num_read,
                    "tokens": {
                        "min": min(found.lengths, default=None),
                        "median": median(found.lengths) if found.lengths else None,
                        "max": max(found.lengths, default=None),
                    },
                    "num_learned": found.num_learned,
                    "num_too_long": found.num_too_long,
                    "not_used": dict(found.refusals),
                    "num_ending": found.num_ending,
                },
            }
            for dataset, rows, found in shown
        ],
        "contamination": {
            task: {"num_prompts": num_prompts, "prompts": {place: asdict(each) for place, each in found.items()}}
            for task, (num_prompts, found) in contained.items()
        },
    }


def _row(given: GivenRows, row: ShownRow) -> dict[str, Any]:
    return {
        "number": row.number,
        "place": row.place,
        "texts": [
            {
                "title": text.title,
                "num_tokens": len(text.tokens),
                "num_learned": int(text.learned.sum()),
                "too_long": is_too_long,
                "images": [{"digest": each.digest, "width": each.width, "height": each.height} for each in text.images],
                "spans": [{"text": part, "learned": is_learned} for part, is_learned in _spans(given, text)],
            }
            for text, is_too_long in zip(row.texts, row.too_long, strict=True)
        ],
        "environment": row.environment or None,
        "fields": json.loads(json.dumps(dict(row.fields), default=str)),
        "not_used": None if row.refusal is None else row.refusal.reason,
    }


def _print_text(given: GivenRows, text: Text, console: Console, *, is_too_long: bool) -> None:
    learned = int(text.learned.sum())
    size = f"{len(text.tokens)} tokens" + (f", {learned} learned" if learned else "")
    _print(console, Line(f"  {text.title or 'text'} ({size})", "dim"))
    parts = [(_printable(part), is_learned) for part, is_learned in _spans(given, text)]
    has_colours = console.is_terminal and console.color_system is not None and not console.no_color
    whole = "".join(part for part, _ in parts)
    free = (pair for pair in _MARKS if not any(mark in whole for mark in pair))
    marks = ("", "") if has_colours else next(free, _MARKS[-1])
    line = Line()
    for part, is_learned in parts:
        line.append(f"{marks[0]}{part}{marks[1]}" if is_learned else part, _LEARNED if is_learned else "")
    for each in line.split("\n", allow_blank=True):
        _print(console, Line(_INDENT).append_text(each))
    if is_too_long:
        reader = given.reader
        over = f"more than the {reader.limit} of {reader.limit_key}"
        fate = "left out (data.overlong: skip)" if given.config.data.overlong == "skip" else _ends("overlong", given)
        _print(console, Line(f"  too long: {len(text.tokens)} tokens, {over}; {fate}", "red"))


def _print_example(example: Example, console: Console) -> None:
    """Print messages, tools and responses of a row without rendered text."""
    _print(console, Line("  messages", "dim"))
    for message in example.messages:
        _print_message(message, console)
    said = example.answer if example.solution is None else example.solution
    if said is not None and not example.has_response:
        _print(console, Line(f"  answer: {_shortened(_as_json(said))}"))
    for number, response in enumerate(example.responses, start=1):
        verdict: dict[str, object] = {
            "rank": response.rank,
            "score": response.score,
            "desirable": response.is_desirable,
        }
        verdict["steps"] = " ".join(f"{label:g}" for label in response.step_labels) or None
        known = ", ".join(f"{name} {value}" for name, value in verdict.items() if value is not None)
        _print(console, Line(f"  response {number}{f' ({known})' if known else ''}", "dim"))
        for message in response.messages:
            _print_message(message, console)
    if example.tools:
        _print(console, Line(f"  tools: {', '.join(str(tool['function']['name']) for tool in example.tools)}"))


def _print_message(message: Mapping[str, Any], console: Console) -> None:
    content = message.get("content")
    said = content if isinstance(content, str) else _as_json(content)
    calls = f" calls {_shortened(_as_json(message['tool_calls']))}" if message.get("tool_calls") else ""
    for line in _printable(f"{message['role']}: {said}{calls}").split("\n"):
        _print(console, Line(f"{_INDENT}{line}"))


def _print_scoring(given: GivenRows, row: ShownRow, console: Console) -> None:
    if given.reader.environment is None or row.example is None:
        return
    if not row.environment:
        hint = "" if given.is_run else "; data.train.env_name=NAME or file.py:function names one"
        _print(console, Line(f"  scored by no environment{hint}"))
        return
    _print(console, Line(f"  scored by {row.environment}, which is given", "dim"))
    _print_values(row.fields, console)


def _print_values(values: Mapping[str, Any], console: Console) -> None:
    for name, value in values.items():
        _print(console, Line(f"{_INDENT}{_printable(str(name))}: {_shortened(_as_json(value))}"))


def _ends(key: str, given: GivenRows) -> str:
    return f"{'it ends' if given.is_run else 'it would end'} the run (data.{key}=skip leaves such rows out)"


def _spans(given: GivenRows, text: Text) -> Iterator[tuple[str, bool]]:
    from rl_algos.data.preview import spans

    return spans(given.tokenizer, text)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _shortened(text: str) -> str:
    text = _printable(text)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."


def _printable(text: str) -> str:
    """Return a string whose control characters are written as escapes, except line breaks and tabs."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _print(console: Console, line: Line) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False)
