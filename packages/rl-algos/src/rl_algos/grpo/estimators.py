"""Advantage estimators: chosen by name, given what their parameters ask for, and held to what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_algos.grpo import advantages as of_rewards
from rl_algos.grpo import turn_advantages as of_turns
from rl_algos.grpo.config import EstimatorConfig, GRPOConfig, trained_agents, trained_environments
from rl_algos.losses.custom import unknown_name
from rl_algos.policy_gradient.advantages import clip_advantages, loss_masks
from rl_algos.rollouts.training.batch import Advantages
from rl_algos.rollouts.training.rewards import lengths_of, scores_of, trained_rewards
from rl_algos.rollouts.training.segments import whole_rollouts
from rl_algos.rollouts.training.turns import turns_of_rollouts
from rl_core import resolve
from rl_core.config import Config, section_of, settings_of
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import RolloutGroup

Estimator = Callable[..., Advantages]
"""A function whose positional parameters name what it reads, of `INPUTS`, and whose keyword-only parameters are its
settings. It returns float64 `[rollouts]`, or a `Ragged` with a value at every token of `loss_mask`.
"""

ESTIMATORS: Mapping[str, Estimator] = {
    function.__name__: function
    for function in (
        of_rewards.grpo,
        of_rewards.grpo_batch_std,
        of_rewards.drgrpo,
        of_rewards.rloo,
        of_rewards.reinforce,
        of_rewards.reinforce_plus_plus,
        of_rewards.reinforce_plus_plus_baseline,
        of_rewards.gpg,
        of_rewards.opo,
        of_rewards.remax,
        of_rewards.pass_at_k,
        of_rewards.maxrl,
        of_rewards.raft,
        of_rewards.tpo,
        of_rewards.optimal_token_baseline,
        of_rewards.gdpo,
        of_turns.turn_returns,
        of_turns.mt_grpo,
        of_turns.gigpo,
    )
}
"""Estimators by the name that `grpo.adv_estimator` gives."""


@dataclass(frozen=True)
class _Rollouts:
    """The rollouts of one agent in a step, which give the inputs of its estimator.

    Args:
        groups: Groups of the step.
        config: Config section of the algorithm.
        rows: int64, ascending: the rollouts that are given to the estimator.
        penalties: `[tokens]`, a row per rollout, the part of the reward that each sampled token takes away; None for
            nothing.
        greedy: One greedy rollout of each group's prompt; empty if the estimator reads none.
        batch: Batch of the rollouts, with logprobs; None if the estimator reads none.
        by_token: True if the estimator subtracts the penalties by token itself.
    """

    groups: Sequence[RolloutGroup]
    config: GRPOConfig
    rows: np.ndarray
    penalties: Ragged | None
    greedy: Sequence[RolloutGroup]
    batch: Batch | None
    by_token: bool

    def rewards(self) -> np.ndarray:
        shaped = trained_rewards(self.groups, self.config)[self.rows]
        return shaped if self.penalties is None or self.by_token else shaped - self.penalties.sums()[self.rows]

    def rewards_by_name(self) -> dict[str, np.ndarray]:
        failed = np.array([status == "failed" for group in self.groups for status in group.rollouts.status])
        all_rewards = [each for group in self.groups for each in group.rollouts.rewards]
        rewards = [all_rewards[row] for row in self.rows]
        names = sorted(set().union(*rewards) - {"reward"})
        return {name: np.where(failed[self.rows], np.nan, [each.get(name, 0.0) for each in rewards]) for name in names}

    def compared(self) -> np.ndarray:
        keys = [(place, *key) for place, group in enumerate(self.groups) for key in group.rollouts.compared]
        numbers: dict[tuple[int, str, str], int] = {}
        return np.array([numbers.setdefault(keys[row], len(numbers)) for row in self.rows], dtype=np.int64)

    def baselines(self) -> np.ndarray:
        if any(len(group.rollouts) > 1 for group in self.greedy):
            raise ValueError(
                "the estimator compares with one greedy rollout of each prompt, but a play has several rollouts here; "
                "choose another grpo.adv_estimator, such as grpo"
            )
        of_prompts = trained_rewards(self.greedy, self.config)
        return np.repeat(of_prompts, [len(group.rollouts) for group in self.groups])[self.rows]

    def masks(self) -> Ragged:
        return loss_masks(self.groups).select(self.rows)

    def logprobs(self) -> np.ndarray:
        assert self.batch is not None, "an estimator that reads logprobs is handed the batch"
        mask = loss_masks(self.groups)
        own = np.where(mask.values > 0, self.batch.ragged("prev_logprobs").values.astype(np.float64), 0.0)
        return mask.like(own).sums()[self.rows]

    def squared_scores(self) -> Ragged:
        assert self.batch is not None, "an estimator that reads squared scores is handed the batch"
        mask = loss_masks(self.groups)  # Has the tokens of all rows of the batch; some are selected below.
        is_sampled = mask.values > 0
        prev, collision = (self.batch.ragged(name).values for name in ("prev_logprobs", "prev_collision"))
        squared = np.zeros(len(is_sampled))
        own = np.exp(prev[is_sampled].astype(np.float64))
        squared[is_sampled] = np.maximum(1 - 2 * own + collision[is_sampled], 0.0)
        return mask.like(squared).select(self.rows)


INPUTS: Mapping[str, Callable[[_Rollouts], Any]] = {
    "rewards": _Rollouts.rewards,
    "scores": lambda step: scores_of(step.groups)[step.rows],
    "rewards_by_name": _Rollouts.rewards_by_name,
    "baselines": _Rollouts.baselines,
    "groups": _Rollouts.compared,
    "lengths": lambda step: lengths_of(step.groups)[step.rows],
    "loss_mask": _Rollouts.masks,
    "penalties": lambda step: None if step.penalties is None else step.penalties.select(step.rows),
    "turn_rewards": lambda step: turns_of_rollouts(step.groups, step.rows).adding_up_to(step.rewards()),
    "turn_lengths": lambda step: turns_of_rollouts(step.groups, step.rows).lengths,
    "turn_states": lambda step: turns_of_rollouts(step.groups, step.rows).states,
    "logprobs": _Rollouts.logprobs,
    "squared_scores": _Rollouts.squared_scores,
    "normalize": lambda step: step.config.normalize_rewards,
}
"""Inputs that an estimator may read, by the name of its parameter. If plays have several agents, an estimator is given
the rollouts of one agent at a time:

- `rewards` float64 `[rollouts]`, scaled and shaped, NaN for failed rollouts;
- `scores` float64 `[rollouts]`, rewards as the environments gave them, likewise;
- `rewards_by_name`, the same by the name that environments give them, except `reward`;
- `baselines` float64 `[rollouts]`, the reward of a greedy rollout of the same prompt, scaled and shaped;
- `groups` int64 `[rollouts]`, the group of each: the rollouts that it is compared with, of the same prompt and, if they
  have a name of peers, with the same name;
- `lengths` int64 `[rollouts]`, sampled tokens;
- `loss_mask` uint8 `[tokens]` (a `Ragged` with a row per rollout), 1 on sampled tokens;
- `penalties` float64 `[tokens]` (a `Ragged`), with KL in the reward what each sampled token takes from it, None
  without: for an estimator that does not read them, their sums are subtracted from `rewards`;
- `turn_rewards` float64 `[turns]` (a `Ragged` with a row per rollout), the reward of each turn, which add up to
  `rewards`: the last turn has the changes by shaping and penalties; one NaN for failed rollouts;
- `turn_lengths` int64 `[turns]` (a `Ragged`), the sampled tokens of each turn;
- `turn_states` int64 `[turns]` (a `Ragged`), equal for turns that answer the same messages;
- `logprobs` float64 `[rollouts]`, the sum of the logprobs of the sampled tokens before the update;
- `squared_scores` float64 `[tokens]` (a `Ragged`), the squared norm of the gradient of each sampled token's logprob by
  the logits, before the update: 1 less twice its probability, plus the sum of the squares of all probabilities;
- `normalize`, the setting `grpo.normalize_rewards`.
"""


def estimator_section(name: str | None) -> type[Config]:
    """Return the type of `grpo.adv_estimator`: the name of an estimator and its settings.

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


def chosen(config: GRPOConfig, agent: str = "", environment: str = "") -> str:
    """Return the name of the effective estimator of an agent in an environment; without these names, the estimator of
    rollouts that have no other."""
    name = _section(config, agent, environment).name
    return name or ("rloo" if config.use_leave_one_out_baseline else "grpo")


def estimators_in_use(config: GRPOConfig) -> set[str]:
    """Return the names of the effective estimators."""
    agents, environments = trained_agents(config), trained_environments(config)
    own = [agent.adv_estimator.name for agent in agents.values()]
    own += [environment.adv_estimator.name for environment in environments.values()]
    return {chosen(config), *(name for name in own if name)}


def _section(config: GRPOConfig, agent: str, environment: str) -> EstimatorConfig:
    """Return the section of the effective estimator."""
    for settings in (trained_agents(config).get(agent), trained_environments(config).get(environment)):
        if settings is not None and settings.adv_estimator.name:
            return settings.adv_estimator
    return config.adv_estimator


def inputs_of(function: Estimator) -> list[str]:
    """Return the names of the inputs of an estimator: its positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in inspect.signature(function).parameters.values() if each.kind in kinds]


def reads_turns(config: GRPOConfig, environment: str) -> bool:
    """Return whether the effective estimator of an environment reads the rewards of turns."""
    return "turn_rewards" in inputs_of(_function(chosen(config, environment=environment)))


def reads(config: GRPOConfig, name: str) -> bool:
    """Return whether an effective estimator reads this input."""
    return any(name in inputs_of(_function(estimator)) for estimator in estimators_in_use(config))


def columns_before(config: GRPOConfig) -> frozenset[str]:
    """Return the columns that the effective estimators read among the reads of the policy before the update."""
    by_input = {"logprobs": ["prev_logprobs"], "squared_scores": ["prev_logprobs", "prev_collision"]}
    return frozenset(column for name, columns in by_input.items() if reads(config, name) for column in columns)


def advantages_of(
    groups: Sequence[RolloutGroup],
    config: GRPOConfig,
    *,
    penalties: Ragged | None = None,
    greedy: Sequence[RolloutGroup] = (),
    batch: Batch | None = None,
) -> Advantages:
    """Return the advantages of all rollouts, in the order of groups and of rollouts within them.

    If plays have several agents, each agent's rollouts are given to its estimator by themselves, and so are the
    rollouts of an environment with an estimator of its own. Advantages are multiplied by the weights of the agent and
    of the environment after they are clipped.

    Args:
        groups: Groups of the step, one per prompt.
        config: Config section of the algorithm, with its estimator and the bounds of advantages.
        penalties: `[tokens]`, by rows of the batch, the part of the reward that each sampled token takes away; None for
            nothing.
        greedy: One greedy rollout of each group's prompt, for an estimator that reads `baselines`.
        batch: Batch from `build_batch`, with the `columns_before` of the estimators.

    Raises:
        ValueError: If the estimator returns something else, or numbers that are not finite.
    """
    penalties = None if penalties is None else whole_rollouts(penalties, groups)
    agents, environments = trained_agents(config), trained_environments(config)
    scores = scores_of(groups)
    keys: list[tuple[str, str]] = []
    weights: list[float] = []
    for group in groups:
        own = environments.get(group.prompt.environment)
        environment = group.prompt.environment if own is not None and own.adv_estimator.name else ""
        for agent in group.rollouts.agents:
            keys.append((agent, environment))
            weights.append((agents[agent].weight if agent in agents else 1.0) * (1.0 if own is None else own.weight))
    parts: list[tuple[np.ndarray, Advantages]] = []
    for agent, environment in dict.fromkeys(keys):
        rows = np.array([row for row, key in enumerate(keys) if key == (agent, environment)])
        is_trained = agent not in agents or agents[agent].train
        # A play that failed has no agent.
        if not is_trained or (len(rows) < len(keys) and np.isnan(scores[rows]).all()):
            parts.append((rows, np.zeros(len(rows))))
            continue
        name = chosen(config, agent, environment)
        function = _function(name)
        wanted = inputs_of(function)
        step = _Rollouts(groups, config, rows, penalties, greedy, batch, by_token="penalties" in wanted)
        inputs = [INPUTS[each](step) for each in wanted]
        found = function(*inputs, **settings_of(_section(config, agent, environment)))
        _check(found, name, step)
        parts.append((rows, clip_advantages(found, config.advantage_clip_low, config.advantage_clip_high)))
    whole = parts[0][1] if len(parts) == 1 else _joined(parts, groups)
    return _weighed(whole, np.array(weights))


def _weighed(advantages: Advantages, weights: np.ndarray) -> Advantages:
    """Return advantages times the weight of each rollout."""
    if isinstance(advantages, Ragged):
        return advantages.like(advantages.values * np.repeat(weights, advantages.lengths))
    return advantages * weights


def _joined(parts: Sequence[tuple[np.ndarray, Advantages]], groups: Sequence[RolloutGroup]) -> Advantages:
    """Return the advantages of all rollouts from parts with some rollouts each; by token if some are by token."""
    by_rollout = [(rows, advantages) for rows, advantages in parts if not isinstance(advantages, Ragged)]
    if len(by_rollout) == len(parts):
        whole = np.zeros(sum(len(rows) for rows, _ in parts))
        for rows, own in by_rollout:
            whole[rows] = own
        return whole
    mask = loss_masks(groups)
    rollout_of_token = np.repeat(np.arange(len(mask)), mask.lengths)
    values = np.zeros(len(rollout_of_token))
    for rows, advantages in parts:
        by_token = advantages.values if isinstance(advantages, Ragged) else np.repeat(advantages, mask.lengths[rows])
        values[np.isin(rollout_of_token, rows)] = by_token
    return mask.like(values)


def _function(name: str) -> Estimator:
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" not in name:
        raise unknown_name(name, ESTIMATORS, others="your own function as package.module:function or file.py:function")
    found: Estimator = resolve(name)
    if not callable(found):
        raise ValueError(f"{name} is not a function")
    return found


def _check(advantages: Any, name: str, step: _Rollouts) -> None:
    """Raise a `ValueError` unless there is one advantage for each rollout or token."""
    if isinstance(advantages, Ragged):
        wanted = step.masks()
        if advantages.values.ndim != 1 or not np.array_equal(advantages.offsets, wanted.offsets):
            raise ValueError(f"the estimator {name} must return a value at every token of `loss_mask`")
        values = advantages.values
    else:
        num_rollouts = len(step.rows)
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
