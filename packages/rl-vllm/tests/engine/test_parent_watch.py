import mmap
import multiprocessing
import os
import uuid
from pathlib import Path

from rl_vllm.engine.process_env import CPU_GROUPS, forget_cpu_groups, forget_semaphores


def test_a_semaphore_without_a_name_still_locks_and_leaves_nothing() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    name = f"sem.{lock._semlock.name.removeprefix('/')}"
    assert name in os.listdir("/dev/shm")
    forget_semaphores()
    assert name not in os.listdir("/dev/shm")
    with lock:
        assert not lock.acquire(block=False)


def test_memory_of_a_group_without_a_name_is_still_shared_and_leaves_nothing() -> None:
    ours, others = (Path(f"{CPU_GROUPS}{uuid.uuid4().hex}-tp:0-[0-1]-cpushm_{rank}") for rank in range(2))
    others.touch()
    with ours.open("x+b") as file:
        file.truncate(4096)
        first, second = mmap.mmap(file.fileno(), 4096), mmap.mmap(file.fileno(), 4096)
    forget_cpu_groups()
    first[0] = 7
    assert second[0] == 7
    assert not ours.exists()
    assert others.exists()
    others.unlink()
