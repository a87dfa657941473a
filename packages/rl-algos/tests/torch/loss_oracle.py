"""The policy loss written out from its papers, one token at a time in float64, without a tensor.

`frozen` is a second copy of the logprobs that stands for what the papers put under a stop-gradient, so that finite
differences by `logprobs` give the gradient that is meant.
"""

import copy
import math

import numpy as np

from rl_algos.losses.importance import ImportanceCorrection, Rejection
from rl_algos.losses.policy import PolicyLoss
from rl_algos.losses.terms import KLPenalty
from rl_core.data.batch import Batch


def oracle(loss: PolicyLoss, batch: Batch, frozen: np.ndarray | None = None) -> float:
    """The loss of the whole batch."""
    if frozen is not None:
        batch = batch.with_columns({"frozen": batch.ragged("logprobs").like(frozen)})
    else:
        batch = batch.with_columns({"frozen": batch.ragged("logprobs")})
    policy = penalty = weights = 0.0
    nll, num_positive, num_tokens, num_sequences = 0.0, 0, 0, 0
    observed = [
        (row, t)
        for row in range(len(batch))
        for t in np.flatnonzero(batch["loss_mask"][row] == 0)
        if batch["loss_mask"][row][:t].any() and batch["loss_mask"][row][t:].any()
        if loss.demonstrations is None or not batch["demonstration"][row]
    ]
    shown = Shown(loss)
    for row in range(len(batch)):
        sequence = Sequence(loss, {name: batch[name][row] for name in batch})
        n = len(sequence.sampled)
        if n == 0:
            continue
        if loss.demonstrations is not None and sequence.column["demonstration"]:
            shown.add(sequence)
            continue
        share = 1 / n if loss.aggregation.name == "sequence-mean" else 1 / loss.aggregation.divisor
        kept = sequence.is_kept()
        for t in sequence.sampled:
            weight = sequence.weight(t)
            policy += share * kept * weight * sequence.policy(t) if weight else 0.0
            penalty += share * kept * sequence.penalty(t)
            weights += weight_of(loss, sequence, t) / (1 if loss.aggregation.name == "token-mean" else n)
        if sequence.column["positive"]:
            nll += kept * sum(-sequence.logp[t] for t in sequence.sampled)
            num_positive += n
        num_tokens, num_sequences = num_tokens + n, num_sequences + 1
    counts = {"token-mean": num_tokens, "token-sum": 1}
    count = counts.get(loss.aggregation.name, num_sequences)
    if loss.importance is not None and loss.importance.batch_normalize:
        policy = policy / weights * count if weights else 0.0
    learned = loss.observation_nll_weight * sum(-batch["logprobs"][row][t] for row, t in observed) / len(observed)
    further = learned + (loss.positive_example_nll_weight * nll / num_positive if num_positive else 0.0)
    if loss.demonstrations is None:
        return (policy + penalty) / count + further
    if loss.demonstrations.name == "shaped":
        own = {"token-mean": shown.num_tokens, "token-sum": 0}.get(loss.aggregation.name, shown.num_sequences)
        return (policy + penalty + shown.surrogate) / (count + own) + further
    mu = loss.demonstrations.weight
    return (1 - mu) * ((policy + penalty) / count + further) + mu * shown.nll / shown.num_tokens


class Shown:
    """Sums over demonstrations: `-sum phi log p` of CHORD (arXiv:2508.11408, with phi from its authors' code), and the
    off-policy part of LUFFY (arXiv:2504.14945), `-sum A f(p)` with `f(x) = x / (x + gamma)`."""

    def __init__(self, loss: PolicyLoss) -> None:
        self.loss = loss
        self.nll = self.surrogate = 0.0
        self.num_tokens = self.num_sequences = 0

    def add(self, sequence: "Sequence") -> None:
        term, aggregation, n = self.loss.demonstrations, self.loss.aggregation, len(sequence.sampled)
        share = 1 / n if aggregation.name == "sequence-mean" else 1 / aggregation.divisor
        for t in sequence.sampled:
            p, known = math.exp(sequence.logp[t]), math.exp(sequence.frozen[t])
            self.nll -= (known * (1 - known) if term.by_probability else 1.0) * sequence.logp[t]
            self.surrogate -= share * sequence.advantages[t] * p / (p + term.gamma)
        self.num_tokens, self.num_sequences = self.num_tokens + n, self.num_sequences + 1


def weight_of(loss: PolicyLoss, sequence: "Sequence", t: int) -> float:
    """The importance weight alone, without other filters."""
    return importance(loss.importance, sequence.prev, sequence.gen, t, sequence.sampled) if loss.importance else 1.0


class Sequence:
    """One row."""

    def __init__(self, loss: PolicyLoss, column) -> None:
        self.loss, self.column = loss, column
        self.sampled = np.flatnonzero(column["loss_mask"]).tolist()
        self.logp, self.frozen, self.gen = column["logprobs"], column["frozen"], column["generation_logprobs"]
        self.prev = self.frozen if loss.on_policy else column["prev_logprobs"]
        self.advantages = np.broadcast_to(column["advantages"], self.logp.shape)

    def mean(self, of) -> float:
        return sum(of(t) for t in self.sampled) / len(self.sampled)

    def is_kept(self) -> float:
        threshold = self.loss.mismatch_threshold
        error = self.mean(lambda t: math.exp(abs(self.prev[t] - self.gen[t])))
        return float(threshold is None or error <= threshold)

    def weight(self, t: int) -> float:
        threshold = self.loss.filters.off_policy_threshold
        distance = self.mean(lambda i: self.gen[i] - self.frozen[i])
        if threshold is not None and self.mean(lambda i: self.advantages[i]) < 0 and distance > threshold:
            return 0.0
        return weight_of(self.loss, self, t) * self.by_age(t)

    def by_age(self, t: int) -> float:
        if self.loss.staleness is None:
            return 1.0
        return self.loss.staleness.decay ** max(0, self.loss.weight_version - int(self.column["weight_versions"][t]))

    def policy(self, t: int) -> float:
        if not all(self.column[column][t] for column in self.loss.filters.columns):
            return 0.0
        compared = copy.copy(self)
        compared.prev = self.gen if self.loss.ratio_denominator == "generation" else self.prev
        return globals()[self.loss.surrogate.name.replace("-", "_")](self.loss.surrogate, compared, t)

    def penalty(self, t: int) -> float:
        value = 0.0
        if self.loss.kl is not None:
            value += self.loss.kl.weight * self.kl(self.loss.kl, t)
        if self.loss.entropy_bonus is not None:
            value -= self.loss.entropy_bonus.weight * self.column["entropy"][t]
        return value

    def kl(self, penalty: KLPenalty, t: int) -> float:
        d = clamp(self.column["ref_logprobs"][t] - self.logp[t], penalty.input_clamp)
        value = clamp(k(penalty.estimator, d), penalty.output_clamp)
        base = self.gen if penalty.from_generation else self.prev
        if penalty.unbiased:
            return value * exp(self.logp[t] - base[t])
        return value * exp(self.frozen[t] - base[t]) if penalty.from_generation else value


def importance(correction: ImportanceCorrection, prev, gen, t: int, sampled) -> float:
    differences = [prev[i] - gen[i] for i in sampled]
    low = -math.inf if correction.low is None else correction.low
    high = math.inf if correction.high is None else correction.high
    if correction.rejection is not None and rejects(correction.rejection, differences):
        return 0.0
    weight = exp(sum(differences) if correction.level == "sequence" else prev[t] - gen[t])
    if correction.truncation == "tis":
        return min(max(weight, low), high)
    if correction.truncation == "icepop":
        return weight if low <= weight <= high else 0.0
    return weight if low <= exp(sum(differences) / len(differences)) <= high else 0.0


def rejects(rejection: Rejection, differences) -> bool:
    values = [k(rejection.estimator, d) for d in differences]
    found = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}[rejection.statistic]
    return (rejection.high is not None and found > rejection.high) or (
        rejection.low is not None and found < rejection.low
    )


def k(estimator: str, d: float) -> float:
    return {"k1": lambda: -d, "k2": lambda: d * d / 2, "k3": lambda: math.exp(d) - d - 1}[estimator]()


def clamp(value: float, bound: float | None) -> float:
    return value if bound is None else min(max(value, -bound), bound)


def exp(log_ratio: float) -> float:
    return math.exp(clamp(log_ratio, 20.0))


def ppo(surrogate, ratio: float, advantage: float) -> float:
    low, high = 1 - surrogate.clip_low, 1 + surrogate.clip_high
    value = max(-advantage * ratio, -advantage * min(max(ratio, low), high))
    dual = getattr(surrogate, "dual_clip", None)
    return min(value, -dual * advantage) if dual is not None and advantage < 0 else value


def clip(surrogate, s: Sequence, t: int) -> float:
    return ppo(surrogate, exp(s.logp[t] - s.prev[t]), s.advantages[t])


def gspo(surrogate, s: Sequence, t: int) -> float:
    ratio = exp(s.mean(lambda i: s.frozen[i] - s.prev[i])) * math.exp(s.logp[t] - s.frozen[t])
    return ppo(surrogate, ratio, s.advantages[t])


def cispo(surrogate, s: Sequence, t: int) -> float:
    ratio = exp(s.frozen[t] - s.prev[t])
    return -s.advantages[t] * min(max(ratio, 1 - surrogate.clip_low), 1 + surrogate.clip_high) * s.logp[t]


def reinforce(_surrogate, s: Sequence, t: int) -> float:
    return -s.advantages[t] * s.logp[t]


def sapo(surrogate, s: Sequence, t: int) -> float:
    tau = surrogate.tau_positive if s.advantages[t] > 0 else surrogate.tau_negative
    gate = 4 / tau / (1 + math.exp(-tau * (exp(s.logp[t] - s.prev[t]) - 1)))
    return -s.advantages[t] * gate


def gmpo(surrogate, s: Sequence, _t: int) -> float:
    product = 1.0
    for i in s.sampled:
        ratio, sign = exp(s.logp[i] - s.prev[i]), np.sign(s.advantages[i])
        low, high = max(1 - surrogate.clip_low, math.exp(-20)), 1 + surrogate.clip_high
        clipped = min(max(ratio, low), high)
        product *= min(ratio**sign, clipped**sign) ** sign if sign else ratio
    return -s.mean(lambda i: s.advantages[i]) * product ** (1 / len(s.sampled))


def dppo_tv(surrogate, s: Sequence, t: int) -> float:
    p, q = math.exp(s.frozen[t]), math.exp(s.prev[t])
    return in_region(surrogate, s, t, abs(p - q))


def dppo_kl(surrogate, s: Sequence, t: int) -> float:
    p, q = math.exp(s.frozen[t]), math.exp(s.prev[t])
    return in_region(surrogate, s, t, q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))


def in_region(surrogate, s: Sequence, t: int, divergence: float) -> float:
    leads_away = (s.advantages[t] > 0 and s.frozen[t] > s.prev[t]) or (s.advantages[t] < 0 and s.frozen[t] < s.prev[t])
    return 0.0 if divergence > surrogate.threshold and leads_away else -s.advantages[t] * exp(s.logp[t] - s.prev[t])


def clip_cov(surrogate, s: Sequence, t: int) -> float:
    return 0.0 if s.column["high_covariance"][t] else clip(surrogate, s, t)


def kl_cov(surrogate, s: Sequence, t: int) -> float:
    penalty = surrogate.weight * abs(clamp(s.logp[t] - s.prev[t], 20)) if s.column["high_covariance"][t] else 0.0
    return -s.advantages[t] * exp(s.logp[t] - s.prev[t]) + penalty


def vespo(surrogate, s: Sequence, t: int) -> float:
    whole = exp(sum(s.frozen[i] - s.prev[i] for i in s.sampled))
    positive = s.advantages[t] >= 0
    power = surrogate.k_positive if positive else surrogate.k_negative
    rate = surrogate.lambda_positive if positive else surrogate.lambda_negative
    return -s.advantages[t] * whole**power * math.exp(rate * (1 - whole)) * s.logp[t]


def topr(_surrogate, s: Sequence, t: int) -> float:
    whole = exp(sum(s.frozen[i] - s.prev[i] for i in s.sampled))
    return -s.advantages[t] * (min(whole, 1.0) if s.advantages[t] < 0 else 1.0) * s.logp[t]


def dro(surrogate, s: Sequence, t: int) -> float:
    return -s.advantages[t] * s.logp[t] + surrogate.beta / 2 * clamp(s.logp[t] - s.prev[t], 20) ** 2
