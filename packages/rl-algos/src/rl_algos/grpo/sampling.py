"""Which groups a step trains on."""

from __future__ import annotations

import numpy as np

from rl_algos.grpo.config import GRPOConfig
from rl_core.errors import DataError
from rl_core.generation import RolloutSource
from rl_core.rollout import RolloutGroup


def varies(group: RolloutGroup) -> bool:
    """Whether the group's rewards differ, so that it has something to teach."""
    rewards = group.rewards()
    rewards = rewards[~np.isnan(rewards)]
    return len(rewards) > 1 and bool(np.any(rewards != rewards[0]))


def collect_groups(rollouts: RolloutSource, config: GRPOConfig) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """The groups of one step, and those that dynamic sampling set aside; both empty or short where the data ends.

    Raises:
        DataError: where `dynamic_sampling_max_gen_batches` rounds did not find enough groups whose rewards differ.
    """
    if not config.use_dynamic_sampling:
        return rollouts.collect(config.num_prompts_per_step), []
    kept: list[RolloutGroup] = []
    aside: list[RolloutGroup] = []
    for _ in range(config.dynamic_sampling_max_gen_batches):
        wanted = config.num_prompts_per_step - len(kept)
        groups = rollouts.collect(wanted)
        kept += [group for group in groups if varies(group)]
        aside += [group for group in groups if not varies(group)]
        if len(kept) == config.num_prompts_per_step or len(groups) < wanted:
            return kept, aside
    raise DataError(
        f"dynamic sampling found {len(kept)} of {config.num_prompts_per_step} groups with differing rewards in "
        f"{config.dynamic_sampling_max_gen_batches} rounds; raise grpo.dynamic_sampling_max_gen_batches or choose "
        "prompts the policy sometimes solves"
    )
