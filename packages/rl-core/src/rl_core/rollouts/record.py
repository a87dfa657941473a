"""A rollout as a JSON object, for people to read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, repeat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rl_core.rollouts.rollout import NOT_SAMPLED, Prompt, Rollout, Turn

MAX_CHARACTERS = 4000
"""Of a value of the row in a record: hidden tests of a program may be megabytes, in every one of its rollouts."""
MAX_STRING, MAX_CONTEXT, MIN_STRING = 2**16, 2**20, 200
"""Maximum number of characters of a string in the messages and tools of an agent's record, and of all of them. Strings
beyond the sum keep their first `MIN_STRING` characters. The policy's turns are bounded by its tokens, and are whole."""


def rollout_record(prompt: Prompt, index: int, rollout: Rollout) -> np.ndarray:
    """uint8 `[bytes]`, UTF-8 of a JSON object on one line; `index` is the rollout's place in its group.

    `weight_spans` count tokens from the start of the rollout. A rollout of several segments has `segments` with the
    `num_tokens` of each; their tokens lie end to end. Rollouts of several agents have `agent`, `peers` and `play`, and
    rollouts of an opponent have `opponent`, which is true, as demonstrations have `demonstration`. `row` is the
    environment's input in addition to the conversation, such as the right answer; values longer than `MAX_CHARACTERS`
    are cut.

    `verdicts` has the `judge`, `question`, `answer` and `value` of each verdict on it, and whether it was `cached`; a
    rollout that nobody judged does not have it.

    A rollout of an agent that calls the policy by HTTP has `turns` in its `segments` (at least one). A segment also has
    the `messages` and `tools` that it begins with, and `call`, the number of its first turn in the order of time. If it
    begins as another one, `shared` has the index of that `segment` and the number of `messages` that they share, turns
    included; only further messages are listed, and the tools are the same.
    """
    starts = np.flatnonzero(np.diff(rollout.weight_versions, prepend=-1))
    ends = np.append(starts, len(rollout.weight_versions))[1:]
    runs = zip(starts.tolist(), ends.tolist(), strict=True)
    row = {}
    for name, value in prompt.info.items():
        text = value if isinstance(value, str) else json.dumps(value, default=_foreign, ensure_ascii=False)
        row[name] = value if len(text) <= MAX_CHARACTERS else _beginning(text, MAX_CHARACTERS)
    described = {
        "prompt_id": prompt.id,
        "dataset": prompt.dataset,
        "environment": prompt.environment,
        "index": index,
        "prompt": prompt.messages,
        "row": row,
        "turns": [_turn(turn) for turn in rollout.turns],
        "rewards": dict(rollout.rewards),
        "status": rollout.status,
        "failure": rollout.failure,
        "stop_reason": rollout.stop_reason,
        "num_sampled": rollout.num_sampled,
        "weight_versions": sorted({span.version for span in rollout.spans} - {NOT_SAMPLED}),
        "weight_spans": [
            {"start": start, "end": end, "version": int(rollout.weight_versions[start])}
            for start, end in runs
            if rollout.weight_versions[start] >= 0
        ],
        "info": rollout.info,
    }
    if rollout.contexts:
        del described["turns"]
        described["segments"] = list(_agent_segments(rollout))
    elif rollout.segments:
        described["segments"] = [{"num_tokens": length} for length in rollout.segments]
    if rollout.agent or rollout.play is not None:
        described |= {"agent": rollout.agent, "peers": rollout.peers, "play": rollout.play}
    for name, is_so in (("opponent", rollout.is_opponent), ("demonstration", rollout.is_demonstration)):
        if is_so:
            described[name] = True
    if rollout.verdicts:
        described["verdicts"] = [
            {key: _beginning(each, MAX_STRING) if isinstance(each, str) else each for key, each in verdict.items()}
            for verdict in rollout.verdicts
        ]
    text = json.dumps(described, default=_foreign, ensure_ascii=False)
    # Half of a surrogate pair has no UTF-8, but an escape that JSON knows.
    return np.frombuffer(text.encode(errors="backslashreplace"), dtype=np.uint8)


def turns_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of a record, in the order of time for an agent."""
    return _objects(record.get("turns")) or [turn for segment in segments_of(record) for turn in segment["turns"]]


def segments_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the segments of an agent's record in the order of time, each with its `number` in this order, and `shared`
    with the other segment's number; none for another record.

    Entries of another type than a run writes are replaced, so that a foreign file can be read.
    """
    listed = [(index, each) for index, each in enumerate(_objects(record.get("segments"))) if "turns" in each]
    listed.sort(key=lambda each: call if isinstance(call := each[1].get("call"), int) else each[0])
    numbers = {index: number for number, (index, _) in enumerate(listed, 1)}
    return [
        {
            **segment,
            "number": numbers[index],
            **{name: _objects(segment.get(name)) for name in ("messages", "tools", "turns")},
            "shared": {"number": numbers.get(shared.get("segment", -1)), "messages": shared.get("messages")}
            if isinstance(shared := segment.get("shared"), dict)
            else None,
        }
        for index, segment in listed
    ]


def write_records(path: Path, records: Iterable[tuple[np.ndarray, float | None]]) -> None:
    """Write a new file of rollouts to the disk: each a record and its advantage, which is added to the object."""
    with path.open("xb", buffering=_BUFFER_BYTES) as file:
        append_records(file, records)
        file.flush()
        os.fsync(file.fileno())


def append_records(file: BinaryIO, records: Iterable[tuple[np.ndarray, float | None]]) -> None:
    """Write records as `write_records` does, to a file that is open. An advantage that is not finite becomes null."""
    for record, advantage in records:
        finite = advantage if advantage is not None and math.isfinite(advantage) else None
        # The record is an object on one line; one entry is added at its end.
        file.write(record[:-1].data)
        file.write(f', "advantage": {json.dumps(finite)}}}\n'.encode())


_BUFFER_BYTES = 2**20


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _agent_segments(rollout: Rollout) -> Iterator[dict[str, Any]]:
    room, turns = MAX_CONTEXT, iter(rollout.turns)

    def cut(value: Any) -> Any:
        """Return nested values with strings that are cut to the room that is left in the record."""
        nonlocal room
        match value:
            case str():
                most = max(min(MAX_STRING, room), MIN_STRING)
                room -= min(len(value), most)
                return _beginning(value, most)
            case Mapping():
                return {str(key): cut(item) for key, item in value.items()}
            case list() | tuple():
                return [cut(item) for item in value]
        return value

    lengths = rollout.segments or (len(rollout.tokens),) if rollout.status != "failed" else repeat(0)
    for length, context in zip(lengths, rollout.contexts, strict=rollout.status != "failed"):
        segment: dict[str, Any] = {"num_tokens": length, "call": context.call}
        if context.num_shared:
            segment["shared"] = {"segment": context.shared_with, "messages": context.num_shared}
        else:
            segment["tools"] = cut(context.tools)
        segment["messages"] = cut(context.messages)
        segment["turns"] = [_turn(turn) for turn in islice(turns, context.num_turns)]
        for turn in segment["turns"]:
            # The last turn of a segment has no answer.
            observation = turn.pop("observation")
            if observation:
                turn["observation"] = cut(observation)
        yield segment


def _turn(turn: Turn) -> dict[str, Any]:
    shown = {"text": turn.text, "observation": turn.observation, "rewards": dict(turn.rewards)}
    return {**shown, "has_invalid_call": True} if turn.has_invalid_call else shown


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _foreign(value: Any) -> Any:
    """Return a value that JSON has no form for: numpy's as plain ones, an environment's own objects as text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else repr(value)
