"""The loss of a run from step to step: columns of the whole step, a penalty on rewards, weights that adapt."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import numpy as np

from rl_algos.losses.importance import LOG_RATIO_BOUND
from rl_algos.losses.kl import KLPenalty
from rl_algos.losses.policy import PolicyLoss
from rl_algos.policy_gradient.adaptive import AdaptiveWeight
from rl_algos.policy_gradient.step_statistics import Statistic, StepData
from rl_core.config import Config
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.model import COLLISION, ENTROPY, LOGPROBS, Loss, Model, Read
from rl_core.rollouts.group import LOSS_MASK
from rl_core.weights import Weights

T = TypeVar("T", bound=Config)

READ_BEFORE: Mapping[str, Read] = {"prev_logprobs": LOGPROBS, "prev_entropy": ENTROPY, "prev_collision": COLLISION}
"""Reads of the policy before the update, by the columns that they become."""


def kl_estimates(kl: KLPenalty, batch: Batch) -> Ragged:
    """float64 `[tokens]`, the estimate of KL(policy || reference) at each sampled token, 0 elsewhere.

    Args:
        kl: Estimator and clamps.
        batch: Batch with `loss_mask`, `prev_logprobs` and `ref_logprobs`.
    """
    mask = batch.ragged(LOSS_MASK)
    is_sampled = mask.values > 0
    ref, prev = batch.ragged("ref_logprobs").values, batch.ragged("prev_logprobs").values
    d = _clamp(ref[is_sampled].astype(np.float64) - prev[is_sampled], kl.input_clamp)
    within = _clamp(d, LOG_RATIO_BOUND)
    k = {"k1": lambda: -d, "k2": lambda: d**2 / 2, "k3": lambda: np.expm1(within) - within}[kl.estimator]()
    values = np.zeros(len(is_sampled))
    values[is_sampled] = _clamp(k, kl.output_clamp)
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
        loss: What a step minimises.
        statistics: Columns of the whole step by name, for a loss that reads them.
        read_before: Columns that statistics and the estimator read, of those that `with_logprobs` adds.
        weights: of the policy, whose version tells a loss with weights by age how old tokens are; then `loss` is a
            `PolicyLoss`.
        reward_kl: The KL penalty on rewards, None for none.
        kl_weight: The weight of the KL term, or of the penalty on rewards, if it adapts; then `loss` is a `PolicyLoss`.
        entropy_weight: The weight of the entropy bonus, if it adapts; likewise.
    """

    def __init__(
        self,
        loss: Loss,
        *,
        statistics: Mapping[str, Statistic] | None = None,
        read_before: Collection[str] = (),
        weights: Weights | None = None,
        reward_kl: KLPenalty | None = None,
        kl_weight: AdaptiveWeight | None = None,
        entropy_weight: AdaptiveWeight | None = None,
    ) -> None:
        self._loss = loss
        self._statistics = dict(statistics or {})
        self._read_before = frozenset(read_before)
        self._versions = weights
        self._reward_kl = reward_kl
        adaptive = {"kl_weight": kl_weight, "entropy_weight": entropy_weight}
        self._weights = {name: weight for name, weight in adaptive.items() if weight is not None}
        self._measured: dict[str, float] = {}

    @property
    def loss(self) -> Loss:
        """The loss with the weights in force, and the version of the policy's weights."""
        loss = self._loss
        if not isinstance(loss, PolicyLoss):
            return loss
        if loss.staleness is not None and self._versions is not None:
            loss = dataclasses.replace(loss, weight_version=self._versions.version)
        if "kl_weight" in self._weights and loss.kl is not None:
            loss = dataclasses.replace(loss, kl=_weighing(loss.kl, self._weights["kl_weight"]))
        if "entropy_weight" in self._weights and loss.entropy_bonus is not None:
            loss = dataclasses.replace(
                loss, entropy_bonus=_weighing(loss.entropy_bonus, self._weights["entropy_weight"])
            )
        return loss

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the loss, the penalty on rewards, statistics and the estimator read, beside those that
        `prepared` adds."""
        of_rewards = () if self._reward_kl is None else ("prev_logprobs", "ref_logprobs")
        return frozenset((*self._loss.columns, *of_rewards, *self._read_before)) - self._statistics.keys()

    def penalties(self, batch: Batch) -> Ragged | None:
        """float64 `[tokens]`, what each sampled token takes from the reward, None if nothing does."""
        if self._reward_kl is None:
            return None
        estimates = kl_estimates(self._reward_kl, batch)
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
            What to report beside them: the penalty on rewards, the effective sample size, and the weights that were in
            force.
        """
        weights = {f"policy/{name}": weight.value for name, weight in self._weights.items()}
        reported = {**self._measured, **_effective_sample_size(metrics), **weights}
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


def with_logprobs(batch: Batch, policy: Model, objective: Objective) -> Batch:
    """The batch with what the objective asks for of the policy before the update, and with `ref_logprobs`.

    Those of the policy are of the tokens that sampling keeps, as the loss reads them; those of the reference of all.
    """
    temperature, columns = objective.loss.temperature, objective.columns
    token_filter = next((read.token_filter for read in objective.loss.reads), None)
    before = {
        column: dataclasses.replace(read, token_filter=token_filter)
        for column, read in READ_BEFORE.items()
        if column in columns
    }
    if before:
        found = policy.infer(batch, list(before.values()), temperature=temperature)
        batch = batch.with_columns({column: found.columns[read.name] for column, read in before.items()})
    if "ref_logprobs" in columns:
        found = policy.infer(batch, [LOGPROBS], reference=True, temperature=temperature)
        batch = batch.with_columns({"ref_logprobs": found.columns["logprobs"]})
    return batch


def _effective_sample_size(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The share of the sampled tokens that as many tokens of the policy itself would be worth: with the importance
    weights `w = exp(prev - generation)`, `(mean w)^2 / mean w^2`. Empty if the loss does not measure the weights.
    """
    if "mismatch/weight" not in metrics:
        return {}
    mean, square = (metrics[name].result() for name in ("mismatch/weight", "mismatch/weight_squared"))
    return {"mismatch/effective_sample_size": mean**2 / square} if square else {}


def _weighing(term: T, weight: AdaptiveWeight) -> T:
    """The same term of the loss with the weight in force."""
    return term.model_copy(update={"weight": weight.value})


def _clamp(values: np.ndarray, bound: float | None) -> np.ndarray:
    return values if bound is None else np.clip(values, -bound, bound)
