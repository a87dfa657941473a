"""Spans of a process: bounded, nested, and joined where work overlaps."""

import itertools
import threading
import time

import pytest

from rl_core.tracing.spans import SpanRing


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by 10 whenever it is read."""
    times = itertools.count(10, 10)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(times))


def found(ring):
    return [(span.track, span.name, span.begin, span.end, span.count) for span in ring.take().spans]


def test_spans_come_in_the_order_in_which_they_end_and_only_once(clock):
    ring = SpanRing()
    with ring.span("calls", "outer"), ring.span("calls", "inner"):
        pass
    ring.mark("restarts", "lost")
    assert found(ring) == [
        ("calls", "inner", 20, 30, 1),
        ("calls", "outer", 10, 40, 1),
        ("restarts", "lost", 50, 50, 1),
    ]
    assert found(ring) == []


def test_a_block_that_raises_is_recorded():
    ring = SpanRing()
    with pytest.raises(KeyError), ring.span("calls", "broken"):
        raise KeyError
    assert [span.name for span in ring.take().spans] == ["broken"]


def test_old_spans_are_dropped_and_counted():
    ring = SpanRing(most=3)
    for number in range(5):
        ring.record("calls", str(number), number, number)
    report = ring.take()
    assert [span.name for span in report.spans] == ["2", "3", "4"]
    assert report.num_dropped == 2
    assert ring.take().num_dropped == 0


def test_overlapping_work_is_one_span_with_its_number_of_pieces(clock):
    ring = SpanRing()
    generation = ring.overlapping("generation", "generation")
    with generation:
        with generation:
            pass
        with generation:
            pass
    with generation:
        pass
    assert found(ring) == [("generation", "generation", 10, 20, 3), ("generation", "generation", 30, 40, 1)]


def test_overlapping_work_in_progress_is_cut_when_it_is_collected(clock):
    ring = SpanRing()
    generation = ring.overlapping("generation", "generation")
    with generation:
        assert found(ring) == [("generation", "generation", 10, 20, 1)]
        with generation:
            pass
    # without a gap
    assert found(ring) == [("generation", "generation", 20, 30, 2)]


def test_threads_record_at_the_same_time():
    ring = SpanRing()
    work = ring.overlapping("writing", "writing")

    def record():
        for _ in range(200):
            with work, ring.span("calls", "call"):
                pass

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = ring.take().spans
    assert sum(span.name == "call" for span in spans) == 800
    assert sum(span.count for span in spans if span.name == "writing") == 800
