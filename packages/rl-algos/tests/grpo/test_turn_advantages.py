"""Advantages by turn against the papers' formulas in plain Python, and from the turns of rollouts to the batch."""

import dataclasses
import statistics

import numpy as np
import pytest
from rollouts_builder import make_group, make_prompt, make_rollout, make_turns

from rl_algos.advantages import grpo
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.estimators import advantages_of, estimator_section
from rl_algos.grpo.turn_advantages import gigpo, mt_grpo, turn_returns
from rl_algos.rollouts.checks import reward_problems
from rl_algos.rollouts.config import RewardScalingConfig, RewardShapingConfig
from rl_algos.rollouts.training.batch import build_batch, with_advantages
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Turn

EPS = 1e-6


class Case:
    """Rollouts of up to four turns in groups of different sizes, shuffled, with failed ones and equal rewards."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        sizes = [5, 1, 6, 3]
        self.groups = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
        num_turns = random.integers(1, 5, len(self.groups))
        self.failed = int(np.flatnonzero(self.groups == 0)[0])
        num_turns[self.failed] = 1
        self.rewards = [random.choice([0.0, 0.5, 1.0], n).tolist() for n in num_turns]
        self.states = [[0, *random.integers(1, 3, max(n - 1, 0)).tolist()][:n] for n in num_turns]
        self.rewards[self.failed] = [float("nan")]
        self.lengths = [random.integers(1, 4, n).tolist() for n in num_turns]
        self.turn_rewards = Ragged.from_rows(self.rewards, np.float64)
        self.turn_lengths = Ragged.from_rows(self.lengths, np.int64)
        self.turn_states = Ragged.from_rows(self.states, np.int64)
        # A token of context precedes each turn.
        self.mask = Ragged.from_rows([[t for n in own for t in (0, *[1] * n)] for own in self.lengths], np.uint8)
        self.sums = np.array([sum(own) for own in self.rewards])

    def peers(self, i: int) -> list[int]:
        return [j for j in range(len(self.groups)) if self.groups[j] == self.groups[i] and j != self.failed]

    def to_go(self, j: int, k: int, discount: float) -> float:
        return sum(discount**n * r for n, r in enumerate(self.rewards[j][k:]))

    def check(self, found: Ragged, of_turn) -> None:
        """Compare with a function of rollout and turn."""
        for i, lengths in enumerate(self.lengths):
            if i == self.failed:
                assert not found[i].any()
                continue
            expected = [a for k, n in enumerate(lengths) for a in (0.0, *[of_turn(i, k)] * n)]
            np.testing.assert_allclose(found[i], expected, rtol=1e-9, atol=1e-9)


def score(value, values, normalize=True):
    if len(values) < 2 or len(set(values)) < 2:
        return 0.0
    centred = value - statistics.fmean(values)
    return centred / (statistics.stdev(values) + EPS) if normalize else centred


@pytest.fixture(params=range(6))
def case(request):
    return Case(request.param)


@pytest.mark.parametrize(("discount", "normalize"), [(1.0, True), (0.9, False), (0.0, True)])
def test_returns_by_turn(case, discount, normalize):
    def of_turn(i, k):
        others = [case.to_go(j, k, discount) for j in case.peers(i) if len(case.rewards[j]) > k]
        return score(case.to_go(i, k, discount), others, normalize)

    found = turn_returns(
        case.turn_rewards, case.turn_lengths, case.mask, case.groups, normalize, discount=discount, eps=EPS
    )
    case.check(found, of_turn)


@pytest.mark.parametrize("turn_weight", [1.0, 0.3])
def test_mt_grpo(case, turn_weight):
    def of_turn(i, k):
        outcome = score(case.rewards[i][-1], [case.rewards[j][-1] for j in case.peers(i)])
        if k == len(case.rewards[i]) - 1:
            return outcome
        own = [case.rewards[j][k] for j in case.peers(i) if len(case.rewards[j]) - 1 > k]
        return outcome + turn_weight * score(case.rewards[i][k], own)

    found = mt_grpo(case.turn_rewards, case.turn_lengths, case.mask, case.groups, turn_weight=turn_weight, eps=EPS)
    case.check(found, of_turn)


@pytest.mark.parametrize(("discount", "turn_weight", "normalize"), [(0.95, 1.0, True), (0.5, 0.7, False)])
def test_gigpo(case, discount, turn_weight, normalize):
    def of_turn(i, k):
        of_rollout = score(sum(case.rewards[i]), [sum(case.rewards[j]) for j in case.peers(i)], normalize)
        same = [
            case.to_go(j, n, discount)
            for j in case.peers(i)
            for n, state in enumerate(case.states[j])
            if state == case.states[i][k]
        ]
        return of_rollout + turn_weight * score(case.to_go(i, k, discount), same, normalize)

    found = gigpo(
        case.sums,
        case.turn_rewards,
        case.turn_lengths,
        case.turn_states,
        case.mask,
        case.groups,
        normalize,
        discount=discount,
        turn_weight=turn_weight,
        eps=EPS,
    )
    case.check(found, of_turn)


def steps_to_learn(by_turn, rate, seed, *, letters=16, turns=5, counted=2, num_groups=4, size=4, limit=300):
    """Return the steps until the counted one of five turns is right in 95 % of ten steps, for a table of logits.

    Every turn asks for one of the letters, and the answers of all turns come from the same table.
    """
    random, logits, recent = np.random.default_rng(seed), np.eye(letters), []
    groups = np.repeat(np.arange(num_groups), size)
    lengths = Ragged.from_rows([[1] * turns] * len(groups), np.int64)
    for step in range(1, limit):
        asked = random.integers(letters, size=(num_groups, turns))[groups]
        probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        said = (probs[asked].cumsum(-1) < random.random((*asked.shape, 1))).sum(-1).clip(max=letters - 1)
        earned = np.zeros(asked.shape)
        earned[:, counted] = said[:, counted] == asked[:, counted]
        recent = [*recent[-9:], earned.sum() / len(groups)]
        if len(recent) == 10 and statistics.fmean(recent) >= 0.95:
            return step
        found = grpo(earned.sum(1), groups)[:, None]
        if by_turn:
            rewards = Ragged.from_rows(earned.tolist(), np.float64)
            found = turn_returns(rewards, lengths, lengths, groups, discount=0.0).values.reshape(asked.shape)
        np.add.at(logits, asked, rate * found[..., None] * (np.eye(letters)[said] - probs[asked]) / len(groups))
    return limit


def test_returns_by_turn_need_at_most_half_of_the_steps_of_sums_if_one_of_five_turns_matters():
    seeds, rates = (1, 2, 3), (4.0, 8.0, 16.0, 32.0)
    by_turn, by_sum = (
        min(([steps_to_learn(way, rate, seed) for seed in seeds] for rate in rates), key=statistics.fmean)
        for way in (True, False)
    )
    assert all(2 * turns <= sums for turns, sums in zip(by_turn, by_sum, strict=True)), (by_turn, by_sum)


def configured(name, **settings):
    return GRPOConfig(adv_estimator=estimator_section(name)(name=name), **settings)


def test_the_turns_of_rollouts_reach_the_batch():
    prompt = make_prompt("p")
    group = RolloutGroup.of(prompt, [make_turns(prompt, [0.0, 1.0]), make_turns(prompt, [0.5, 0.0], late=1.0)])
    config = configured("turn_returns", normalize_rewards=False)
    found = advantages_of([group], config)
    # Returns are 1 and 1.5 from the first turn on, 1 and 1 from the second.
    np.testing.assert_allclose(found[0], [0, 0, 0, -0.25, -0.25, 0, 0, 0, 0])
    np.testing.assert_allclose(found[1], [0, 0, 0, 0.25, 0.25, 0, 0, 0, 0])
    batch = with_advantages(build_batch([group], config), found)
    np.testing.assert_allclose(batch.ragged("advantages").values, found.values)


def test_shaping_changes_the_last_turn():
    prompt = make_prompt("p")
    group = RolloutGroup.of(prompt, [make_turns(prompt, [0.0, 1.0]), make_turns(prompt, [0.0, 1.0, 0.0])])
    shaping = RewardShapingConfig(enabled=True, max_response_length=6, overlong_buffer_length=2)
    found = advantages_of([group], configured("turn_returns", normalize_rewards=False, reward_shaping=shaping))
    # The longer rollout loses 1 for its 6 tokens, in its third turn, which no other rollout has.
    np.testing.assert_allclose(found[1], [0, 0, 0, -0.5, -0.5, 0, -0.5, -0.5, 0, 0, 0, 0])


def test_turns_with_the_same_observation_before_them_share_a_state():
    prompt = make_prompt("p")
    rollouts = [
        make_turns(prompt, [0.0, 1.0], ("left",)),
        make_turns(prompt, [0.0, 0.0], ("right",)),
        make_rollout(prompt, 0.0),
    ]
    again = make_turns(prompt, [0.0, 0.0, 0.0], ("left", "left"))
    group = RolloutGroup.of(prompt, [*rollouts, again])
    states = [[state for _, _, state in report.turns] for report in group.rollouts]
    assert states[0][0] == states[1][0] == states[3][0] == 0
    assert states[0][1] == states[3][1] == states[3][2] != states[1][1]
    assert states[2] == []  # The only turn of a rollout is the rollout.
    found = advantages_of([group], configured("gigpo"))
    assert found[0][6] > 0 > found[3][6]
    single = make_group("q", [1.0, 0.0])
    np.testing.assert_allclose(
        [row[3] for row in advantages_of([single], configured("turn_returns"))], advantages_of([single], GRPOConfig())
    )


def test_failed_rollouts_and_turns_without_their_tokens():
    prompt = make_prompt("p")
    failed = make_turns(prompt, [1.0, 1.0], status="failed")
    group = RolloutGroup.of(prompt, [make_turns(prompt, [0.0, 1.0]), make_turns(prompt, [0.0, 0.0]), failed])
    assert not advantages_of([group], configured("gigpo"))[2].any()
    unknown = dataclasses.replace(failed, status="ok", turns=(Turn("x", None, {}), Turn("y", None, {})))
    with pytest.raises(ValueError, match=r"of p has turns of 0 sampled tokens, but 4 were sampled"):
        advantages_of([RolloutGroup.of(prompt, [unknown])], configured("gigpo"))


def test_scaled_rewards_and_discounts_above_one_are_refused():
    config = configured("gigpo", reward_scaling=RewardScalingConfig(enabled=True))
    (problem,) = reward_problems(config, by_turn="grpo.adv_estimator=gigpo")
    assert problem.key == "grpo.reward_scaling.enabled"
    assert not list(reward_problems(config))
    with pytest.raises(ValueError, match="less than or equal to 1"):
        estimator_section("gigpo")(name="gigpo", discount=1.5)
