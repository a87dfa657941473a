"""Prompts that are drawn by their pass rates: which come, how often at least, and after a checkpoint."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts_builder import make_prompt, make_rollout

from rl_algos.data.stream import Shares, Stream
from rl_algos.rollouts.config import CurriculumConfig
from rl_algos.rollouts.driver.mixture import PRIOR, Mixture
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.weights import WeightUpdate

NUM_GENERATIONS = 8


def prompts_of(name, count):
    return [replace(make_prompt(f"{name}{index}"), dataset=name) for index in range(count)]


def mixture_of(sizes, *, seed=0, enabled=True, weights=None, **settings):
    names = [f"set{index}" for index in range(len(sizes))]
    stream = Stream([prompts_of(name, size) for name, size in zip(names, sizes, strict=True)], weights, seed=seed)
    curriculum = CurriculumConfig(enabled=True, by="prompt", **settings) if enabled else None
    return stream, Mixture(stream, names, curriculum)


class Earned:
    """The part of a group that a curriculum reads: making real ones takes most of the time of a simulation."""

    def __init__(self, prompt, rewards):
        self.prompt = prompt
        self.rollouts = SimpleNamespace(status=["ok"] * len(rewards))
        self.sampled = self
        self._rewards = np.asarray(rewards, dtype=np.float64)

    def rewards(self):
        return self._rewards


def drawn_rewards(prompt, draw, rates):
    """Rewards that depend only on the prompt and the number of its draw."""
    rng = np.random.default_rng((sum(prompt.id.encode()), draw))
    return rng.random(4) < rates[prompt.id]


@settings(deadline=None, max_examples=20)
@given(
    size=st.integers(1, 30),
    floor=st.sampled_from([0.1, 0.3, 1.0]),
    batch=st.integers(1, 7),
    seed=st.integers(0, 5),
    data=st.randoms(use_true_random=False),
)
def test_unseen_prompts_come_first_and_no_prompt_waits_too_long(size, floor, batch, seed, data):
    stream, mixture = mixture_of([size], seed=seed, floor=floor)
    rates = {prompt.id: data.choice([0.0, 0.5, 1.0]) for prompt in stream.datasets[0]}
    order = []
    while len(order) < 5 * size / floor:
        prompts = stream.take(batch)
        order += [prompt.id for prompt in prompts]
        mixture.learn([Earned(prompt, drawn_rewards(prompt, len(order), rates)) for prompt in prompts])
    assert len(set(order[:size])) == size
    for id in rates:
        places = [place for place, each in enumerate(order) if each == id]
        assert max(np.diff([*places, len(order)])) <= size * (1 / floor + 2)


def test_the_first_pass_has_the_order_of_a_run_without_a_curriculum():
    stream, _ = mixture_of([30, 20], seed=3)
    plain, _ = mixture_of([30, 20], seed=3, enabled=False)
    assert [prompt.id for prompt in stream.take(50)] == [prompt.id for prompt in plain.take(50)]
    # With equal weights, later passes have every prompt once as well, in another order.
    later = [prompt.id for prompt in stream.take(50)]
    assert sorted(later) == sorted(prompt.id for prompts in stream.datasets for prompt in prompts)
    unshuffled = Stream([list("abc")], shuffle=False)
    unshuffled.choose_items(str)
    assert "".join(unshuffled.take(7)) == "abcabca"


def test_weights_of_prompts_are_their_expected_variance():
    stream, mixture = mixture_of([4], floor=0.05, half_life=0.5)
    never, often, always, unseen = stream.take(4)
    rewards = [(never, [0] * 8), (often, [1, 0, 1, 0]), (always, [1] * 8)]
    metrics = mixture.learn([Earned(prompt, each) for prompt, each in rewards])
    weights = stream.state()["items"][0]["weights_now"]

    def expected(passed, failed):
        a, b = passed + PRIOR, failed + PRIOR
        p = np.random.default_rng(0).beta(a, b, 400_000)
        return (4 * p * (1 - p)).mean()

    places = [stream.place_of(prompt.id)[1] for prompt in (never, often, always, unseen)]
    assert weights[places] == pytest.approx([expected(0, 8), expected(2, 2), expected(8, 0), 1.0], abs=2e-3)
    assert metrics["dataset/set0/unseen"] == 0.25
    assert metrics["dataset/set0/weight"] == pytest.approx(weights.mean())
    # Two groups of four prompts are half an epoch, the half life, so the counts have halved.
    mixture.learn([Earned(unseen, [0, 1]), Earned(unseen, [1, 0])])
    weights = stream.state()["items"][0]["weights_now"]
    assert weights[places[:3]] == pytest.approx([expected(0, 4), expected(1, 1), expected(4, 0)], abs=2e-3)


def test_datasets_keep_their_shares():
    stream, mixture = mixture_of([5, 40], weights=[3.0, 1.0])
    order = []
    for _ in range(25):
        prompts = stream.take(8)
        order += [prompt.dataset for prompt in prompts]
        mixture.learn([Earned(prompt, [0, 0]) for prompt in prompts])
    assert order.count("set0") == 150


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_groups_without_signal_are_halved(seed):
    def share_without_signal(enabled):
        rng = np.random.default_rng(seed)
        # Most pass rates are near 0 or 1, as those of real prompts are.
        stream, mixture = mixture_of([400], seed=seed, enabled=enabled)
        rates = {prompt.id: 1 / (1 + np.exp(-rng.normal(0, 4))) for prompt in stream.datasets[0]}
        without = []
        for _ in range(60):
            prompts = stream.take(32)
            rewards = [rng.random(NUM_GENERATIONS) < rates[prompt.id] for prompt in prompts]
            without.append(np.mean([np.ptp(each.astype(int)) == 0 for each in rewards]))
            mixture.learn([Earned(prompt, each) for prompt, each in zip(prompts, rewards, strict=True)])
        return np.mean(without[13:])  # after the first pass, in which every prompt comes once

    assert share_without_signal(True) <= 0.5 * share_without_signal(False)


class Pool:
    """Ends groups in the order that they were submitted in; their rewards follow from the seeds."""

    num_replicas = 1

    def __init__(self):
        self.tasks = []
        self.under_way = []

    def submit(self, tasks):
        self.under_way += [(len(self.tasks) + index, task) for index, task in enumerate(tasks)]
        self.tasks += tasks
        return [ticket for ticket, _ in self.under_way[-len(tasks) :]] if tasks else []

    def next_done(self):
        ticket, task = self.under_way.pop(0)
        rate = (0.0, 0.5, 1.0)[int(task.prompt.id.removeprefix("set0")) % 3]
        rewards = [float(seed % 1000 < 1000 * rate) for seed in task.seeds]
        return ticket, RolloutGroup.of(task.prompt, [make_rollout(task.prompt, each) for each in rewards])

    def adopt(self, update, *, in_flight=False):
        pass

    def turns(self):
        return {}

    def idle_share(self):
        return None


class Trainer:
    """A run of steps whose state is what a checkpoint holds."""

    def __init__(self, staleness):
        self.stream, self.mixture = mixture_of([10])
        self.source = PacedRolloutSource(
            Pool(),
            self.stream,
            sampling=SamplingParams(max_new_tokens=2),
            num_generations=2,
            seed=5,
            max_staleness=staleness,
            prompts_per_step=3,
        )

    def step(self, number):
        self.mixture.stream.begin(number)
        groups = self.source.collect(3)
        metrics = self.mixture.learn(groups)
        self.source.adopt(WeightUpdate(number + 1))
        return [group.prompt.id for group in groups], metrics

    def state(self):
        return copy.deepcopy({"source": self.source.state(), "mixture": self.mixture.state()})

    def restore(self, state):
        self.source.restore(state["source"])
        self.mixture.restore(state["mixture"])


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_run_that_is_killed_after_any_step_continues_with_the_same_prompts(staleness):
    whole, states, steps = Trainer(staleness), [], []
    whole.source.adopt(WeightUpdate(1))
    for number in range(1, 21):
        states.append(whole.state())
        steps.append(whole.step(number))
    for at in range(20):
        resumed = Trainer(staleness)
        resumed.restore(states[at])
        resumed.source.adopt(WeightUpdate(at + 1))
        # The step before the kill trained its prompts, so the ledger does not let any of them train again.
        for number in range(at + 1, min(at + 4, 21)):
            assert resumed.step(number) == steps[number - 1]


def test_a_branch_may_begin_to_weigh_prompts():
    plain, before = mixture_of([10], enabled=False)
    drawn = plain.take(4)
    before.learn([Earned(prompt, [0, 1]) for prompt in drawn])
    stream, mixture = mixture_of([10])
    stream.restore(plain.state())
    mixture.restore(before.state())
    assert len({prompt.id for prompt in stream.take(10)}) == 10


def test_a_large_dataset_is_drawn_from_quickly():
    shares = Shares(np.ones(50_000), entropy=(1, 0))
    first = [shares.next() for _ in range(300)]
    assert len(set(first)) == 300
    restored = Shares(np.ones(50_000), entropy=(1, 0))
    restored.restore(shares.state())
    assert [restored.next() for _ in range(50)] == [shares.next() for _ in range(50)]
