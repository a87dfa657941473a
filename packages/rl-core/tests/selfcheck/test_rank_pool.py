"""The pool runs functions on ranks and tells whose fault a failure is."""

import signal

import pool_functions
import pytest

from rl_core.errors import WorkerDied, WorkerError
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


def test_each_rank_gets_its_own_arguments_in_its_own_process(pool):
    first, second = pool.run(pool_functions.describe, [("a",), ("b",)])
    assert first[:3] == (0, 2, "a")
    assert second[:3] == (1, 2, "b")
    assert first[3] != second[3]
    assert pool.run("pool_functions:describe", [("c",)]) == [(0, 1, "c", first[3])]


def test_what_is_held_outlives_a_run(pool):
    before = pool.run(pool_functions.count, [(), ()])
    assert pool.run(pool_functions.count, [(), ()]) == [count + 1 for count in before]


def test_a_failure_names_its_rank_and_keeps_the_pool(pool):
    generation = pool.generation
    with pytest.raises(WorkerError, match="the second rank's fault") as caught:
        pool.run(pool_functions.fail_on_one, [(), ()])
    assert caught.value.kind == "builtins.KeyError"
    assert caught.value.origin.rank == 1
    assert "pool_functions.py" in caught.value.traceback
    pool.run(pool_functions.count, [(), ()])
    assert pool.generation == generation


def test_a_rank_that_does_not_answer_is_named_and_replaced(pool):
    generation = pool.generation
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        pool.run(pool_functions.sleep, [(0.0,), (60.0,)], timeout_s=0.5)
    assert pool.run(pool_functions.count, [(), ()]) == [1, 1]
    assert pool.generation == generation + 1


def test_a_run_that_is_cut_off_leaves_nothing_to_the_next(pool):
    class CutOffError(BaseException):
        pass

    def cut_off(number, frame):
        raise CutOffError

    before = signal.signal(signal.SIGALRM, cut_off)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(CutOffError):
            pool.run(pool_functions.sleep, [(0.0,), (60.0,)])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert pool.run(pool_functions.count, [(), ()]) == [1, 1]


def test_a_rank_that_dies_is_named(pool):
    with pytest.raises(WorkerDied, match="rank 0"):
        pool.run(pool_functions.die, [()])


def test_a_rank_that_dies_in_a_call_of_a_model_is_named_once_the_model_is_closed(pool):
    with (
        pytest.raises(WorkerDied, match="rank 1"),
        PooledModel(pool, "pool_functions:mortal", ModelConfig(model_name="none"), ModelSpec(), 2) as model,
    ):
        model.call("die_on_the_second_rank")


def test_more_ranks_than_processes_are_refused(pool):
    with pytest.raises(ValueError, match="3 ranks requested from a pool of 2"):
        pool.run(pool_functions.count, [()] * 3)


@pytest.mark.parametrize(("visible", "own"), [("", ["0", "1"]), ("4,6,7", ["4", "6"])])
def test_each_rank_sees_one_gpu(monkeypatch, visible, own):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pool = RankPool(2, device="cuda")
    assert [pool._variables(rank) for rank in range(2)] == [{"CUDA_VISIBLE_DEVICES": each} for each in own]
    assert RankPool(2)._variables(0) == RankPool(2, device="rehearsal")._variables(0) == {}


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match="2 ranks need as many GPUs, but CUDA_VISIBLE_DEVICES lists 1"):
        RankPool(2, device="cuda")._variables(1)
