"""Summary of a run: figures, samples of rollouts, times and advice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, Literal

from rl_algos.evaluation.summary import reason_counts
from rl_core.errors import RunDirectoryError
from rl_core.rollouts.record import segments_of
from rl_launch.run_session.checkpoints.checkpoints import ADAPTER, EXPORT
from rl_launch.run_session.directory.row_files import text_of_content
from rl_launch.run_session.directory.run_folder import Description, RunFolder, timings_of
from rl_launch.run_session.directory.run_state import RunState
from rl_launch.run_session.rollouts.rollout_store import Kind
from rl_launch.show.advice import Advice, acted, advice
from rl_launch.show.selection import Selection, response_of, reward_of

NUM_SAMPLES = 2
"""Number of rollouts shown with the highest rewards, and with the lowest."""

MAX_FAILURES = 5
"""Number of reasons of failed rollouts that are shown."""

MAX_STEPS_WITH_FAILURES = 20
"""Number of steps whose failed rollouts are read for their reasons."""

_HIGHER_IS_BETTER = (
    "reward/",
    "val/accuracy",
    "val/reward",
    "environment/accuracy",
    "generation/tokens_per_second",
    "train/tokens_per_second",
    "train/mfu",
    "train/flops_per_second",
)

_LOWER_IS_BETTER = ("train/loss", "val/loss", "rollout/failed", "rollout/truncated")

_NEITHER = ("reward/std",)

_OF_SURROGATES = "policy/nll"
"""A metric of runs whose `train/loss` is a surrogate with the right gradient, and whose value means little."""

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Steps and values of each metric, without values that are not finite."""


def headings(keys: Sequence[str]) -> list[str]:
    """Return the last names of each key that tell it from the others: `lr` of `policy.optimizer.kwargs.lr`. Metrics
    stay whole.
    """
    found = []
    for key in keys:
        names, others = key.split("."), [other.split(".") for other in keys if other != key]
        counts = () if "/" in key else range(1, len(names))
        count = next((n for n in counts if all(other[-n:] != names[-n:] for other in others)), len(names))
        found.append(".".join(names[-count:]))
    return found


@dataclass(frozen=True)
class MetricSummary:
    """A metric over the steps of a run.

    Args:
        name: As `metrics.jsonl` spells it.
        first: The first value.
        best: None for a metric without a better end.
        best_step: Step of the best value.
        last: The last value.
        last_step: Step that recorded it.
    """

    name: str
    first: float
    best: float | None
    best_step: int | None
    last: float
    last_step: int


@dataclass(frozen=True)
class SampleSegment:
    """A conversation of an agent, as people read it.

    Args:
        title: Its number, the messages that it shares with another segment, and its tools.
        messages: Role and text of each further message; the role of the policy's turns is `policy`.
    """

    title: str
    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RolloutSample:
    """A rollout, as people read it.

    Args:
        reward: None if it failed.
        prompt: Text of the prompt's last message.
        response: Text of all turns.
        why: The reason of a failure, or how the rollout ended.
        num_tokens: Number of sampled tokens.
        parts: Further rewards by name.
        system: Text of the system prompt; empty if there is none.
        row: Fields of the row that the environment was given, such as the right answer.
        segments: Conversations of an agent in the order of time; empty for another rollout.
        verdicts: Judge and answer of each verdict on it.
    """

    reward: float | None
    prompt: str
    response: str
    why: str
    num_tokens: int
    parts: Mapping[str, float] = field(default_factory=dict)
    system: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    segments: tuple[SampleSegment, ...] = ()
    verdicts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of a step.

    Args:
        step: Step that trained on them, or last step before the validation.
        num_rollouts: Total number of rollouts.
        best: The best rollout of each of the prompts whose rollouts differ most in reward, the most mixed prompt first;
            if no prompt has rollouts of different rewards, those with the highest rewards, of different prompts.
        worst: The worst rollouts of the same prompts, or those with the lowest rewards.
        are_mixed: True if they are of prompts whose rollouts differ in reward.
        failures: Reasons of failed ones, the most frequent first, each with its count.
        kind: `val` for rollouts of a validation, `eval` for those of `rl eval`.
        chosen: Those that were asked for, in place of `best` and `worst`; None if none were.
        num_chosen: Number of chosen rollouts; the first of them are in `chosen`.
    """

    step: int
    num_rollouts: int
    best: tuple[RolloutSample, ...]
    worst: tuple[RolloutSample, ...]
    failures: Mapping[str, int]
    are_mixed: bool = False
    kind: Kind | Literal["eval"] = "step"
    chosen: tuple[RolloutSample, ...] | None = None
    num_chosen: int = 0

    @property
    def were_asked_for(self) -> bool:
        """True if the user asked for rollouts rather than for the run."""
        return self.chosen is not None or self.kind == "val"


@dataclass(frozen=True)
class RunReport:
    """A run summed up.

    Args:
        series: Values of each metric over steps, without those that are not finite.
        timings: Seconds of all steps by phase, `step` for the whole.
        rollouts: None if the run generates nothing.
        exports: Folders of the newest checkpoint that other libraries load, by name.
    """

    path: str
    description: Description
    state: RunState
    summaries: tuple[MetricSummary, ...]
    series: Series
    timings: Mapping[str, float]
    rollouts: Rollouts | None
    advice: tuple[Advice, ...]
    exports: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `rl show --json` prints."""
        fields = ("path", "description", "state", "summaries", "timings", "rollouts", "advice", "exports")
        data = asdict(self)
        return {"schema": 1, **{name: data[name] for name in fields}}


def report_of(run: RunFolder, step: int | None = None, selection: Selection | None = None) -> RunReport:
    """Summarise a run.

    Args:
        run: The run, finished or in progress.
        step: The step whose rollouts are shown, and the last step of the metrics; the last one if not given.
        selection: The rollouts that are shown; None for the best and the worst that were trained on.

    Raises:
        RunDirectoryError: If nothing was recorded of that step, or rollouts are asked for and there are none.
    """
    rows = run.metrics()
    steps = [row["step"] for row in rows]
    if step is not None and step not in steps:
        known = f"it has {steps[0]} to {steps[-1]}" if steps else "it has none yet"
        raise RunDirectoryError(f"{run.path} has no metrics of step {step}; {known}.")
    if step is not None:
        rows = [row for row in rows if row["step"] <= step]
    series = series_of(rows)
    timings = timings_of(rows)
    saved = run.checkpoints()
    folders = {"model": EXPORT, "adapter": ADAPTER} if saved else {}
    return RunReport(
        path=str(run.path),
        description=run.description(),
        state=run.state(),
        summaries=tuple(summaries_of(series)),
        series=series,
        timings=timings,
        rollouts=_rollouts(run, step, selection),
        advice=(*acted(run.path), *advice(rows, timings, run.config(), failures_of(run, rows))),
        exports={
            name: str(saved[-1].path / each) for name, each in folders.items() if (saved[-1].path / each).is_dir()
        },
    )


def series_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the values of each metric over steps, except times and values that are not finite."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and not name.startswith("time/") and value is not None and isfinite(value):
                series.setdefault(name, []).append((row["step"], value))
    return series


def summaries_of(series: Series) -> list[MetricSummary]:
    """Return the summaries of the metrics of a run."""
    found = []
    for name, points in series.items():
        higher = higher_is_better(name, series)
        if not points:
            continue
        step, best = None, None
        if higher is not None:
            step, best = (max if higher else min)(points, key=lambda point: point[1])
        found.append(MetricSummary(name, points[0][1], best, step, points[-1][1], points[-1][0]))
    return found


def higher_is_better(name: str, metrics: Container[str] = ()) -> bool | None:
    """Return whether a higher value of a metric is better; None if neither is.

    Args:
        name: Name of the metric.
        metrics: Names of all metrics of the run.
    """
    if name in _NEITHER or (name == "train/loss" and _OF_SURROGATES in metrics):
        return None
    if name.startswith(_HIGHER_IS_BETTER) or (name.startswith("val/") and name.endswith(("/accuracy", "/reward"))):
        return True
    is_loss = name.startswith("val/") and name.endswith("/loss")
    return False if is_loss or name.startswith(_LOWER_IS_BETTER) else None


def _rollouts(run: RunFolder, step: int | None, asked: Selection | None) -> Rollouts | None:
    selection = asked or Selection()
    steps = run.rollout_steps(selection.kind)
    if asked is None and (not steps or (step is not None and step not in steps)):
        return None
    shown_step = step if step is not None else steps[-1] if steps else 0
    return rollouts_of(list(run.rollouts(shown_step, selection.kind)), selection, step=shown_step)


def rollouts_of(records: Sequence[Mapping[str, Any]], selection: Selection, *, step: int | None = None) -> Rollouts:
    """Return the rollouts to show of all records of a step, or of an evaluation, whose step is None."""
    failed = [record for record in records if record.get("status") == "failed"]
    scored = [record for record in records if record.get("status") != "failed" and record.get("rewards")]
    scored.sort(key=reward_of, reverse=True)
    by_prompt: dict[Any, list[Mapping[str, Any]]] = {}
    for record in scored:
        by_prompt.setdefault(record.get("prompt_id"), []).append(record)
    spread = {prompt: reward_of(group[0]) - reward_of(group[-1]) for prompt, group in by_prompt.items()}
    ordered = sorted(spread, key=lambda prompt: -spread[prompt])
    mixed = [by_prompt[prompt] for prompt in ordered if spread[prompt] > 0][:NUM_SAMPLES]
    best = [group[0] for group in mixed] or _of_different_prompts(scored)
    rest = [record for record in reversed(scored) if not any(record is other for other in best)]
    chosen = selection.of(records) if selection.is_a_choice else None
    return Rollouts(
        step=step or 0,
        num_rollouts=len(records),
        best=tuple(map(_sample, best)),
        worst=tuple(map(_sample, [group[-1] for group in mixed] or _of_different_prompts(rest))),
        are_mixed=bool(mixed),
        failures=dict(Counter(str(record.get("failure", "")) for record in failed).most_common(MAX_FAILURES)),
        kind="eval" if step is None else selection.kind,
        chosen=None if chosen is None else tuple(map(_sample, chosen[: selection.limit])),
        num_chosen=len(chosen or ()),
    )


def failures_of(run: RunFolder, rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of failed rollouts by their reason, in the last steps that have some and whose rollouts
    are kept."""
    kept = set(run.rollout_steps("step"))
    steps = [row["step"] for row in rows if row.get("rollout/failed") and row["step"] in kept]
    return reason_counts(
        [
            str(record.get("failure", ""))
            for step in steps[-MAX_STEPS_WITH_FAILURES:]
            for record in run.rollouts(step)
            if record.get("status") == "failed"
        ]
    )


def _of_different_prompts(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first rollouts of a list, from as many prompts as possible."""
    firsts: dict[Any, Mapping[str, Any]] = {}
    for record in records:
        firsts.setdefault(record.get("prompt_id"), record)
    others = [record for record in records if not any(record is first for first in firsts.values())]
    return [*firsts.values(), *others][:NUM_SAMPLES]


def _sample(record: Mapping[str, Any]) -> RolloutSample:
    prompt = record.get("prompt") or [{}]
    has_failed = record.get("status") == "failed"
    system = prompt[0].get("content", "") if prompt[0].get("role") == "system" else ""
    return RolloutSample(
        reward=None if has_failed else reward_of(record),
        prompt=text_of_content(prompt[-1].get("content", "")),
        response=response_of(record),
        why=str(record.get("failure" if has_failed else "stop_reason", "")),
        num_tokens=int(record.get("num_sampled", 0)),
        parts={name: value for name, value in (record.get("rewards") or {}).items() if name != "reward"},
        system=str(system or ""),
        row=record.get("row") or {},
        segments=tuple(map(_segment, segments_of(record))),
        verdicts=tuple(map(_verdict, record.get("verdicts") or ())),
    )


def _verdict(verdict: Mapping[str, Any]) -> tuple[str, str]:
    """Return the judge and the answer of a verdict; its value if there is no answer."""
    return str(verdict.get("judge", "")), str(verdict.get("answer") or json.dumps(verdict.get("value")))


def _segment(segment: Mapping[str, Any]) -> SampleSegment:
    shared, tools = segment["shared"], [_tool_name(tool) for tool in segment["tools"]]
    begin = f", begins with {shared['messages']} of the messages of segment {shared['number']}" if shared else ""
    title = f"segment {segment['number']}{begin}{', tools: ' * bool(tools)}{', '.join(tools)}"
    messages = [_said(message) for message in segment["messages"]]
    for turn in segment["turns"]:
        messages.append(("policy", str(turn.get("text", ""))))
        messages += map(_said, turn.get("observation") or ())
    return SampleSegment(title, tuple(messages))


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str((tool.get("function") or {}).get("name", "?"))


def _said(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the role and the text of a message, with its tool calls."""
    calls = [
        f"{_tool_name(call)}({json.dumps((call.get('function') or {}).get('arguments'), ensure_ascii=False)})"
        for call in message.get("tool_calls") or ()
    ]
    return str(message.get("role", "")), "\n".join(filter(None, [text_of_content(message.get("content")), *calls]))
