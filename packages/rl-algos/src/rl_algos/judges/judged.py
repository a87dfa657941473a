"""Rollouts as judges see them, and rollouts with the rewards that judges gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from rl_core.images import image_digests
from rl_core.rollouts.judging import JudgedReward, JudgedRollout
from rl_core.rollouts.rollout import Message, Prompt, Rollout, Turn
from rl_core.rollouts.thoughts import final_text


@dataclass(frozen=True)
class JudgingSpec:
    """The judging of rollouts in a rollout worker; sent to its process.

    Args:
        weights: Weight of each reward by a language model, by environment and reported name.
        scored: Environments whose rollouts reward models score after that, so that their conversations stay with them.
        engines: Judges that the engines of a rollout worker serve.
    """

    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    scored: frozenset[str] = frozenset()
    engines: tuple[Any, ...] = ()


def judged_rollout(prompt: Prompt, rollout: Rollout, opened: str = "") -> JudgedRollout | None:
    """Return a rollout as judges see it; None if it failed.

    Args:
        prompt: Its prompt.
        rollout: The rollout.
        opened: Mark of thoughts that ends the policy's prompts; empty if there is none.
    """
    if rollout.status == "failed":
        return None
    return JudgedRollout(prompt.messages, tuple(_said(prompt, rollout, opened)), prompt.info)


def with_rewards(
    prompt: Prompt, rollout: Rollout, rewards: Mapping[str, JudgedReward], weights: Mapping[str, float]
) -> Rollout:
    """Return a rollout with rewards by judges added to its own. It has failed if one of them could not be given.

    A reward by turn is earned by its turns, any other by the newest turn.

    Args:
        prompt: Its prompt.
        rollout: The rollout, which has not failed.
        rewards: Rewards by reported name.
        weights: Weight of each in the sum.
    """
    verdicts = (*rollout.verdicts, *(verdict for each in rewards.values() for verdict in each.verdicts))
    named, turns = dict(rollout.rewards), list(rollout.turns)
    for name, given in rewards.items():
        failure = given.failure
        if not failure and name in named:
            failure = f"two rewards are called {name!r}; rename the one under `rewards`"
        if not failure and given.turns and len(given.turns) != len(turns):
            failure = f"the judge gave rewards to {len(given.turns)} turns, but the policy took {len(turns)}"
        if failure or given.value is None:
            return _failed(prompt, rollout, f"the reward {name} could not be given: {failure}", verdicts)
        named[name] = given.value
        named["reward"] = named.get("reward", 0.0) + weights[name] * given.value
        of_turns = given.turns or (*[0.0] * (len(turns) - 1), given.value)
        turns = [
            _credited(turn, name, value, weights[name], is_judged=bool(given.turns) or place == len(turns) - 1)
            for place, (turn, value) in enumerate(zip(turns, of_turns, strict=True))
        ]
    return replace(rollout, rewards=named, turns=tuple(turns), verdicts=verdicts)


def _credited(turn: Turn, name: str, value: float, weight: float, *, is_judged: bool) -> Turn:
    if not is_judged:
        return turn
    return replace(turn, rewards={**turn.rewards, name: value}, late_reward=turn.late_reward + weight * value)


def _failed(prompt: Prompt, rollout: Rollout, reason: str, verdicts: tuple[Mapping[str, Any], ...]) -> Rollout:
    failed = Rollout.failed(prompt, reason, image_digests(prompt.messages), [rollout])
    kept = ("agent", "peers", "play", "is_demonstration", "info")
    return replace(failed, verdicts=verdicts, **{name: getattr(rollout, name) for name in kept})


def _said(prompt: Prompt, rollout: Rollout, opened: str) -> Iterator[Message]:
    """Yield the messages after the prompt: the policy's turns without their thoughts, and what it saw between them."""
    if not rollout.contexts:
        yield from _answered(rollout.turns, opened)
        return
    turns = iter(rollout.turns)
    for number, context in enumerate(sorted(rollout.contexts, key=lambda each: each.call)):
        shown: Sequence[Message] = context.messages
        if not number and list(map(dict, shown[: len(prompt.messages)])) == list(map(dict, prompt.messages)):
            shown = shown[len(prompt.messages) :]
        # What an agent says in the policy's name is not the policy's.
        yield from (message for message in shown if message.get("role") != "assistant")
        yield from _answered(list(islice(turns, context.num_turns)), opened)


def _answered(turns: Sequence[Turn], opened: str) -> Iterator[Message]:
    for turn in turns:
        yield {"role": "assistant", "content": final_text(turn.text, opened)}
        yield from turn.observation or ()
