"""The groups that a step trains on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_algos.rollouts.config import PolicyGradientConfig, RolloutConfig
from rl_algos.rollouts.training.rewards import varies
from rl_core.errors import DataError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.source import RolloutSource

NO_SIGNAL = "all rewards of the group are equal"
NOT_WANTED = "the step had its groups"
"""Reasons for which dynamic sampling sets groups aside."""

NO_TURN = "the policy had no turn"
"""Reason for which a group is set aside whose plays opponents ended before the policy had a turn."""

TRIES = 10
"""Prompts that are tried for each of a step before a run in which the policy has no turn is given up."""


def collect_groups(
    rollouts: RolloutSource, config: RolloutConfig, *, num_later: int | None = None
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """The groups of one step, and those that were set aside: by dynamic sampling (without signal, or beyond those
    wanted), or because opponents ended every play before the policy had a turn. Both are empty or short when the data
    ends.

    Args:
        rollouts: Source of the rollouts.
        config: Config section of the algorithm, with the size of a step and the settings of dynamic sampling.
        num_later: Groups that later steps train on; None if that is not known.

    Raises:
        DataError: If `dynamic_sampling_max_gen_batches` rounds did not find enough groups whose rewards differ, or the
            policy had no turn in far too many.
    """
    if not (isinstance(config, PolicyGradientConfig) and config.use_dynamic_sampling):
        return _with_turns(rollouts, config, num_later)
    kept: list[RolloutGroup] = []
    aside: list[RolloutGroup] = []
    for _ in range(config.dynamic_sampling_max_gen_batches):
        drawn = math.ceil((config.num_prompts_per_step - len(kept)) * config.batch_multiplier)
        groups = rollouts.collect(drawn, num_later=num_later)
        useful = [group for group in groups if varies(group)]
        num_wanted = config.num_prompts_per_step - len(kept)
        kept += useful[:num_wanted]
        rollouts.set_aside([group for group in groups if not varies(group)], NO_SIGNAL)
        rollouts.set_aside(useful[num_wanted:], NOT_WANTED)
        chosen = {id(group) for group in kept}
        aside += [group for group in groups if id(group) not in chosen]
        if len(kept) == config.num_prompts_per_step or len(groups) < drawn:
            return kept, aside
    raise DataError(
        f"dynamic sampling found {len(kept)} of {config.num_prompts_per_step} groups with differing rewards in "
        f"{config.dynamic_sampling_max_gen_batches} rounds. Increase "
        f"{config.section}.dynamic_sampling_max_gen_batches, or choose prompts that the policy sometimes solves"
    )


def _with_turns(
    rollouts: RolloutSource, config: RolloutConfig, num_later: int | None
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    kept: list[RolloutGroup] = []
    aside: list[RolloutGroup] = []
    while len(aside) < TRIES * config.num_prompts_per_step:
        num_wanted = config.num_prompts_per_step - len(kept)
        groups = rollouts.collect(num_wanted, num_later=num_later)
        without = [group for group in groups if not len(group.rollouts)]
        kept += [group for group in groups if len(group.rollouts)]
        if without:
            rollouts.set_aside(without, NO_TURN)
            aside += without
        if not without or len(groups) < num_wanted:
            return kept, aside
    raise DataError(
        f"opponents ended every play of {len(aside)} prompts before the policy had a turn, and {len(kept)} of "
        f"{config.num_prompts_per_step} prompts are left to train on. Leave an agent to the policy in "
        f"{config.section}.agents, or begin with a policy that can play"
    )


def greedy_groups(
    rollouts: RolloutSource, groups: Sequence[RolloutGroup], sampling: SamplingParams | None
) -> Sequence[RolloutGroup]:
    """One greedy rollout of each group's prompt with the weights of the moment; none without `sampling`."""
    if sampling is None:
        return ()
    return rollouts.evaluate([group.prompt for group in groups], sampling).groups
