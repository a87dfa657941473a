import multiprocessing
import os

from rl_vllm.parent_watch import forget_semaphores


def test_a_semaphore_without_a_name_still_locks_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    lock = multiprocessing.get_context("spawn").Lock()
    assert set(os.listdir("/dev/shm")) > before
    forget_semaphores()
    assert set(os.listdir("/dev/shm")) <= before
    with lock:
        assert not lock.acquire(block=False)
