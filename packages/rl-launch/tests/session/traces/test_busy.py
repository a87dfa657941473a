"""Busy shares: unions of intervals, against a count of points."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_launch.run_session.traces.trace_folder import RangeShares, length, overlap, shares_of, union

intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))))


def covered(spans) -> np.ndarray:
    """True for each unit of time that is in one of the spans."""
    units = np.zeros(80, bool)
    for begin, end in spans:
        units[begin:end] = True
    return units


@given(intervals)
def test_a_union_covers_what_its_parts_cover_and_is_disjoint(spans):
    found = union(spans)
    assert length(found) == covered(spans).sum()
    assert (found[1:, 0] > found[:-1, 1]).all()


@given(intervals, intervals)
def test_the_overlap_is_what_both_cover(first, second):
    assert overlap(union(first), union(second)) == (covered(first) & covered(second)).sum()


def test_only_the_time_of_steps_counts():
    def span(process, track, name, begin, duration):
        return {"ph": "X", "pid": process, "tid": track, "name": name, "ts": begin, "dur": duration}

    events = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "driver"}},
        {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "steps"}},
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "policy-0"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "calls"}},
        span(0, 1, "step 1", 1e6, 1e6),
        span(0, 1, "step 2", 3e6, 1e6),
        # half of it is between the steps
        span(1, 1, "save", 1.5e6, 1e6),
        span(1, 1, "nested", 1.6e6, 1e5),
    ]
    found = shares_of(1, 20, events)
    assert (found.seconds, found.shares) == (2.0, {"policy-0/calls": pytest.approx(0.25)})
    assert RangeShares(**json.loads(json.dumps(asdict(found)))) == found


def test_a_file_without_a_whole_step_has_no_shares():
    assert shares_of(1, 20, []) == RangeShares(1, 20, 0.0, {})
