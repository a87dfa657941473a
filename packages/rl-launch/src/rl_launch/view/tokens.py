"""Answers about the tokens of one rollout: texts, values and their ranges, in pages."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from rl_core.errors import RunDirectoryError
from rl_launch.run_session.rollouts import rollout_store
from rl_launch.run_session.rollouts.token_table import RecordedRollout, read_tokens, recorded_rollouts
from rl_launch.view.catalog import CatalogEntry, PageCatalog
from rl_launch.view.index import RolloutLine
from rl_launch.view.parameters import Parameters
from rl_launch.view.rollouts import rollout_of

MAX_TOKENS = 2000
"""Maximum number of tokens in one answer."""

MEASURED = ("logprob", "generation_logprob", "difference", "advantage", "entropy")
"""Columns of numbers; `difference` is `logprob - generation_logprob`."""


def tokens(catalog: PageCatalog, given: Parameters) -> dict[str, Any]:
    """Answer with a page of the tokens of one rollout; ranges of values are computed from its sampled tokens.

    Without tokens, `count` is 0, `reason` is the reason, and `others` are the rollouts of the step that have some.

    Raises:
        RunDirectoryError: If the file of tokens cannot be read.
    """
    entry, line, found = rollout_of(catalog, given)
    record, offset = found or {}, given.integer("offset", 0, least=0)
    recorded = recorded_in(entry, line.kind, line.step)
    same = [each for each in recorded if (each.prompt_id, each.index) == (record.get("prompt_id"), record.get("index"))]
    if not same:
        others = [each.number for each in recorded]
        return {"count": 0, "reason": _reason(entry, line, has_others=bool(others)), "others": others}
    # a prompt may be drawn twice in a step; lines of lost rollouts are missing in the file of rollouts
    number = min(same, key=lambda each: abs(each.number - line.row)).number
    with _opened(entry, line.step) as file:
        columns = read_tokens(file, number)
    columns["difference"] = [
        None if one is None or other is None else one - other
        for one, other in zip(columns["logprob"], columns["generation_logprob"], strict=True)
    ]
    shown, parts = shown_texts(columns["text"], columns["segment"])
    of_sampled = zip(columns["weight_version"], columns["generation_logprob"], strict=True)
    sampled = [number for number, each in enumerate(of_sampled) if each != (None, None)]
    ranges = {}
    for name in MEASURED:
        values = [columns[name][at] for at in sampled]
        if finite := [value for value in values if value is not None and abs(value) < float("inf")]:
            ranges[name] = [_short(min(finite)), _short(max(finite))]
    page = slice(offset, offset + MAX_TOKENS)
    return {
        "count": len(shown),
        "offset": offset,
        "num_segments": 1 + max(columns["segment"]),
        "ranges": ranges,
        "versions": sorted({version for version in columns["weight_version"] if version is not None}),
        "columns": {
            "text": shown[page],
            "part": parts[page],
            **{name: columns[name][page] for name in ("segment", "position", "token_id", "weight_version")},
            **{name: [int(value) for value in columns[name][page]] for name in ("is_special", "loss_mask")},
            **{name: [None if value is None else _short(value) for value in columns[name][page]] for name in MEASURED},
        },
    }


def recorded_in(entry: CatalogEntry, kind: str, step: int) -> list[RecordedRollout]:
    """Return the rollouts of a step whose tokens are recorded.

    Raises:
        RunDirectoryError: If the file of tokens cannot be read.
    """
    if entry.sort != "run" or kind != "step":
        return []
    try:
        with _opened(entry, step) as file:
            return recorded_rollouts(file)
    except FileNotFoundError:
        return []


def shown_texts(pieces: Sequence[bytes | None], segments: Sequence[int]) -> tuple[list[str | None], list[str]]:
    """Return the text of each token, and the bytes in hexadecimal of each that does not end a character.

    A character that several tokens make up is the text of the last of them. Bytes that are not UTF-8 are replaced. A
    token without a text has None.

    Args:
        pieces: Bytes of each token.
        segments: Segment of each token; characters end with it.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts: list[str | None] = []
    parts: list[str] = []
    for number, piece in enumerate(pieces):
        if number and segments[number] != segments[number - 1]:
            decoder.reset()
        text = None if piece is None else decoder.decode(piece)
        texts.append(text)
        parts.append(piece.hex(" ") if piece and not text else "")
    return texts, parts


@contextmanager
def _opened(entry: CatalogEntry, step: int) -> Iterator[IO[bytes]]:
    import pyarrow as pa

    with rollout_store.open_step(entry.path / "rollouts", step, "tokens") as file:
        try:
            yield file
        except (pa.ArrowException, KeyError) as error:
            raise RunDirectoryError(f"the file of tokens of step {step} cannot be read: {error}") from None


def _reason(entry: CatalogEntry, line: RolloutLine, *, has_others: bool) -> str:
    if entry.sort != "run" or line.kind != "step":
        return "Values of tokens are recorded for rollouts of training steps only."
    if has_others:
        return (
            "The tokens of this rollout are not recorded. logger.token_level=all records those of every rollout, and "
            "logger.token_level_groups is the number of groups of a step that logger.token_level=sampled records."
        )
    logger = entry.run.config().get("logger")
    if isinstance(logger, dict) and logger.get("token_level") == "none":
        return "This run records no tokens, because logger.token_level is none. Values: sampled, all."
    return (
        f"No tokens of step {line.step} are recorded. logger.token_level=sampled or all records them; the log of the "
        "driver has the reason if they could not be written."
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")
