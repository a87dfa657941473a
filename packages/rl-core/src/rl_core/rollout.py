"""Prompts, the rollouts sampled from them, and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike

from rl_core.batch import TOKENS, Batch, Column
from rl_core.ragged import Ragged
from rl_core.rollout_record import rollout_record

LOSS_MASK = "loss_mask"
GENERATION_LOGPROBS = "generation_logprobs"
ROUTED_EXPERTS = "routed_experts"
WEIGHT_VERSIONS = "weight_versions"
RECORD = "record"
"""Columns of a `RolloutGroup`, beside `tokens`."""

NOT_SAMPLED = -1
"""In `weight_versions`: the policy did not sample the token."""

UNKNOWN_EXPERT = -1
"""In `routed_experts`: the engine did not report where it sent the token."""

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and what a chat template understands besides (tool calls, names)."""

StopReason = Literal["stop", "length", "abort"]
Status = Literal["ok", "truncated", "failed"]


@dataclass(frozen=True)
class Prompt:
    """The start of a rollout.

    Args:
        id: unique within the dataset and stable across runs, so that exactly-once can be proved.
        messages: the conversation so far.
        token_ids: int32 `[tokens]`, the conversation rendered by the chat template and tokenised, ready for generation.
        environment: name of the environment that scores it.
        info: whatever else the environment needs beside the conversation (the answer, a seed).
        dataset: name of the dataset it came from.
        place: of its row, as messages say it: `prompts.jsonl, line 3`.
        tools: JSON schemas of the tools that the policy may call, as the chat template has rendered them.
        is_text: Whether the row gave the prompt as plain text rather than as messages.
    """

    id: str
    messages: tuple[Message, ...]
    token_ids: np.ndarray
    environment: str
    info: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""
    place: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    is_text: bool = False

    def __str__(self) -> str:
        return self.place or f"prompt {self.id}"


@dataclass(frozen=True)
class WeightSpan:
    """A run of sampled tokens and the weight version they were sampled with."""

    version: int
    num_tokens: int


@dataclass(frozen=True)
class Completion:
    """One answer of a generator.

    Args:
        token_ids: int32 `[tokens]`, the sampled tokens, the stop token included.
        logprobs: float32 `[tokens]`, processed logprobs (after temperature, top-k, top-p) of those tokens.
        stop_reason: `stop` (stop token or string), `length` (token limit), `abort` (cut off from outside).
        spans: the weight versions, in order; their token counts add up to the tokens.
        routed_experts: int16 `[computed, layers, experts_per_token]`, the experts that each token of the prompt and of
            the completion was sent to, as far as the engine computed them: the last sampled token is not fed back.
            Layers count over the whole model; those without experts hold any number. None unless
            `rl_core.generation.Placement.reports_routing`.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    spans: tuple[WeightSpan, ...]
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True)
class Turn:
    """One exchange: the policy's text and the environment's answer (`None` at the end)."""

    text: str
    observation: tuple[Message, ...] | None
    rewards: Mapping[str, float]


@dataclass(frozen=True)
class Rollout:
    """One whole trajectory.

    Args:
        prompt_id: of the prompt it came from.
        tokens: int32 `[tokens]`, prompt, completions and observations in order; sampled tokens are never re-tokenised.
            Those of several segments lie end to end.
        loss_mask: uint8 `[tokens]`, 1 only on tokens the policy sampled.
        generation_logprobs: float32 `[tokens]`, the engine's, 0 where `loss_mask` is 0.
        spans: weight version of each run of sampled tokens, in order; together they have as many tokens as `loss_mask`
            has ones.
        turns: texts and rewards by turn, for people to read.
        rewards: reward by name, summed over turns; `reward` is the one trained on.
        stop_reason: of the last completion.
        status: `failed` trains nothing and counts in no statistic; `truncated` ran into a length or turn limit.
        failure: why it failed, empty otherwise.
        info: what the environment reported (numbers are averaged into metrics).
        routed_experts: int16 `[tokens, layers, experts_per_token]`, the experts that each token was sent to;
            `UNKNOWN_EXPERT` for tokens of which the engine reported none. None if it reports none at all.
        segments: number of tokens of each segment, if there are several. A segment begins where the engine consumed
            something else than all tokens before, as when the chat template rewrote earlier turns; it is a row of its
            own, which begins with what the engine consumed. Empty for a rollout of one row.
    """

    prompt_id: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    generation_logprobs: np.ndarray
    spans: tuple[WeightSpan, ...]
    turns: tuple[Turn, ...]
    rewards: Mapping[str, float]
    stop_reason: StopReason
    status: Status = "ok"
    failure: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.segments and sum(self.segments) != len(self.tokens):
            raise ValueError(
                f"a rollout of {self.prompt_id} has segments of {sum(self.segments)} tokens, but {len(self.tokens)} "
                "tokens; every token belongs to one segment"
            )
        in_spans = sum(span.num_tokens for span in self.spans)
        if in_spans != self.num_sampled:
            raise ValueError(
                f"a rollout of {self.prompt_id} has spans of {in_spans} tokens, but its loss mask marks "
                f"{self.num_sampled} as sampled; every sampled token belongs to one span"
            )

    @property
    def reward(self) -> float:
        """The reward trained on; 0.0 for a failed rollout."""
        return float(self.rewards.get("reward", 0.0))

    @property
    def num_sampled(self) -> int:
        """Number of tokens the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def weight_versions(self) -> np.ndarray:
        """int32 `[tokens]`, the version that each token was sampled with; `NOT_SAMPLED` where `loss_mask` is 0."""
        versions = np.full(len(self.tokens), NOT_SAMPLED, dtype=np.int32)
        spans = self.spans
        versions[self.loss_mask != 0] = np.repeat([s.version for s in spans], [s.num_tokens for s in spans])
        return versions

    def by_segment(self, values: np.ndarray) -> list[np.ndarray]:
        """Token-aligned values `[tokens, ...]`, as those of each row."""
        return np.split(values, np.cumsum(self.segments)[:-1]) if self.segments else [values]

    @classmethod
    def failed(cls, prompt: Prompt, reason: str) -> Rollout:
        """A rollout that trains nothing and says why."""
        length = len(prompt.token_ids)
        return cls(
            prompt_id=prompt.id,
            tokens=np.asarray(prompt.token_ids, dtype=np.int32),
            loss_mask=np.zeros(length, dtype=np.uint8),
            generation_logprobs=np.zeros(length, dtype=np.float32),
            spans=(),
            turns=(),
            rewards={},
            stop_reason="abort",
            status="failed",
            failure=reason,
        )


@dataclass(frozen=True)
class RolloutReport:
    """The part of a `Rollout` that a loop decides by: all but its tokens and texts.

    Args:
        num_tokens: of all its rows, prompts included.
        num_sampled: tokens that the policy sampled.
        num_turns: completions.
        info: the numbers that the environment reported.

    The others are as in `Rollout`.
    """

    prompt_id: str
    num_tokens: int
    num_sampled: int
    num_turns: int
    spans: tuple[WeightSpan, ...]
    rewards: Mapping[str, float]
    stop_reason: StopReason
    status: Status = "ok"
    failure: str = ""
    info: Mapping[str, float] = field(default_factory=dict)
    segments: tuple[int, ...] = ()

    @classmethod
    def of(cls, rollout: Rollout) -> RolloutReport:
        """The report of a rollout."""
        return cls(
            prompt_id=rollout.prompt_id,
            num_tokens=len(rollout.tokens),
            num_sampled=rollout.num_sampled,
            num_turns=len(rollout.turns),
            spans=rollout.spans,
            rewards=dict(rollout.rewards),
            stop_reason=rollout.stop_reason,
            status=rollout.status,
            failure=rollout.failure,
            info={name: value for name, value in rollout.info.items() if isinstance(value, int | float)},
            segments=rollout.segments,
        )

    @property
    def reward(self) -> float:
        """The reward trained on; 0.0 for a failed rollout."""
        return float(self.rewards.get("reward", 0.0))


@dataclass(frozen=True)
class RolloutReports(Sequence[RolloutReport]):
    """Reports of the rollouts of one prompt, by column: thousands come in every step, and few are looked at alone.

    Args:
        prompt_id: of all of them.
        segments: of each rollout; empty if each has one row.

    The others are the fields of `RolloutReport`, each with a value per rollout; a span is a version and a number of
    tokens.
    """

    prompt_id: str
    num_tokens: tuple[int, ...]
    num_sampled: tuple[int, ...]
    num_turns: tuple[int, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    rewards: tuple[Mapping[str, float], ...]
    stop_reason: tuple[StopReason, ...]
    status: tuple[Status, ...]
    failure: tuple[str, ...]
    info: tuple[Mapping[str, float], ...]
    segments: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, prompt_id: str, rollouts: Sequence[Rollout]) -> RolloutReports:
        """The reports of the rollouts of a prompt."""
        reports = [RolloutReport.of(rollout) for rollout in rollouts]
        return cls(
            prompt_id,
            tuple(report.num_tokens for report in reports),
            tuple(report.num_sampled for report in reports),
            tuple(report.num_turns for report in reports),
            tuple(tuple((span.version, span.num_tokens) for span in report.spans) for report in reports),
            tuple(report.rewards for report in reports),
            tuple(report.stop_reason for report in reports),
            tuple(report.status for report in reports),
            tuple(report.failure for report in reports),
            tuple(report.info for report in reports),
            tuple(report.segments for report in reports) if any(report.segments for report in reports) else (),
        )

    @property
    def row_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Of each rollout, the tokens of each of its rows."""
        if not self.segments:
            return tuple((length,) for length in self.num_tokens)
        return tuple(own or (length,) for own, length in zip(self.segments, self.num_tokens, strict=True))

    def __len__(self) -> int:
        return len(self.num_tokens)

    @overload
    def __getitem__(self, index: int) -> RolloutReport: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[RolloutReport]: ...

    def __getitem__(self, index: int | slice) -> RolloutReport | Sequence[RolloutReport]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return RolloutReport(
            self.prompt_id,
            self.num_tokens[index],
            self.num_sampled[index],
            self.num_turns[index],
            tuple(WeightSpan(version, num_tokens) for version, num_tokens in self.spans[index]),
            self.rewards[index],
            self.stop_reason[index],
            self.status[index],
            self.failure[index],
            self.info[index],
            self.segments[index] if self.segments else (),
        )


@dataclass(frozen=True)
class GroupReport:
    """A group apart from its columns, which may lie elsewhere.

    Args:
        rollouts: in the order of their seeds.
        columns: names of the columns that training reads, the rows in the same order.
        records: names of those that people read.
    """

    rollouts: RolloutReports
    columns: tuple[str, ...]
    records: tuple[str, ...]


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one prompt, in the order of their seeds.

    Args:
        prompt: of all of them.
        rollouts: what is known of each without reading its columns.
        columns: a row per rollout, or per segment of one that has several: `tokens` int32, `loss_mask` uint8,
            `generation_logprobs` float32 and `weight_versions` int32 `[tokens]` (`NOT_SAMPLED` where `loss_mask` is 0),
            `routed_experts` int16 `[tokens, layers, experts_per_token]` if the engine reports them, and `record` uint8
            `[bytes]`, a JSON object for people at the first row of each rollout.
    """

    prompt: Prompt
    rollouts: RolloutReports
    columns: Batch

    @classmethod
    def of(cls, prompt: Prompt, rollouts: Sequence[Rollout]) -> RolloutGroup:
        """A group whose columns are in this process."""
        (report,), columns, records = parts_of([(prompt, rollouts)])
        return cls(prompt, report.rollouts, columns.with_columns(records.columns))

    @property
    def records(self) -> Batch:
        """The column `record` with a row per rollout."""
        records = self.columns.only([RECORD])
        if not self.rollouts.segments:
            return records
        num_rows = [len(lengths) for lengths in self.rollouts.row_lengths]
        return records.select(np.cumsum(num_rows) - num_rows)

    def rewards(self) -> np.ndarray:
        """float64 `[rollouts]`, the rewards trained on; NaN for failed rollouts."""
        rows = zip(self.rollouts.status, self.rollouts.rewards, strict=True)
        return np.array(
            [np.nan if status == "failed" else rewards.get("reward", 0.0) for status, rewards in rows], dtype=np.float64
        )


def parts_of(groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> tuple[list[GroupReport], Batch, Batch]:
    """The report of each group, the columns that training reads, and those that people read, of the rollouts of all
    groups in order; each part can be used without the others.
    """
    rollouts = [rollout for _, own in groups for rollout in own]

    def column(of: Callable[[Rollout], np.ndarray], dtype: DTypeLike) -> Ragged:
        return Ragged.from_rows([row for rollout in rollouts for row in rollout.by_segment(of(rollout))], dtype)

    columns: dict[str, Column] = {
        TOKENS: column(lambda rollout: rollout.tokens, np.int32),
        LOSS_MASK: column(lambda rollout: rollout.loss_mask, np.uint8),
        GENERATION_LOGPROBS: column(lambda rollout: rollout.generation_logprobs, np.float32),
        WEIGHT_VERSIONS: column(lambda rollout: rollout.weight_versions, np.int32),
    }
    columns.update(_routing(rollouts))
    record = [
        part
        for prompt, own in groups
        for index, rollout in enumerate(own)
        for part in (rollout_record(prompt, index, rollout), *([_NO_RECORD] * (len(rollout.segments) - 1)))
    ]
    records: dict[str, Column] = {RECORD: Ragged.from_rows(record, np.uint8)}
    reports = [GroupReport(RolloutReports.of(prompt.id, own), tuple(columns), tuple(records)) for prompt, own in groups]
    return reports, Batch(columns), Batch(records)


def has_routing(rollouts: Sequence[Rollout]) -> bool:
    """Whether the columns of these rollouts name the experts of their tokens."""
    return any(rollout.routed_experts is not None for rollout in rollouts)


def unknown_routing(num_tokens: int, shape: tuple[int, ...]) -> np.ndarray:
    """int16 `[num_tokens, *shape]`: experts of tokens of which the engine reported none."""
    return np.full((num_tokens, *shape), UNKNOWN_EXPERT, dtype=np.int16)


def _routing(rollouts: Sequence[Rollout]) -> dict[str, Column]:
    """The column of routed experts, if a rollout has any; one that failed has none."""
    shapes = [rollout.routed_experts.shape[1:] for rollout in rollouts if rollout.routed_experts is not None]
    if not shapes:
        return {}
    rows = [
        row
        for rollout in rollouts
        for row in rollout.by_segment(
            unknown_routing(len(rollout.tokens), shapes[0])
            if rollout.routed_experts is None
            else rollout.routed_experts
        )
    ]
    return {ROUTED_EXPERTS: Ragged.from_rows(rows, np.int16, shapes[0])}


_NO_RECORD = np.zeros(0, dtype=np.uint8)
