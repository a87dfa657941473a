import os
import pickle
import subprocess
import sys

import pytest

from rl_core.devices import CPU, CUDA, DEVICES, NODE_ADDRESS, REHEARSAL, device_named
from rl_core.devices.kinds import hide_real_gpus
from rl_core.rollouts.generation import Placement


def test_every_kind_is_found_by_its_name_and_survives_a_process_boundary():
    for name, device in DEVICES.items():
        assert device_named(name) == device
        assert pickle.loads(pickle.dumps(device.at(3))) == device.at(3)


def test_an_unknown_kind_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'tpu' is not a kind of device; use one of cpu, cuda, rehearsal"):
        device_named("tpu")


def test_planning_with_devices_imports_no_engine():
    code = "import sys, rl_core.devices as d; d.CUDA.bundle(2); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rehearsal_asks_ray_for_what_gpus_ask_for():
    assert REHEARSAL.bundle(4) == CUDA.bundle(4) == {"GPU": 4, "CPU": 4}
    assert REHEARSAL.num_gpus(2) == CUDA.num_gpus(2) == 2
    assert CPU.num_gpus(2) == 0


def test_a_placement_shows_its_process_its_own_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    device = Placement("cuda", ("2", "GPU-5")).claim(num_ranks=2)
    assert device.visible() == ("2", "GPU-5")


def test_a_placement_without_gpus_has_those_that_ray_shows_its_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert Placement("cuda").claim(num_ranks=2).visible() == ("6", "7")


@pytest.mark.parametrize("seen", ["", "1,2,3"])
def test_ranks_without_a_gpu_and_gpus_without_a_rank_are_refused(monkeypatch, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    with pytest.raises(ValueError, match="a replica of 2 ranks needs 2 GPUs, but its process sees"):
        Placement("rehearsal").claim(num_ranks=2)


def test_a_placement_on_the_cpu_hides_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    Placement("cpu").claim(num_ranks=2)
    assert CPU.visible() == ("0",)


def test_threads_of_cpu_workers_spin_shortly_unless_the_user_says_how(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert CPU.worker_variables(2)["GOMP_SPINCOUNT"] == "20000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert CPU.worker_variables(2)["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in CPU.worker_variables(2)


def test_logical_gpus_share_memory_by_node_and_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv(NODE_ADDRESS, "127.0.0.7")
    assert REHEARSAL.memory_id == "127.0.0.7/3"
    assert REHEARSAL.at(1).memory_id == "127.0.0.7/5"


def test_a_rehearsing_worker_keeps_its_logical_gpus_and_sees_no_real_one(monkeypatch):
    for name, value in REHEARSAL.worker_variables(8).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    hide_real_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert REHEARSAL.visible() == ("1", "2")
    assert Placement("rehearsal", ("3",)).claim(num_ranks=1).visible() == ("3",)
    hide_real_gpus()
    assert REHEARSAL.visible() == ("3",)


def test_a_worker_on_real_gpus_keeps_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    hide_real_gpus()
    assert CUDA.visible() == ("1", "2")
