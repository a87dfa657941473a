"""Readings agree with psutil read by hand."""

import os
import pickle
import subprocess
import sys
import time

import psutil
import pytest
from fake_nvml import FakeGpu, FakeNvml

from rl_core.usage import meter as meter_module
from rl_core.usage.meter import CoreMeter, Meter, ProcessMeter, read_memory, read_shared_memory


def test_the_first_reading_of_a_process_counts_from_its_start():
    this = psutil.Process()
    before = _used_s(this), time.time() - this.create_time()
    found = ProcessMeter(with_children=False).read(None)
    after = _used_s(this), time.time() - this.create_time()
    assert before[0] / after[1] <= found.cpu_cores <= after[0] / before[1]
    assert found.memory_bytes == pytest.approx(this.memory_info().rss, rel=0.1)
    assert found.gpu_memory_bytes is None


def _used_s(process):
    times = process.cpu_times()
    return times.user + times.system


def test_the_next_reading_counts_only_what_was_used_since(monkeypatch):
    seconds = {1: 10.0, 2: 3.0}
    monkeypatch.setattr(
        meter_module, "_processes", lambda with_children: [(pid, used, 100) for pid, used in seconds.items()]
    )
    now = [1000.0]
    meter = ProcessMeter(clock=lambda: now[0])
    meter.read(None)
    # process 2 has ended, process 3 was started since
    seconds |= {1: 14.0, 3: 2.0}
    del seconds[2]
    now[0] += 4.0
    found = meter.read({1: 7, 3: 5, 99: 1000})
    assert (found.cpu_cores, found.memory_bytes, found.gpu_memory_bytes) == (6.0 / 4.0, 200, 12)


def test_descendants_count_with_a_process():
    alone = ProcessMeter(with_children=False).read(None).memory_bytes
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child_bytes = psutil.Process(child.pid).memory_info().rss
        together = ProcessMeter().read({child.pid: 42})
        child.communicate(b"\n")
    assert together.memory_bytes >= alone + child_bytes // 2
    assert together.gpu_memory_bytes == 42


def test_descendants_can_be_left_out():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = ProcessMeter(with_children=False).read({child.pid: 42})
        child.communicate(b"\n")
    assert found.gpu_memory_bytes is None


def test_cores_of_a_machine_are_a_share_of_the_time_between_two_readings(monkeypatch):
    first = psutil.cpu_times()
    later = first._replace(user=first.user + 30, guest=first.guest + 10, iowait=first.iowait + 20, idle=first.idle + 50)
    readings = iter([first, later, later])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(readings))
    meter = CoreMeter()
    # the time of guests is part of the time of users
    assert meter.read() == pytest.approx(30 / (30 + 20 + 50))
    assert meter.read() == 0.0


def test_memory_is_what_psutil_says():
    used, total = read_memory()
    memory = psutil.virtual_memory()
    assert total == memory.total
    assert used == pytest.approx(memory.total - memory.available, rel=0.2)
    assert read_shared_memory() == pytest.approx(psutil.disk_usage("/dev/shm").used, rel=0.2, abs=2**26)


def test_a_machine_is_read_only_on_request_and_a_reading_crosses_processes(monkeypatch):
    gpu = FakeGpu(utilization=50, processes=[(os.getpid(), 11)])
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([gpu]))
    meter = Meter()
    assert meter.read(with_machine=False).machine is None
    found = pickle.loads(pickle.dumps(meter.read(with_machine=True)))
    assert found.process.gpu_memory_bytes == 11
    assert [each.utilization for each in found.machine.gpus] == [0.5]
