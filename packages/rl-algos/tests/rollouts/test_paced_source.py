"""The source that runs ahead of training, on a pool that ends groups in any order."""

import dataclasses
import io
import random
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algos.data.stream import Stream
from rl_algos.rollouts.config import PolicyGradientConfig, Sampler
from rl_algos.rollouts.driver.ledger import Ledger, digest
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_algos.rollouts.driver.steps import NO_SIGNAL, collect_groups
from rl_core.errors import DataError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutTurns
from rl_core.rollouts.rollout import Completion, Prompt, Rollout, WeightSpan
from rl_core.weights import WeightUpdate

PROMPTS = [Prompt(f"p{i}", (), np.array([i], np.int32), "math") for i in range(40)]
SAMPLING = SamplingParams(max_new_tokens=3)


class ShuffledPool:
    """Ends the groups that it has in an order of its own; each is sampled with the weights at its begin.

    Args:
        seed: of the order.
        last: ids of prompts whose groups end after all others that are under way.
        alike: whether the rewards of a prompt's group are all equal, by its id.
    """

    def __init__(self, seed=0, *, last=(), alike=lambda prompt_id: False):
        self._random = random.Random(seed)
        self._last, self._alike = frozenset(last), alike
        self.version = 0
        self.in_flight = []
        self.under_way = {}
        self.tasks = []
        self.most_under_way = 0
        self.idle = None

    def submit(self, tasks):
        tickets = list(range(len(self.tasks), len(self.tasks) + len(tasks)))
        self.tasks += tasks
        self.under_way |= {ticket: (task, self.version) for ticket, task in zip(tickets, tasks, strict=True)}
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return tickets

    def next_done(self):
        quick = [ticket for ticket, (task, _) in self.under_way.items() if task.prompt.id not in self._last]
        ticket = self._random.choice(quick or list(self.under_way))
        task, version = self.under_way.pop(ticket)
        rollouts = [self._rollout(task, place, version) for place in range(len(task.seeds))]
        return ticket, RolloutGroup.of(task.prompt, rollouts)

    def adopt(self, update, *, in_flight=False):
        self.version = update.version
        self.in_flight.append(in_flight)

    num_replicas = 2

    speculated = None

    def speculation(self):
        return self.speculated

    def idle_share(self):
        return self.idle

    def turns(self):
        """One turn of every rollout under way, sampled at its begin, unless it had turns already."""
        return {
            ticket: task.turns or tuple(RolloutTurns({f"turn of {seed}": turn(version)}) for seed in task.seeds)
            for ticket, (task, version) in self.under_way.items()
        }

    def _rollout(self, task, place, version):
        reward = 0.0 if self._alike(task.prompt.id) else float(place % 2)
        tokens = np.array([1, task.seeds[place] % 97], np.int32)
        logprobs = np.array([0.0, -0.5], np.float32)
        mask = np.array([0, 1], np.uint8)
        spans = (WeightSpan(version, 1),)
        return Rollout(task.prompt.id, tokens, mask, logprobs, spans, (), {"reward": reward}, "stop")


def turn(version):
    return Completion(np.array([7], np.int32), np.array([-0.5], np.float32), "stop", (WeightSpan(version, 1),))


def make_source(pool, *, staleness, per_step=4, prompts=PROMPTS, epochs=None, **settings):
    stream = Stream([prompts], seed=1, max_num_epochs=epochs)
    return PacedRolloutSource(
        pool,
        stream,
        sampling=SAMPLING,
        num_generations=2,
        seed=7,
        max_staleness=staleness,
        prompts_per_step=per_step,
        **settings,
    )


def versions_of(group):
    return [version for spans in group.rollouts.spans for version, _ in spans]


def ledger_of(source):
    ledger = Ledger()
    ledger.restore(source.state()["ledger"])
    return ledger


def reloaded(state):
    """The state as a checkpoint gives it back: arrays through a file, everything else as it is."""
    if isinstance(state, np.ndarray):
        file = io.BytesIO()
        np.save(file, state, allow_pickle=False)
        return np.load(io.BytesIO(file.getvalue()))
    if isinstance(state, dict):
        assert all(isinstance(key, str) for key in state)
        return {key: reloaded(value) for key, value in state.items()}
    if isinstance(state, tuple | list):
        return type(state)(reloaded(value) for value in state)
    assert state is None or isinstance(state, int | float | str)
    return state


def test_at_staleness_0_only_what_is_asked_for_is_begun():
    pool = ShuffledPool()
    source = make_source(pool, staleness=0)
    source.adopt(WeightUpdate(1))
    assert len(source.collect(3)) == 3
    assert not pool.under_way
    assert len(pool.tasks) == 3


def test_a_source_runs_ahead_by_the_prompts_of_so_many_steps():
    pool = ShuffledPool()
    source = make_source(pool, staleness=2)
    for version in range(1, 6):
        source.adopt(WeightUpdate(version))
        source.collect(4)
        assert len(pool.tasks) == 4 * (version + 2)


def test_nothing_is_begun_that_no_later_step_needs():
    pool = ShuffledPool()
    source = make_source(pool, staleness=2)
    num_begun = []
    for version in range(1, 6):
        source.adopt(WeightUpdate(version))
        assert len(source.collect(4, num_later=4 * (5 - version))) == 4
        num_begun.append(len(pool.tasks))
    assert num_begun == [12, 16, 20, 20, 20]
    assert not pool.under_way


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_group_is_older_than_the_bound_and_none_is_lost(staleness):
    slow = [prompt.id for prompt in PROMPTS[::5]]
    pool = ShuffledPool(3, last=slow)
    source = make_source(pool, staleness=staleness, epochs=2)
    ages, ids = [], []
    for version in range(1, 21):
        source.adopt(WeightUpdate(version))
        groups = source.collect(4)
        ages += [version - min(versions_of(group)) for group in groups]
        ids += [group.prompt.id for group in groups]
    assert max(ages) == staleness
    assert sorted(ids) == sorted(2 * [prompt.id for prompt in PROMPTS])


def test_a_slow_group_is_waited_for_only_when_it_is_due():
    first = Stream([PROMPTS], seed=1).take(8)
    pool = ShuffledPool(last=[first[0].id])
    source = make_source(pool, staleness=1)
    source.adopt(WeightUpdate(1))
    early = source.collect(4)
    assert first[0].id not in [group.prompt.id for group in early]
    source.adopt(WeightUpdate(2))
    assert first[0].id in [group.prompt.id for group in source.collect(4)]


def test_groups_that_were_set_aside_have_others_in_their_place():
    alike = {prompt.id for prompt in PROMPTS[1::2]}
    pool = ShuffledPool(5, alike=alike.__contains__)
    source = make_source(pool, staleness=2, epochs=1)
    config = PolicyGradientConfig(num_prompts_per_step=4, num_generations_per_prompt=2, use_dynamic_sampling=True)
    PolicyGradientConfig.section = "grpo"
    trained = []
    for version in range(1, 6):
        source.adopt(WeightUpdate(version))
        groups, _ = collect_groups(source, config)
        assert [version - min(versions_of(group)) <= 2 for group in groups] == [True] * 4
        trained += [group.prompt.id for group in groups]
    source.adopt(WeightUpdate(6))
    assert sorted(trained) == sorted(prompt.id for prompt in PROMPTS[::2])
    ledger = ledger_of(source)
    assert sum(map(len, ledger.trained().values())) == 20
    dropped = ledger.dropped()
    assert {ledger.digest(draw) for draw in dropped[NO_SIGNAL]} <= {digest(prompt_id) for prompt_id in alike}


def test_an_evaluation_keeps_the_groups_that_end_meanwhile():
    pool = ShuffledPool(1)
    source = make_source(pool, staleness=1)
    source.adopt(WeightUpdate(1))
    source.collect(4)
    evaluation = source.evaluate(PROMPTS[:6], SAMPLING, num_generations=3)
    assert [task.is_urgent for task in pool.tasks] == [False] * 8 + [True] * 6
    assert [group.prompt.id for group in evaluation.groups] == [prompt.id for prompt in PROMPTS[:6]]
    assert [len(group.rollouts) for group in evaluation.groups] == [3] * 6
    source.adopt(WeightUpdate(2))
    source.collect(4)
    assert len(pool.tasks) == 8 + 6 + 4


def test_finished_groups_are_in_the_state_and_are_not_sampled_again():
    pool = ShuffledPool(2)
    pool.turns = dict  # none of the others has finished a turn
    source = make_source(pool, staleness=2)
    source.adopt(WeightUpdate(1))
    source.collect(4)
    source.adopt(WeightUpdate(2))
    source.collect(4)
    source.adopt(WeightUpdate(3))
    state = reloaded(source.state())
    assert state["finished"]

    again = ShuffledPool(9)
    resumed = make_source(again, staleness=2)
    resumed.restore(state)
    resumed.adopt(WeightUpdate(3))
    groups = resumed.collect(4)
    assert len(again.tasks) == 12 - len(state["finished"])
    finished = {saved["rollouts"]["prompt_id"]: saved for saved in state["finished"].values()}
    kept = [group for group in groups if group.prompt.id in finished]
    assert kept
    for group in kept:
        saved = finished[group.prompt.id]["columns"]["tokens"]["values"]
        assert group.columns.ragged("tokens").values.tolist() == saved.tolist()


def test_finished_groups_that_are_older_than_a_lowered_bound_are_sampled_again():
    pool, again = ShuffledPool(2), ShuffledPool(3)
    source, lowered = make_source(pool, staleness=2), make_source(again, staleness=0)
    for version in (1, 2, 3):
        source.adopt(WeightUpdate(version))
        source.collect(4)
    source.adopt(WeightUpdate(4))
    state = reloaded(source.state())
    assert {saved["version"] for saved in state["finished"].values()} <= {1, 2, 3}
    assert state["finished"]
    lowered.restore(state)
    lowered.adopt(WeightUpdate(4))
    ahead = ledger_of(source).pending()
    trained = []
    for version in (4, 5):
        groups = lowered.collect(4)
        assert {min(versions_of(group)) for group in groups} == {version}
        trained += [group.prompt.id for group in groups]
        lowered.adopt(WeightUpdate(version + 1))
    drawn = Stream([PROMPTS], seed=1).take(len(PROMPTS))
    assert sorted(trained) == sorted(drawn[draw].id for draw in ahead)


def test_a_draw_that_runs_again_has_the_seeds_it_had():
    pool, again = ShuffledPool(2), ShuffledPool(4)
    source, resumed = make_source(pool, staleness=1), make_source(again, staleness=1)
    source.adopt(WeightUpdate(1))
    source.collect(4)
    source.adopt(WeightUpdate(2))
    resumed.restore(reloaded(source.state()))
    resumed.adopt(WeightUpdate(2))
    resumed.collect(4)
    seeds = {task.prompt.id: task.seeds for task in pool.tasks}
    assert {task.prompt.id: task.seeds for task in again.tasks[:2]}.items() <= seeds.items()


def test_turns_of_groups_under_way_are_in_the_state_and_go_to_those_that_run_again():
    pool, again = ShuffledPool(2), ShuffledPool(4)
    source, resumed = make_source(pool, staleness=2), make_source(again, staleness=2)
    for version in (1, 2):
        source.adopt(WeightUpdate(version))
        source.collect(4)
    source.adopt(WeightUpdate(3))
    begun = {task.prompt.id: version for task, version in pool.under_way.values()}
    assert set(begun.values()) == {1, 2}
    state = reloaded(source.state())
    resumed.restore(state)
    # saved again before anything has begun
    assert str(state["turns"]) == str(reloaded(resumed.state())["turns"])
    resumed.adopt(WeightUpdate(3))
    resumed.collect(4)
    tasks = {task.prompt.id: task for task in again.tasks}
    for prompt_id, version in begun.items():
        for seed, turns in zip(tasks[prompt_id].seeds, tasks[prompt_id].turns, strict=True):
            ((digest, completion),) = turns.completions.items()
            assert digest == f"turn of {seed}"
            assert (completion.token_ids.tolist(), completion.logprobs.tolist()) == ([7], [-0.5])
            assert (completion.stop_reason, completion.spans) == ("stop", (WeightSpan(version, 1),))
    assert all(not task.turns for prompt_id, task in tasks.items() if prompt_id not in begun)
    # the age of a group counts from the begin of its first run
    still = {resumed._under_way[ticket].number: task.prompt.id for ticket, (task, _) in again.under_way.items()}
    saved = resumed.state()["turns"]
    for draw, prompt_id in still.items():
        assert saved[str(draw)]["version"] == begun.get(prompt_id, 3)


def test_turns_that_are_older_than_a_lowered_bound_are_sampled_again():
    pool, again = ShuffledPool(2), ShuffledPool(4)
    source, lowered = make_source(pool, staleness=2), make_source(again, staleness=1)
    for version in (1, 2):
        source.adopt(WeightUpdate(version))
        source.collect(4)
    source.adopt(WeightUpdate(3))
    begun = {task.prompt.id: version for task, version in pool.under_way.values()}
    lowered.restore(reloaded(source.state()))
    lowered.adopt(WeightUpdate(3))
    lowered.collect(4)
    tasks = {task.prompt.id: task for task in again.tasks if task.prompt.id in begun}
    assert {prompt_id: bool(task.turns) for prompt_id, task in tasks.items()} == {
        prompt_id: begun[prompt_id] == 2 for prompt_id in tasks
    }
    assert {begun[prompt_id] for prompt_id in tasks} == {1, 2}


@pytest.mark.parametrize("in_flight", [False, True])
def test_the_pool_interrupts_what_is_under_way_only_if_the_source_is_to_update_in_flight(in_flight):
    pool = ShuffledPool()
    source = make_source(pool, staleness=1, in_flight=in_flight)
    source.adopt(WeightUpdate(1))
    source.collect(4)
    source.adopt(WeightUpdate(2))
    assert pool.in_flight == [in_flight] * 2


def test_a_state_of_other_prompts_is_refused():
    source = make_source(ShuffledPool(), staleness=1)
    source.adopt(WeightUpdate(1))
    source.collect(4)
    others = [Prompt(f"q{i}", (), np.array([i], np.int32), "math") for i in range(40)]
    resumed = make_source(ShuffledPool(), staleness=1, prompts=others)
    with pytest.raises(DataError, match=r"draw 0 was not the prompt prompt q\d+"):
        resumed.restore(source.state())


def test_metrics_say_how_old_groups_are_and_how_long_training_waited_for_them():
    # creation, the first weights, then the begin and the end of two collects
    times = iter([-500.0, 0.0, 10.0, 40.0, 90.0, 100.0])
    pool = ShuffledPool()
    source = make_source(pool, staleness=1, clock=times.__next__)
    source.adopt(WeightUpdate(1))
    source.collect(4)
    first = source.metrics()
    assert (first["staleness/max"], first["staleness/share_0"]) == (0, 1)
    assert first["queue/under_way"] + first["queue/finished"] == 4
    assert first["idle/trainer"] == pytest.approx(30 / 40)
    assert "idle/generators" not in first
    source.adopt(WeightUpdate(2))
    pool.idle = 0.25
    source.collect(4)
    pool.idle = 0.75  # of the groups that this collecting began
    second = source.metrics()
    assert second["idle/generators"] == 0.25
    assert (second["staleness/mean"], second["staleness/share_1"]) == (1, 1)
    assert second["idle/trainer"] == pytest.approx(10 / 60)


def test_a_synchronous_source_says_the_number_of_replicas_alone():
    source = make_source(ShuffledPool(), staleness=0)
    source.adopt(WeightUpdate(1))
    source.collect(4)
    assert source.metrics() == {"generation/replicas": 2.0}


def test_a_state_that_has_drawn_beyond_the_end_of_the_data_is_refused():
    source = make_source(ShuffledPool(), staleness=1, per_step=30)
    source.adopt(WeightUpdate(1))
    source.collect(30)
    source.adopt(WeightUpdate(2))
    resumed = make_source(ShuffledPool(), staleness=1, per_step=30, epochs=1)
    with pytest.raises(DataError, match=r"ends after 40 prompts, but the checkpoint has drawn 60.*max_num_epochs"):
        resumed.restore(source.state())


def over_sampling(pool, *, staleness=2, **settings):
    """A synchronous source that begins 6 groups for a step of 4."""
    more = {"num_ahead": 2, "sampler": "ready_first", "overlaps_training": False, "in_flight": True}
    return make_source(pool, staleness=staleness, **{**more, **settings})


def test_over_sampling_ends_a_step_at_its_last_group_and_carries_the_others_over():
    first = [prompt.id for prompt in Stream([PROMPTS], seed=1).take(6)]
    pool = ShuffledPool(last=first[:2])
    source = over_sampling(pool)
    source.adopt(WeightUpdate(1))
    assert [group.prompt.id for group in source.collect(4)] == first[2:]
    assert {task.prompt.id for task, _ in pool.under_way.values()} == set(first[:2])
    source.adopt(WeightUpdate(2))
    assert pool.in_flight == [True, True]
    # 4 more begin beside the two, which are not due yet
    assert not {group.prompt.id for group in source.collect(4)} & set(first)
    assert len(pool.tasks) == 10
    source.adopt(WeightUpdate(3))
    # but in step 3 they are, because they began with version 1
    assert {group.prompt.id for group in source.collect(4)} > set(first[:2])
    assert source.metrics()["staleness/max"] == 2
    source.adopt(WeightUpdate(4))
    assert ledger_of(source).num_drawn == 14
    assert sum(map(len, ledger_of(source).trained().values())) == 12


def test_metrics_compare_the_lengths_of_carried_rollouts_with_the_others():
    pool = ShuffledPool()
    source = over_sampling(pool, staleness=1)
    source.adopt(WeightUpdate(1))
    source.collect(4)
    found = source.metrics()
    assert (found["carried/share"], found["carried/mean_length_of_others"]) == (0.0, 1.0)
    assert "carried/mean_length" not in found
    source.adopt(WeightUpdate(2))
    source.collect(4)
    found = source.metrics()
    assert (found["carried/share"], found["carried/mean_length"]) == (0.5, 1.0)
    assert (found["queue/under_way"] + found["queue/finished"], found["staleness/mean"]) == (2.0, 0.5)
    assert not [name for name in found if name.startswith("idle/")]


def test_the_last_step_begins_nothing_that_no_step_trains_on():
    pool = ShuffledPool()
    source = over_sampling(pool)
    source.adopt(WeightUpdate(1))
    source.collect(4, num_later=4)
    source.adopt(WeightUpdate(2))
    source.collect(4, num_later=0)
    assert (len(pool.tasks), pool.under_way) == (8, {})


def test_dynamic_sampling_refills_a_step_that_over_samples():
    pool = ShuffledPool(alike=lambda prompt_id: int(prompt_id[1:]) % 2)
    source = over_sampling(pool, staleness=1)
    config = PolicyGradientConfig(num_prompts_per_step=4, use_dynamic_sampling=True)
    trained = []
    for version in range(1, 5):
        source.adopt(WeightUpdate(version))
        kept, aside = collect_groups(source, config)
        assert all(version - min(versions_of(group)) <= 1 for group in [*kept, *aside])
        trained += [group.prompt.id for group in kept]
    assert len(trained) == 16
    assert all(int(prompt_id[1:]) % 2 == 0 for prompt_id in trained)


@settings(deadline=None, max_examples=60)
@given(
    staleness=st.integers(0, 3),
    ahead=st.integers(0, 9),
    sampler=st.sampled_from(get_args(Sampler)),
    seed=st.integers(0, 1000),
    steps=st.lists(st.sampled_from(["train", "train", "collect", "save", "kill", "evaluate"]), max_size=25),
)
def test_every_draw_is_trained_once_dropped_with_a_reason_or_pending_whenever_a_run_is_killed(
    staleness, ahead, sampler, seed, steps
):
    chance = random.Random(seed)
    rule = {"num_ahead": min(ahead, 3 * staleness), "sampler": sampler, "window": 5, "in_flight": ahead % 2 == 0}
    pool = ShuffledPool(seed)
    source = make_source(pool, staleness=staleness, per_step=3, **rule)
    version = 1
    trained: list[str] = []
    collected: list[RolloutGroup] = []
    source.adopt(WeightUpdate(version))
    saved = (reloaded(source.state()), version, [])
    for step in steps:
        if step == "evaluate":
            source.evaluate(PROMPTS[:2], SAMPLING)
        elif step == "kill":
            state, version, trained = saved[0], saved[1], list(saved[2])
            pool = ShuffledPool(chance.randrange(1000))
            source = make_source(pool, staleness=staleness, per_step=3, **rule)
            source.restore(state)
            source.adopt(WeightUpdate(version))
            collected = []
        elif step == "save":
            saved = (reloaded(source.state()), version, list(trained))
        else:
            collected += source.collect(3)
            assert all(version - min(versions_of(group)) <= staleness for group in collected)
            if step == "train":
                aside = collected[:1] if chance.random() < 0.3 else []
                source.set_aside(aside, "chance")
                version += 1
                source.adopt(WeightUpdate(version))
                trained += [group.prompt.id for group in collected if group not in aside]
                collected = []
        ledger = ledger_of(source)
        drawn = Stream([PROMPTS], seed=1).take(ledger.num_drawn)
        left = sorted(draw for draws in ledger.trained().values() for draw in draws)
        dropped = sorted(draw for draws in ledger.dropped().values() for draw in draws)
        assert sorted([*left, *dropped, *ledger.pending()]) == list(range(ledger.num_drawn))
        assert sorted(drawn[draw].id for draw in left) == sorted(trained)


def test_a_share_of_the_rollouts_are_demonstrations_and_the_same_ones_after_a_restart():
    prompts = [dataclasses.replace(each, demonstration=np.array([4], np.int32)) for each in PROMPTS[:30]] + PROMPTS[30:]

    def counts(share, stop=None):
        pool = ShuffledPool()
        source = make_source(pool, staleness=0, prompts=prompts, demonstrated_share=share)
        source.adopt(WeightUpdate(1))
        source.collect(12)
        if stop is not None:
            state = reloaded(source.state())
            pool = ShuffledPool()
            source = make_source(pool, staleness=0, prompts=prompts, demonstrated_share=share)
            source.restore(state)
        source.adopt(WeightUpdate(2))
        source.collect(28)
        return [(task.prompt.demonstration is not None, task.num_demonstrated) for task in pool.tasks]

    assert set(counts(0.5)) == {(True, 1), (False, 0)}
    found = counts(0.25)
    assert {number for shown, number in found if shown} == {0, 1}
    assert 5 <= sum(number for _, number in found) <= 25
    # groups that were collected and not trained come again, with the same rollouts
    assert counts(0.25, stop=12) == found[:28]
    assert {number for shown, number in counts(0.9) if shown} == {1, 2}
