import numpy as np
import pytest

from rl_algos.data.stream import Stream
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_core.errors import RolloutsFailed
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout
from rl_core.weights import WeightUpdate

PROMPTS = [Prompt(f"p{i}", (), np.array([i], np.int32), "math") for i in range(10)]
SAMPLING = SamplingParams(max_new_tokens=3)


class RecordingPool:
    """Ends groups in another order than they were submitted in."""

    def __init__(self, *, fails=False):
        self.tasks, self.updates, self.taken = [], [], []
        self._fails = fails

    def submit(self, tasks):
        tickets = list(range(len(self.tasks), len(self.tasks) + len(tasks)))
        self.tasks += tasks
        self.taken += tickets
        return tickets

    def next_done(self):
        ticket = self.taken.pop()
        task = self.tasks[ticket]
        good = Rollout(task.prompt.id, *[np.zeros(1)] * 3, (), (), {"reward": 0.0}, "stop")
        rollout = Rollout.failed(task.prompt, "no engine") if self._fails else good
        return ticket, RolloutGroup.of(task.prompt, [rollout for _ in task.seeds])

    def adopt(self, update, *, in_flight=False):
        self.updates.append(update)


def make_source(pool, **kwargs):
    stream = Stream([PROMPTS], seed=1, **kwargs)
    return PacedRolloutSource(pool, stream, sampling=SAMPLING, num_generations=4, seed=7)


def test_each_prompt_comes_once_an_epoch_with_a_seed_for_every_rollout():
    pool = RecordingPool()
    source = make_source(pool)
    groups = [group for _ in range(5) for group in source.collect(2)]
    assert sorted(group.prompt.id for group in groups) == sorted(prompt.id for prompt in PROMPTS)
    seeds = [seed for task in pool.tasks for seed in task.seeds]
    assert len(set(seeds)) == 40


def test_a_source_restored_from_its_state_goes_on_with_the_same_tasks():
    pool, again = RecordingPool(), RecordingPool()
    source, resumed = make_source(pool), make_source(again)
    source.collect(3)
    source.adopt(WeightUpdate(1))
    resumed.restore(source.state())
    source.collect(4)
    resumed.collect(4)
    assert again.tasks == pool.tasks[3:]


def test_what_was_collected_counts_once_an_update_has_been_adopted():
    pool, again = RecordingPool(), RecordingPool()
    source, resumed = make_source(pool), make_source(again)
    source.collect(3)
    source.adopt(WeightUpdate(1))
    source.collect(2)
    resumed.restore(source.state())
    resumed.collect(2)
    assert again.tasks == pool.tasks[3:]


def test_groups_come_in_the_order_of_the_prompts_whichever_ends_first():
    pool = RecordingPool()
    groups = make_source(pool).collect(4)
    assert [group.prompt.id for group in groups] == [task.prompt.id for task in pool.tasks]


def test_the_end_of_the_data_gives_fewer_groups():
    source = make_source(RecordingPool(), max_num_epochs=1)
    assert [len(source.collect(4)) for _ in range(4)] == [4, 4, 2, 0]


def test_an_evaluation_moves_no_position_and_repeats_its_seeds():
    pool = RecordingPool()
    source = make_source(pool)
    evaluation = source.evaluate(PROMPTS[:3], SAMPLING, num_generations=2)
    source.evaluate(PROMPTS[:3], SAMPLING, num_generations=2)
    assert source.state()["prompts"]["drawn"] == [0]
    assert pool.tasks[:3] == pool.tasks[3:]
    assert evaluation.rewards.tolist() == [0, 0, 0]


def test_adopting_reaches_the_pool():
    pool = RecordingPool()
    make_source(pool).adopt(WeightUpdate(3))
    assert pool.updates == [WeightUpdate(3)]


def test_groups_of_which_too_many_failed_are_refused():
    stream = Stream([PROMPTS], seed=1)
    source = PacedRolloutSource(
        RecordingPool(fails=True), stream, sampling=SAMPLING, num_generations=4, seed=7, max_failed_share=0.5
    )
    with pytest.raises(RolloutsFailed, match=r"8 of 8 rollouts failed.* 8 x no engine"):
        source.collect(2)
    with pytest.raises(RolloutsFailed, match="4 of 4 rollouts failed"):
        source.evaluate(PROMPTS[:1], SAMPLING, num_generations=4)
