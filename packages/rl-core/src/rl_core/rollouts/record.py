"""A rollout as a JSON object, for people to read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rl_core.rollouts.rollout import Prompt, Rollout, Turn

MOST_CHARACTERS = 4000
"""Of a value of the row in a record: hidden tests of a program may be megabytes, in every one of its rollouts."""


def rollout_record(prompt: Prompt, index: int, rollout: Rollout) -> np.ndarray:
    """uint8 `[bytes]`, UTF-8 of a JSON object on one line; `index` is the rollout's place in its group.

    `weight_spans` count tokens from the start of the rollout; with several segments, whose numbers of tokens are then
    in `segments`, these lie end to end. Rollouts of several agents have `agent`, `peers` and `play`, and those of an
    opponent `opponent`, which is true. `row` is what the environment was given in addition to the conversation, such as
    the right answer; values longer than `MOST_CHARACTERS` are cut.
    """
    described = {
        "prompt_id": prompt.id,
        "dataset": prompt.dataset,
        "environment": prompt.environment,
        "index": index,
        "prompt": prompt.messages,
        "row": {name: _shown(value) for name, value in prompt.info.items()},
        "turns": [_turn(turn) for turn in rollout.turns],
        "rewards": dict(rollout.rewards),
        "status": rollout.status,
        "failure": rollout.failure,
        "stop_reason": rollout.stop_reason,
        "num_sampled": rollout.num_sampled,
        "weight_versions": sorted({span.version for span in rollout.spans}),
        "weight_spans": _weight_spans(rollout.weight_versions),
        "info": rollout.info,
    }
    if rollout.segments:
        described["segments"] = rollout.segments
    if rollout.agent or rollout.play is not None:
        described |= {"agent": rollout.agent, "peers": rollout.peers, "play": rollout.play}
    if rollout.is_opponent:
        described["opponent"] = True
    text = json.dumps(described, default=_foreign, ensure_ascii=False)
    # half of a surrogate pair has no UTF-8, but an escape that JSON knows
    return np.frombuffer(text.encode(errors="backslashreplace"), dtype=np.uint8)


def write_records(path: Path, records: Iterable[tuple[np.ndarray, float | None]]) -> None:
    """Write a new file of rollouts to the disk: each a record and its advantage, which is added to the object."""
    with path.open("xb", buffering=_BUFFER_BYTES) as file:
        append_records(file, records)
        file.flush()
        os.fsync(file.fileno())


def append_records(file: BinaryIO, records: Iterable[tuple[np.ndarray, float | None]]) -> None:
    """Same as `write_records`, to a file that is open. An advantage that is not finite becomes null."""
    for record, advantage in records:
        finite = advantage if advantage is not None and math.isfinite(advantage) else None
        # an object on one line, to which one entry is added
        file.write(record[:-1].data)
        file.write(f', "advantage": {json.dumps(finite)}}}\n'.encode())


_BUFFER_BYTES = 2**20


def _weight_spans(versions: np.ndarray) -> list[dict[str, int]]:
    """Runs of tokens that were sampled with one weight version: `start` and `end` in the rollout, and `version`.

    Args:
        versions: Int32 `[tokens]`, negative for tokens that were not sampled.
    """
    starts = np.flatnonzero(np.diff(versions, prepend=-1))
    ends = np.append(starts, len(versions))[1:]
    runs = zip(starts.tolist(), ends.tolist(), strict=True)
    return [
        {"start": start, "end": end, "version": int(versions[start])} for start, end in runs if versions[start] >= 0
    ]


def _turn(turn: Turn) -> dict[str, Any]:
    shown = {"text": turn.text, "observation": turn.observation, "rewards": dict(turn.rewards)}
    return {**shown, "has_invalid_call": True} if turn.has_invalid_call else shown


def _shown(value: Any) -> Any:
    """A value of a row, or the beginning of its text if it is long."""
    text = value if isinstance(value, str) else json.dumps(value, default=_foreign, ensure_ascii=False)
    if len(text) <= MOST_CHARACTERS:
        return value
    return f"{text[:MOST_CHARACTERS]}... ({len(text):,} characters)"


def _foreign(value: Any) -> Any:
    """A value that JSON has no form for: numpy's as plain ones, an environment's own objects as text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else repr(value)
