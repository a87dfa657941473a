"""Files of traces: Chrome's format, by range of steps, whole after every death, and bounded."""

import gzip
import json
from collections.abc import Iterator

import pytest

from rl_launch.run_session.traces import trace_folder
from rl_launch.run_session.traces.trace_folder import (
    STEPS_PER_FILE,
    Piece,
    TraceWriter,
    range_of,
    range_shares,
    trace_files,
)


def pieces(step: int, *others: Piece) -> list[Piece]:
    """A step of one second that begins at `step` seconds, half of which a rank works."""
    begin = step * 1e6
    return [
        Piece("driver", "steps", f"step {step}", begin, 1e6),
        Piece("policy-0", "calls", "train_step", begin + 1e5, 5e5),
        *others,
    ]


def whole(path) -> list[dict]:
    """All events of a complete file, by a reader of JSON that knows nothing of lines."""
    return json.loads(gzip.decompress(path.read_bytes()))


def names_of(events: Iterator[dict]) -> list[str]:
    return [event["name"] for event in events if event["ph"] != "M"]


def test_a_complete_file_is_a_chrome_trace(tmp_path):
    writer = TraceWriter(tmp_path)
    writer.append(1, pieces(1, Piece("driver", "restarts", "replica 1 is lost", 1.5e6, None)))
    writer.append(2, pieces(2, Piece("rollout-worker-0", "generation", "generation", 2e6, 3e5, 12)))
    writer.close()

    (file,) = trace_files(tmp_path)
    assert file.path.name == "step_1-20.json.gz"
    events = whole(file.path)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["driver", "policy-0", "rollout-worker-0"]
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for event in events:
        # phases, and the fields that each needs, as in the "Trace Event Format"
        assert event["ph"] in "MXi"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert tracks[event["pid"], event["tid"]] == event["cat"]
        if event["ph"] == "i":
            assert event["s"] == "p"
    (generation,) = (event for event in events if event["name"] == "generation")
    assert (generation["ts"], generation["dur"], generation["args"]) == (2e6, 3e5, {"count": 12})


def test_steps_of_a_range_share_a_file_and_a_later_range_completes_it(tmp_path):
    assert range_of(0) == range_of(1) == (1, STEPS_PER_FILE)
    assert range_of(STEPS_PER_FILE + 1) == (STEPS_PER_FILE + 1, 2 * STEPS_PER_FILE)
    writer = TraceWriter(tmp_path)
    for step in (1, 20, 21):
        writer.append(step, pieces(step))
        writer.flush()
    first, second = trace_files(tmp_path)
    assert (first.is_open, second.is_open) == (False, True)
    assert names_of(second.events()) == ["step 21", "train_step"]
    # late spans of a range that is complete are not lost
    writer.append(20, [Piece("policy-0", "calls", "late", 2e7, 1e5)])
    writer.close()
    assert names_of(iter(whole(trace_files(tmp_path)[1].path)))[-1] == "late"


@pytest.mark.parametrize("cut", range(1, 90))
def test_a_file_that_a_process_was_killed_in_is_continued(tmp_path, cut):
    writer = TraceWriter(tmp_path)
    writer.append(1, pieces(1))
    writer.flush()
    (left,) = trace_files(tmp_path)
    left.path.write_bytes(left.path.read_bytes()[:-cut])

    again = TraceWriter(tmp_path)
    again.append(2, pieces(2))
    again.close()

    found = names_of(iter(whole(trace_files(tmp_path)[0].path)))
    assert found[-2:] == ["step 2", "train_step"]
    assert found[:-2] in ([], ["step 1"])


def test_a_range_that_was_complete_is_continued_with_its_numbers(tmp_path):
    for step in (1, 2):
        writer = TraceWriter(tmp_path)
        writer.append(step, pieces(step))
        writer.close()
    (file,) = trace_files(tmp_path)
    events = whole(file.path)
    assert names_of(iter(events)) == ["step 1", "train_step", "step 2", "train_step"]
    assert sum(event["name"] == "process_name" for event in events) == 2
    # the range counts as it was last summed up
    (shares,) = range_shares(tmp_path)
    assert shares.seconds == 2.0
    assert shares.shares == {"policy-0/calls": 0.5}


def test_files_that_an_earlier_process_left_open_are_completed(tmp_path):
    writer = TraceWriter(tmp_path)
    writer.append(1, pieces(1))
    writer.flush()
    later = TraceWriter(tmp_path)
    later.append(41, pieces(41))
    later.close()
    assert [file.path.name for file in trace_files(tmp_path)] == ["step_1-20.json.gz", "step_41-60.json.gz"]
    assert [shares.first for shares in range_shares(tmp_path)] == [1, 41]


def test_events_and_files_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_folder, "MAX_EVENTS", 10)
    monkeypatch.setattr(trace_folder, "MAX_BYTES", 1000)
    writer = TraceWriter(tmp_path)
    for step in range(1, 101):
        writer.append(step, pieces(step))
    writer.close()
    files = trace_files(tmp_path)
    assert sum(file.path.stat().st_size for file in files) <= 1000
    assert files[-1].last == 100
    assert "more events were dropped" in names_of(files[-1].events())[-1]
    # the shares of the removed ones remain
    assert [shares.first for shares in range_shares(tmp_path)] == [1, 21, 41, 61, 81]


def test_a_folder_without_traces_is_empty(tmp_path):
    assert trace_files(tmp_path / "missing") == []
    assert range_shares(tmp_path / "missing") == []
