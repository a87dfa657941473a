"""A rollout as it grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rl_algos.rollouts.training.metrics import thinking_info
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.rollout import Completion, Prompt, Rollout, Thinking, Turn, WeightSpan, unknown_routing
from rl_core.token_filter import allowed_row


class Transcript:
    """Tokens, mask and logprobs of a rollout, always of one length, with its turns and rewards.

    Its tokens are segments end to end. There is one segment unless a request does not begin with all tokens before it.

    Args:
        prompt: The prompt.
        first: int32 `[tokens]` that the engine consumed first; None for the tokens of the prompt.
        images: Digests of the images among these tokens, in order.
    """

    def __init__(self, prompt: Prompt, first: np.ndarray | None = None, *, images: Sequence[str] = ()) -> None:
        self._prompt = prompt
        self._tokens: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._routing: list[list[np.ndarray]] = [[]]
        self._begins = [0]
        self._images: list[tuple[str, ...]] = [()]
        self._spans: list[WeightSpan] = []
        self._turns: list[Turn] = []
        self._rewards: Counter[str] = Counter()
        self._late_rewards: Counter[int] = Counter()
        self._num_sampled: list[int] = []
        self._info: dict[str, object] = {}
        self._thoughts: list[Thinking] = []
        self._allowed: list[tuple[bytes, ...]] = []
        self._stop_reason = "abort"
        self.add_context(prompt.token_ids if first is None else first, images)

    @property
    def tokens(self) -> np.ndarray:
        """int32 `[tokens]` of the last segment, which the engine consumed and sampled last."""
        return np.concatenate(self._tokens[self._begins[-1] :])

    @property
    def images(self) -> tuple[str, ...]:
        """Digests of the images among `tokens`, in order."""
        return self._images[-1]

    def go_on(self, tokens: np.ndarray, images: Sequence[str] = ()) -> None:
        """Take the tokens that the engine consumes next. A segment begins unless they begin with the last segment.

        Args:
            tokens: int32 `[tokens]`.
            images: Digests of the images among them, in order.
        """
        before = self.tokens
        if np.array_equal(tokens[: len(before)], before):
            self.add_context(tokens[len(before) :], images[len(self.images) :])
            return
        self.begin(tokens, images)

    def begin(self, tokens: np.ndarray, images: Sequence[str] = ()) -> None:
        """Begin a segment; see `go_on`."""
        self._begins.append(len(self._tokens))
        self._routing.append([])
        self._images.append(())
        self.add_context(tokens, images)

    def add_context(self, tokens: np.ndarray, images: Sequence[str] = ()) -> None:
        """Append tokens that the policy did not sample, with the images among them; see `go_on`."""
        self._images[-1] += tuple(images)
        self._append(tokens, 0, np.zeros(len(tokens), dtype=np.float32))

    def add_completion(self, completion: Completion) -> None:
        """Append the tokens of a turn as they are; those that ended thoughts by force count as not sampled.

        If the experts of a token are reported more than once, the report of the pass that sampled it stays.
        """
        if completion.routed_experts is not None:
            own = self._routing[-1]
            own.append(completion.routed_experts[sum(map(len, own)) :])
        mask = completion.sampled_mask
        self._append(completion.token_ids, mask, completion.logprobs, completion.allowed)
        self._num_sampled.append(int(mask.sum()))
        if completion.thinking is not None:
            self._thoughts.append(completion.thinking)
        self._spans.extend(completion.spans)
        self._stop_reason = completion.stop_reason

    def add_result(self, text: str, result: StepResult, *, ends: bool, has_invalid_call: bool = False) -> None:
        """Record the text and rewards of a turn; see `Turn` for the arguments."""
        rewards = result.rewards()
        for name, reward in rewards.items():
            self._rewards[name] += reward  # type: ignore[assignment]  # Counter sums floats as well
        self._turns.append(Turn(text, None if ends else tuple(result.observation), rewards, has_invalid_call))
        self._info.update(result.info)

    def add_rewards(self, rewards: Mapping[str, float]) -> None:
        """Add rewards of the whole rollout, by name; estimators by turn credit the newest turn with them."""
        named = StepResult(reward=rewards).rewards()
        for name, reward in named.items():
            self._rewards[name] += reward  # type: ignore[assignment]  # Counter sums floats as well
        self._late_rewards[len(self._num_sampled) - 1] += named["reward"]  # type: ignore[assignment]

    def rollout(self, *, truncated: bool) -> Rollout:
        """Return the finished rollout."""
        ends = [*self._begins[1:], len(self._tokens)]
        places = zip(self._begins, ends, strict=True)
        segments = tuple(sum(map(len, self._tokens[begin:end])) for begin, end in places)
        return Rollout(
            prompt_id=self._prompt.id,
            tokens=np.concatenate(self._tokens),
            loss_mask=np.concatenate(self._mask),
            generation_logprobs=np.concatenate(self._logprobs),
            spans=tuple(self._spans),
            turns=tuple(
                replace(turn, num_sampled=num_sampled, late_reward=float(self._late_rewards[number]))
                for number, (turn, num_sampled) in enumerate(zip(self._turns, self._num_sampled, strict=False))
            ),
            rewards={name: float(value) for name, value in self._rewards.items()},
            stop_reason=self._stop_reason,  # type: ignore[arg-type]  # set from Completion.stop_reason
            status="truncated" if truncated else "ok",
            info={**self._info, **thinking_info(self._thoughts)},
            routed_experts=self._routed_experts(segments),
            segments=segments if len(segments) > 1 else (),
            images=tuple(self._images) if any(self._images) else (),
            allowed=self._allowed_rows(ends),
        )

    def _allowed_rows(self, ends: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Return the entry of each segment in the column of allowed tokens; empty if no turn had a grammar."""
        if not any(map(any, self._allowed)):
            return ()
        return tuple(
            allowed_row([each for part in self._allowed[begin:end] for each in part])
            for begin, end in zip(self._begins, ends, strict=True)
        )

    def _routed_experts(self, segments: Sequence[int]) -> np.ndarray | None:
        known = [part for own in self._routing for part in own]
        if not known:
            return None
        parts: list[np.ndarray] = []
        for own, length in zip(self._routing, segments, strict=True):
            parts += [*own, unknown_routing(length - sum(map(len, own)), known[0].shape[1:])]
        return np.concatenate(parts)

    def _append(
        self, tokens: np.ndarray, mask: int | np.ndarray, logprobs: np.ndarray, allowed: tuple[bytes, ...] = ()
    ) -> None:
        self._allowed.append(allowed or (b"",) * len(tokens))
        self._tokens.append(np.asarray(tokens, dtype=np.int32))
        self._mask.append(np.full(len(tokens), mask, dtype=np.uint8))
        self._logprobs.append(np.asarray(logprobs, dtype=np.float32))
