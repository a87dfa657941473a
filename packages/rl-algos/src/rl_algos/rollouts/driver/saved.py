"""Finished groups, and turns of unfinished rollouts, as plain data of a checkpoint."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

import numpy as np

from rl_core.data.batch import Batch, Column
from rl_core.data.ragged import Ragged
from rl_core.environments.messages import read_results, write_results
from rl_core.rollouts.group import RolloutGroup, RolloutReports
from rl_core.rollouts.pool import AnsweredTurns, RolloutTurns
from rl_core.rollouts.rollout import Completion, Prompt, Thinking, WeightSpan


def group_state(group: RolloutGroup) -> Mapping[str, Any]:
    """Return the plain data of a group without its prompt; columns in other processes are fetched."""
    columns = group.columns.local()
    return {
        "rollouts": asdict(group.rollouts),
        "columns": {
            name: {"values": column.values, "offsets": column.offsets}
            if isinstance(column, Ragged)
            else {"values": column}
            for name, column in ((name, columns[name]) for name in columns)
        },
        "opponents": None if group.opponents is None else group_state(group.opponents),
    }


def group_from(state: Mapping[str, Any], prompt: Prompt) -> RolloutGroup:
    """Return the group of a prompt from its plain data.

    Raises:
        ValueError: If the data is of another prompt.
    """
    rollouts = RolloutReports(**state["rollouts"])
    if rollouts.prompt_id != prompt.id:
        raise ValueError(f"the saved rollouts are of prompt {rollouts.prompt_id}, not of {prompt.id}")
    columns: dict[str, Column] = {
        name: Ragged(saved["values"], saved["offsets"]) if "offsets" in saved else saved["values"]
        for name, saved in state["columns"].items()
    }
    # A checkpoint of an earlier release has no opponents.
    opponents = state.get("opponents")
    played = None if opponents is None else group_from(opponents, prompt)
    return RolloutGroup(prompt, rollouts, Batch(columns), played)


def turns_state(turns: Sequence[RolloutTurns]) -> Mapping[str, Any]:
    """Return the plain data of the turns of a group's rollouts; few arrays, however many turns there are."""
    completions = [completion for each in turns for completion in each.completions.values()]
    results = [result for each in turns for answered in each.conversations for result in answered.results]
    return {
        "digests": tuple(tuple(each.completions) for each in turns),
        "lengths": tuple(len(completion.token_ids) for completion in completions),
        "token_ids": np.concatenate([np.zeros(0, np.int32), *(each.token_ids for each in completions)]),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *(each.logprobs for each in completions)]),
        "stop_reasons": tuple(completion.stop_reason for completion in completions),
        "spans": tuple(tuple((s.version, s.num_tokens) for s in completion.spans) for completion in completions),
        "routed_experts": {
            str(index): completion.routed_experts
            for index, completion in enumerate(completions)
            if completion.routed_experts is not None
        },
        "thinking": tuple(each.thinking and astuple(each.thinking) for each in completions),
        "conversations": tuple(tuple(answered.digests for answered in each.conversations) for each in turns),
        "results": np.frombuffer(write_results(results), np.uint8),
    }


def turns_from(state: Mapping[str, Any]) -> tuple[RolloutTurns, ...]:
    """Return turns from their plain data."""
    ends = np.cumsum(state["lengths"], dtype=np.int64)
    # A checkpoint of an earlier release has no thoughts.
    thinking = state.get("thinking") or (None,) * len(state["lengths"])
    completions = iter(
        Completion(token_ids, logprobs, reason, spans, state["routed_experts"].get(str(index)), thoughts)
        for index, (token_ids, logprobs, reason, spans, thoughts) in enumerate(
            zip(
                np.split(state["token_ids"], ends)[:-1],
                np.split(state["logprobs"], ends)[:-1],
                state["stop_reasons"],
                [tuple(WeightSpan(version, num_tokens) for version, num_tokens in spans) for spans in state["spans"]],
                [each and Thinking(*each) for each in thinking],
                strict=True,
            )
        )
    )
    # A checkpoint of an earlier release has no answers.
    answers = iter(read_results(state["results"].tobytes()) if "results" in state else ())
    conversations = state.get("conversations") or ((),) * len(state["digests"])
    return tuple(
        RolloutTurns(
            {digest: next(completions) for digest in digests},
            tuple(AnsweredTurns(each, tuple(next(answers) for _ in each)) for each in answered),
        )
        for digests, answered in zip(state["digests"], conversations, strict=True)
    )


def packed_turns(turns: Sequence[RolloutTurns]) -> bytes:
    """Return the completions of rollouts as bytes: JSON, and arrays without pickles. The environment's answers are left
    out."""
    state = dict(turns_state([replace(each, conversations=()) for each in turns]))
    del state["results"]
    arrays = {name: state.pop(name) for name, value in [*state.items()] if isinstance(value, np.ndarray)}
    arrays |= {f"{_EXPERTS}{name}": value for name, value in state.pop("routed_experts").items()}
    file = io.BytesIO()
    np.savez_compressed(file, state=np.frombuffer(json.dumps(state).encode(), np.uint8), **arrays)
    return file.getvalue()


def unpacked_turns(packed: bytes) -> tuple[RolloutTurns, ...]:
    """Return the completions of `packed_turns`.

    Raises:
        ValueError: If the bytes are something else.
    """
    try:
        with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
            state = json.loads(arrays["state"].tobytes())
            named = {name: arrays[name] for name in arrays.files if name != "state"}
        experts = {name.removeprefix(_EXPERTS): named.pop(name) for name in [*named] if name.startswith(_EXPERTS)}
        return turns_from({**state, **named, "routed_experts": experts})
    except _DAMAGE as error:
        raise ValueError(f"these bytes are not turns: {type(error).__name__}: {error}") from None


_DAMAGE = (OSError, KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Errors of reading an archive whose bytes were changed."""

_EXPERTS = "routed_experts/"
"""Beginning of the names of arrays of experts."""
