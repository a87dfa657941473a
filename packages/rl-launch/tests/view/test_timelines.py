"""Answers about traces and profiles."""

import pytest
from made_runs import add_profiles, add_traces, made_run

from rl_core.errors import RunDirectoryError
from rl_launch.run_session.traces.trace_folder import Piece, TraceWriter, trace_files
from rl_launch.view import timelines
from rl_launch.view.answers import ANSWERS
from rl_launch.view.catalog import PageCatalog
from rl_launch.view.parameters import Parameters


@pytest.fixture
def run(tmp_path):
    return made_run(tmp_path / "runs" / "one")


def ask(run, request, **given):
    values = {key: [str(value)] for key, value in {"id": run.name, **given}.items()}
    return ANSWERS[request](PageCatalog([run.parent]), Parameters(values))


def rows_of(answer):
    return {f"{row['process']}/{row['track']}": row for row in answer["rows"]}


def test_a_run_without_traces_says_so(run):
    assert ask(run, "processes")["last"] is None
    assert ask(run, "profiles") == {"profiles": []}
    with pytest.raises(RunDirectoryError, match="no traces"):
        ask(run, "spans")


def test_rows_of_the_whole_run_have_their_busy_share_by_range(run):
    add_traces(run, 30)
    found = ask(run, "processes")
    assert (found["ranges"], found["first"], found["last"]) == ([[1, 20], [21, 40]], 1, 30)
    rows = rows_of(found)
    assert list(rows) == [
        "driver/phases",
        "driver/weight sync",
        "environment-math/turns",
        "policy-0/calls",
        "rollout-worker-0/generation",
    ]
    # the second range is still being written
    assert rows["policy-0/calls"]["busy"] == [0.5, 0.5]
    assert rows["policy-0/calls"]["share"] == pytest.approx(0.5)
    assert rows["rollout-worker-0/generation"]["share"] == pytest.approx(0.45)


def test_a_step_has_the_spans_that_reach_into_it_with_idle_shares(run):
    add_traces(run, 3)
    found = ask(run, "spans", step=2)
    assert (found["step"], found["seconds"]) == (2, 2.0)
    assert found["marks"] == [{"at": 1.0, "text": "rollout worker 1 is lost"}]
    rows = rows_of(found)
    assert rows["policy-0/calls"]["spans"] == [[1.0, 1.0, "train_step", 1, 0]]
    assert rows["policy-0/calls"]["idle"] == 0.5
    # a phase within a phase is one deeper
    assert [span[2:] for span in rows["driver/phases"]["spans"]] == [["validation", 1, 0], ["generation", 1, 1]]
    assert ask(run, "spans")["step"] == 3


def test_neighbouring_spans_are_joined_until_a_row_has_few_enough(run, monkeypatch):
    monkeypatch.setattr(timelines, "MAX_SPANS", 10)
    add_traces(run, 1)
    row = rows_of(ask(run, "spans", step=1))["rollout-worker-0/generation"]
    assert 1 <= len(row["spans"]) <= 10
    assert sum(span[3] for span in row["spans"]) == 800
    # joined for the drawing, not for the share
    assert row["idle"] == pytest.approx(1 - 0.45)


def test_a_step_that_was_made_again_is_shown_as_it_was_made_last(run):
    writer = TraceWriter(run / "traces")
    for begin in (1e6, 9e6):
        writer.append(
            1, [Piece("driver", "steps", "step 1", begin, 1e6), Piece("policy-0", "calls", "infer", begin, begin / 10)]
        )
    writer.flush()
    (row,) = ask(run, "spans", step=1)["rows"]
    assert row["spans"] == [[0.0, 0.9, "infer", 1, 0]]


def test_a_step_whose_file_was_removed_is_an_answer_of_its_own(run):
    add_traces(run, 30)
    trace_files(run / "traces")[0].path.unlink()
    with pytest.raises(RunDirectoryError, match="no trace of step 3"):
        ask(run, "spans", step=3)
    assert ask(run, "processes")["ranges"] == [[1, 20], [21, 40]]


def test_processes_are_in_the_order_of_their_numbers(run):
    writer = TraceWriter(run / "traces")
    names = ["policy-10", "rollout-worker-1", "policy-2", "driver"]
    writer.append(1, [Piece(name, "calls", "call", 1e6, 1e6) for name in names])
    writer.append(1, [Piece("driver", "steps", "step 1", 1e6, 1e6)])
    writer.flush()
    found = [row["process"] for row in ask(run, "spans", step=1)["rows"]]
    assert found == ["driver", "policy-2", "policy-10", "rollout-worker-1"]


def test_profiles_are_listed_with_what_opens_them(run):
    add_profiles(run)
    found = ask(run, "profiles")["profiles"]
    assert [(each["worker"], each["tool"], each["first"], each["last"], each["bytes"]) for each in found] == [
        ("policy-0", "memory", 5, 7, 2048),
        ("policy-0", "torch", 5, 7, 2048),
        ("rollout-worker-0", "py-spy", 5, 7, 2048),
    ]
    assert "ui.perfetto.dev" in found[1]["how"]
