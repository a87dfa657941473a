"""Rollouts and groups made up for tests."""

import dataclasses

import numpy as np

from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan


def make_prompt(id: str = "p0", tokens: tuple[int, ...] = (1, 2, 3), **info) -> Prompt:
    return Prompt(id, ({"role": "user", "content": "?"},), np.array(tokens, np.int32), "math", info, "sums")


def make_rollout(
    prompt: Prompt, reward: float, sampled: tuple[int, ...] = (7, 8), stop_reason: str = "stop", status: str = "ok"
) -> Rollout:
    num_prompt = len(prompt.token_ids)
    return Rollout(
        prompt_id=prompt.id,
        tokens=np.concatenate([prompt.token_ids, np.array(sampled, np.int32)]),
        loss_mask=np.array([0] * num_prompt + [1] * len(sampled), np.uint8),
        generation_logprobs=np.array([0.0] * num_prompt + [-0.5] * len(sampled), np.float32),
        spans=(WeightSpan(1, len(sampled)),),
        turns=(),
        rewards={"reward": reward},
        stop_reason=stop_reason,
        status=status,
    )


def make_turns(
    prompt: Prompt,
    rewards: list[float],
    observations: tuple[str, ...] = ("a", "b", "c"),
    *,
    late: float = 0.0,
    status: str = "ok",
) -> Rollout:
    """A rollout with a turn of two tokens per reward, each followed by a token of its observation."""
    texts = [*observations[: len(rewards) - 1], None]
    turns = tuple(
        Turn("x", None if text is None else ({"role": "user", "content": text},), {"reward": r}, num_sampled=2)
        for r, text in zip(rewards, texts, strict=True)
    )
    turns = (*turns[:-1], dataclasses.replace(turns[-1], late_reward=late))
    base = make_rollout(prompt, sum(rewards) + late, (7, 8) * len(rewards), status=status)
    mask = np.array([0, 0, 0, *[1, 1, 0] * len(rewards)], np.uint8)
    return dataclasses.replace(
        base,
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        generation_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        spans=(WeightSpan(1, 2 * len(rewards)),),
        turns=turns,
    )


def make_split_rollout(prompt: Prompt, reward: float, *turns: tuple[int, ...], status: str = "ok") -> Rollout:
    """A rollout with a segment per turn, whose prompts differ by a token."""
    segments = [make_rollout(prompt, reward, sampled) for sampled in turns]
    tokens = [np.insert(each.tokens, 0, number) if number else each.tokens for number, each in enumerate(segments)]
    mask = [np.insert(each.loss_mask, 0, 0) if n else each.loss_mask for n, each in enumerate(segments)]
    return dataclasses.replace(
        segments[0],
        tokens=np.concatenate(tokens),
        loss_mask=np.concatenate(mask),
        generation_logprobs=-0.5 * np.concatenate(mask).astype(np.float32),
        spans=(WeightSpan(1, sum(map(len, turns))),),
        status=status,
        segments=tuple(map(len, tokens)),
    )


def make_group(id: str, rewards: list[float]) -> RolloutGroup:
    prompt = make_prompt(id)
    return RolloutGroup.of(prompt, tuple(make_rollout(prompt, reward) for reward in rewards))


def make_plays(id: str, *plays: list[tuple[str, str, float]]) -> RolloutGroup:
    """A group of plays of several rollouts, each an agent, its peers and its reward."""
    prompt = make_prompt(id)
    return RolloutGroup.of(
        prompt,
        [
            dataclasses.replace(make_rollout(prompt, reward), agent=agent, peers=peers, play=number)
            for number, play in enumerate(plays)
            for agent, peers, reward in play
        ],
    )
