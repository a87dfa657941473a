import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algos.data.config import weight_at
from rl_algos.data.stream import Stream
from rl_core.errors import DataError

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def items(sizes: list[int]) -> list[list[tuple[int, int]]]:
    return [[(which, index) for index in range(size)] for which, size in enumerate(sizes)]


@settings(deadline=None)
@given(sizes=sizes, seed=st.integers(0, 3), shuffle=st.booleans(), batch=st.integers(1, 7))
def test_every_epoch_holds_every_item_exactly_once(sizes, seed, shuffle, batch):
    data = items(sizes)
    stream = Stream(data, seed=seed, shuffle=shuffle, max_num_epochs=3)
    drawn = []
    for _ in range(stream.num_batches(batch)):
        assert stream.num_left > 0
        drawn += stream.take(batch)
    assert stream.take(batch) == []
    assert stream.epoch == 3
    for epoch in range(3):
        part = drawn[epoch * stream.num_items : (epoch + 1) * stream.num_items]
        assert sorted(part) == sorted(item for dataset in data for item in dataset)


@settings(deadline=None)
@given(sizes=sizes, weights=st.booleans(), before=st.integers(0, 40), seed=st.integers(0, 3))
def test_a_restored_stream_goes_on_where_the_saved_one_was(sizes, weights, before, seed):
    shares = [index + 0.5 for index in range(len(sizes))] if weights else None
    first = Stream(items(sizes), shares, seed=seed)
    first.take(before)
    state = json.loads(json.dumps(first.state()))
    second = Stream(items(sizes), shares, seed=seed)
    second.restore(state)
    assert second.take(30) == first.take(30)
    assert second.num_drawn == before + 30


def test_batch_size_does_not_change_the_order():
    one, many = Stream(items([5, 9])), Stream(items([5, 9]))
    assert [item for _ in range(40) for item in one.take(1)] == many.take(40)


def test_draws_follow_weights_and_each_dataset_is_passed_through_before_it_repeats():
    stream = Stream(items([10, 10]), [3.0, 1.0])
    drawn = stream.take(40)
    assert Counter(which for which, _ in drawn) == {0: 30, 1: 10}
    assert sorted(item for item in drawn if item[0] == 0)[::3] == [(0, index) for index in range(10)]
    # also within every stretch, not only in the end
    for start in range(0, 40, 4):
        assert Counter(which for which, _ in drawn[start : start + 4]) == {0: 3, 1: 1}


def test_shuffling_changes_with_the_epoch_and_the_seed_alone():
    data = items([50])
    first, second = Stream(data, seed=1).take(100), Stream(data, seed=1).take(100)
    assert first == second
    assert first[:50] != first[50:]
    assert first != Stream(data, seed=2).take(100)
    assert first[:50] != data[0]


def test_without_shuffling_items_come_as_they_lie():
    assert Stream(items([3]), shuffle=False).take(7) == [(0, index % 3) for index in range(7)]


def test_the_order_is_the_same_on_every_machine():
    # worked out from the definition: indices in the order of PCG64's raw bits for SeedSequence((7, 0, 0))
    bits = np.random.Generator(np.random.PCG64(np.random.SeedSequence((7, 0, 0)))).bit_generator.random_raw(6)
    assert [index for _, index in Stream(items([6]), seed=7).take(6)] == sorted(range(6), key=lambda i: int(bits[i]))


def test_changed_data_is_refused_on_restore():
    state = Stream(items([4])).state()
    with pytest.raises(DataError, match=r"sizes was \[4\] and is \[5\]"):
        Stream(items([5])).restore(state)
    with pytest.raises(DataError, match="seed was 0 and is 1"):
        Stream(items([4]), seed=1).restore(state)


def test_more_epochs_may_be_asked_for_on_resume():
    first = Stream(items([4]), max_num_epochs=1)
    first.take(4)
    second = Stream(items([4]), max_num_epochs=2)
    second.restore(first.state())
    assert len(second.take(10)) == 4


@pytest.mark.parametrize(("data", "weights"), [([], None), ([[]], None), ([[1], [2]], [1.0]), ([[1]], [0.0])])
def test_what_cannot_be_drawn_from_is_refused(data, weights):
    with pytest.raises(DataError):
        Stream(data, weights)


SCHEDULE = [[(1, 3.0), (5, 3.0), (6, 0.0)], [(3, 1.0), (11, 0.0)], [(6, 0.0), (10, 2.0)]]


def test_weights_are_linear_between_steps_and_constant_outside():
    for points in SCHEDULE:
        steps, values = zip(*points, strict=True)
        for step in range(1, 15):
            assert weight_at(points, step) == pytest.approx(np.interp(step, steps, values))
    assert weight_at(0.5, 7) == 0.5


@given(saved_at=st.integers(0, 14), batch=st.integers(1, 30))
@settings(deadline=None, max_examples=25)
def test_a_schedule_of_weights_is_followed_and_resumed_at_any_step(saved_at, batch):
    def taken(stream, first, last):
        drawn = []
        for step in range(first, last):
            stream.begin(step)
            drawn += [stream.take(batch)]
        return drawn

    whole = Stream(items([5, 7, 3]), SCHEDULE)
    before = taken(whole, 1, saved_at + 1)
    resumed = Stream(items([5, 7, 3]), SCHEDULE)
    resumed.restore(json.loads(json.dumps(whole.state())))
    after = taken(whole, saved_at + 1, 16)
    assert taken(resumed, saved_at + 1, 16) == after
    for step, drawn in enumerate([*before, *after], start=1):
        weights = np.array([weight_at(points, step) for points in SCHEDULE])
        counts = np.bincount([which for which, _ in drawn], minlength=3)
        assert (np.abs(counts - batch * weights / weights.sum()) <= 3).all()
        assert not counts[weights == 0].any()


def test_a_changed_schedule_is_refused_on_restore():
    state = json.loads(json.dumps(Stream(items([4, 4]), [[(1, 1.0), (9, 2.0)], 1.0]).state()))
    Stream(items([4, 4]), [[(1, 1.0), (9, 2.0)], 1.0]).restore(state)
    with pytest.raises(DataError, match="weights was"):
        Stream(items([4, 4]), [[(1, 1.0), (8, 2.0)], 1.0]).restore(state)
