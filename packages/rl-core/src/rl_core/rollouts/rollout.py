"""Prompts, the rollouts sampled from them, and their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

NOT_SAMPLED = -1
"""In `weight_versions`: the policy did not sample the token."""

UNKNOWN_EXPERT = -1
"""In `routed_experts`: the engine did not report where it sent the token."""

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and other fields that a chat template reads (tool calls, names)."""

StopReason = Literal["stop", "length", "abort"]
"""End of a completion: a stop token or string, the token limit, or an interruption."""
Status = Literal["ok", "truncated", "failed"]


@dataclass(frozen=True)
class Prompt:
    """The start of a rollout.

    Args:
        id: Unique within the dataset and stable across runs, so that exactly-once can be proved.
        messages: The conversation so far.
        token_ids: Int32 `[tokens]`, the conversation rendered by the chat template and tokenised, ready for generation.
        environment: Name of the environment that scores it.
        info: Whatever else the environment needs in addition to the conversation (the answer, a seed).
        dataset: Name of the dataset it came from.
        place: Place of its row, as in messages: `prompts.jsonl, line 3`.
        tools: JSON schemas of the tools that the policy may call, as the chat template has rendered them.
        is_text: True if the row gave the prompt as plain text rather than as messages.
        demonstration: Int32 `[tokens]`, the response in its row as the policy would have sampled it, the token that
            ends the turn included; None if the row has none, or if no rollout of the run is a demonstration.
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
    demonstration: np.ndarray | None = None

    def __str__(self) -> str:
        return self.place or f"prompt {self.id}"


@dataclass(frozen=True)
class WeightSpan:
    """A run of sampled tokens and the weight version they were sampled with."""

    version: int
    num_tokens: int


@dataclass(frozen=True)
class Thinking:
    """Thoughts of a completion that was sampled with a thinking budget.

    Args:
        num_tokens: Number of tokens up to the end of the thoughts; all if they do not end, 0 if there are none.
        num_forced: Number of tokens after these that end the thoughts and were not sampled.
        is_cut: True if the budget ended the thoughts.
    """

    num_tokens: int
    num_forced: int = 0
    is_cut: bool = False


@dataclass(frozen=True)
class Completion:
    """One answer of a generator.

    Args:
        token_ids: Int32 `[tokens]`, the sampled tokens, the stop token included; and those that end thoughts by force.
        logprobs: Float32 `[tokens]`, processed logprobs (after temperature, top-k, top-p) of those tokens; 0 for forced
            ones.
        stop_reason: `stop` (stop token or string), `length` (token limit), `abort` (cut off from outside).
        spans: The weight versions, in order; their token counts add up to the sampled tokens.
        routed_experts: Int16 `[computed, layers, experts_per_token]`, the experts that each token of the prompt and of
            the completion was sent to, as far as the engine computed them: the last sampled token is not fed back.
            Layers count over the whole model; those without experts hold any number. None unless
            `rl_core.rollouts.generation.Placement.reports_routing`.
        thinking: Thoughts of a turn with a thinking budget; None for an answer of an engine, and without a budget.
        allowed: The tokens that a grammar allowed at each token (`rl_core.token_filter.allowed_row`); empty for an
            answer of an engine, and without a grammar.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    spans: tuple[WeightSpan, ...]
    routed_experts: np.ndarray | None = None
    thinking: Thinking | None = None
    allowed: tuple[bytes, ...] = ()

    @property
    def sampled_mask(self) -> np.ndarray:
        """uint8 `[tokens]`, 1 at sampled tokens and 0 at forced ones."""
        mask = np.ones(len(self.token_ids), dtype=np.uint8)
        if self.thinking is not None:
            mask[self.thinking.num_tokens :][: self.thinking.num_forced] = 0
        return mask


@dataclass(frozen=True)
class Turn:
    """One exchange: the policy's text and the environment's answer (`None` at the end).

    Args:
        text: Text of the policy.
        observation: Answer of the environment.
        rewards: Rewards by name.
        has_invalid_call: True if the policy wrote a tool call that cannot be read.
        num_sampled: Number of tokens that the policy sampled.
        late_reward: Part of the reward trained on that came after the answer, such as for a later move of another
            agent or for the whole rollout.
    """

    text: str
    observation: tuple[Message, ...] | None
    rewards: Mapping[str, float]
    has_invalid_call: bool = False
    num_sampled: int = 0
    late_reward: float = 0.0


@dataclass(frozen=True)
class SegmentContext:
    """The conversation that a segment of an agent's rollout begins with.

    Args:
        messages: Messages before the first turn of the segment, without those that it shares with another one.
        tools: JSON schemas of the tools that the policy may call; empty if the segment shares messages, as it then
            shares their tools.
        num_turns: Number of turns of the rollout that are in the segment.
        call: Number of the first of these turns among all turns of the agent, in the order of time, from 1.
        shared_with: Index of the segment whose conversation begins with the same messages.
        num_shared: Number of these messages, turns included.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    num_turns: int
    call: int
    shared_with: int = 0
    num_shared: int = 0


@dataclass(frozen=True)
class Rollout:
    """One whole trajectory.

    Args:
        prompt_id: Id of the prompt it came from.
        tokens: Int32 `[tokens]`, prompt, completions and observations in order; sampled tokens are never re-tokenised.
            Those of several segments lie end to end.
        loss_mask: Uint8 `[tokens]`, 1 only on tokens that the policy, or an opponent, sampled.
        generation_logprobs: Float32 `[tokens]`, the engine's, 0 where `loss_mask` is 0.
        spans: Weight version of each run of sampled tokens, in order; together they have as many tokens as `loss_mask`
            has ones.
        turns: Texts and rewards by turn, for people to read.
        rewards: Reward by name, summed over turns; `reward` is the one trained on.
        stop_reason: Stop reason of the last completion.
        status: `failed` trains nothing and counts in no statistic; `truncated` ran into a length or turn limit.
        failure: Why it failed, empty otherwise.
        info: Report of the environment (numbers are averaged into metrics).
        routed_experts: Int16 `[tokens, layers, experts_per_token]`, the experts that each token was sent to;
            `UNKNOWN_EXPERT` for tokens that the engine reported none for. None if it reports none at all.
        segments: Number of tokens of each segment, if there are several. A segment begins where the engine consumed
            other tokens than all before, as when the chat template rewrote earlier turns; it is a separate row, which
            begins with the consumed tokens. Empty for a rollout of one row.
        agent: Name of the agent whose trajectory it is, if a play has several; empty for the only one.
        peers: Name of the rollouts that it is compared with: all of the same prompt, agent and peers. Empty if these
            are all rollouts of its agent.
        play: Number of the play in its group, if plays have several rollouts (one per agent or per sub-task); a rollout
            worker fills it in. None if every rollout is a play of its own.
        is_opponent: True if other weights than the policy's sampled it: older ones, or another model. It trains
            nothing; a rollout worker fills it in.
        is_demonstration: True if the response is the one in the prompt's row, which nobody sampled. Its environment
            scores it like a sampled one, and metrics leave it out; a rollout worker fills it in.
        images: Digests of the images among the tokens of each segment, in order (`rl_core.images`); a rollout of one
            row has one entry. Empty without images.
        allowed: The tokens that a grammar allowed at each token of each segment (`rl_core.token_filter.allowed_row`);
            empty if no turn had a grammar.
        contexts: Conversations of the segments of an agent's rollout, for people to read: one per segment, also if
            there is only one. Empty for other rollouts, whose conversation is the prompt and the turns. Those of a
            failed rollout have no tokens.
        verdicts: Verdicts of judges, for people to read: judge, question, answer, value, and whether nobody was asked.
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
    agent: str = ""
    peers: str = ""
    play: int | None = None
    is_opponent: bool = False
    is_demonstration: bool = False
    images: tuple[tuple[str, ...], ...] = ()
    allowed: tuple[np.ndarray, ...] = ()
    contexts: tuple[SegmentContext, ...] = ()
    verdicts: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.segments and sum(self.segments) != len(self.tokens):
            raise ValueError(
                f"a rollout of {self.prompt_id} has segments of {sum(self.segments)} tokens, but {len(self.tokens)} "
                "tokens; every token belongs to one segment"
            )
        if self.images and len(self.images) != max(len(self.segments), 1):
            raise ValueError(
                f"a rollout of {self.prompt_id} has images of {len(self.images)} segments, but it has "
                f"{max(len(self.segments), 1)}; every segment has a tuple of digests, which may be empty"
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
        """Split token-aligned values `[tokens, ...]` into one array per row."""
        return np.split(values, np.cumsum(self.segments)[:-1]) if self.segments else [values]

    @classmethod
    def failed(
        cls, prompt: Prompt, reason: str, images: tuple[str, ...] = (), played: Sequence[Rollout] = ()
    ) -> Rollout:
        """Return a rollout that is not trained on, with the reason.

        Args:
            prompt: Its prompt.
            reason: Why it failed.
            images: Digests of the images of the prompt, in order.
            played: Rollouts so far, of several agents if there are several. Their turns are kept, for people to read.
        """
        length = len(prompt.token_ids)
        contexts: list[SegmentContext] = []
        for each in played:
            begin = len(contexts)
            contexts += [replace(own, shared_with=begin + own.shared_with) for own in each.contexts]
        return cls(
            prompt_id=prompt.id,
            tokens=np.asarray(prompt.token_ids, dtype=np.int32),
            loss_mask=np.zeros(length, dtype=np.uint8),
            generation_logprobs=np.zeros(length, dtype=np.float32),
            spans=(),
            turns=tuple(turn for each in played for turn in each.turns),
            rewards={},
            stop_reason="abort",
            status="failed",
            failure=reason,
            images=(images,) if images else (),
            contexts=tuple(contexts),
        )


def has_images(rollouts: Sequence[Rollout]) -> bool:
    """Return whether the columns of these rollouts name images."""
    return any(any(rollout.images) for rollout in rollouts)


def has_routing(rollouts: Sequence[Rollout]) -> bool:
    """Return whether the columns of these rollouts name the experts of their tokens."""
    return any(rollout.routed_experts is not None for rollout in rollouts)


def unknown_routing(num_tokens: int, shape: tuple[int, ...]) -> np.ndarray:
    """int16 `[num_tokens, *shape]`: experts of tokens without a report of the engine."""
    return np.full((num_tokens, *shape), UNKNOWN_EXPERT, dtype=np.int16)
