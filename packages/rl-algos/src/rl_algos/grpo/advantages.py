"""From the rewards of a step to its advantages, each compared within its group: pure functions on numpy arrays.

Notation, for a group of n rollouts that did not fail: r a rollout's reward, m the mean of the group's, s their sample
standard deviation (n - 1 in the denominator). A failed rollout has the reward NaN, counts for nothing and gets 0, and
so does every rollout of a group of one or of equal rewards. Estimators return float64 `[rollouts]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import numpy as np
from pydantic import Field

from rl_algos.policy_gradient.advantages import whitened
from rl_algos.rollouts.training.batch import Advantages
from rl_core.data.ragged import Ragged


def grpo(rewards: np.ndarray, groups: np.ndarray, normalize: bool = True, *, eps: float = 1e-6) -> np.ndarray:
    """Return the difference to the group's mean (GRPO, arXiv:2402.03300).

    With the mean m and the sample standard deviation s (n - 1 in the denominator) of the n rewards of a group, the
    advantage of reward r is `(r - m) / (s + eps)`; without `normalize`, `r - m` (Dr. GRPO, arXiv:2503.20783).

    Args:
        rewards: float `[rollouts]`; NaN marks a failed rollout, which counts for nothing and gets 0.
        groups: `[rollouts]`, group id of each.
        normalize: True to divide by the deviation.
        eps: Added to the deviation.

    Returns:
        float64 `[rollouts]`; exactly 0 for a group of one or of equal rewards.
    """
    return _by_group(rewards, groups, lambda centred: _scaled(centred, centred, normalize, eps))


def rloo(rewards: np.ndarray, groups: np.ndarray, normalize: bool = True, *, eps: float = 1e-6) -> np.ndarray:
    """Return the difference to the mean of the others in the group (RLOO, arXiv:2402.14740).

    In the terms of `grpo`, the advantage is `(r - m) n / (n - 1)`, which is r minus the mean of the other n - 1;
    `normalize` divides it by `s + eps`. The deviation is taken over the whole group, because the deviation of the
    others would be 0 for a single outlier. For the arguments and the result, see `grpo`.
    """

    def advantage(centred: np.ndarray) -> np.ndarray:
        return _scaled(centred * (len(centred) / (len(centred) - 1)), centred, normalize, eps)

    return _by_group(rewards, groups, advantage)


def drgrpo(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return `r - m` (Dr. GRPO, arXiv:2503.20783): no group weighs more for having rewards that differ little. The
    paper's loss also has the aggregation `sequence-mean-token-sum` with a constant divisor. For the arguments, see
    `grpo`.
    """
    return grpo(rewards, groups, False)


def grpo_batch_std(rewards: np.ndarray, groups: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """Return `(r - m) / (S + eps)`, S the sample standard deviation of all rewards of the step (arXiv:2508.08221).

    For the arguments, see `grpo`.
    """
    usable = rewards[~np.isnan(rewards)]
    deviation = float(usable.std(ddof=1)) if len(usable) > 1 else 0.0
    return _by_group(rewards, groups, lambda centred: centred / (deviation + eps))


def reinforce(rewards: np.ndarray) -> np.ndarray:
    """Return `r`, without a baseline (REINFORCE, Williams 1992).

    Args:
        rewards: See `grpo`.
    """
    return np.nan_to_num(np.asarray(rewards, dtype=np.float64), nan=0.0)


def gpg(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return `(r - m) B / (B - M)` (GPG, arXiv:2504.02546), if M of the step's B groups have equal rewards.

    For the arguments, see `grpo`.
    """
    num_groups, num_varied = len(np.unique(groups)), sum(1 for _ in _varied(rewards, groups))
    return _by_group(rewards, groups, lambda centred: centred * (num_groups / num_varied))


def opo(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return `r - sum(l r) / sum(l)`, the mean of the group weighted by the lengths l (OPO, arXiv:2505.23585): the
    baseline of least variance if a gradient's square grows with the length.

    Args:
        rewards: See `grpo`.
        groups: See `grpo`.
        lengths: int `[rollouts]`, sampled tokens.
    """
    advantages = np.zeros(len(rewards))
    for members in _varied(rewards, groups):
        weights = lengths[members]
        if weights.sum():
            advantages[members] = rewards[members] - (weights * rewards[members]).sum() / weights.sum()
    return advantages


def remax(rewards: np.ndarray, baselines: np.ndarray) -> np.ndarray:
    """Return `r - b`, b the reward of a greedy rollout of the same prompt (ReMax, arXiv:2310.10505).

    Args:
        rewards: See `grpo`.
        baselines: float `[rollouts]`, b; NaN if the greedy rollout failed.
    """
    return np.nan_to_num(np.asarray(rewards, dtype=np.float64) - baselines, nan=0.0)


def pass_at_k(scores: np.ndarray, groups: np.ndarray, *, k: int, threshold: float = 0.5) -> np.ndarray:
    """Return the advantages of the best of k (Pass@k training, arXiv:2508.10751, the analytical form).

    Over all subsets of k rollouts of the group, a subset's reward is 1 if any of it is right. Its advantage is the
    difference to the mean p over the deviation sqrt(p (1 - p)), and the advantage of a rollout is the mean over its
    subsets. With w of n rollouts wrong: `p = 1 - C(w, k) / C(n, k)`; a right one has `(1 - p) / sqrt(p (1 - p))`, a
    wrong one `(1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / sqrt(p (1 - p))`. A group smaller than k gets 0.

    Args:
        scores: float `[rollouts]`, rewards as the environment gave them; NaN for failed rollouts.
        groups: See `grpo`.
        k: Rollouts of a subset.
        threshold: Score above which a rollout is right.
    """
    advantages = np.zeros(len(scores))
    for members in _members(scores, groups):
        is_right = scores[members] > threshold
        n, w = len(members), int((~is_right).sum())
        p = 1 - math.comb(w, k) / math.comb(n, k) if n >= k else 0.0
        if 0 < p < 1:
            alone = math.comb(w - 1, k - 1) / math.comb(n - 1, k - 1)
            advantages[members] = np.where(is_right, 1 - p, 1 - p - alone) / math.sqrt(p * (1 - p))
    return advantages


def raft(scores: np.ndarray, *, threshold: float = 0.5) -> np.ndarray:
    """Return 1 for right rollouts and 0 for all others, which teach nothing (RAFT; RAFT++ with the surrogate `clip`,
    arXiv:2504.11343).

    Args:
        scores: float `[rollouts]`, rewards as the environment gave them; NaN for failed rollouts.
        threshold: Score above which a rollout is right.
    """
    return np.where(scores > threshold, 1.0, 0.0)


def maxrl(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return `(r - m) / m` (maximum-likelihood RL, arXiv:2602.02710): in expectation, with rewards 0 and 1, the
    gradient of log p, p the chance of a right answer, expanded to the order of the group's size. Hard prompts weigh
    more.

    Args:
        scores: float `[rollouts]`, rewards as the environment gave them, not negative; NaN for failed rollouts.
        groups: See `grpo`.
    """
    if np.any(scores < 0):
        raise ValueError(
            f"maxrl divides by the mean reward of a group and needs rewards of 0 or more, got {np.nanmin(scores)}"
        )
    advantages = np.zeros(len(scores))
    for members in _varied(scores, groups):
        mean = scores[members].mean()
        advantages[members] = (scores[members] - mean) / mean
    return advantages


def tpo(
    rewards: np.ndarray,
    groups: np.ndarray,
    lengths: np.ndarray,
    logprobs: np.ndarray,
    *,
    temperature: Annotated[float, Field(gt=0)] = 1.0,
    length_normalize: bool = True,
    eps: float = 1e-6,
) -> np.ndarray:
    """Return `n (q - p)`, with p the softmax of the logprobs of a group's n responses and the target q that is
    proportional to `p exp(u / temperature)`, `u = (r - m) / (s' + eps)` with the deviation s' over n (target policy
    optimization, arXiv:2604.06159).

    In the first update of a step, this is the gradient of the paper's cross-entropy from q, summed over a group and
    averaged over groups, with the surrogate `reinforce` or `clip` and the aggregation `sequence-mean`; without
    `length_normalize`, the aggregation is `sequence-mean-token-sum`.

    Args:
        rewards: See `grpo`.
        groups: See `grpo`.
        lengths: int `[rollouts]`, sampled tokens.
        logprobs: float64 `[rollouts]`, sum of the logprobs of the sampled tokens before the update.
        temperature: Temperature of the target: the smaller it is, the more mass the best responses get.
        length_normalize: True to compare the mean logprob of a token instead of the sum.
        eps: Added to the deviation.
    """
    advantages = np.zeros(len(rewards))
    for members in _varied(rewards, groups):
        own = logprobs[members] / np.maximum(lengths[members], 1) if length_normalize else logprobs[members]
        centred = rewards[members] - rewards[members].mean()
        tilted = own + centred / (centred.std() + eps) / temperature
        before, target = (np.exp(each - each.max()) for each in (own, tilted))
        advantages[members] = len(members) * (target / target.sum() - before / before.sum())
    return advantages


def optimal_token_baseline(
    rewards: np.ndarray,
    groups: np.ndarray,
    loss_mask: Ragged,
    penalties: Ragged | None,
    squared_scores: Ragged,
    *,
    eps: float = 1e-8,
) -> Ragged:
    """Return `G_t - B_t` with the baseline of least variance for each token, `B_t = sum(W_t G_t) / sum(W_t)` (optimal
    token baseline, arXiv:2602.07078).

    `G_t` is the reward of the rollout, less its KL penalties from token t on if they are in the reward. `W_t = sum of
    |s_j|^2 for j <= t`, where `|s|^2 = 1 - 2 p + sum p'^2` is the squared norm of the gradient of a token's logprob by
    the logits, p the probability of the token and p' the probabilities of all tokens: it approximates the squared norm
    of the gradient of the tokens so far. Sums are over the rollouts of the group that sampled t tokens or more. The
    mean of their `G_t` is subtracted first. This changes the result only if all `W_t` vanish: then the mean is the
    baseline.

    Args:
        rewards: See `grpo`.
        groups: See `grpo`.
        loss_mask: `[tokens]`, 1 on sampled tokens.
        penalties: `[tokens]`, weighted KL penalty of each sampled token, 0 elsewhere; None without KL in the reward.
        squared_scores: float64 `[tokens]`, `|s|^2` of each sampled token before the update.
        eps: Added to the sums of weights.

    Returns:
        float64 `[tokens]`; a group of equal rewards without penalties gets exactly 0.
    """
    advantages = loss_mask.like(np.zeros(len(loss_mask.values)))
    for members in _varied(rewards, groups) if penalties is None else _members(rewards, groups):
        sampled = [np.flatnonzero(loss_mask[member]) for member in members]
        places = np.arange(max(len(each) for each in sampled))
        is_there = places < np.array([len(each) for each in sampled])[:, None]
        to_go, weights = np.zeros(is_there.shape), np.zeros(is_there.shape)
        for row, (member, tokens) in enumerate(zip(members, sampled, strict=True)):
            ahead = 0.0 if penalties is None else penalties[member][tokens][::-1].cumsum()[::-1]
            to_go[row, : len(tokens)] = rewards[member] - ahead
            weights[row, : len(tokens)] = squared_scores[member][tokens].cumsum()
        means = to_go.sum(0, where=is_there) / is_there.sum(0)
        centred = np.where(is_there, to_go - means, 0.0)
        found = centred - (weights * centred).sum(0) / (weights.sum(0) + eps)
        for row, (member, tokens) in enumerate(zip(members, sampled, strict=True)):
            advantages[member][tokens] = found[row, : len(tokens)]
    return advantages


def _by_group(rewards: np.ndarray, groups: np.ndarray, advantage: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply `advantage` to the centred rewards of every group with rewards that differ; all other rollouts get 0."""
    rewards = np.asarray(rewards, dtype=np.float64)
    advantages = np.zeros_like(rewards)
    for members in _varied(rewards, groups):
        values = rewards[members]
        advantages[members] = advantage(values - values.mean())
    return advantages


def _varied(rewards: np.ndarray, groups: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rollouts of each group whose rewards differ."""
    for members in _members(rewards, groups):
        if np.any(rewards[members] != rewards[members[0]]):
            yield members


def _members(rewards: np.ndarray, groups: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rollouts of each group that did not fail, if there are any."""
    usable = np.flatnonzero(~np.isnan(rewards))
    usable = usable[np.argsort(groups[usable], kind="stable")]
    for members in np.split(usable, np.flatnonzero(np.diff(groups[usable])) + 1):
        if len(members):
            yield members


def _scaled(advantage: np.ndarray, centred: np.ndarray, normalize: bool, eps: float) -> np.ndarray:
    """Divide an advantage by the sample standard deviation of its group, if it is to be normalized."""
    if not normalize:
        return advantage
    deviation = np.sqrt(np.square(centred).sum() / (len(centred) - 1))
    return advantage / (deviation + eps)


def reinforce_plus_plus(
    rewards: np.ndarray, lengths: np.ndarray, loss_mask: Ragged, penalties: Ragged | None, *, eps: float = 1e-8
) -> Advantages:
    """Return `(A - mean A) / (std A + eps)` with `A_t = r - sum of the KL penalties from token t on` (REINFORCE++,
    arXiv:2501.03262), mean and deviation over all sampled tokens of the step.

    Args:
        rewards: float `[rollouts]`; NaN marks a failed rollout, which counts for nothing and gets 0.
        lengths: int `[rollouts]`, sampled tokens.
        loss_mask: `[tokens]`, 1 on sampled tokens.
        penalties: `[tokens]`, weighted KL penalty of each sampled token, 0 elsewhere; None without KL in the reward.
        eps: Added to the deviation.

    Returns:
        float64 `[tokens]`, or `[rollouts]` without KL in the reward.
    """
    if penalties is None:
        return whitened(rewards, np.where(np.isnan(rewards), 0, lengths), eps)
    to_go = penalties.like(np.concatenate([row[::-1].cumsum()[::-1] for row in penalties] or [np.zeros(0)]))
    values = np.repeat(rewards, loss_mask.lengths) - to_go.values
    return loss_mask.like(whitened(values, np.where(np.isnan(values), 0, loss_mask.values), eps))


def reinforce_plus_plus_baseline(
    rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, *, eps: float = 1e-8
) -> np.ndarray:
    """Return `(A - mean A) / (std A + eps)` with `A = r - m`, m the mean of the group (REINFORCE++-baseline,
    arXiv:2501.03262), mean and deviation over all sampled tokens of the step.

    Args:
        rewards: float `[rollouts]`; NaN marks a failed rollout, which counts for nothing and gets 0.
        groups: `[rollouts]`, group id of each.
        lengths: int `[rollouts]`, number of sampled tokens.
        eps: Added to the deviation.

    Returns:
        float64 `[rollouts]`.
    """
    return whitened(drgrpo(rewards, groups), np.where(np.isnan(rewards), 0, lengths), eps)


def gdpo(
    rewards_by_name: Mapping[str, np.ndarray],
    groups: np.ndarray,
    *,
    weights: dict[str, float] | None = None,
    eps: float = 1e-6,
) -> np.ndarray:
    """Normalise several rewards in their groups before they are added up (GDPO, arXiv:2601.05242).

    `A = sum_k weight_k (r_k - m_k) / (s_k + eps)`, then `(A - mean A) / (std A + eps)` over all rollouts of the step. A
    reward that varies little counts as much as one that varies a lot, and combinations of rewards with the same
    sum are distinguished.

    Args:
        rewards_by_name: float `[rollouts]` by name, as the environment gave them, except `reward`; NaN for failed
            rollouts.
        groups: `[rollouts]`, group id of each.
        weights: Weights of the rewards by name; those without one are left out. None takes all, with the weight 1.
        eps: Added to deviations.

    Returns:
        float64 `[rollouts]`.
    """
    chosen = dict.fromkeys(rewards_by_name, 1.0) if weights is None else weights
    missing = sorted(set(chosen) - set(rewards_by_name))
    if missing or not chosen:
        found = ", ".join(rewards_by_name) or "none"
        raise ValueError(
            f"gdpo needs rewards by name{': no ' + ', '.join(missing) if missing else ''}; in addition to `reward`, "
            f"the environments returned {found}. Return a mapping from the environment, such as "
            '{"correct": 1.0, "format": 0.5}'
        )
    named = [weight * grpo(rewards_by_name[name], groups, eps=eps) for name, weight in chosen.items()]
    failed = np.isnan(rewards_by_name[next(iter(chosen))])
    return whitened(np.sum(named, axis=0), ~failed, eps)
