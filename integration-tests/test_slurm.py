"""Runs that `rl submit slurm` gives to a real Slurm, whose hosts are namespaces.

Most tests have stand-ins for Ray and the driver, which take no time: they are about the script, the signals of Slurm
and its queue. The others train.
"""

import os
import signal
import stat

import psutil
import pytest
from runs import figures, python_of, steps_of
from slurm_cluster import SlurmCluster, missing_requirement
from slurm_runs import Submitted, is_ray_of, is_script_of

from rl_core.plugins import POLICIES
from rl_core.testing.exhaustive import exhaustive
from rl_launch.run_session.directory.exactly_once import prove
from rl_launch.run_session.directory.run_folder import RunFolder

PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=8 PreemptMode=REQUEUE MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
WARNING = "SlurmctldParameters=preempt_send_user_signal"

pytestmark = [
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement() or "Slurm can run here"),
    pytest.mark.timeout(900),  # jobs with a Ray of their own on several hosts, which share the cores of one machine
]


NODES = ("cluster.device=rehearsal", "cluster.num_nodes=2", "cluster.gpus_per_node=1")


@pytest.fixture
def slurm(tmp_path):
    with SlurmCluster(tmp_path / "slurm") as cluster:
        yield cluster


@pytest.fixture
def bystander():
    """A process of another job on the same machine."""
    process = psutil.Popen(["sleep", "1000"], env={**os.environ, "RL_JOB": "1000000"})
    yield process
    assert process.is_running()
    process.kill()
    process.wait()


def test_a_run_saves_before_the_limit_and_is_continued_until_it_is_finished(slurm, tmp_path, bystander):
    submitted = Submitted(slurm, tmp_path, "sft-arithmetic", *NODES, plan=("wait", "finish"))
    submitted.await_driver(1)
    slurm.run("scancel", "--batch", "--signal=USR1", submitted.job)
    assert submitted.await_end() == "COMPLETED 0:0"
    assert submitted.attempts == [f"{submitted.job}.0", f"{submitted.job}.1"]
    assert sorted(path.name for path in (submitted.run / "checkpoints").iterdir()) == ["step_1", "step_2"]
    assert "COMPLETED" in submitted.rl("status", str(submitted.run))
    submitted.assert_nothing_is_left()


@exhaustive
@pytest.mark.parametrize(("plan", "num_attempts"), [(("fail",), 1), (("wait", "stall", "stall", "finish"), 3)])
def test_a_run_that_fails_or_stays_where_it_is_is_not_continued(plan, num_attempts, slurm, tmp_path):
    keys = ("slurm.max_attempts_without_checkpoint=2",)
    submitted = Submitted(slurm, tmp_path, "sft-arithmetic", *NODES, *keys, plan=plan)
    if plan[0] == "wait":
        submitted.await_driver(1)
        slurm.run("scancel", "--batch", "--signal=USR1", submitted.job)
    assert submitted.await_end() == "FAILED 1:0"
    assert len(submitted.attempts) == num_attempts
    submitted.assert_nothing_is_left()


@exhaustive
@pytest.mark.parametrize(
    ("plan", "end", "commands"),
    [(("fail",), "FAILED 1:0", ["doctor"]), (("finish", "finish"), "COMPLETED 0:0", ["doctor", "train"])],
)
def test_nodes_are_examined_before_the_run_which_does_not_start_if_they_are_not_fit(
    plan, end, commands, slurm, tmp_path
):
    submitted = Submitted(slurm, tmp_path, "sft-arithmetic", *NODES, "slurm.preflight=true", plan=plan)
    assert submitted.await_end() == end
    assert [each.split()[0] for each in submitted.drivers] == commands
    submitted.assert_nothing_is_left()


@exhaustive
@pytest.mark.parametrize(("options", "end"), [((), "COMPLETED 0:0"), (("--now",), "CANCELLED")])
def test_a_cancelled_run_is_not_continued_and_saves_unless_it_is_ended_at_once(
    options, end, slurm, tmp_path, bystander
):
    submitted = Submitted(slurm, tmp_path, "sft-arithmetic", *NODES, plan=("wait", "finish"))
    submitted.await_driver(1)
    submitted.rl("cancel", str(submitted.run), *options)
    assert submitted.await_end().startswith(end)
    assert len(submitted.attempts) == 1
    assert options or (submitted.run / "checkpoints" / "step_1").is_dir()
    submitted.assert_nothing_is_left()


@exhaustive
@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_a_driver_in_a_container_is_told_to_save(runtime, slurm, tmp_path):
    keys = (f"slurm.container.runtime={runtime}", "slurm.container.image=/images/rl")
    submitted = Submitted(slurm, tmp_path, "sft-arithmetic", *NODES, *keys, plan=("wait", "finish"))
    submitted.await_driver(1)
    slurm.run("scancel", "--batch", "--signal=USR1", submitted.job)
    assert submitted.await_end() == "COMPLETED 0:0"
    assert sorted(path.name for path in (submitted.run / "checkpoints").iterdir()) == ["step_1", "step_2"]
    submitted.assert_nothing_is_left()


@exhaustive
@pytest.mark.parametrize("warns", [True, False], ids=["with the site's signal", "without it"])
def test_a_preempted_run_is_continued_after_the_other_job(warns, tmp_path, bystander):
    with SlurmCluster(tmp_path / "slurm", further=PREEMPTION + (WARNING if warns else "")) as slurm:
        submitted = Submitted(slurm, tmp_path, "sft-arithmetic", *NODES, "slurm.partition=low", plan=("wait", "finish"))
        submitted.await_driver(1)
        other = slurm.run(
            "sbatch", "--parsable", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 3"
        )
        assert submitted.await_end() == "COMPLETED 0:0"
        assert slurm.run("scontrol", "show", "job", other.strip()).count("JobState=COMPLETED") == 1
        assert len(submitted.drivers) == 2
        # told in time, it saves
        assert (submitted.run / "checkpoints" / "step_1").is_dir() == warns
        submitted.assert_nothing_is_left()


@exhaustive
@pytest.mark.parametrize("host", ["n1", "n2"])
def test_a_run_without_ray_on_its_first_node_is_continued_and_another_node_is_the_drivers_affair(host, slurm, tmp_path):
    plan = ("wait", "finish") if host == "n1" else ("wait",)
    submitted = Submitted(slurm, tmp_path, "sft-arithmetic", *NODES, plan=plan)
    submitted.await_driver(1)
    (ray,) = (each for each in submitted.processes() if is_ray_of(each, host))
    ray.kill()
    if host == "n2":
        # the driver decides whether the rest is enough
        submitted.until(lambda: "Ray has ended on all other nodes" in submitted.output, "the loss of Ray")
        assert submitted.shown()["JobState"] == "RUNNING"
        submitted.rl("cancel", str(submitted.run))
    assert submitted.await_end() == "COMPLETED 0:0"
    assert len(submitted.attempts) == len(plan)
    submitted.assert_nothing_is_left()


@exhaustive
def test_a_run_on_a_lost_node_is_continued_on_others(tmp_path):
    with SlurmCluster(tmp_path / "slurm", ("n1", "n2", "n3"), "SlurmdTimeout=6") as slurm:
        submitted = Submitted(slurm, tmp_path, "sft-arithmetic", *NODES, plan=("wait", "finish"))
        submitted.await_driver(1)
        first, lost = slurm.run("scontrol", "show", "hostnames", submitted.shown()["NodeList"]).split()
        assert first == "n1"  # Slurm's controller is there
        slurm.kill(lost)
        submitted.until(lambda: "Ray has ended on all other nodes" in submitted.output, "the loss of a node")
        submitted.stop_driver()
        assert submitted.await_end() == "COMPLETED 0:0"
        assert len(submitted.attempts) == 2


@exhaustive
@pytest.mark.parametrize("continuation", ["array", "dependency"])
def test_a_chain_of_jobs_ends_with_its_run(continuation, slurm, tmp_path, bystander):
    keys = (f"slurm.continuation={continuation}", "slurm.max_jobs=4")
    submitted = Submitted(slurm, tmp_path, "sft-arithmetic", *NODES, *keys, plan=("wait", "finish"))
    other = slurm.run("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
    submitted.await_driver(1)
    (script,) = (each for each in psutil.process_iter() if is_script_of(each, submitted))
    script.send_signal(signal.SIGUSR1)
    submitted.await_driver(2)
    submitted.until(lambda: slurm.run("squeue", "--noheader", "--format=%A").split() == [other], "the end of the chain")
    assert len(submitted.attempts) == 2


class Trained(Submitted):
    """A run with the real Ray and driver."""

    def __init__(self, slurm, folder, *words):
        python_of(POLICIES, "dtensor")  # the hosts reach nothing but each other
        super().__init__(slurm, folder, *words, "slurm.ray_options=[--object-store-memory=100000000]")

    def await_step(self, step, timeout=600):
        self.until(lambda: len(steps_of(self.run)) >= step, f"step {step}", timeout)


def test_a_run_trains_over_two_hosts(slurm, tmp_path):
    submitted = Trained(slurm, tmp_path, "sft-arithmetic", *NODES, "sft.max_num_steps=2")
    assert submitted.await_end() == "COMPLETED 0:0", submitted.output
    assert len(steps_of(submitted.run)) == 2
    assert str(submitted.run) in submitted.rl("logs", str(submitted.run))
    token = submitted.run / "jobs" / f"{submitted.job}.0" / "ray-token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    submitted.assert_nothing_is_left()


NUM_STEPS = 16
"""Most of which are left when a run is interrupted after the third."""

GRPO = (
    "grpo-arithmetic",
    *NODES,
    "policy.generation.backend=hf",
    "grpo.num_prompts_per_step=16",
    "policy.train_global_batch_size=64",
    f"grpo.max_num_steps={NUM_STEPS}",
    "grpo.val_period=0",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=2",
)


def signalled(submitted):
    """As before the time limit."""
    submitted.slurm.run("scancel", "--batch", "--signal=USR1", submitted.job)


def preempted(submitted):
    submitted.slurm.run("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 3")


def loses_a_node(submitted):
    _, lost = submitted.slurm.run("scontrol", "show", "hostnames", submitted.shown()["NodeList"]).split()
    submitted.slurm.kill(lost)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, rl):
    """Folder of the run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = rl("train", *GRPO, f"run_dir={folder}")
    assert result.code == 0, result.output
    return folder


@exhaustive
@pytest.mark.parametrize("event", [signalled, preempted, loses_a_node])
def test_an_interrupted_run_is_continued_bit_for_bit(event, whole_run, tmp_path, bystander):
    with SlurmCluster(tmp_path / "slurm", ("n1", "n2", "n3"), f"{PREEMPTION}\nSlurmdTimeout=6") as slurm:
        submitted = Trained(slurm, tmp_path, *GRPO, "slurm.partition=low")
        submitted.await_step(3)
        event(submitted)
        assert submitted.await_end() == "COMPLETED 0:0", submitted.output
        assert len(submitted.attempts) == 2
        assert [line["step"] for line in steps_of(submitted.run)] == list(range(1, NUM_STEPS + 1))
        assert figures(submitted.run) == figures(whole_run)
        assert prove(RunFolder(submitted.run)).holds
        submitted.assert_nothing_is_left()
