"""Time without rollouts, on a clock of the test's."""

from hypothesis import given
from hypothesis import strategies as st

from rl_algos.rollouts.worker.worker import IdleTime


class Clock:
    now = 5.0

    def __call__(self):
        return self.now


def test_time_without_work_counts_from_the_first_work_and_once():
    clock = Clock()
    idle = IdleTime(clock)
    assert idle.take() == (0.0, 0.0)
    clock.now = 10.0
    idle.begin()
    clock.now = 13.0
    idle.end()
    clock.now = 20.0
    assert idle.take() == (7.0, 10.0)
    clock.now = 24.0
    idle.begin()
    clock.now = 25.0
    assert idle.take() == (4.0, 5.0)
    clock.now = 26.0
    assert idle.take() == (0.0, 1.0)


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "take"]), st.integers(0, 9)), max_size=30))
def test_looks_add_up_to_the_whole_time(events):
    clock = Clock()
    idle, is_busy, has_begun = IdleTime(clock), False, False
    expected_idle = expected_all = found_idle = found_all = 0.0
    for event, seconds in [*events, ("take", 0)]:
        if event == "take":
            idle_s, all_s = idle.take()
            found_idle, found_all = found_idle + idle_s, found_all + all_s
        elif event == "begin":
            idle.begin()
            is_busy = has_begun = True
        elif is_busy:
            idle.end()
            is_busy = False
        clock.now += seconds
        expected_all += seconds if has_begun else 0
        expected_idle += seconds if has_begun and not is_busy else 0
    idle_s, all_s = idle.take()
    assert (found_idle + idle_s, found_all + all_s) == (expected_idle, expected_all)
