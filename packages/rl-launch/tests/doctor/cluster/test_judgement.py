"""Findings on clusters that are odd in one way each."""

from dataclasses import replace

import pytest
from surveys import GIB, H100, READINGS, ROOM, survey

from rl_core.devices import CPU
from rl_launch.doctor.cluster.examination import ClusterReport
from rl_launch.doctor.cluster.judgement import judged
from rl_launch.doctor.cluster.node_readings import GpuFault, GpuReadings
from rl_launch.doctor.cluster.survey import AllReduce, NodeClock
from rl_launch.doctor.findings import Report

ALL_REDUCE = AllReduce(24, 3, 2**28, 0.012)


def odd(**changed):
    """Findings that are not ok."""
    return [each for each in judged(survey(**{"all_reduce": ALL_REDUCE} | changed)) if each.status != "ok"]


def test_a_healthy_cluster_has_no_finding_that_needs_a_remedy():
    found = list(judged(survey(all_reduce=ALL_REDUCE, hub={})))
    assert {each.status for each in found} == {"ok"}
    assert not any(each.remedy for each in found)
    said = {each.name: each.found for each in found}
    assert said["NVIDIA driver"] == "580.65.06 on all nodes with GPUs"
    assert said["gpus"] == "24 without faults, all free"
    assert said["bandwidth"].endswith("the interfaces promise 10 Gbit/s")
    assert said["all-reduce"].startswith(
        "343 Gbit/s of bus bandwidth by nccl over 24 ranks on 3 nodes (256 MiB in 12 ms)"
    )
    assert said["all-reduce"].endswith("InfiniBand promises 400 Gbit/s")


def test_a_driver_that_is_too_old_for_torch_is_missing_on_each_node_that_has_it():
    old = {"gpus": replace(H100, driver="550.54", cuda="12.4")}
    (said,) = [each for each in judged(survey(node="n1", readings=old, cuda="13.0")) if each.status == "missing"]
    assert (said.name, said.found) == ("NVIDIA driver of n1", "550.54 runs CUDA 12.4; torch is built for 13.0")
    assert "580" in said.remedy
    assert "cuda-compat-13-0" in said.remedy
    for alike in (judged(survey(cuda="13.0")), judged(survey(node="n1", readings=old, cuda="12.8"))):
        assert not [each for each in alike if each.status == "missing"]


BUSY = replace(H100, gpus=(*H100.gpus[:7], replace(H100.gpus[7], used_bytes=30 * GIB)))
PCIE = replace(H100, gpus=tuple(replace(gpu, num_nvlinks=17) for gpu in H100.gpus))


@pytest.mark.parametrize(
    ("name", "status", "readings", "found", "remedy"),
    [
        ("python of n1", "missing", {"python": "3.11.2"}, "3.11.2; the driver's is 3.12.4", "Install python 3.12.4"),
        ("ray of n1", "missing", {"ray": "2.59.0"}, "2.59.0", "Install ray 2.60.0"),
        ("NVIDIA driver of n1", "warning", {"gpus": replace(H100, driver="570.1")}, "most nodes have 580", "alike"),
        ("CUDA of the driver of n1", "warning", {"gpus": replace(H100, cuda="12.8")}, "most nodes have 13.0", "alike"),
        ("GPUs of n1", "missing", {"gpus": GpuReadings(problem="NVML: no driver")}, "no driver", "nvidia-smi"),
        ("GPUs of n1", "missing", {"gpus": replace(H100, gpus=H100.gpus[:7])}, "7 answer, and Ray", "replace the GPU"),
        ("NVLinks of n1", "warning", {"gpus": PCIE}, "8 x 17 NVLinks; most nodes have 8 x 18", "alike"),
        ("GPU memory of n1", "warning", {"gpus": BUSY}, "GPU 7 30 GiB", "nvidia-smi"),
        (
            *("GPUs of n1", "missing", {"gpus": replace(H100, faults=(GpuFault("GPU 3 is lost", is_fatal=True),))}),
            *("GPU 3 is lost", "Xid"),
        ),
        (
            *("GPUs of n1", "warning", {"gpus": replace(H100, faults=(GpuFault("GPU 3 is hot", is_fatal=False),))}),
            *("GPU 3 is hot", "Xid"),
        ),
        (
            *("disk of runs on n1", "missing", {"rooms": {"runs": replace(ROOM, free_bytes=2**20)}}),
            *("1 MiB of 100 GiB free at /there", "run_dir"),
        ),
        (
            *("disk of Ray on n1", "warning", {"rooms": {"Ray": replace(ROOM, free_bytes=GIB)}}),
            *("1.0 GiB of 100 GiB", "--temp-dir"),
        ),
        (
            *("disk of runs on n1", "missing", {"rooms": {"runs": replace(ROOM, is_writable=False)}}),
            *("/there is not writable", "run_dir"),
        ),
        ("shared memory of n1", "warning", {"shared_memory": None}, "no /dev/shm", "--shm-size"),
        (
            *("shared memory of n1", "warning", {"shared_memory": replace(ROOM, total_bytes=GIB)}),
            *("1.0 GiB, less than Ray's object store of 30 GiB", "object store"),
        ),
        ("limits of n1", "warning", {"limits": {"nofile": 1024, "memlock": 65536}}, "nofile 1024, memlock", "ulimit"),
        ("network interface of n1", "warning", {"ethernet_bytes_per_s": 1.25e8}, "1 Gbit/s, most", "ethtool"),
        ("InfiniBand of n1", "warning", {"infiniband_bytes_per_s": {"mlx5_0/1": 25e9}}, "200 Gbit/s, most", "ibstat"),
        ("InfiniBand of n1", "warning", {"inactive_infiniband": ("mlx5_1/1 (INIT)",)}, "mlx5_1/1", "subnet"),
    ],
)  # fmt: skip
def test_an_odd_node_is_named_with_a_remedy(name, status, readings, found, remedy):
    said = next(each for each in odd(node="n1", readings=readings) if each.name == name)
    assert said.status == status
    assert found in said.found
    assert remedy in said.remedy
    assert said.remedy.endswith(".")


@pytest.mark.parametrize(
    ("clock", "found"),
    [
        (NodeClock(1.5, 0.001), "1.5 s ahead of the driver's clock (± 1 ms)"),
        (NodeClock(-0.2, 0.001), "0.2 s behind the driver's"),
        (NodeClock(0.2, 0.15), None),
        (NodeClock(0.05, 0.001), None),
    ],
)
def test_a_clock_is_wrong_if_the_round_trip_does_not_explain_it(clock, found):
    said = odd(clocks={"n0": NodeClock(0, 0.001), "n1": clock})
    assert [each.name for each in said] == (["clock of n1"] if found else [])
    assert all(found in each.found for each in said)


def test_nodes_with_the_same_problem_are_in_one_line():
    (said,) = odd(unshared={"n1": "it does not exist", "n2": "it does not exist"})
    assert said.name == "run directory on n1, n2"
    assert said.found == "/shared/runs: it does not exist"
    assert said.status == "missing"


def test_silent_nodes_are_named_and_too_few_remain():
    said = odd(silent={"n2": "it did not answer within 60 s while waiting for facts of the node"})
    assert [each.name for each in said] == ["nodes", "node n2"]
    assert said[0].found == "3 in the cluster, 2 with 8 GPUs; 3 needed"
    assert {each.status for each in said} == {"missing"}


def test_a_cluster_that_adds_nodes_may_have_too_few():
    assert [each.status for each in odd(num_nodes=4)] == ["missing"]
    assert [each.status for each in odd(num_nodes=4, autoscaling=True)] == ["warning"]


def test_models_and_hub_are_judged_by_node():
    said = odd(unlike_models={"policy.model_name /models/8b": {"n1": "it does not exist"}}, hub={"n2": "timed out"})
    assert [each.name for each in said] == ["policy.model_name /models/8b on n1", "model hub on n2"]
    assert {each.status for each in said} == {"missing"}


def test_gpus_and_locked_memory_matter_only_to_a_recipe_on_gpus():
    readings = {"gpus": GpuReadings(problem="no driver"), "limits": {"nofile": 2**20, "memlock": 65536}}
    assert not odd(device=CPU, ranks_per_node=1, node="n1", readings=readings)
    assert READINGS.infiniband_bytes_per_s


def test_the_object_names_nodes_transfers_and_the_all_reduce():
    found = survey(2, silent={"n1": "lost"}, clocks={}, broken={("n0", "n1"): "refused"}, all_reduce=ALL_REDUCE)
    seen = ClusterReport(Report("some-recipe", "cuda", tuple(judged(found)), place="on this cluster"), found).as_json()
    assert seen["schema"] == 1
    assert not seen["can_run"]
    assert [(node["name"], node["problem"], node["clock"]) for node in seen["nodes"]] == [
        ("n0", "", None),
        ("n1", "lost", None),
    ]
    assert seen["transfers"][0] == {"sender": "n0", "receiver": "n1", "bytes_per_s": 1.125e9, "problem": "refused"}
    assert seen["all_reduce"]["bus_bytes_per_s"] == pytest.approx(2 * 23 / 24 * 2**28 / 0.012)
