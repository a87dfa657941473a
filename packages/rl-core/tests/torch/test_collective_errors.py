"""A failure on one rank reaches the others."""

import logging
from pathlib import Path

import pytest
from collective_error_cases import FILE, wait, work, write

from rl_core.errors import RLError
from rl_core.torch.training.checkpoint_files import BackgroundSave, plain_errors

LOST = "no such shelf"


@pytest.mark.parametrize(
    ("run", "failing", "expected"),
    [
        ("on_rank0", None, [(["worked"], ""), ([], "")]),
        (
            "on_rank0",
            0,
            [([], f"FileNotFoundError: {LOST}"), ([], f"PeerFailed: rank 0 failed: FileNotFoundError: {LOST}")],
        ),
        ("on_all_ranks", None, [(["worked"], ""), (["worked"], "")]),
        (
            "on_all_ranks",
            1,
            [(["worked"], f"PeerFailed: rank 1 failed: FileNotFoundError: {LOST}"), ([], f"FileNotFoundError: {LOST}")],
        ),
    ],
)
def test_a_failure_is_raised_where_it_was_and_repeated_elsewhere(pool, run, failing, expected):
    assert pool.run(work, [(run, failing)] * 2) == expected


def test_ranks_wait_for_a_slow_leader_longer_than_a_collective_may_take(pool):
    assert pool.run(wait, [(), ()]) == [["worked", "worked"], []]


def test_a_write_in_the_background_is_told_to_be_done_once_it_is(pool):
    assert pool.run(write, [(False,), (False,)]) == [[(), None, (FILE,), (FILE,)]] * 2


def test_a_write_that_fails_in_the_background_is_told_once(pool):
    told = "the checkpoint at step_3 was not written: [Errno 28] No space left on device"
    assert pool.run(write, [(True,), (True,)]) == [[(), None, told, ()]] * 2


def test_closing_logs_what_was_not_written(caplog):
    def fail():
        raise OSError(28, "No space left on device")

    background = BackgroundSave()
    background.begin(Path("step_3"), fail, wait=False)
    with caplog.at_level(logging.WARNING):
        background.close()
    assert "the checkpoint at step_3 was not written: [Errno 28] No space left on device" in caplog.text


def test_other_errors_pass_as_they_are():
    with pytest.raises(KeyError), plain_errors(Path("step_3"), "written"):
        raise KeyError("weight")
    with pytest.raises(RLError, match="step_3 was not written"), plain_errors(Path("step_3"), "written"):
        raise PermissionError(13, "Permission denied")
