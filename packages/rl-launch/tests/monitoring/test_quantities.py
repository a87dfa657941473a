"""Readings become the mean and the maximum of a step, and keep their newest value for the endpoint."""

import pytest

from rl_core.usage.meter import GpuUsage, MachineUsage, ProcessUsage
from rl_launch.monitoring.quantities import HEALTH, PROCESS, SystemReadings, readings_of, readings_of_machine

GIB = 2**30


def machine(*gpus, cpu=0.5):
    return MachineUsage(cpu, 3 * GIB, 8 * GIB, GIB, tuple(gpus))


def gpu(index, utilization=0.5, **values):
    known = {"memory_bytes": 2 * GIB, "memory_total_bytes": 80 * GIB, "power_w": 300.0, "temperature_c": 60.0}
    return GpuUsage(index, f"GPU-{index}", utilization, **{**known, **values})


def test_a_step_has_the_mean_and_the_maximum_of_its_readings():
    readings = SystemReadings()
    for cpu in (0.2, 0.9, 0.1):
        readings.add(readings_of_machine("node0", machine(cpu=cpu), ()))
    found = readings.take()
    assert found["system/node0/cpu_utilization"] == pytest.approx(0.4)
    assert found["system/node0/max_cpu_utilization"] == 0.9
    assert found["system/node0/memory_gib"] == found["system/node0/max_memory_gib"] == 3.0
    # totals are constant, and exported only
    assert not [name for name in found if "total" in name]


def test_a_step_counts_only_its_own_readings_and_the_newest_ones_stay():
    readings = SystemReadings()
    readings.add(readings_of(PROCESS, "policy-0", {"worker": "policy-0"}, vars(ProcessUsage(2.5, GIB, None))))
    assert readings.take() == {
        "system/policy-0/cpu_cores": 2.5,
        "system/policy-0/max_cpu_cores": 2.5,
        "system/policy-0/memory_gib": 1.0,
        "system/policy-0/max_memory_gib": 1.0,
    }
    assert not readings.has_any
    assert readings.take() == {}
    assert {reading.quantity.exported: reading.value for reading in readings.newest()} == {
        "rl_worker_cpu_cores": 2.5,
        "rl_worker_resident_memory_bytes": GIB,
    }


def test_gpus_have_a_mean_over_all_of_them():
    readings = SystemReadings()
    readings.add(readings_of_machine("node0", machine(gpu(0, 0.9), gpu(1, 0.5)), ()))
    readings.add(readings_of_machine("node1", machine(gpu(0, 0.1)), ()))
    found = readings.take()
    assert found["system/gpu_utilization"] == pytest.approx(0.5)
    assert found["system/node0/gpu1/power_w"] == 300.0
    assert found["system/node1/gpu0/max_temperature_c"] == 60.0


@pytest.mark.parametrize("used", [("1",), ("GPU-1",)])
def test_only_the_gpus_of_the_run_are_read(used):
    found = readings_of_machine("node0", machine(gpu(0), gpu(1)), used)
    assert {reading.labels.get("gpu") for reading in found} == {None, "1"}


def test_a_value_that_a_gpu_does_not_report_has_no_reading():
    found = list(readings_of_machine("node0", machine(gpu(0, None, power_w=None)), ()))
    assert not {"rl_gpu_utilization_ratio", "rl_gpu_power_watts"} & {each.quantity.exported for each in found}


def test_an_engine_has_readings_of_what_it_reports():
    health = {"num_requests": 7, "num_running": 5, "num_waiting": 2, "kv_cache_usage": 0.25, "num_sampled": 1000}
    readings = SystemReadings()
    readings.add(readings_of(HEALTH, "rollout-worker-0", {"replica": "0"}, health))
    assert readings.take() == {
        "system/rollout-worker-0/running_requests": 5,
        "system/rollout-worker-0/max_running_requests": 5,
        "system/rollout-worker-0/waiting_requests": 2,
        "system/rollout-worker-0/max_waiting_requests": 2,
        "system/rollout-worker-0/kv_cache_usage": 0.25,
        "system/rollout-worker-0/max_kv_cache_usage": 0.25,
    }
    # a counter is exported, and has no mean
    assert [each.value for each in readings.newest() if each.quantity.kind == "counter"] == [1000]


def test_readings_of_what_no_longer_answers_are_forgotten():
    readings = SystemReadings()
    for worker in ("policy-0", "policy-1"):
        readings.add(readings_of(PROCESS, worker, {"worker": worker}, vars(ProcessUsage(1.0, GIB, None))))
    readings.forget("worker", "policy-0")
    assert {reading.labels["worker"] for reading in readings.newest()} == {"policy-1"}
