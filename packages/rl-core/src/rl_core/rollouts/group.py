"""The rollouts of one prompt, as a loop decides by them and as training reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike

from rl_core.data.batch import TOKENS, Batch, Column, image_column
from rl_core.data.ragged import Ragged
from rl_core.images import IMAGES
from rl_core.rollouts.record import rollout_record
from rl_core.rollouts.rollout import Prompt, Rollout, Status, StopReason, Turn, WeightSpan, has_images, unknown_routing
from rl_core.token_filter import ALLOWED

LOSS_MASK = "loss_mask"
"""Column that is True at the tokens under the loss, bool `[tokens]`."""
GENERATION_LOGPROBS = "generation_logprobs"
"""Column of the engine's log-probabilities of sampled tokens, float32 `[tokens]`."""
ROUTED_EXPERTS = "routed_experts"
"""Column of the experts that the engine chose, `[tokens, layers, experts per token]`."""
WEIGHT_VERSIONS = "weight_versions"
"""Column of the weight version that each token was sampled with, `[tokens]`."""
RECORD = "record"
"""Columns of a `RolloutGroup`, in addition to `tokens`."""
SAID = "said"
"""Column of the messages after the prompt, a JSON list, uint8 `[bytes]` at the first row of each rollout. Groups
have it until models of the run have judged them."""


@dataclass(frozen=True)
class RolloutReport:
    """The part of a `Rollout` that a loop needs for decisions: everything except its tokens and strings.

    Args:
        num_tokens: Number of tokens of all its rows, prompts included.
        num_sampled: Tokens that the policy sampled.
        num_turns: completions.
        info: The numbers that the environment reported.
        turns: Sampled tokens, reward and state of each turn, if there are several: the reward of its answer and what
            came later for it, which add up to the reward trained on, and a number that turns have in common if they
            answer the same messages; 0 for the first turn, which answers the prompt.

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
    agent: str = ""
    peers: str = ""
    play: int | None = None
    is_opponent: bool = False
    is_demonstration: bool = False
    turns: tuple[tuple[int, float, int], ...] = ()

    @classmethod
    def of(cls, rollout: Rollout) -> RolloutReport:
        """Return the report of a rollout."""
        same = ("prompt_id", "num_sampled", "spans", "stop_reason", "status", "failure", "segments")
        of_agents = ("agent", "peers", "play", "is_opponent", "is_demonstration")
        return cls(
            num_tokens=len(rollout.tokens),
            num_turns=len(rollout.turns),
            rewards=dict(rollout.rewards),
            info={name: value for name, value in rollout.info.items() if isinstance(value, int | float)},
            turns=tuple(_turn_reports(rollout.turns)) if len(rollout.turns) > 1 else (),
            **{name: getattr(rollout, name) for name in (*same, *of_agents)},
        )

    @property
    def reward(self) -> float:
        """The reward trained on; 0.0 for a failed rollout."""
        return float(self.rewards.get("reward", 0.0))


@dataclass(frozen=True)
class RolloutReports(Sequence[RolloutReport]):
    """Reports of the rollouts of one prompt, by column: thousands come in every step, and few are read one by one.

    Args:
        prompt_id: Id of the prompt of all of them.
        segments: Segments of each rollout; empty if each has one row.
        agent: Agent of each rollout; empty if none is named.
        peers: Peers of each rollout; empty if none are named.
        play: Play of each rollout, ascending; empty if each is a play of its own.
        is_opponent: True for each rollout that an opponent sampled; empty if no opponent did.
        is_demonstration: True for each rollout that is the response in the prompt's row; empty if none is.
        turns: Turns of each rollout; empty if no rollout has several.

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
    agent: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    play: tuple[int, ...] = ()
    is_opponent: tuple[bool, ...] = ()
    is_demonstration: tuple[bool, ...] = ()
    turns: tuple[tuple[tuple[int, float, int], ...], ...] = ()

    @classmethod
    def of(cls, prompt_id: str, rollouts: Sequence[Rollout]) -> RolloutReports:
        """Return the reports of the rollouts of a prompt."""
        reports = [RolloutReport.of(rollout) for rollout in rollouts]
        assert len({report.play is None for report in reports}) < 2, "a group numbers the plays of all rollouts or none"
        columns = {each.name: tuple(getattr(report, each.name) for report in reports) for each in fields(RolloutReport)}
        del columns["prompt_id"]
        columns["spans"] = tuple(tuple((span.version, span.num_tokens) for span in spans) for spans in columns["spans"])
        columns["play"] = tuple(play for play in columns["play"] if play is not None)
        for name in ("segments", "agent", "peers", "is_opponent", "is_demonstration", "turns"):
            columns[name] = columns[name] if any(columns[name]) else ()
        return cls(prompt_id, **columns)

    def select(self, indices: Sequence[int]) -> RolloutReports:
        """Return the reports of these rollouts, in this order."""
        chosen = {
            each.name: tuple(values[index] for index in indices) if (values := getattr(self, each.name)) else ()
            for each in fields(self)
            if each.name != "prompt_id"
        }
        return RolloutReports(self.prompt_id, **chosen)

    @property
    def row_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Of each rollout, the tokens of each of its rows."""
        if not self.segments:
            return tuple((length,) for length in self.num_tokens)
        return tuple(own or (length,) for own, length in zip(self.segments, self.num_tokens, strict=True))

    @property
    def agents(self) -> tuple[str, ...]:
        """Agent of each rollout; empty strings if there is only one."""
        return self.agent or ("",) * len(self)

    @property
    def plays(self) -> tuple[int, ...]:
        """Of each rollout, the number of its play in the group, ascending."""
        return self.play or tuple(range(len(self)))

    @property
    def compared(self) -> tuple[tuple[str, str], ...]:
        """Of each rollout, agent and peers: rollouts of the group that are equal in both are compared."""
        return tuple(zip(self.agents, self.peers or ("",) * len(self), strict=True))

    def __len__(self) -> int:
        return len(self.num_tokens)

    @overload
    def __getitem__(self, index: int) -> RolloutReport: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[RolloutReport]: ...

    def __getitem__(self, index: int | slice) -> RolloutReport | Sequence[RolloutReport]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        # An empty column means the default for each rollout. The column that is never empty raises the IndexError that
        # ends an iteration.
        values: dict[str, Any] = {"num_tokens": self.num_tokens[index]}
        names = [each.name for each in fields(self) if each.name not in ("prompt_id", "num_tokens")]
        values |= {name: column[index] for name in names if (column := getattr(self, name))}
        values["spans"] = tuple(WeightSpan(version, num_tokens) for version, num_tokens in values["spans"])
        return RolloutReport(self.prompt_id, **values)


@dataclass(frozen=True)
class GroupReport:
    """A group without its columns, which may be elsewhere.

    Args:
        rollouts: Rollouts in the order of their seeds; the rollouts of a play are adjacent.
        columns: Names of the columns that training reads, the rows in the same order.
        records: Names of the columns that people read.
    """

    rollouts: RolloutReports
    columns: tuple[str, ...]
    records: tuple[str, ...]


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one prompt, in the order of their seeds; the rollouts of a play are adjacent.

    Args:
        prompt: Prompt of all of them.
        rollouts: Report of each, known without reading its columns.
        columns: A row per rollout, or per segment of one that has several: `tokens` int32, `loss_mask` uint8,
            `generation_logprobs` float32 and `weight_versions` int32 `[tokens]` (`NOT_SAMPLED` where `loss_mask` is 0),
            `routed_experts` int16 `[tokens, layers, experts_per_token]` if the engine reports them, `images` uint8
            `[images, rl_core.images.DIGEST_BYTES]` if there are any, `allowed_tokens` uint8 `[bytes]` if a grammar
            constrained any turn, and `record` uint8 `[bytes]`, a JSON object for people at the first row of each
            rollout.
        opponents: Rollouts of the same plays that opponents sampled: they are recorded, and nothing is trained on them
            or measured by them. None if there are none.
    """

    prompt: Prompt
    rollouts: RolloutReports
    columns: Batch
    opponents: RolloutGroup | None = None

    @classmethod
    def of(cls, prompt: Prompt, rollouts: Sequence[Rollout]) -> RolloutGroup:
        """Return a group whose columns are in this process."""
        (report,), columns, records = parts_of([(prompt, rollouts)])
        return cls.split(prompt, report.rollouts, columns.with_columns(records.columns))

    @classmethod
    def split(cls, prompt: Prompt, rollouts: RolloutReports, columns: Batch) -> RolloutGroup:
        """Return a group of these rollouts, with the opponents' rollouts apart."""
        if not rollouts.is_opponent:
            return cls(prompt, rollouts, columns)
        of_rows = np.repeat(rollouts.is_opponent, [len(lengths) for lengths in rollouts.row_lengths])

        def part(*, is_opponent: bool) -> RolloutGroup:
            own = [index for index, each in enumerate(rollouts.is_opponent) if each == is_opponent]
            return cls(prompt, rollouts.select(own), columns.select(np.flatnonzero(of_rows == is_opponent)))

        return replace(part(is_opponent=False), opponents=part(is_opponent=True))

    @property
    def sampled(self) -> RolloutGroup:
        """The group without its demonstrations, for everything that measures the policy."""
        is_demonstration = self.rollouts.is_demonstration
        if not is_demonstration:
            return self
        kept = np.flatnonzero(~np.array(is_demonstration))
        # A demonstration is one row, but a sampled rollout may have several segments.
        rows = np.repeat(~np.array(is_demonstration), [len(lengths) for lengths in self.rollouts.row_lengths])
        return replace(
            self, rollouts=self.rollouts.select(kept.tolist()), columns=self.columns.select(np.flatnonzero(rows))
        )

    @property
    def records(self) -> Batch:
        """The column `record` with a row per rollout."""
        records = self.columns.only([RECORD])
        if not self.rollouts.segments:
            return records
        num_rows = [len(lengths) for lengths in self.rollouts.row_lengths]
        return records.select(np.cumsum(num_rows) - num_rows)

    @property
    def all_records(self) -> Batch:
        """`records`, followed by the opponents' records."""
        return self.records if self.opponents is None else Batch.concat([self.records, self.opponents.records])

    @property
    def num_plays(self) -> int:
        """Number of plays: runs of the rollout program."""
        return len(set(self.rollouts.plays))

    def rewards(self) -> np.ndarray:
        """float64 `[rollouts]`, the rewards trained on; NaN for failed rollouts."""
        rows = zip(self.rollouts.status, self.rollouts.rewards, strict=True)
        return np.array(
            [np.nan if status == "failed" else rewards.get("reward", 0.0) for status, rewards in rows], dtype=np.float64
        )


def parts_of(
    groups: Sequence[tuple[Prompt, Sequence[Rollout]]], said: Callable[[Prompt, Rollout], np.ndarray] | None = None
) -> tuple[list[GroupReport], Batch, Batch]:
    """Return the report of each group, the columns that training reads, and the columns that people read, of the
    rollouts of all groups in order; each part can be used without the others.

    Args:
        groups: Prompts with their rollouts.
        said: Returns the entry of a rollout in the column `said`; None for no such column.
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
    shapes = [rollout.routed_experts.shape[1:] for rollout in rollouts if rollout.routed_experts is not None]
    if shapes:

        def experts(rollout: Rollout) -> np.ndarray:
            # A rollout that failed has none.
            found = rollout.routed_experts
            return unknown_routing(len(rollout.tokens), shapes[0]) if found is None else found

        routing = [row for rollout in rollouts for row in rollout.by_segment(experts(rollout))]
        columns[ROUTED_EXPERTS] = Ragged.from_rows(routing, np.int16, shapes[0])
    if any(rollout.allowed for rollout in rollouts):
        free = np.zeros(0, np.uint8)
        entries = [row for rollout in rollouts for row in rollout.allowed or (free,) * max(len(rollout.segments), 1)]
        columns[ALLOWED] = Ragged.from_rows(entries, np.uint8)
    if has_images(rollouts):
        digests = [row for rollout in rollouts for row in rollout.images or ((),) * max(len(rollout.segments), 1)]
        columns[IMAGES] = image_column(digests)

    def of_people(entry: Callable[[Prompt, int, Rollout], np.ndarray]) -> Ragged:
        rows = [
            part
            for prompt, own in groups
            for index, rollout in enumerate(own)
            for part in (entry(prompt, index, rollout), *([_NO_RECORD] * (len(rollout.segments) - 1)))
        ]
        return Ragged.from_rows(rows, np.uint8)

    records: dict[str, Column] = {RECORD: of_people(rollout_record)}
    if said is not None:
        records[SAID] = of_people(lambda prompt, _, rollout: said(prompt, rollout))
    reports = [GroupReport(RolloutReports.of(prompt.id, own), tuple(columns), tuple(records)) for prompt, own in groups]
    return reports, Batch(columns), Batch(records)


def _turn_reports(turns: Sequence[Turn]) -> Iterator[tuple[int, float, int]]:
    """Yield sampled tokens, reward and state of each turn."""
    state = 0
    for turn in turns:
        yield turn.num_sampled, float(turn.rewards.get("reward", 0.0)) + turn.late_reward, state
        shown = repr([sorted(message.items()) for message in turn.observation or ()])
        state = int.from_bytes(hashlib.blake2b(shown.encode(errors="backslashreplace"), digest_size=7).digest())


_NO_RECORD = np.zeros(0, dtype=np.uint8)
