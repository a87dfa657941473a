"""The loss of a run from step to step: columns of the whole step, a penalty on rewards, weights that adapt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rl_algos.losses.importance import LOG_RATIO_BOUND
from rl_algos.losses.mask import without_demonstrations
from rl_algos.losses.policy import PolicyLoss
from rl_algos.losses.surrogates import ClipCov, KLCov
from rl_algos.losses.terms import EntropyBonus, KLPenalty
from rl_algos.policy_gradient.mismatch_watch import MismatchWatch
from rl_algos.rollouts.training.segments import ROLLOUT, to_rows
from rl_core.data.batch import TOKENS, Batch, Column
from rl_core.data.ragged import Ragged
from rl_core.errors import LogprobsDiffer
from rl_core.metrics import Metric
from rl_core.model import COLLISION, ENTROPY, LOGPROBS, Loss, Model, Read
from rl_core.rollouts.group import GENERATION_LOGPROBS, LOSS_MASK, RolloutGroup
from rl_core.token_filter import TokenFilter
from rl_core.weights import Weights

READ_BEFORE: Mapping[str, Read] = {"prev_logprobs": LOGPROBS, "prev_entropy": ENTROPY, "prev_collision": COLLISION}
"""Reads of the policy before the update, by the columns that they become."""


def kl_estimates(kl: KLPenalty, batch: Batch) -> Ragged:
    """Return float64 `[tokens]`, the estimate of KL(policy || reference) at each sampled token, 0 elsewhere.

    Args:
        kl: Estimator and clamps.
        batch: Batch with `loss_mask`, `prev_logprobs` and `ref_logprobs`.
    """
    mask = without_demonstrations(batch).ragged(LOSS_MASK)
    is_sampled = mask.values > 0
    ref, prev = batch.ragged("ref_logprobs").values, batch.ragged("prev_logprobs").values
    d = _clamp(ref[is_sampled].astype(np.float64) - prev[is_sampled], kl.input_clamp)
    within = _clamp(d, LOG_RATIO_BOUND)
    k = {"k1": lambda: -d, "k2": lambda: d**2 / 2, "k3": lambda: np.expm1(within) - within}[kl.estimator]()
    values = np.zeros(len(is_sampled))
    values[is_sampled] = _clamp(k, kl.output_clamp)
    return mask.like(values)


class Objective:
    """The loss of a run, with the computations that it needs once a step, on the driver.

    The usage loop::

        batch = with_logprobs(batch, policy, objective)
        advantages = advantages_of(groups, config, objective.penalties(batch))
        batch = objective.prepared(StepData(step, groups, batch_with_advantages))
        updates = [policy.train_step(minibatch, objective.loss) for minibatch in minibatches(batch, rows)]
        objective.observe(metrics_of(updates))

    Args:
        loss: Loss that a step minimises.
        statistics: Columns of the whole step by name, for a loss that reads them.
        read_before: Columns that statistics and the estimator read among the columns that `with_logprobs` adds.
        weights: Weights of the policy, whose version a loss with weights by age needs for the age of tokens; then
            `loss` is a `PolicyLoss`.
        reward_kl: The KL penalty on rewards, None for none.
        kl_weight: The weight of the KL term, or of the penalty on rewards, if it adapts; then `loss` is a `PolicyLoss`.
        entropy_weight: The weight of the entropy bonus, if it adapts; likewise.
        exact: True if `with_logprobs` refuses logprobs of other bits than the generator's.

    Attributes:
        mismatch: Examines a large mismatch.
    """

    def __init__(
        self,
        loss: Loss,
        *,
        statistics: Mapping[str, Statistic] | None = None,
        read_before: Collection[str] = (),
        weights: Weights | None = None,
        reward_kl: KLPenalty | None = None,
        kl_weight: AdaptiveKL | None = None,
        entropy_weight: AdaptiveEntropy | None = None,
        exact: bool = False,
    ) -> None:
        self._loss, self.exact = loss, exact
        self._statistics = dict(statistics or {})
        self._read_before = frozenset(read_before)
        self._versions = weights
        self._reward_kl = reward_kl
        adaptive = {"kl_weight": kl_weight, "entropy_weight": entropy_weight}
        self._weights = {name: weight for name, weight in adaptive.items() if weight is not None}
        self._measured: dict[str, float] = {}
        self.mismatch = MismatchWatch()
        self._step = 1

    @property
    def loss(self) -> Loss:
        """The loss with the weights in force, and the version of the policy's weights."""
        loss = self._loss
        if not isinstance(loss, PolicyLoss):
            return loss
        if loss.staleness is not None and self._versions is not None:
            loss = dataclasses.replace(loss, weight_version=self._versions.version)
        if loss.demonstrations is not None:
            loss = dataclasses.replace(loss, demonstrations=loss.demonstrations.at_step(self._step))
        if "kl_weight" in self._weights and loss.kl is not None:
            kl = loss.kl.model_copy(update={"weight": self._weights["kl_weight"].value})
            loss = dataclasses.replace(loss, kl=kl)
        if "entropy_weight" in self._weights and loss.entropy_bonus is not None:
            bonus = loss.entropy_bonus.model_copy(update={"weight": self._weights["entropy_weight"].value})
            loss = dataclasses.replace(loss, entropy_bonus=bonus)
        return loss

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the loss, the penalty on rewards, statistics and the estimator read, except the columns that
        `prepared` adds."""
        of_rewards = () if self._reward_kl is None else ("prev_logprobs", "ref_logprobs")
        compared = ("prev_logprobs",) if self.exact else ()
        columns = frozenset((*self._loss.columns, *of_rewards, *self._read_before, *compared))
        return columns - self._statistics.keys()

    def penalties(self, batch: Batch) -> Ragged | None:
        """Return float64 `[tokens]`, the part of the reward that each sampled token takes away, None without a
        penalty."""
        if self._reward_kl is None:
            return None
        estimates = kl_estimates(self._reward_kl, batch)
        num_sampled = without_demonstrations(batch).ragged(LOSS_MASK).values.sum(dtype=np.int64)
        self._measured = {"policy/kl": float(estimates.values.sum() / max(num_sampled, 1))}
        weight = self._weights["kl_weight"].value if "kl_weight" in self._weights else self._reward_kl.weight
        return estimates.like(weight * estimates.values)

    def prepared(self, data: StepData) -> Batch:
        """Return the batch with the columns of the whole step that the loss reads; `loss` is the loss of this step from
        then on."""
        self._step = data.step
        columns = {name: statistic(data) for name, statistic in self._statistics.items()}
        return data.batch.with_columns(columns) if columns else data.batch

    def observe(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Move the weights by the metrics of a step's updates.

        Returns:
            Further metrics: the penalty on rewards, the effective sample size, and the weights during the step.
        """
        weights = {f"policy/{name}": weight.value for name, weight in self._weights.items()}
        shown = self._loss.demonstrations if isinstance(self._loss, PolicyLoss) else None
        if shown is not None and shown.name == "nll":
            weights["policy/demonstration_weight"] = shown.at_step(self._step).weight
        reported = {**self._measured, **_effective_sample_size(metrics), **weights}
        for weight in self._weights.values():
            metric = metrics.get(weight.watches)
            weight.observe(self._measured[weight.watches] if metric is None else metric.result())
        return {**reported, **self.mismatch.observe(metrics)}

    def state(self) -> Mapping[str, Any]:
        """Return the weights that adapt, and a mismatch that was noted."""
        noted = self.mismatch.state()
        return {name: weight.state() for name, weight in self._weights.items()} | ({"mismatch": noted} if noted else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from saved weights; a weight that the state does not have, as after a change of the config, starts
        anew."""
        for name, weight in self._weights.items():
            if name in state:
                weight.restore(state[name])
        self.mismatch.restore(state.get("mismatch", {}))


def with_logprobs(batch: Batch, policy: Model, objective: Objective) -> Batch:
    """Add the columns that the objective reads from the policy before the update, and `ref_logprobs`.

    Logprobs of the policy are normalised over the tokens that sampling keeps, as the loss reads them; logprobs of the
    reference over all tokens that a grammar allows.

    Raises:
        LogprobsDiffer: If the run is exact and a sampled token has another logprob than in the generator.
    """
    objective.mismatch.examine(batch, policy, objective.loss)
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
    if objective.exact:
        _check_equal(batch)
    if "ref_logprobs" in columns:
        allowed = TokenFilter(allowed=True) if token_filter is not None and token_filter.allowed else None
        read = dataclasses.replace(LOGPROBS, token_filter=allowed)
        found = policy.infer(batch, [read], reference=True, temperature=temperature)
        batch = batch.with_columns({"ref_logprobs": found.columns["logprobs"]})
    return batch


def _check_equal(batch: Batch) -> None:
    """Raise `LogprobsDiffer` with the first sampled token whose logprob differs between policy and generator."""
    mask = without_demonstrations(batch).ragged(LOSS_MASK)
    prev, generated = (batch.ragged(name).values for name in ("prev_logprobs", GENERATION_LOGPROBS))
    differs = (mask.values > 0) & ~(prev == generated)  # NaN differs from everything.
    if not differs.any():
        return
    place = int(differs.argmax())
    row = int(np.searchsorted(mask.offsets, place, side="right")) - 1
    token = batch.ragged(TOKENS).values[place]
    sizes = np.abs(prev[differs].astype(np.float64) - generated[differs])
    raise LogprobsDiffer(
        f"row {row} of the step, position {place - mask.offsets[row]} (token {token}): the logprob is "
        f"{float(prev[place])!r} in the policy and {float(generated[place])!r} in the generator, but "
        f"policy.generation.exact=true allows no difference. {differs.sum()} of {int((mask.values > 0).sum())} sampled "
        f"tokens differ, by up to {sizes.max():.2g}. `rl doctor mismatch` with the folder of the run finds the cause"
    )


def _effective_sample_size(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the effective sample size of importance sampling as a share of the sampled tokens: `(mean w)^2 / mean w^2`
    with the weights `w = exp(prev - generation)`. Empty if the loss does not measure the weights.
    """
    if "mismatch/weight" not in metrics:
        return {}
    mean, square = (metrics[name].result() for name in ("mismatch/weight", "mismatch/weight_squared"))
    return {"mismatch/effective_sample_size": mean**2 / square} if square else {}


def _clamp(values: np.ndarray, bound: float | None) -> np.ndarray:
    return values if bound is None else np.clip(values, -bound, bound)


class AdaptiveKL:
    """`weight (1 + clip(kl / target - 1, -0.2, 0.2) rollouts / horizon)` after each step (Ziegler et al.,
    arXiv:1909.08593).

    Args:
        kl: Initial weight, target and horizon.
        rollouts_per_step: Number of rollouts of a step.
    """

    watches = "policy/kl"

    def __init__(self, kl: KLPenalty, *, rollouts_per_step: int) -> None:
        assert kl.target is not None
        self.value = kl.weight
        self._target = kl.target
        self._rate = rollouts_per_step / kl.horizon

    def observe(self, measured: float) -> None:
        """Increase above the target, and decrease below it."""
        self.value *= 1 + float(np.clip(measured / self._target - 1, -0.2, 0.2)) * self._rate

    def state(self) -> Mapping[str, Any]:
        """Return the weight."""
        return {"weight": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved weight."""
        self.value = state["weight"]


class AdaptiveEntropy:
    """A weight that increases by a step below the target entropy and decreases above it, not below 0, and which is 0
    above it (Skywork-OR1, arXiv:2505.22312).

    Args:
        bonus: Initial weight, target and change of the weight.
    """

    watches = "policy/entropy"

    def __init__(self, bonus: EntropyBonus) -> None:
        assert bonus.target is not None
        self._weight = bonus.weight
        self._target = bonus.target
        self._step = bonus.weight_step
        self._is_below = True

    @property
    def value(self) -> float:
        """Current weight; 0 while the last measured entropy is above the target."""
        return self._weight if self._is_below else 0.0

    def observe(self, measured: float) -> None:
        """Increase below the target, and decrease above it."""
        self._is_below = measured <= self._target
        self._weight = max(0.0, self._weight + (self._step if measured < self._target else -self._step))

    def state(self) -> Mapping[str, Any]:
        """Return the weight, and whether it applies."""
        return {"weight": self._weight, "is_below": self._is_below}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved weight."""
        self._weight, self._is_below = state["weight"], state["is_below"]


class StepData(NamedTuple):
    """Data of a whole step that a statistic may be computed from.

    Args:
        step: Number of the step.
        groups: Groups trained on.
        batch: Batch of the rollouts, with advantages and logprobs.
    """

    step: int
    groups: Sequence[RolloutGroup]
    batch: Batch


Statistic = Callable[[StepData], Column]
"""A column that needs all rows of a step."""


def high_covariance(surrogate: ClipCov | KLCov, seed: int) -> Statistic:
    """Return a statistic, uint8 `[tokens]`: 1 at the tokens that the surrogate chooses by `(prev - mean prev) (A - mean
    A)`, means over all sampled tokens of the step (arXiv:2505.22617).

    Args:
        surrogate: Surrogate that chooses tokens by covariance: Clip-Cov or KL-Cov.
        seed: Seed of a random choice, together with the number of the step.
    """

    def statistic(data: StepData) -> Column:
        mask = without_demonstrations(data.batch).ragged(LOSS_MASK)
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


def high_entropy(share: float) -> Statistic:
    """Return a statistic, uint8 `[tokens]`: 1 at the share of the step's sampled tokens with the highest entropy of the
    policy before the update (arXiv:2506.01939); tokens that tie with the last of them count too."""

    def statistic(data: StepData) -> Column:
        mask = without_demonstrations(data.batch).ragged(LOSS_MASK)
        is_sampled = mask.values > 0
        entropy = data.batch.ragged("prev_entropy").values[is_sampled]
        chosen = np.zeros(len(is_sampled), dtype=np.uint8)
        if len(entropy):
            place = len(entropy) - math.ceil(share * len(entropy))
            chosen[is_sampled] = entropy >= np.partition(entropy, place)[place]
        return mask.like(chosen)

    return statistic


def small_moment(bound: float) -> Statistic:
    """Return a statistic, uint8 `[tokens]`: 1 at the sampled tokens of the step that are left when those with the
    largest `(prev - generation)^2` are taken away until the mean of the others is at most the bound (M2PO,
    arXiv:2510.01161; the paper takes `logp` instead of `prev`, which is the same in the first update of a step)."""

    def statistic(data: StepData) -> Column:
        mask = without_demonstrations(data.batch).ragged(LOSS_MASK)
        is_sampled = mask.values > 0
        prev, generation = (data.batch.ragged(name).values for name in ("prev_logprobs", GENERATION_LOGPROBS))
        squares = np.square(prev[is_sampled].astype(np.float64) - generation[is_sampled])
        order = np.argsort(squares, kind="stable")
        means = np.cumsum(squares[order]) / np.arange(1, len(order) + 1)
        kept = np.zeros(len(order), dtype=np.uint8)
        kept[order[: np.count_nonzero(means <= bound)]] = 1
        chosen = np.zeros(len(is_sampled), dtype=np.uint8)
        chosen[is_sampled] = kept
        return mask.like(chosen)

    return statistic


def positive_examples(data: StepData) -> Column:
    """Return uint8 `[rows]`, 1 for rollouts with a reward above 0 from their environment."""
    # A failed rollout has the reward NaN, which is not above 0.
    positive: np.ndarray = np.concatenate([group.rewards() for group in data.groups]) > 0
    return to_rows(data.batch, positive.astype(np.uint8))


def by_environment(otherwise: float, values: Mapping[str, float]) -> Statistic:
    """Return a statistic, float32 `[rows]`: the value of the environment of each row.

    Args:
        otherwise: Value of all other environments.
        values: Values by environment.
    """

    def statistic(data: StepData) -> Column:
        own = [values.get(group.prompt.environment, otherwise) for group in data.groups]
        by_rollout = np.repeat(np.array(own, dtype=np.float32), [len(group.rollouts) for group in data.groups])
        return to_rows(data.batch, by_rollout)

    return statistic


def rollouts_of_rows(data: StepData) -> Column:
    """Return int64 `[rows]`, the number of each row's rollout."""
    return data.batch.array(ROLLOUT)
