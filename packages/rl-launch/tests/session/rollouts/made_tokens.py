"""A step of a few tokens whose records can be worked out by hand."""

from __future__ import annotations

import numpy as np

from rl_core.data.batch import Batch
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, WeightSpan


class Texts:
    """Token 9 has no text, and 5 is special."""

    def text(self, number: int) -> bytes | None:
        return None if number == 9 else b"t%d" % number

    def is_special(self, number: int) -> bool:
        return number == 5


def prompt(name: str) -> Prompt:
    return Prompt(name, (), np.array([5], np.int32), "math")


def rollout(name: str, tokens: list[int], mask: list[int], versions: tuple[tuple[int, int], ...], **others) -> Rollout:
    """A rollout whose n-th sampled token has the generator's logprob `-n / 2`."""
    sampled = np.array(mask, np.uint8)
    logprobs = np.where(sampled, -0.5 * np.cumsum(sampled), 0).astype(np.float32)
    spans = tuple(WeightSpan(*span) for span in versions)
    return Rollout(name, np.array(tokens, np.int32), sampled, logprobs, spans, (), {"reward": 1.0}, "stop", **others)


def trained_group() -> RolloutGroup:
    """A rollout of two weight versions, and one of two segments."""
    first = rollout("a", [5, 6, 7], [0, 1, 1], ((3, 1), (4, 1)))
    second = rollout("a", [5, 6, 7, 8, 9], [0, 1, 0, 0, 1], ((4, 2),), segments=(2, 3))
    return RolloutGroup.of(prompt("a"), [first, second])


def aside_group() -> RolloutGroup:
    """A rollout that was not trained on, and one that failed."""
    return RolloutGroup.of(prompt("b"), [rollout("b", [5, 1], [0, 1], ((4, 1),)), Rollout.failed(prompt("b"), "x")])


def trained_batch(*groups: RolloutGroup) -> Batch:
    """The batch of a step: logprobs 0, -1, -2, ... over all tokens, and an advantage of 0.5, 1.5, ... by row."""
    names = ["tokens", "loss_mask", "generation_logprobs", "weight_versions"]
    batch = Batch.concat([group.columns.only(names) for group in groups])
    tokens = batch.ragged("tokens")
    logprobs = tokens.like(-np.arange(len(tokens.values), dtype=np.float32))
    return batch.with_columns({"prev_logprobs": logprobs, "advantages": np.arange(len(batch)) + 0.5})
