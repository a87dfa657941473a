"""Advantage estimators: chosen by name, given what their parameters ask for, and held to what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_algos.grpo import advantages as by_group
from rl_algos.grpo import batch_advantages
from rl_algos.grpo.config import EstimatorConfig, GRPOConfig
from rl_algos.losses.custom import unknown_name
from rl_algos.policy_gradient.advantages import clip_advantages, loss_masks
from rl_algos.rollouts.training.batch import Advantages
from rl_algos.rollouts.training.rewards import lengths_of, scores_of, trained_rewards
from rl_algos.rollouts.training.segments import whole_rollouts
from rl_core.config import Config, section_of, settings_of
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.plugins import resolve
from rl_core.rollouts.group import RolloutGroup

Estimator = Callable[..., Advantages]
"""A function whose positional parameters name what it reads, of `INPUTS`, and whose keyword-only parameters are its
settings. It returns float64 `[rollouts]`, or a `Ragged` with a value at every token of `loss_mask`.
"""

ESTIMATORS: Mapping[str, Estimator] = {
    function.__name__: function
    for function in (
        by_group.grpo,
        by_group.grpo_batch_std,
        by_group.drgrpo,
        by_group.rloo,
        by_group.reinforce,
        batch_advantages.reinforce_plus_plus,
        batch_advantages.reinforce_plus_plus_baseline,
        by_group.gpg,
        by_group.opo,
        by_group.remax,
        by_group.pass_at_k,
        by_group.maxrl,
        by_group.optimal_token_baseline,
        batch_advantages.gdpo,
    )
}
"""Estimators by the name that `grpo.adv_estimator` gives."""


@dataclass(frozen=True)
class _Step:
    """Sources of the inputs of an estimator.

    Args:
        groups, config: of the step.
        penalties: `[tokens]`, a row per rollout, what each sampled token takes from the reward; None for nothing.
        greedy: One greedy rollout of each group's prompt; empty if the estimator reads none.
        batch: Batch of the rollouts, with logprobs; None if the estimator reads none.
        by_token: True if the estimator takes the penalties off by token itself.
    """

    groups: Sequence[RolloutGroup]
    config: GRPOConfig
    penalties: Ragged | None
    greedy: Sequence[RolloutGroup]
    batch: Batch | None
    by_token: bool

    @property
    def rewards(self) -> np.ndarray:
        shaped = trained_rewards(self.groups, self.config)
        return shaped if self.penalties is None or self.by_token else shaped - self.penalties.sums()

    @property
    def rewards_by_name(self) -> dict[str, np.ndarray]:
        failed = np.array([status == "failed" for group in self.groups for status in group.rollouts.status])
        rewards = [each for group in self.groups for each in group.rollouts.rewards]
        names = sorted(set().union(*rewards) - {"reward"})
        return {name: np.where(failed, np.nan, [each.get(name, 0.0) for each in rewards]) for name in names}

    @property
    def group_of_rollout(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.groups)), [len(group.rollouts) for group in self.groups])

    @property
    def baselines(self) -> np.ndarray:
        return trained_rewards(self.greedy, self.config)[self.group_of_rollout]

    @property
    def squared_scores(self) -> Ragged:
        assert self.batch is not None, "an estimator that reads squared scores is handed the batch"
        mask = loss_masks(self.groups)
        is_sampled = mask.values > 0
        prev, collision = (self.batch.ragged(name).values for name in ("prev_logprobs", "prev_collision"))
        squared = np.zeros(len(is_sampled))
        own = np.exp(prev[is_sampled].astype(np.float64))
        squared[is_sampled] = np.maximum(1 - 2 * own + collision[is_sampled], 0.0)
        return mask.like(squared)


INPUTS: Mapping[str, Callable[[_Step], Any]] = {
    "rewards": lambda step: step.rewards,
    "scores": lambda step: scores_of(step.groups),
    "rewards_by_name": lambda step: step.rewards_by_name,
    "baselines": lambda step: step.baselines,
    "groups": lambda step: step.group_of_rollout,
    "lengths": lambda step: lengths_of(step.groups),
    "loss_mask": lambda step: loss_masks(step.groups),
    "penalties": lambda step: step.penalties,
    "squared_scores": lambda step: step.squared_scores,
    "normalize": lambda step: step.config.normalize_rewards,
}
"""Inputs that an estimator may read, by the name of its parameter:

- `rewards` float64 `[rollouts]`, scaled and shaped, NaN for failed rollouts;
- `scores` float64 `[rollouts]`, rewards as the environments gave them, likewise;
- `rewards_by_name`, the same by the name that environments give them, except `reward`;
- `baselines` float64 `[rollouts]`, the reward of a greedy rollout of the same prompt, scaled and shaped;
- `groups` int64 `[rollouts]`, the group of each;
- `lengths` int64 `[rollouts]`, sampled tokens;
- `loss_mask` uint8 `[tokens]` (a `Ragged` with a row per rollout), 1 on sampled tokens;
- `penalties` float64 `[tokens]` (a `Ragged`), with KL in the reward what each sampled token takes from it, None
  without: an estimator that does not read them finds their sums taken off `rewards`;
- `squared_scores` float64 `[tokens]` (a `Ragged`), the squared norm of the gradient of each sampled token's logprob by
  the logits, before the update: 1 less twice its probability, plus the sum of the squares of all probabilities;
- `normalize`, the setting `grpo.normalize_rewards`.
"""


def estimator_section(name: str | None) -> type[Config]:
    """The type of `grpo.adv_estimator`: the name of an estimator and its settings.

    Raises:
        ValueError: If there is no such estimator, or it asks for an input that does not exist.
        ModuleNotFoundError: If its package is not installed.
    """
    function = _function(name or "grpo")
    unknown = [wanted for wanted in inputs_of(function) if wanted not in INPUTS]
    if unknown:
        raise ValueError(
            f"{name} has the parameters {', '.join(unknown)}; positional parameters of an estimator may be "
            f"{', '.join(INPUTS)}, and its own settings must be keyword-only (after `*`)"
        )
    return section_of(function, EstimatorConfig)


def chosen(config: GRPOConfig) -> str:
    """Return the name of the effective estimator."""
    return config.adv_estimator.name or ("rloo" if config.use_leave_one_out_baseline else "grpo")


def inputs_of(function: Estimator) -> list[str]:
    """Return the names of the inputs of an estimator: its positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in inspect.signature(function).parameters.values() if each.kind in kinds]


def reads(config: GRPOConfig, name: str) -> bool:
    """Return whether the effective estimator reads this input."""
    return name in inputs_of(_function(chosen(config)))


def columns_before(config: GRPOConfig) -> frozenset[str]:
    """Columns that the estimator in force reads, of those that the policy gives before the update."""
    return frozenset(("prev_logprobs", "prev_collision")) if reads(config, "squared_scores") else frozenset()


def advantages_of(
    groups: Sequence[RolloutGroup],
    config: GRPOConfig,
    *,
    penalties: Ragged | None = None,
    greedy: Sequence[RolloutGroup] = (),
    batch: Batch | None = None,
) -> Advantages:
    """Advantages of all rollouts, in the order of groups and of rollouts within them.

    Args:
        groups: Groups of the step, one per prompt.
        config: Config section of the algorithm, with its estimator and the bounds of advantages.
        penalties: `[tokens]`, by rows of the batch, what each sampled token takes from the reward; None for nothing.
        greedy: One greedy rollout of each group's prompt, for an estimator that reads `baselines`.
        batch: Batch from `build_batch`, with `prev_logprobs` and `prev_collision` for an estimator that reads
            `squared_scores`.

    Raises:
        ValueError: If the estimator returns something else, or numbers that are not finite.
    """
    name = chosen(config)
    function = _function(name)
    wanted = inputs_of(function)
    penalties = None if penalties is None else whole_rollouts(penalties, groups)
    step = _Step(groups, config, penalties, greedy, batch, by_token="penalties" in wanted)
    advantages = function(*[INPUTS[name](step) for name in wanted], **settings_of(config.adv_estimator))
    _check(advantages, name, groups)
    return clip_advantages(advantages, config.advantage_clip_low, config.advantage_clip_high)


def _function(name: str) -> Estimator:
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" not in name:
        raise unknown_name(name, ESTIMATORS, others="your own function as package.module:function or file.py:function")
    found: Estimator = resolve(name)
    if not callable(found):
        raise ValueError(f"{name} is not a function")
    return found


def _check(advantages: Any, name: str, groups: Sequence[RolloutGroup]) -> None:
    """Raise a `ValueError` unless there is one advantage for each rollout or token."""
    if isinstance(advantages, Ragged):
        wanted = loss_masks(groups)
        if advantages.values.ndim != 1 or not np.array_equal(advantages.offsets, wanted.offsets):
            raise ValueError(f"the estimator {name} must return a value at every token of `loss_mask`")
        values = advantages.values
    else:
        num_rollouts = sum(len(group.rollouts) for group in groups)
        if not isinstance(advantages, np.ndarray) or advantages.shape != (num_rollouts,):
            got = f"shape {advantages.shape}" if isinstance(advantages, np.ndarray) else type(advantages).__name__
            raise ValueError(
                f"the estimator {name} must return an array [{num_rollouts}], a value for every rollout, or a Ragged "
                f"with one at every token of `loss_mask`; got {got}"
            )
        values = advantages
    if not np.isfinite(values).all():
        raise ValueError(
            f"the estimator {name} returned {int((~np.isfinite(values)).sum())} values that are not finite. Return 0 "
            "for failed rollouts, whose reward is NaN"
        )
