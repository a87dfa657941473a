"""Rollouts as judges see them, and rollouts with the rewards that judges gave."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.environments.rewards import VERDICTS, merged_info
from rl_core.images import image_digests
from rl_core.rollouts.group import LOSS_MASK, RECORD, SAID, RolloutGroup
from rl_core.rollouts.judging import JudgedReward, JudgedRollout
from rl_core.rollouts.record import turns_of
from rl_core.rollouts.rollout import Message, Prompt, Rollout, Turn
from rl_core.rollouts.thoughts import final_text

CONVERSATION = "conversation"
"""Entry of a rollout's `info` with its last conversation as plain values, until functions have scored it."""
_OF_VERDICT: Mapping[str, type] = {"judge": str, "question": str, "answer": str, "cached": bool}


@dataclass(frozen=True)
class JudgingSpec:
    """The judging of rollouts in a rollout worker; sent to its process.

    Args:
        weights: Weight of each reward by a language model, by environment and reported name.
        scored: Environments whose rollouts reward models score after that, so that their conversations stay with them.
        later: Environments with functions that score rollouts after that, so that their last conversation stays with
            them.
        engines: Judges that the engines of a rollout worker serve.
    """

    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    scored: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
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
    credit = Credit.of(rollout.rewards, len(rollout.turns), rewards, weights)
    verdicts = (*rollout.verdicts, *credit.verdicts)
    if credit.failure:
        failed = Rollout.failed(prompt, credit.failure, image_digests(prompt.messages), [rollout])
        kept = ("agent", "peers", "play", "is_demonstration", "info")
        return replace(failed, verdicts=verdicts, **{name: getattr(rollout, name) for name in kept})
    turns = tuple(
        replace(turn, rewards={**turn.rewards, **named}, late_reward=turn.late_reward + late) if named else turn
        for turn, named, late in zip(rollout.turns, credit.of_turns, credit.late, strict=True)
    )
    return replace(rollout, rewards=credit.rewards, turns=turns, verdicts=verdicts)


def given_verdicts(info: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Mapping[str, Any], ...]]:
    """Return the `info` of an environment's answer without the verdicts that its functions were given, and these.
    Anything else in their place is left out."""
    listed = info.get(VERDICTS, ())
    verdicts = tuple(
        each
        for each in (listed if isinstance(listed, list) else ())
        if isinstance(each, Mapping)
        and each.keys() == {*_OF_VERDICT, "value"}
        and all(isinstance(each[name], kind) for name, kind in _OF_VERDICT.items())
    )
    return {name: value for name, value in info.items() if name != VERDICTS}, verdicts


def group_with_rewards(
    group: RolloutGroup, rewards: Sequence[Mapping[str, JudgedReward]], weights: Mapping[str, float]
) -> RolloutGroup:
    """Return a group with rewards by judges added to the rewards of its rollouts, as `with_rewards` does, also in their
    records. It has no column `said`.

    Args:
        group: The group, whose records are brought into this process.
        rewards: Rewards of each rollout by reported name; none for those that failed.
        weights: Weight of each in the sum.
    """
    reports, records = group.rollouts, [bytes(each) for each in group.records.ragged(RECORD)]
    columns: dict[str, list[Any]] = {
        name: list(getattr(reports, name))
        for name in ("rewards", "status", "failure", "num_sampled", "spans", "turns", "info")
    }
    for place, given in enumerate(rewards):
        if not given and f'"{CONVERSATION}":'.encode() not in records[place]:
            continue
        credit = Credit.of(reports.rewards[place], reports.num_turns[place], given, weights)
        described = json.loads(records[place])
        described["info"].pop(CONVERSATION, None)
        for reward in given.values():
            described["info"] = merged_info(described["info"], reward.info)
            numbers = {name: value for name, value in reward.info.items() if isinstance(value, int | float)}
            columns["info"][place] = {**columns["info"][place], **numbers}
        if verdicts := [*described.get("verdicts", ()), *credit.verdicts]:
            described["verdicts"] = verdicts
        changed: dict[str, Any] = {"rewards": credit.rewards}
        if credit.failure:
            changed = {"rewards": {}, "status": "failed", "failure": credit.failure, "num_sampled": 0}
            columns["spans"][place] = ()
        described |= changed
        for turn, named in zip(turns_of(described), credit.of_turns, strict=False):
            turn["rewards"] = {**turn["rewards"], **named}
        for name, value in changed.items():
            columns[name][place] = value
        if columns["turns"]:
            own = [] if credit.failure else zip(columns["turns"][place], credit.late, strict=False)
            columns["turns"][place] = tuple((count, earned + late, state) for (count, earned, state), late in own)
        text = json.dumps(described, ensure_ascii=False)
        records[place] = text.encode(errors="backslashreplace")
    num_rows = [len(lengths) for lengths in reports.row_lengths]
    failed = np.array([status == "failed" for status in columns["status"]])
    rows = [part for record, count in zip(records, num_rows, strict=True) for part in (record, *[b""] * (count - 1))]
    held = {name: column for name, column in group.columns.columns.items() if name != SAID}
    changed_columns: dict[str, Any] = {name: tuple(values) for name, values in columns.items()}
    held[RECORD] = Ragged.from_rows([np.frombuffer(row, np.uint8) for row in rows], np.uint8)
    return replace(
        group,
        rollouts=replace(reports, **changed_columns),
        columns=Batch(held).with_zeros(LOSS_MASK, np.repeat(failed, num_rows)),
    )


@dataclass(frozen=True)
class Credit:
    """Rewards by judges as a rollout earns them.

    Args:
        rewards: Rewards of the rollout by name, its own included.
        of_turns: Rewards of each turn by name.
        late: Weighted sum of these of each turn.
        verdicts: Records of the verdicts.
        failure: Reason that the rollout fails; empty if it does not.
    """

    rewards: Mapping[str, float]
    of_turns: Sequence[Mapping[str, float]]
    late: Sequence[float]
    verdicts: tuple[Mapping[str, Any], ...]
    failure: str = ""

    @classmethod
    def of(
        cls, own: Mapping[str, float], num_turns: int, given: Mapping[str, JudgedReward], weights: Mapping[str, float]
    ) -> Credit:
        """Return the credit of a rollout with these rewards of its own and this number of turns."""
        verdicts = tuple(verdict for each in given.values() for verdict in each.verdicts)
        rewards = dict(own)
        of_turns: list[dict[str, float]] = [{} for _ in range(num_turns)]
        late = [0.0] * num_turns
        for name, reward in given.items():
            failure = reward.failure
            if not failure and name in own:
                failure = f"two rewards are called {name!r}; rename the one under `rewards`"
            if not failure and reward.turns and len(reward.turns) != num_turns:
                failure = f"the judge gave rewards to {len(reward.turns)} turns, but the policy took {num_turns}"
            if failure or reward.value is None:
                return cls({}, (), (), verdicts, f"the reward {name} could not be given: {failure}")
            rewards[name] = reward.value
            rewards["reward"] = rewards.get("reward", 0.0) + weights[name] * reward.value
            # A reward of the whole rollout is of its newest turn.
            first = 0 if reward.turns else num_turns - 1
            for place, value in enumerate(reward.turns or (reward.value,), first):
                of_turns[place][name] = value
                late[place] += weights[name] * value
        return cls(rewards, of_turns, late, verdicts)


def _said(prompt: Prompt, rollout: Rollout, opened: str) -> Iterator[Message]:
    """Yield the messages after the prompt: the policy's turns without their thoughts, and what it saw between them."""
    if not rollout.contexts:
        yield from _answered(rollout.turns, opened)
        return
    turns = iter(rollout.turns)
    # Turns are listed by segment, and judges give them their rewards in this order.
    for number, context in enumerate(rollout.contexts):
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
