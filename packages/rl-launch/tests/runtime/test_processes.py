import shlex
from types import SimpleNamespace

import pytest

from rl_core.devices import CPU, CUDA, REHEARSAL
from rl_core.model_config import ColocatedConfig, ColocatedResources
from rl_core.plugins import Preload
from rl_launch.placement.topology import Claim, plan
from rl_launch.runtime.models import ModelGroup
from rl_launch.runtime.processes import NsysReports, Processes, with_allocators

PYTHON = "/envs/worker/bin/python"


def processes(device, fork_server_s):
    facts = SimpleNamespace(cores=8)
    node = SimpleNamespace(facts=facts, interpreters={"policy": PYTHON, "other": PYTHON}, network_variables={})
    return Processes(
        SimpleNamespace(device=device, network_variables=None, ranks_per_node=2),
        {"n": node},
        None,
        logs="",
        timeouts=None,
        env_vars={},
        env_vars_by_role={},
        preloads={"policy": Preload(("an_engine",), {"ITS_VARIABLE": "1"})},
        fork_server_s=fork_server_s,
    )


@pytest.mark.parametrize(
    ("device", "chosen", "idle"),
    [
        pytest.param(CPU, None, "600", id="by default on a CPU"),
        pytest.param(CPU, 30.0, "30", id="as chosen"),
        pytest.param(CUDA, 30.0, "30", id="as chosen on GPUs"),
        pytest.param(CPU, 0.0, None, id="off"),
        pytest.param(CUDA, None, None, id="off on GPUs by default"),
    ],
)
def test_workers_are_forked_as_the_cluster_section_says(device, chosen, idle):
    made = processes(device, chosen).on("n", "policy")
    if idle is None:
        assert made.python == PYTHON
    else:
        assert made.python.startswith(f"{PYTHON} -P -m rl_core.fork_server")
        assert f"--import=an_engine --idle={idle} " in made.python
    assert made.variables["ITS_VARIABLE"] == "1"


def test_ranks_share_the_cores_of_a_node_whichever_model_they_belong_to():
    made = processes(CPU, 0.0)
    assert made.on("n", "policy", shares_cores=True).variables["OMP_NUM_THREADS"] == "4"
    assert made.on("n", "policy").variables["OMP_NUM_THREADS"] == "8"
    assert [made.cores("n", ranks) for ranks in (0, 1, 2)] == [1, 4, 8]


def test_the_ranks_of_a_model_are_started_on_their_part_of_the_cores():
    made = processes(CPU, 0.0)
    started = []

    def start_worker(process, bundle):
        started.append(process.variables["OMP_NUM_THREADS"])
        raise RuntimeError("nothing is started here")

    made.cluster.start_worker = start_worker
    with pytest.raises(RuntimeError):
        ModelGroup(made, [[SimpleNamespace(node="n")]], role="policy", section="policy", num_gpus=0)
    assert started == ["4"]


def test_a_role_without_modules_to_import_has_no_server():
    assert processes(CPU, 600.0).on("n", "other").python == PYTHON


@pytest.mark.parametrize(
    ("device", "is_colocated", "expanding"),
    [(CUDA, True, {"critic"}), (CUDA, False, {"critic", "policy"}), (CPU, False, set()), (REHEARSAL, False, set())],
)
def test_segments_expand_where_no_other_process_maps_them(device, is_colocated, expanding):
    own = ColocatedResources(gpus_per_node=2)
    colocated = ColocatedConfig() if is_colocated else ColocatedConfig(enabled=False, resources=own)
    claims = [
        Claim("policy", "policy", 1, ColocatedConfig()),
        Claim("critic", "critic", 1, ColocatedConfig()),
        Claim("generation", "policy.generation", 1, colocated),
    ]
    topology = plan(claims, num_nodes=1, ranks_per_node=8, device=device)
    found = with_allocators(dict.fromkeys(topology.claims, Preload(variables={"ITS_VARIABLE": "1"})), topology)
    allocated = {role for role, preload in found.items() if "expandable_segments:True" in preload.variables.values()}
    assert allocated == expanding
    assert all(preload.variables["ITS_VARIABLE"] == "1" for preload in found.values())


def test_a_worker_that_nsys_records_is_started_under_it_without_a_fork_server(tmp_path):
    reports = NsysReports(tmp_path / "profiles" / "step_5-7", frozenset([1]))
    command = shlex.split(reports.command("/env with space/bin/python", "policy-1"))
    assert command[:2] == ["nsys", "profile"]
    assert command[-1] == "/env with space/bin/python"
    assert "--capture-range=cudaProfilerApi" in command
    assert f"--output={tmp_path}/profiles/step_5-7/policy-1" in command
    assert reports.folder.is_dir()
