"""An algorithm of a third party with three models, each with a backend, a size and a mesh of its own.

It is a package with an entry point, installed as a user would.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from driver_process import DriverProcess
from runs import Run, last_kept_step, lines_of

from rl_algos.tiny_model import make_tiny_model
from rl_core.testing.exhaustive import exhaustive

pytestmark = exhaustive

HERE = Path(__file__).parent / "three_roles"
RECIPE = str(HERE / "three-roles.yaml")
ROLLOUTS_RECIPE = str(HERE / "three-roles-rollouts.yaml")

CPU = ("cluster.device=cpu", "cluster.cpu_ranks_per_node=2")
REHEARSAL = ("cluster.device=rehearsal", "cluster.num_nodes=1", "cluster.gpus_per_node=2")
FOUR = (*REHEARSAL, "cluster.gpus_per_node=4")
APART = (
    "value.colocated={enabled: false, resources: {gpus_per_node: 2}}",
    "teachers.first.colocated={enabled: false, resources: {gpus_per_node: 1}}",
)
CPU_APART = ("cluster.device=cpu", "cluster.cpu_ranks_per_node=4", *APART)
FIGURES = ("train/loss", "train/grad_norm", "critic/loss", "critic/grad_norm", "teacher/sum", "values/sum")
MISMATCH = "mismatch/max"
ROLES = {"policy", "critic", "teacher"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Environment variables with which the algorithm is installed, and its models' folder."""
    folder = tmp_path_factory.mktemp("three-roles")
    site = folder / "site"
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    subprocess.run([*install, "--target", str(site), str(HERE)], check=True)
    for seed, (name, size) in enumerate({"policy": 32, "critic": 48, "teacher": 64}.items()):
        make_tiny_model(folder / name, seed=seed, hidden_size=size, num_layers=2)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "THREE_ROLES_MODELS": str(folder)}


@pytest.fixture(scope="module")
def its_driver(tmp_path_factory, installed):
    """Makes its runs in one Ray with four logical GPUs."""
    process = DriverProcess(tmp_path_factory.mktemp("driver") / "log", *FOUR, **installed)
    yield process
    process.close()


def figures(folder, *others):
    return [{name: line[name] for name in (*FIGURES, *others)} for line in lines_of(folder)]


def finished(folder, its_driver, *arguments):
    its_driver.train(folder, RECIPE, *arguments)
    return figures(folder)


def kill_after_the_third_step(run):
    """Leave only the checkpoint of the second step, so that the third is always made again; returns the metrics."""
    run.await_step(3)
    run.kill_all()
    for path in (run.folder / "checkpoints").glob("step_*"):
        if path.name != "step_2":
            shutil.rmtree(path)
    return lines_of(run.folder)


def roles_with_logs(folder):
    return {log.name.rpartition("-")[0] for log in (folder / "logs").glob("*-0.log")}


@pytest.fixture(scope="module")
def colocated(tmp_path_factory, its_driver):
    """Figures of the run that nothing happened to, its models side by side on two CPU ranks."""
    return finished(tmp_path_factory.mktemp("whole") / "run", its_driver, *CPU)


def test_both_models_that_train_learn_and_the_teacher_stays(colocated):
    assert len(colocated) == 6
    assert colocated[-1]["train/loss"] < colocated[0]["train/loss"]
    assert colocated[-1]["critic/loss"] < colocated[0]["critic/loss"]
    assert colocated[-1]["values/sum"] != colocated[0]["values/sum"]


def test_models_that_take_turns_compute_what_those_side_by_side_do(tmp_path, its_driver, colocated):
    in_turns = finished(tmp_path / "run", its_driver, *REHEARSAL, "sft.max_num_steps=2")
    for ours, theirs in zip(in_turns, colocated, strict=False):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_models_on_devices_of_their_own_are_killed_and_each_restored_on_a_device_of_another_kind(
    tmp_path, installed, its_driver, colocated
):
    run = Run.start(tmp_path / "run", RECIPE, *CPU_APART, **installed)
    killed = kill_after_the_third_step(run)
    undisturbed = figures(run.folder)
    resumed = finished(run.folder, its_driver, *FOUR, *APART)
    assert last_kept_step(run.folder, killed) == 2
    assert len(undisturbed) >= 3
    for found in (undisturbed, resumed):
        for ours, theirs in zip(found, colocated, strict=False):
            assert ours == pytest.approx(theirs, rel=1e-4)
    assert len(resumed) == len(colocated)
    checkpoint = run.folder / "checkpoints" / "step_6"
    assert {entry.name for entry in checkpoint.iterdir() if entry.is_dir()} == {"policy", "critic", "hf", "state"}
    assert roles_with_logs(run.folder) == ROLES


def test_generation_takes_turns_with_all_models_is_killed_and_goes_on_bit_for_bit(tmp_path, installed, its_driver):
    arguments = (*REHEARSAL, "sft.max_num_steps=4")
    run = Run.start(tmp_path / "run", ROLLOUTS_RECIPE, *arguments, **installed)
    killed = kill_after_the_third_step(run)
    undisturbed = figures(run.folder, MISMATCH)
    its_driver.train(run.folder, ROLLOUTS_RECIPE, *arguments)
    resumed = figures(run.folder, MISMATCH)
    assert last_kept_step(run.folder, killed) == 2
    assert len(undisturbed) >= 3
    assert resumed[: len(undisturbed)] == undisturbed
    assert len(resumed) == 4
    # the replicas have the weights that the policy then had
    assert max(line[MISMATCH] for line in resumed) < 1e-3
    assert len({line["values/sum"] for line in resumed}) == 4
    assert roles_with_logs(run.folder) == {*ROLES, "rollout-worker"}
