"""What is said of machines that are odd in one way each."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import ENGINE, H200, HERE, NO_UV, TO_BUILD, TO_COMPILE, TRAINER, FakeMachine, needs, space

from rl_core.devices import CUDA, REHEARSAL
from rl_core.install_command import install_command
from rl_launch.cluster.process_limit import ProcessLimit
from rl_launch.doctor.checks import CHECKS, plan
from rl_launch.doctor.findings import examine
from rl_launch.doctor.machine import Gpu, GpuDriver
from rl_launch.doctor.needs import ModelNeeds, needs_of
from rl_launch.worker_envs.provision import Availability, TorchBuild

ON_GPUS = {"device": CUDA, "ranks_per_node": 2}
DRIVEN = FakeMachine(num_gpus=2, gpu_driver=GpuDriver("580.65", "13.0", (H200, H200)))


def report(machine, **changed):
    return examine(machine, needs(**changed), CHECKS)


def finding(name, machine, **changed):
    return next(each for each in report(machine, **changed).findings if each.name == name)


def test_a_machine_with_everything_can_run():
    seen = report(FakeMachine())
    assert seen.can_run
    assert {each.status for each in seen.findings} == {"ok"}
    assert not any(each.remedy for each in seen.findings)


@pytest.mark.parametrize(
    ("name", "facts", "found", "remedy"),
    [
        ("python", {"python": "3.10.2"}, "3.10.2", "Python >=3.11,<3.14"),
        ("ray", {"ray": None}, "not installed", install_command("rl-launch")),
        ("ray", {"ray_address": "far:6379"}, "RAY_ADDRESS is far:6379, and nothing answers there", "unset RAY_ADDRESS"),
        ("ray", {"ray_address": "auto"}, "nothing answers", "unset RAY_ADDRESS"),
        ("ray folder", {"ray_folder": Path("/a" * 30)}, "too long", "RAY_TMPDIR"),
        ("uv", {"uv": None, "environments": {TRAINER: HERE, ENGINE: NO_UV}}, "not installed", install_command("uv")),
        ("packages of generation", {"environments": {TRAINER: HERE, ENGINE: NO_UV}}, "uv is not", "'engine[cpu]'"),
        ("shared memory", {"shared_memory": None}, "no /dev/shm", "--shm-size"),
        ("ports", {"ports_error": "Operation not permitted"}, "Operation not permitted", "127.0.0.1"),
        ("disk of runs", {"disks": {"runs": space(0.01)}}, "10 MiB of 100 GiB free", "run_dir"),
        ("disk of runs", {"disks": {"runs": space(50, is_writable=False)}}, "is not writable", "run_dir"),
        ("disk of RL_HOME", {"disks": {"/home/me/.cache/rl": space(0)}}, "0 MiB", "RL_HOME"),
        ("disk of Ray", {"disks": {"/tmp/ray": space(1, is_writable=False)}}, "is not writable", "RAY_TMPDIR"),
        ("memory", {"memory_bytes": 2**31, "available_bytes": 2**30}, "1.0 GiB of 2.0 GiB", "more memory"),
        ("processes", {"process_limit": ProcessLimit("pids.max", 120, 20)}, "pids.max allows 120", "--pids-limit"),
    ],
)
def test_what_is_missing_keeps_the_recipe_from_running_and_says_the_remedy(name, facts, found, remedy):
    seen = report(FakeMachine(**facts))
    assert not seen.can_run
    said = next(each for each in seen.missing if each.name == name)
    assert found in said.found
    assert remedy in said.remedy
    assert said.remedy.endswith(".")


@pytest.mark.parametrize(
    ("name", "facts", "found"),
    [
        ("packages of driver", {"unmet": ("rl-launch needs rich>=14, but 13 is installed",)}, "rich>=14"),
        ("plugins", {"broken_plugins": ("entry point bad (rl.policies) of mydata-pkg 0.1.0",)}, "of mydata-pkg 0.1.0"),
        ("ray token", {"token_problem": ("Others can access it", "Run: chmod")}, "Others can"),
        ("ray", {"ray_processes": (4711,)}, "another Ray is running here (process 4711)"),
        ("uv", {"uv": None, "uv_cache": None}, "not installed"),
        (
            "shared memory",
            {"shared_memory": space(1 / 1024, 1 / 1024)},
            "1 MiB of 1 MiB free at /dev/shm; Ray uses /tmp",
        ),
        ("shared memory", {"shared_memory": space(1 / 8, 1 / 8)}, "128 MiB of 128 MiB"),
        ("disk of Ray", {"disks": {"/tmp/ray": space(4, 100)}}, "under 5%"),
        ("open files", {"open_files": (256, 256)}, "at most 256"),
        ("memory", {"available_bytes": 2**30}, "1.0 GiB of 32 GiB"),
        ("cores", {"cores": 0.5}, "0.5 for 2 ranks and 1 engine"),
    ],
)
def test_what_is_only_unfortunate_is_a_warning_with_a_remedy(name, facts, found):
    seen = report(FakeMachine(**facts))
    assert seen.can_run
    said = next(each for each in seen.findings if each.name == name)
    assert said.status == "warning"
    assert found in said.found
    assert said.remedy


CODE = SimpleNamespace(label="code")


def test_an_environment_that_checks_the_machine_is_only_looked_at_if_the_recipe_names_it():
    refused = FakeMachine(environment_says="namespaces are refused. Set sandbox.isolation: landlock")
    said = finding("environment code", refused, environments=(CODE,))
    assert (said.status, said.found) == ("missing", refused.environment_says)
    assert finding("environment code", FakeMachine(environment_says=""), environments=(CODE,)).status == "ok"
    for machine, environments in ((refused, ()), (FakeMachine(), (CODE,))):
        assert all(each.name != "environment code" for each in report(machine, environments=environments).findings)


def test_building_environments_needs_more_disk_and_a_cache():
    small = {"/home/me/.cache/rl": space(3), "/home/me/.cache/uv": space(3)}
    built = FakeMachine(disks=small)
    to_build = FakeMachine(disks=small, environments={TRAINER: TO_BUILD, ENGINE: HERE})
    assert report(built).can_run
    assert {each.name for each in report(to_build).missing} == {"disk of RL_HOME", "disk of uv's cache"}


def test_a_shared_environment_that_lacks_something_is_to_be_completed():
    lacking = Availability("unavailable", problem="engine needs vllm, which is not installed")
    machine = FakeMachine(environments={TRAINER: HERE, ENGINE: lacking})
    assert "cluster.worker_envs=auto" in finding("packages of generation", machine, worker_envs="shared").remedy


def test_a_cluster_of_many_machines_needs_an_address():
    assert finding("ray", FakeMachine(), num_nodes=2).status == "missing"
    assert finding("ray", FakeMachine(), num_nodes=2, device=REHEARSAL).status == "ok"
    reached = FakeMachine(ray_address="head:6379", listening=frozenset({"head:6379"}))
    assert finding("ray", reached, num_nodes=2).status == "ok"
    through_client = FakeMachine(ray_address="ray://head:10001", listening=frozenset({"head:10001"}))
    assert finding("ray", through_client, num_nodes=2).status == "ok"
    assert finding("ray", FakeMachine(ray_address="auto", ray_processes=(7,))).status == "ok"


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 4), (8, 1), (1, 8)])
def test_a_rehearsal_has_the_ranks_and_engines_of_all_its_nodes_here(nodes, gpus):
    rehearsed = {"device": REHEARSAL, "num_nodes": nodes, "ranks_per_node": gpus, "num_engines": nodes * gpus}
    said = finding("cores", FakeMachine(cores=2), **rehearsed)
    assert (said.status, said.found) == ("warning", "2 for 8 ranks and 8 engines")
    assert "cluster.gpus_per_node" in said.remedy
    assert ("cluster.num_nodes" in said.remedy) == (nodes > 1)
    assert report(FakeMachine(), **rehearsed).can_run


def test_processes_that_cannot_fit_into_the_memory_keep_a_recipe_from_running():
    many = {"device": REHEARSAL, "num_nodes": 2, "ranks_per_node": 64, "num_engines": 128}
    said = finding("memory", FakeMachine(memory_bytes=15 * 2**30), **many)
    assert said.status == "missing"
    assert "128 ranks and 128 engines take at least" in said.found
    assert "cluster.num_nodes or cluster.gpus_per_node" in said.remedy


def test_gpus_are_counted_and_named():
    said = finding("gpus", DRIVEN, **ON_GPUS)
    assert said.status == "ok"
    assert said.found == "2 available of 2 x NVIDIA H200 (140 GiB); driver 580.65, CUDA 13.0"
    assert finding("gpus", FakeMachine()).found == "none available; the recipe runs on the CPU"


def test_too_few_gpus_are_missing_unless_the_cluster_is_elsewhere():
    none, one = finding("gpus", FakeMachine(), **ON_GPUS), finding("gpus", FakeMachine(num_gpus=1), **ON_GPUS)
    assert none.status == one.status == "missing"
    assert "cluster.device=cpu" in none.remedy
    assert "cluster.gpus_per_node=1" in one.remedy
    elsewhere = FakeMachine(ray_address="head:6379", listening=frozenset({"head:6379"}))
    assert finding("gpus", elsewhere, **ON_GPUS).status == "warning"
    assert report(elsewhere, **ON_GPUS).can_run


def test_a_driver_that_does_not_answer_is_missing():
    class Broken(FakeMachine):
        @property
        def gpu_driver(self):
            raise OSError("nvidia-smi ended with exit code 9: NVIDIA-SMI has failed")

        @gpu_driver.setter
        def gpu_driver(self, value):
            pass

    said = finding("gpus", Broken(num_gpus=2), **ON_GPUS)
    assert (said.status, said.found) == ("missing", "nvidia-smi ended with exit code 9: NVIDIA-SMI has failed")
    assert finding("gpus", FakeMachine(num_gpus=2), **ON_GPUS).status == "warning"


def test_gpus_in_use_are_a_warning():
    busy = GpuDriver("580.65", "13.0", (H200, type(H200)("NVIDIA H200", 140 * 2**30, 100 * 2**30)))
    said = finding("gpus", FakeMachine(num_gpus=2, gpu_driver=busy), **ON_GPUS)
    assert said.status == "warning"
    assert "memory of 1 is in use" in said.found


@pytest.mark.parametrize(
    ("need_gib", "machine", "status", "found"),
    [
        (29, DRIVEN, "ok", "about 29 GiB of 140 GiB on each GPU"),
        (139, DRIVEN, "warning", "about 139 GiB of 140 GiB on each GPU"),
        (139, FakeMachine(), "ok", "about 139 GiB on each GPU"),
        (None, DRIVEN, "ok", "not estimated: the number of parameters of org/model is not known here"),
    ],
)
def test_the_memory_of_a_model_is_compared_with_the_gpus_that_are_known(need_gib, machine, status, found):
    device_bytes = need_gib and need_gib * 2**30
    model = ModelNeeds("policy", "policy", "org/model", "70.6B parameters by config.json", 64, device_bytes)
    said = finding("memory of policy", machine, models=(model,), **ON_GPUS)
    assert said.status == status
    assert said.found.startswith(found)
    assert ("lora_cfg" in said.remedy) == (status == "warning")
    assert not any(each.name == "memory of policy" for each in report(machine, models=(model,)).findings)


@pytest.mark.parametrize(
    ("machine", "status"), [(DRIVEN, "warning"), (FakeMachine(), "ok"), (replace(DRIVEN, memory_bytes=2**40), "ok")]
)
def test_models_that_wait_in_host_memory_are_compared_with_a_machine_that_has_the_gpus(machine, status):
    models = (
        ModelNeeds("policy", "policy", "m", host_bytes=30 * 2**30),
        ModelNeeds("critic", "value", "m", "", 1, 0, 2**33),
    )
    said = finding("memory", machine, models=models, **ON_GPUS)
    assert said.status == status
    assert "models take about 38 GiB of host memory on each node (estimate)" in said.found
    on_cpu = finding("memory", machine, models=models)
    assert on_cpu.status == ("ok" if machine.memory_bytes == 2**40 else "warning")
    assert "on this machine" in on_cpu.found


@pytest.mark.parametrize(
    ("free_gib", "count", "status", "found"),
    [
        (
            52,
            5,
            "warning",
            "a checkpoint takes about 12 GiB, and the run keeps up to 5, the one being written included",
        ),
        (61, 5, "ok", "keeps up to 5"),
        (13, None, "ok", "keeps all of them"),
        (11, None, "warning", "keeps all of them"),
        (6, 0, "ok", "6.0 GiB of 100 GiB free at /there"),
    ],
)
def test_the_disk_of_runs_must_hold_all_checkpoints_of_a_run(free_gib, count, status, found):
    models = (ModelNeeds("policy", "policy", "m", checkpoint_bytes=12 * 2**30), ModelNeeds("teacher", "teacher", "m"))
    machine = FakeMachine(disks={"runs": space(free_gib)})
    said = finding("disk of runs", machine, models=models, num_checkpoints=count)
    assert said.status == status
    assert found in said.found


def test_torch_must_fit_the_device_and_its_driver():
    without = Availability("driver", torch=TorchBuild("2.13.0+cpu", ""))
    machine = FakeMachine(num_gpus=2, gpu_driver=DRIVEN.gpu_driver, environments={TRAINER: without, ENGINE: HERE})
    assert finding("torch of policy", machine, **ON_GPUS).status == "missing"
    assert finding("torch of generation", machine, **ON_GPUS).status == "ok"
    assert finding("torch of policy", machine).found == "2.13.0+cpu, without CUDA"
    assert report(machine).can_run
    old = FakeMachine(num_gpus=2, gpu_driver=GpuDriver("550.54", "12.4", (H200, H200)))
    said = finding("torch of policy", old, **ON_GPUS)
    assert said.status == "missing"
    assert "the driver 550.54 runs CUDA 12.4" in said.found
    assert "Update the NVIDIA driver to version 580 or later" in said.remedy
    assert "cuda-compat-13-0" in said.remedy


def test_torch_that_is_still_to_be_built_must_fit_the_driver():
    old = GpuDriver("570.86.15", "12.8", (H200, H200))
    machine = FakeMachine(num_gpus=2, gpu_driver=old, environments={TRAINER: TO_BUILD, ENGINE: TO_BUILD})
    assert finding("torch of policy", machine, **ON_GPUS).status == "missing"
    assert finding("torch of policy", machine).status == "ok"
    # as nvidia-smi reports it with the package for forward compatibility
    forward = replace(machine, gpu_driver=replace(old, cuda="13.0"))
    assert finding("torch of policy", forward, **ON_GPUS).status == "ok"


@pytest.mark.parametrize(("has_compiler", "says"), [(True, "(nvcc)"), (False, "(nvcc), which was not found here")])
def test_an_environment_that_compiles_for_an_hour_is_a_warning_with_the_way_to_build_it_first(has_compiler, says):
    machine = FakeMachine(environments={TRAINER: TO_COMPILE, ENGINE: TO_BUILD}, has_cuda_compiler=has_compiler)
    said = finding("packages of policy", machine)
    assert said.status == "warning"
    assert "transformer-engine-torch is compiled, which takes about an hour" in said.found
    assert said.found.endswith(says)
    assert "rl worker-envs some-recipe cluster.device=cuda" in said.remedy
    assert finding("packages of generation", machine).status == "ok"


def test_a_check_that_fails_itself_is_reported_and_the_others_are_made():
    def fails(machine, needs):
        yield from ()
        raise RuntimeError("no /proc here")

    seen = examine(FakeMachine(), needs(), {"odd": fails, **CHECKS})
    assert seen.findings[0].status == "warning"
    assert seen.findings[0].found == "could not be checked: RuntimeError: no /proc here"
    assert len(seen.findings) == len(report(FakeMachine()).findings) + 1
    assert seen.can_run


def test_json_keys_are_those_promised():
    seen = report(FakeMachine(shared_memory=None)).as_json()
    assert {key: seen[key] for key in ("schema", "recipe", "device", "can_run")} == {
        "schema": 1,
        "recipe": "some-recipe",
        "device": "cpu",
        "can_run": False,
    }
    assert set(seen) == {"schema", "recipe", "device", "can_run", "checks"}
    assert all(set(each) == {"name", "status", "found", "remedy"} for each in seen["checks"])


@pytest.mark.parametrize("problems", [[], ["urls.0: cannot be reached"]])
def test_servers_that_do_not_answer_keep_a_recipe_from_running(problems):
    seen = report(FakeMachine(), server_problems=lambda: problems)
    assert seen.can_run == (not problems)
    (found,) = (each for each in seen.findings if each.name == "servers")
    assert (found.status, found.found) == (
        ("missing", problems[0]) if problems else ("ok", "all servers answer, and serve what the run needs")
    )


@pytest.mark.parametrize(
    ("recipe", "overrides", "found"),
    [
        ("deepscaler-1.5b-8k", (), "training of the policy takes most"),
        ("ppo-math-1b", (), "training of the critic takes"),
        ("distill-math", ("teacher.model_name=Qwen/Qwen2.5-72B",), "logprobs of the teacher takes most"),
        (
            "grpo-math-32b",
            ("policy.generation.vllm_cfg.tensor_parallel_size=1",),
            "raise the engine's tensor_parallel_size",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_gpus_here_is_a_warning(recipe, overrides, found):
    small = FakeMachine(num_gpus=8, gpu_driver=GpuDriver("580.65", "13.0", (Gpu("NVIDIA GeForce RTX 4090", 2**34, 0),)))
    (seen,) = plan(small, needs_of(recipe, ["cluster.device=cuda", *overrides], num_gpus=8))
    assert seen.status == "warning"
    assert found in seen.found
    assert f"rl plan {recipe} --device rtx4090" in seen.remedy


def test_a_plan_is_for_a_common_gpu_if_this_machine_has_none_that_is_known():
    (seen,) = plan(FakeMachine(), needs_of("grpo-math-8b", (), num_gpus=0))
    assert (seen.status, seen.found.partition(":")[0]) == ("ok", "grpo-math-8b fits 8 x H100 SXM")
