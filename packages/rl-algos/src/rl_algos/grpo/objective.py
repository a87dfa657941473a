"""The loss of a run from step to step: columns of the whole step, a penalty on rewards, weights that adapt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rl_algos.losses.kl import KLType
from rl_algos.losses.policy import PolicyLoss
from rl_core.batch import Batch, Column
from rl_core.metrics import Metric
from rl_core.model import Loss
from rl_core.ragged import Ragged
from rl_core.rollout import LOSS_MASK, RolloutGroup


@dataclass(frozen=True)
class StepData:
    """What a statistic of a whole step may be computed from.

    Args:
        step: number of the step.
        groups: trained on.
        batch: one row per rollout, with advantages and logprobs.
    """

    step: int
    groups: Sequence[RolloutGroup]
    batch: Batch


Statistic = Callable[[StepData], Column]
"""A column that needs all rows of a step."""


class AdaptiveWeight(Protocol):
    """A weight that follows what it brings about."""

    @property
    def value(self) -> float:
        """The weight in force."""
        ...

    @property
    def watches(self) -> str:
        """Name of the metric that it follows."""
        ...

    def observe(self, measured: float) -> None:
        """Move by what a step measured."""
        ...

    def state(self) -> Mapping[str, Any]:
        """What `restore` goes on from."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        ...


class AdaptiveKL:
    """`weight (1 + clip(kl / target - 1, -0.2, 0.2) rollouts / horizon)` after each step (Ziegler et al.,
    arXiv:1909.08593).

    Args:
        weight: the first.
        target: mean KL divergence per sampled token.
        rate: rollouts of a step over the horizon.
    """

    watches = "policy/kl"

    def __init__(self, weight: float, *, target: float, rate: float) -> None:
        self.value = weight
        self._target = target
        self._rate = rate

    def observe(self, measured: float) -> None:
        """Rise above the target, fall below it."""
        self.value *= 1 + float(np.clip(measured / self._target - 1, -0.2, 0.2)) * self._rate

    def state(self) -> Mapping[str, Any]:
        """The weight."""
        return {"weight": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from that weight."""
        self.value = state["weight"]


class AdaptiveEntropy:
    """A weight that rises by a step below the target entropy and falls above it, not below 0, and which is 0 above it
    (Skywork-OR1, arXiv:2505.22312).

    Args:
        weight: the first.
        target: mean entropy per sampled token.
        step: change of the weight.
    """

    watches = "policy/entropy"

    def __init__(self, weight: float, *, target: float, step: float) -> None:
        self._weight = weight
        self._target = target
        self._step = step
        self._is_below = True

    @property
    def value(self) -> float:
        """0 while the last entropy measured is above the target."""
        return self._weight if self._is_below else 0.0

    def observe(self, measured: float) -> None:
        """Rise below the target, fall above it."""
        self._is_below = measured <= self._target
        self._weight = max(0.0, self._weight + (self._step if measured < self._target else -self._step))

    def state(self) -> Mapping[str, Any]:
        """The weight, and whether it applies."""
        return {"weight": self._weight, "is_below": self._is_below}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from that weight."""
        self._weight, self._is_below = state["weight"], state["is_below"]


@dataclass(frozen=True)
class RewardKL:
    """A KL penalty on rewards: `weight k` at each sampled token, k an estimate of KL(policy || reference) from
    `d = ref - prev`: k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - d - 1`. No gradient passes through it, so that every estimator
    serves; k1 is exact in expectation.

    Args:
        weight: of the penalty.
        estimator: k1, k2 or k3.
        input_clamp, output_clamp: bounds of `|d|` and of the absolute estimate; None is unbounded.
    """

    weight: float
    estimator: KLType = "k3"
    input_clamp: float | None = 20.0
    output_clamp: float | None = 10.0

    def estimates(self, batch: Batch) -> Ragged:
        """float64 `[tokens]`, the estimate at each sampled token and 0 elsewhere."""
        mask = batch.ragged(LOSS_MASK)
        is_sampled = mask.values > 0
        ref, prev = batch.ragged("ref_logprobs").values, batch.ragged("prev_logprobs").values
        d = _clamp(ref[is_sampled].astype(np.float64) - prev[is_sampled], self.input_clamp)
        k = {"k1": lambda: -d, "k2": lambda: d**2 / 2, "k3": lambda: np.expm1(d) - d}[self.estimator]()
        values = np.zeros(len(is_sampled))
        values[is_sampled] = _clamp(k, self.output_clamp)
        return mask.like(values)


class Objective:
    """The loss of a run, and what has to be computed once a step for it, on the driver.

    The usage loop::

        batch = with_logprobs(batch, policy, objective)
        advantages = advantages_of(groups, config, objective.penalties(batch))
        batch = objective.prepared(StepData(step, groups, batch_with_advantages))
        updates = [policy.train_step(minibatch, objective.loss) for minibatch in minibatches(batch, rows)]
        objective.observe(metrics_of(updates))

    Args:
        loss: what a step minimises.
        statistics: columns of the whole step by name, for a loss that reads them.
        reward_kl: the KL penalty on rewards, None for none.
        kl_weight: the weight of the KL term, or of the penalty on rewards, if it adapts; then `loss` is a `PolicyLoss`.
        entropy_weight: the weight of the entropy bonus, if it adapts; likewise.
    """

    def __init__(
        self,
        loss: Loss,
        *,
        statistics: Mapping[str, Statistic] | None = None,
        reward_kl: RewardKL | None = None,
        kl_weight: AdaptiveWeight | None = None,
        entropy_weight: AdaptiveWeight | None = None,
    ) -> None:
        self._loss = loss
        self._statistics = dict(statistics or {})
        self._reward_kl = reward_kl
        weights = {"kl_weight": kl_weight, "entropy_weight": entropy_weight}
        self._weights = {name: weight for name, weight in weights.items() if weight is not None}
        self._measured: dict[str, float] = {}

    @property
    def loss(self) -> Loss:
        """The loss with the weights in force."""
        if not self._weights:
            return self._loss
        assert isinstance(self._loss, PolicyLoss)
        loss = self._loss
        if "kl_weight" in self._weights and loss.kl is not None:
            loss = dataclasses.replace(loss, kl=dataclasses.replace(loss.kl, weight=self._weights["kl_weight"].value))
        if "entropy_weight" in self._weights:
            loss = dataclasses.replace(loss, entropy_weight=self._weights["entropy_weight"].value)
        return loss

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the loss and the penalty on rewards read, beside those that `prepared` adds."""
        of_rewards = () if self._reward_kl is None else ("prev_logprobs", "ref_logprobs")
        return frozenset((*self._loss.columns, *of_rewards)) - self._statistics.keys()

    def penalties(self, batch: Batch) -> Ragged | None:
        """float64 `[tokens]`, what each sampled token takes from the reward, None if nothing does."""
        if self._reward_kl is None:
            return None
        estimates = self._reward_kl.estimates(batch)
        num_sampled = batch.ragged(LOSS_MASK).values.sum(dtype=np.int64)
        self._measured = {"policy/kl": float(estimates.values.sum() / max(num_sampled, 1))}
        weight = self._weights["kl_weight"].value if "kl_weight" in self._weights else self._reward_kl.weight
        return estimates.like(weight * estimates.values)

    def prepared(self, data: StepData) -> Batch:
        """The batch with the columns of the whole step that the loss reads."""
        columns = {name: statistic(data) for name, statistic in self._statistics.items()}
        return data.batch.with_columns(columns) if columns else data.batch

    def observe(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Move the weights by the metrics of a step's updates.

        Returns:
            What to report beside them: the penalty on rewards, and the weights that were in force.
        """
        reported = {**self._measured, **{f"policy/{name}": weight.value for name, weight in self._weights.items()}}
        for weight in self._weights.values():
            metric = metrics.get(weight.watches)
            weight.observe(self._measured[weight.watches] if metric is None else metric.result())
        return reported

    def state(self) -> Mapping[str, Any]:
        """The weights that adapt."""
        return {name: weight.state() for name, weight in self._weights.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from those weights; one that the state does not have, as after a change of the config, starts anew."""
        for name, weight in self._weights.items():
            if name in state:
                weight.restore(state[name])


class CovarianceSurrogate(Protocol):
    """A surrogate that treats some tokens of high covariance in a way of their own."""

    def chosen(self, covariance: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """bool `[tokens]`, those tokens among all sampled tokens of a step."""
        ...


def high_covariance(surrogate: CovarianceSurrogate, seed: int) -> Statistic:
    """uint8 `[tokens]`, 1 at the tokens that the surrogate chooses by `(prev - mean prev) (A - mean A)`, means over all
    sampled tokens of the step (arXiv:2505.22617).

    Args:
        seed: of a random choice, together with the number of the step.
    """

    def statistic(data: StepData) -> Column:
        mask = data.batch.ragged(LOSS_MASK)
        is_sampled = mask.values > 0
        prev = data.batch.ragged("prev_logprobs").values[is_sampled].astype(np.float64)
        advantages = data.batch["advantages"]
        by_token = advantages.values if isinstance(advantages, Ragged) else np.repeat(advantages, mask.lengths)
        own = by_token[is_sampled].astype(np.float64)
        chosen = np.zeros(len(is_sampled), dtype=np.uint8)
        if len(own):
            covariance = (prev - prev.mean()) * (own - own.mean())
            chosen[is_sampled] = surrogate.chosen(covariance, np.random.default_rng((seed, data.step)))
        return mask.like(chosen)

    return statistic


def positive_examples(data: StepData) -> Column:
    """uint8 `[rows]`, 1 for rollouts whose environment gave them a reward above 0."""
    # NaN, that of a failed rollout, is not above 0
    positive: np.ndarray = np.concatenate([group.rewards() for group in data.groups]) > 0
    return positive.astype(np.uint8)


def _clamp(values: np.ndarray, bound: float | None) -> np.ndarray:
    return values if bound is None else np.clip(values, -bound, bound)
