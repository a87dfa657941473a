"""The dataset `traces`: rows from the calls of language models that a service has recorded."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rl_algos.traces.calls import TracedCall, read_traces
from rl_core.config import Config, PathText
from rl_core.errors import ConfigError, DataError
from rl_core.plugins import DatasetPlugin, Requirement

_log = logging.getLogger(__name__)

MAX_LISTED = 20
"""Maximum number of rows that a warning lists."""

EXACT, UNKNOWN = "exact", "not in the trace"
"""Results of the comparison of a row's tokens with the tokens that were served."""


class TracesSettings(Config):
    """Calls of language models in OpenTelemetry's GenAI traces and in chat logs."""

    path: PathText
    """File, folder or glob pattern of JSON lines or JSON: spans and log records as OpenTelemetry's SDKs print them,
    OTLP as JSON, or chat logs with `request` and `response` (or `messages`) as OpenAI's API has them."""
    form: Literal["sft", "preference", "grpo"] = "sft"
    """Kind of rows. `sft`: each conversation up to its last answer. `preference`: for each prompt with answers of
    different scores, the best one and the worst one. `grpo`: each prompt once."""
    min_score: float | None = None
    """Minimum score of the answers that `sft` learns; answers without one are left out. If unset, all are learned."""
    model: PathText | None = None
    """Folder or hub name of the model that served, to compare tokens: its chat template must render each call to the
    tokens that were served, if the trace has their ids or their number. The result is in the column `token_check`."""
    differing: Literal["report", "skip", "error"] = "report"
    """What to do with rows whose tokens differ from the served ones: `report` keeps them with a warning, `skip` leaves
    them out, `error` ends the run."""


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Load rows; the same ones for each split.

    A row has `messages` and `tools` (`prompt`, `chosen`, `rejected` and `margin` for preferences), `score`,
    `logged_reply` (for GRPO), `token_check` and `source`, the place in the files.

    Raises:
        DataError: If no file has calls with messages, or tokens differ and `differing` is `error`.
    """
    chosen = TracesSettings.model_validate(dict(settings))
    read = read_traces(chosen.path)
    for fault in read.faults[:MAX_LISTED]:
        _log.warning("traces: left out: %s", fault)
    if not read.calls:
        hint = "record their content: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true"
        counted = f"{read.num_others} other records and {len(read.faults)} that cannot be read"
        raise DataError(f"traces: {chosen.path} has no call with messages and an answer, {counted}; {hint}")
    checks = _token_checks(read.calls, chosen)
    calls = [call for call in read.calls if chosen.differing != "skip" or checks[id(call)] in (EXACT, UNKNOWN)]
    make = {"sft": _conversations, "preference": _pairs, "grpo": _prompts}[chosen.form]
    rows = make(calls, chosen, checks)
    counts = (len(rows), len(read.calls), len(read.faults), read.num_others)
    _log.info("traces: %d rows from %d calls; %d records cannot be read, %d are no calls", *counts)
    return rows


def _conversations(
    calls: Sequence[TracedCall], settings: TracesSettings, checks: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return each conversation once, without those that another one continues."""
    continued = {_key(call, call.messages[:end]) for call in calls for end in range(1, len(call.messages) + 1)}
    rows: dict[str, dict[str, Any]] = {}
    for call in calls:
        if settings.min_score is not None and (call.score is None or call.score < settings.min_score):
            continue
        whole = [*call.messages, _reply(call)]
        key = _key(call, whole)
        if key in rows or (key in continued and settings.min_score is None):
            continue
        rows[key] = _row(call, checks, messages=whole)
    return list(rows.values())


def _pairs(calls: Sequence[TracedCall], settings: TracesSettings, checks: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the best answer and the worst answer to each prompt whose answers have different scores."""
    by_prompt: dict[str, list[TracedCall]] = {}
    for call in calls:
        if call.score is not None:
            by_prompt.setdefault(_key(call, call.messages), []).append(call)
    rows = []
    for answers in by_prompt.values():
        ordered = sorted(answers, key=lambda call: call.score or 0.0)
        worst, best = ordered[0], ordered[-1]
        margin = (best.score or 0.0) - (worst.score or 0.0)
        if margin > 0 and _reply(best) != _reply(worst):
            pair = {"chosen": [_reply(best)], "rejected": [_reply(worst)], "margin": margin}
            rows.append({**_row(best, checks, prompt=best.messages), **pair})
    return rows


def _prompts(calls: Sequence[TracedCall], settings: TracesSettings, checks: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return each prompt once, with the answer that was given first."""
    first: dict[str, TracedCall] = {}
    for call in calls:
        first.setdefault(_key(call, call.messages), call)
    return [
        {**_row(call, checks, messages=call.messages), "logged_reply": _reply(call)["content"]}
        for call in first.values()
        if call.messages[-1]["role"] != "assistant"
    ]


def _row(call: TracedCall, checks: Mapping[int, str], **conversation: Any) -> dict[str, Any]:
    row: dict[str, Any] = {**conversation, "source": call.place, "token_check": checks[id(call)]}
    if call.tools:
        row["tools"] = call.tools
    if call.score is not None:
        row["score"] = call.score
    return row


def _reply(call: TracedCall) -> dict[str, Any]:
    assert call.reply is not None, "calls without an answer are not among those that were read"
    return call.reply


def _key(call: TracedCall, messages: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([call.tools, list(messages)], sort_keys=True)


def _token_checks(calls: Sequence[TracedCall], settings: TracesSettings) -> dict[int, str]:
    """Return the result of the comparison of each call, and report the calls that differ.

    Raises:
        DataError: If calls differ and `differing` is `error`.
    """
    if settings.model is None:
        return dict.fromkeys(map(id, calls), UNKNOWN)
    # These modules import transformers, which takes a second.
    from rl_algos.tokenizer import load_tokenizer
    from rl_core.model_config import TokenizerConfig

    try:
        tokenizer = load_tokenizer(TokenizerConfig(), settings.model)
    except ConfigError as error:
        raise DataError(f"traces: model: {str(error).removeprefix('policy.model_name: ')}") from None
    results = {id(call): compared(tokenizer, call) for call in calls}
    differing = [call for call in calls if results[id(call)] not in (EXACT, UNKNOWN)]
    if differing:
        listed = "; ".join(f"{call.place}: {results[id(call)]}" for call in differing[:MAX_LISTED])
        more = "" if len(differing) <= MAX_LISTED else f"; and {len(differing) - MAX_LISTED} more"
        problem = f"traces: {len(differing)} of {len(calls)} calls have other tokens than were served: {listed}{more}"
        if settings.differing == "error":
            raise DataError(f"{problem}. Set `model` to the model that served, or `differing` to skip or report")
        _log.warning("%s", problem)
    counts = Counter(result if result in (EXACT, UNKNOWN) else "different" for result in results.values())
    _log.info("traces: tokens of calls: %s", ", ".join(f"{count} {name}" for name, count in counts.items()))
    return results


def compared(tokenizer: Any, call: TracedCall) -> str:
    """Compare the tokens of a call, as the chat template renders it, with the tokens that were served.

    Args:
        tokenizer: Tokenizer as `rl_algos.tokenizer.load_tokenizer` returns it.
        call: The call.

    Returns:
        `EXACT`, `UNKNOWN` if the trace has neither ids nor numbers of tokens, or the difference.
    """
    from rl_algos.data.rows.example import Example
    from rl_algos.data.rows.messages import as_messages, as_tools
    from rl_algos.sft.data import EncodeShown
    from rl_algos.tokenizer import encode_prompt

    served = (call.num_prompt, call.num_completion, call.prompt_ids, call.completion_ids)
    if served == (None, None, None, None):
        return UNKNOWN
    try:
        messages, tools = as_messages(call.messages), as_tools(call.tools)
        prompt = encode_prompt(tokenizer, messages, tools)
        reply = EncodeShown(tokenizer, 2**31)(Example(messages, solution=[_reply(call)]), prompt, tools)
    except Exception as error:  # noqa: BLE001 - whatever a template does with a strange call is a difference
        return f"the chat template does not render it: {type(error).__name__}: {error}"[:300]
    parts = (
        ("prompt", prompt, call.num_prompt, call.prompt_ids),
        ("answer", reply, call.num_completion, call.completion_ids),
    )
    for name, rendered, number, ids in parts:
        if ids is not None:
            if not np.array_equal(rendered, np.asarray(ids)):
                same = next((i for i, (a, b) in enumerate(zip(rendered, ids, strict=False)) if a != b), None)
                place = min(len(rendered), len(ids)) if same is None else same
                return f"the {name} differs from token {place + 1} on"
        elif number is not None and number != len(rendered):
            return f"the {name} has {len(rendered)} tokens, and {number} were served"
    return EXACT


DATASET = DatasetPlugin(
    name="traces", load="rl_algos.traces.dataset:load", requirement=Requirement("rl-algos"), settings=TracesSettings
)
