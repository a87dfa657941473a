"""Each estimator against its paper's formula, written out by rollout in plain Python on ragged random groups."""

import itertools
import math
import statistics

import numpy as np
import pytest

from rl_algos.grpo.advantages import (
    drgrpo,
    gdpo,
    gpg,
    grpo,
    grpo_batch_std,
    maxrl,
    opo,
    optimal_token_baseline,
    pass_at_k,
    raft,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    tpo,
)
from rl_core.data.ragged import Ragged

EPS = 1e-6


class Case:
    """Groups of different sizes, shuffled, with failed rollouts, a group of equal rewards and one of one rollout."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        sizes = [4, 1, 6, 3, 5]
        order = random.permutation(sum(sizes))
        self.groups = np.repeat(np.arange(len(sizes)), sizes)[order]
        self.rewards = random.normal(0, 2, len(order))
        self.rewards[self.groups == 3] = 0.7
        self.scores = (random.random(len(order)) < 0.5).astype(float)
        self.lengths = random.integers(1, 9, len(order))
        failed = random.choice(np.flatnonzero(np.isin(self.groups, (0, 2))), 2, replace=False)
        self.rewards[failed] = self.scores[failed] = np.nan
        self.lengths[failed] = 0
        self.baselines = random.normal(0, 2, len(order))

    def members(self, i: int, values) -> list[int]:
        """The rollouts of i's group that did not fail."""
        return [j for j in range(len(values)) if self.groups[j] == self.groups[i] and not math.isnan(values[j])]

    def each(self, values, formula) -> list[float]:
        """The formula of each rollout's value and those of its group; 0 for failed ones and groups that do not vary."""
        found = []
        for i, value in enumerate(values):
            group = [values[j] for j in self.members(i, values)]
            is_flat = math.isnan(value) or len(set(group)) < 2
            found.append(0.0 if is_flat else formula(i, value, group))
        return found


@pytest.fixture(params=range(5))
def case(request):
    return Case(request.param)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_grpo(case):
    expected = case.each(case.rewards, lambda _, r, g: (r - statistics.fmean(g)) / (statistics.stdev(g) + EPS))
    close(grpo(case.rewards, case.groups), expected)


def test_grpo_with_the_deviation_of_the_batch(case):
    deviation = statistics.stdev([r for r in case.rewards if not math.isnan(r)])
    expected = case.each(case.rewards, lambda _, r, g: (r - statistics.fmean(g)) / (deviation + EPS))
    close(grpo_batch_std(case.rewards, case.groups), expected)


def test_drgrpo(case):
    close(drgrpo(case.rewards, case.groups), case.each(case.rewards, lambda _, r, g: r - statistics.fmean(g)))


def test_rloo(case):
    expected = case.each(case.rewards, lambda _, r, g: r - (sum(g) - r) / (len(g) - 1))
    close(rloo(case.rewards, case.groups, normalize=False), expected)


def test_reinforce(case):
    close(reinforce(case.rewards), [0.0 if math.isnan(r) else r for r in case.rewards])


def test_raft(case):
    close(raft(case.scores), [float(score > 0.5) for score in case.scores])


def test_gpg(case):
    varied = {case.groups[i] for i, a in enumerate(drgrpo(case.rewards, case.groups)) if a}
    scale = len(set(case.groups.tolist())) / len(varied)
    close(gpg(case.rewards, case.groups), case.each(case.rewards, lambda _, r, g: scale * (r - statistics.fmean(g))))


def test_opo(case):
    def formula(i, reward, _group):
        members = case.members(i, case.rewards)
        return reward - sum(case.lengths[j] * case.rewards[j] for j in members) / sum(case.lengths[j] for j in members)

    close(opo(case.rewards, case.groups, case.lengths), case.each(case.rewards, formula))


def test_remax(case):
    case.baselines[0] = np.nan
    expected = [0.0 if math.isnan(r - b) else r - b for r, b in zip(case.rewards, case.baselines, strict=True)]
    close(remax(case.rewards, case.baselines), expected)


@pytest.mark.parametrize("length_normalize", [True, False])
def test_tpo_is_the_negative_gradient_of_its_cross_entropy(case, length_normalize):
    """The target, and the gradient by finite differences of the cross-entropy from it, of a mean over rollouts."""
    logprobs, temperature, h = -np.random.default_rng(8).exponential(2, len(case.rewards)), 0.5, 1e-6
    found = tpo(
        case.rewards,
        case.groups,
        case.lengths,
        logprobs,
        temperature=temperature,
        length_normalize=length_normalize,
        eps=EPS,
    )

    def softmax(values):
        total = sum(math.exp(value) for value in values)
        return [math.exp(value) / total for value in values]

    def formula(i, _reward, group):
        members = case.members(i, case.rewards)
        scale = [case.lengths[j] if length_normalize else 1 for j in members]
        own = [logprobs[j] / each for j, each in zip(members, scale, strict=True)]
        mean, deviation = statistics.fmean(group), statistics.pstdev(group)
        scores = [(r - mean) / (deviation + EPS) for r in group]
        target = softmax([s + u / temperature for s, u in zip(own, scores, strict=True)])

        def loss(nudge):
            nudged = [s + nudge * (j == i) for s, j in zip(own, members, strict=True)]
            return -sum(q * math.log(p) for q, p in zip(target, softmax(nudged), strict=True))

        return -len(members) * (loss(h) - loss(-h)) / (2 * h)

    np.testing.assert_allclose(found, case.each(case.rewards, formula), atol=1e-6)


@pytest.mark.parametrize("has_penalties", [False, True])
def test_optimal_token_baseline(case, has_penalties):
    random = np.random.default_rng(7)
    mask = masks(case)
    on = mask.values > 0
    squared = mask.like(np.where(on, random.uniform(0.1, 1.9, len(on)), np.nan))
    penalties = mask.like(np.where(on, random.normal(0, 0.3, len(on)), 0.0)) if has_penalties else None
    found = optimal_token_baseline(case.rewards, case.groups, mask, penalties, squared)

    def to_go(j, t):
        taken = penalties[j][mask[j] > 0][t:].sum() if has_penalties else 0.0
        return case.rewards[j] - taken

    for i in range(len(case.rewards)):
        own = found[i][mask[i] > 0]
        assert not found[i][mask[i] == 0].any()
        members = case.members(i, case.rewards)
        is_flat = not has_penalties and len({case.rewards[j] for j in members}) < 2
        if math.isnan(case.rewards[i]) or is_flat:
            assert not own.any()
            continue
        for t in range(case.lengths[i]):
            there = [j for j in members if case.lengths[j] > t]
            weights = [squared[j][mask[j] > 0][: t + 1].sum() for j in there]
            baseline = sum(w * to_go(j, t) for w, j in zip(weights, there, strict=True)) / sum(weights)
            assert own[t] == pytest.approx(to_go(i, t) - baseline, abs=1e-6)


def test_tokens_without_any_gradient_have_the_mean_as_their_baseline():
    mask = Ragged.from_rows([[0, 1, 1], [0, 1]], np.uint8)
    squared = mask.like(np.zeros(5))
    found = optimal_token_baseline(np.array([3.0, 1.0]), np.zeros(2), mask, None, squared)
    assert found.values.tolist() == [0.0, 1.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_mean_over_all_subsets_that_a_rollout_is_in(case, k):
    expected = []
    for i, score in enumerate(case.scores):
        members = case.members(i, case.scores)
        subsets = list(itertools.combinations(members, k))
        rewards = [max(case.scores[j] for j in subset) for subset in subsets]
        if math.isnan(score) or len(set(rewards)) < 2:
            expected.append(0.0)
            continue
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        own = [(r - mean) / deviation for r, subset in zip(rewards, subsets, strict=True) if i in subset]
        expected.append(statistics.fmean(own))
    close(pass_at_k(case.scores, case.groups, k=k), expected)


def test_maxrl(case):
    expected = case.each(case.scores, lambda _, r, g: (r - statistics.fmean(g)) / statistics.fmean(g))
    close(maxrl(case.scores, case.groups), expected)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_maxrl_ascends_the_logarithm_of_the_chance_expanded_to_one_less_than_the_group(n):
    p = 0.3  # the derivative by p of log(p) = -sum (1 - p)^j / j is sum (1 - p)^(j - 1)
    found = 0.0
    for rewards in itertools.product([0.0, 1.0], repeat=n):
        chance = math.prod(p if r else 1 - p for r in rewards)
        scores = [1 / p if r else -1 / (1 - p) for r in rewards]
        found += chance * float(np.mean(maxrl(np.array(rewards), np.zeros(n)) * scores))
    assert found == pytest.approx(sum((1 - p) ** j for j in range(n - 1)))


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match=r"rewards of 0 or more, got -1\.0"):
        maxrl(np.array([np.nan, -1.0, 1.0]), np.zeros(3))


def whiten(values) -> list[float]:
    mean = statistics.fmean(values)
    return [(value - mean) / (statistics.pstdev(values) + 1e-8) for value in values]


def masks(case) -> Ragged:
    return Ragged.from_rows([[0, 0] + [1] * int(n) + [0] for n in case.lengths], np.uint8)


def by_sampled_token(case, values) -> list[float]:
    """Each rollout's value once for every token that it sampled."""
    return [float(v) for v, n in zip(values, case.lengths, strict=True) for _ in range(n)]


def test_reinforce_plus_plus_without_kl(case):
    found = reinforce_plus_plus(case.rewards, case.lengths, masks(case), None)
    assert isinstance(found, np.ndarray)
    close(by_sampled_token(case, found), whiten(by_sampled_token(case, case.rewards)))
    assert not found[np.isnan(case.rewards)].any()


def test_reinforce_plus_plus_gives_each_token_the_penalties_from_it_on(case):
    mask = masks(case)
    penalties = mask.like(np.where(mask.values > 0, np.random.default_rng(0).normal(size=len(mask.values)), 0.0))
    raw = []
    for reward, row, own in zip(case.rewards, penalties, mask, strict=True):
        sampled = row[own > 0]
        raw += [reward - sum(sampled[t:]) for t in range(len(sampled))]
    found = reinforce_plus_plus(case.rewards, case.lengths, mask, penalties)
    assert isinstance(found, Ragged)
    close(found.values[mask.values > 0], whiten(raw))
    assert not found.values[mask.values == 0].any()


def test_reinforce_plus_plus_baseline(case):
    raw = [
        0.0 if math.isnan(r) else r - statistics.fmean([case.rewards[j] for j in case.members(i, case.rewards)])
        for i, r in enumerate(case.rewards)
    ]
    found = reinforce_plus_plus_baseline(case.rewards, case.groups, case.lengths)
    close(by_sampled_token(case, found), whiten(by_sampled_token(case, raw)))


def test_gdpo(case):
    named = {"correct": case.scores, "brief": np.where(np.isnan(case.scores), np.nan, case.baselines)}
    usable = [i for i in range(len(case.scores)) if not math.isnan(case.scores[i])]

    def total(weights):
        parts = [
            [
                w * a
                for a in case.each(named[k], lambda _, r, g: (r - statistics.fmean(g)) / (statistics.stdev(g) + EPS))
            ]
            for k, w in weights.items()
        ]
        return [sum(each) for each in zip(*parts, strict=True)]

    for weights in ({"correct": 1.0, "brief": 1.0}, {"correct": 2.0, "brief": 0.25}, {"brief": 1.0}):
        sums = [total(weights)[i] for i in usable]
        mean, deviation = statistics.fmean(sums), statistics.pstdev(sums)
        found = gdpo(named, case.groups, weights=weights)
        close(found[usable], [(s - mean) / (deviation + EPS) for s in sums])
        assert not np.delete(found, usable).any()
    close(gdpo(named, case.groups), gdpo(named, case.groups, weights={"correct": 1.0, "brief": 1.0}))


def test_gdpo_tells_combinations_with_the_same_sum_apart():
    named = {"correct": np.array([1.0, 0, 0, 0]), "brief": np.array([0.0, 1, 1, 0])}
    found = gdpo(named, np.zeros(4))
    assert found[0] != pytest.approx(found[1])
    assert grpo(sum(named.values()), np.zeros(4))[0] == grpo(sum(named.values()), np.zeros(4))[1]


@pytest.mark.parametrize(("named", "weights"), [({}, None), ({"correct": np.zeros(2)}, {"brief": 1.0})])
def test_gdpo_without_the_rewards_that_it_needs_says_what_to_return(named, weights):
    with pytest.raises(ValueError, match=r"gdpo needs rewards by name.*mapping"):
        gdpo(named, np.zeros(2), weights=weights)


@pytest.mark.parametrize("seed", range(3))
def test_equal_values_are_whitened_to_exactly_zero(seed):
    case = Case(seed)
    flat = np.where(np.isnan(case.rewards), np.nan, 0.1)
    assert not reinforce_plus_plus(flat, case.lengths, masks(case), None).any()
    assert not reinforce_plus_plus_baseline(flat, case.groups, case.lengths).any()
