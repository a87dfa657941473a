"""`rl submit` with stand-ins for Slurm's programs; `integration-tests/test_slurm.py` has the real ones."""

import json
import os

import pytest
from typer.testing import CliRunner

from rl_launch.cli.app import app
from rl_launch.commands.submit import log_lines, plan_job, status_of
from rl_launch.run_session.directory.run_directory import RunDirectory
from rl_launch.submit.target import newest_submission, record_submission

SHOWN = (
    "JobId={job} JobName=run UserId=me(1) JobState={state} Reason=None Requeue=1 Restarts=2 ExitCode=0:0 "
    "RunTime=00:01:05 TimeLimit=04:00:00 StartTime=2026-11-26T10:00:00 EndTime=2026-11-26T14:00:00 NodeList=n[1-2]"
)
CPU = ("sft-arithmetic", "cluster.device=cpu")


class Queue:
    """Stand-ins for Slurm's programs, in a folder that is first on the path."""

    def __init__(self, folder):
        self.folder = folder
        self.program("sbatch", '[[ "$*" == *--test-only* ]] || echo 7')
        self.program("scancel", "")
        self.show("JobId=7 JobState=RUNNING")

    def program(self, name, body):
        path = self.folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.folder}/calls\n{body}\n')
        path.chmod(0o755)

    def show(self, *lines):
        """Let scontrol print these lines."""
        (self.folder / "shown").write_text("".join(f"{line}\n" for line in lines))
        self.program("scontrol", f"cat {self.folder}/shown")

    def forget(self):
        """Let scontrol know of no job."""
        self.program("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')

    @property
    def calls(self):
        """The commands so far, except questions."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if not line.startswith(("scontrol show", "scontrol --oneliner", "sacct"))]


@pytest.fixture
def queue(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return Queue(tmp_path / "bin")


def rl(*words):
    return CliRunner().invoke(app, ["submit", *map(str, words)])


def submitted(run, *jobs):
    """A run directory that was submitted as these jobs."""
    (run / "jobs").mkdir(parents=True)
    record_submission(run, "slurm", jobs)
    return run


def test_a_run_is_submitted_once(queue, tmp_path):
    run = tmp_path / "run"
    answer = rl("slurm", *CPU, f"run_dir={run}", "slurm.partition=cpu")
    assert (answer.exit_code, answer.output) == (0, f"job 7\n{run}\n")
    script = run / "jobs" / "slurm.sh"
    assert queue.calls == [f"sbatch --test-only {script}", f"sbatch --parsable {script}"]
    assert "#SBATCH --partition=cpu" in script.read_text()
    assert newest_submission(run).jobs == ("7",)

    again = rl("slurm", *CPU, f"run_dir={run}")
    assert again.exit_code == 2
    assert "submitted as job 7 already (RUNNING)" in again.output
    queue.show("JobId=7 JobState=FAILED")
    assert rl("slurm", *CPU, f"run_dir={run}").exit_code == 0


def test_the_folder_of_a_submitted_run_is_free_for_the_run(queue, tmp_path):
    run = tmp_path / "run"
    rl("slurm", *CPU, f"run_dir={run}")
    directory = RunDirectory(run)
    plan = plan_job("slurm", CPU[0], [CPU[1], f"run_dir={run}"]).plan
    assert directory.open(plan.root, fresh=True) is False
    directory.close()


def test_a_dependency_chain_is_one_job_after_another(queue, tmp_path):
    run = tmp_path / "run"
    rl("slurm", *CPU, f"run_dir={run}", "slurm.continuation=dependency", "slurm.max_jobs=3")
    assert [call.split()[1] for call in queue.calls] == ["--test-only", "--parsable", "--parsable", "--parsable"]
    assert newest_submission(run).jobs == ("7", "7", "7")


def test_a_dry_run_prints_the_script_and_leaves_nothing(queue, tmp_path):
    answer = rl("slurm", *CPU, f"run_dir={tmp_path / 'run'}", "--dry-run")
    assert answer.output.startswith("#!/bin/bash\n")
    assert not (tmp_path / "run").exists()
    assert not (queue.folder / "calls").exists()
    written = rl("slurm", *CPU, f"run_dir={tmp_path / 'run'}", "--output", tmp_path / "job.sh")
    assert written.exit_code == 0
    assert (tmp_path / "job.sh").read_text() == answer.output


def test_what_slurm_refuses_is_reported_in_its_words_and_nothing_is_recorded(queue, tmp_path):
    queue.program("sbatch", 'echo "sbatch: error: invalid partition specified: gpu" >&2; exit 1')
    answer = rl("slurm", *CPU, f"run_dir={tmp_path / 'run'}")
    assert answer.exit_code == 1
    assert "invalid partition specified: gpu" in answer.output
    assert not (tmp_path / "run").exists()
    (tmp_path / "own").mkdir()
    rl("slurm", *CPU, f"run_dir={tmp_path / 'own'}")
    assert list((tmp_path / "own").iterdir()) == []


HUB = ("dpo-helpsteer3",)


def test_inputs_that_are_not_here_are_named_and_refused_for_nodes_without_a_network(queue, tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    own = (*HUB, f"run_dir={tmp_path / 'run'}", f"slurm.env_vars.HF_HOME={tmp_path / 'hf'}", "--dry-run")
    warned = rl("slurm", *own)
    assert warned.exit_code == 0
    assert warned.stdout.startswith("#!/bin/bash\n")
    assert "warning: policy.model_name, data.train" in warned.stderr
    assert "nodes without a network will not find it" in warned.stderr
    refused = rl("slurm", *own, "slurm.env_vars.HF_HUB_OFFLINE=1")
    assert refused.exit_code == 2
    assert "policy.model_name" in refused.stderr
    assert f"not among the downloads in {tmp_path / 'hf' / 'hub'}" in refused.stderr
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert rl("slurm", *own).exit_code == 2
    assert rl("slurm", *own, "slurm.env_vars.HF_HUB_OFFLINE=0").exit_code == 0
    in_container = rl("slurm", *own, "slurm.container={runtime: apptainer, image: i}")
    assert in_container.exit_code == 0
    assert in_container.stderr.startswith(f"warning: slurm.env_vars.HF_HOME: {tmp_path / 'hf'} is below no mount")
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_keys_of_another_queue_are_refused(queue):
    answer = rl("slurm", *CPU, "kubernetes.image=x")
    assert answer.exit_code == 2
    assert "rl submit slurm takes keys of slurm only" in answer.output


def test_without_slurm_the_remedy_is_another_machine_or_a_dry_run(queue, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    answer = rl("slurm", *CPU, f"run_dir={tmp_path / 'run'}")
    assert answer.exit_code == 2
    assert "sbatch is not installed" in answer.output
    assert "--dry-run" in answer.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sft-arithmetic", "slurm.partiton=gpu"), "slurm.partiton"),
        (("sft-arithmetic", "sft.max_num_step=3"), "sft.max_num_step"),
        (("no-such-recipe",), "no-such-recipe"),
        (("sft-arithmetic", "--profile", "absent"), "no profile 'absent'"),
    ],
)
def test_mistakes_are_refused_before_anything_is_submitted(words, said, queue):
    answer = rl("slurm", *words)
    assert answer.exit_code == 2
    assert said in answer.output
    assert not (queue.folder / "calls").exists()


def test_the_state_of_a_job_and_its_run(queue, tmp_path):
    run = submitted(tmp_path / "run", "7")
    queue.show(SHOWN.format(job=7, state="RUNNING"))
    answer = rl("status", run)
    assert "job 7: RUNNING (nodes n[1-2], restarts 2, running for 00:01:05, limit 04:00:00" in answer.output
    assert "run: nothing in this folder yet" in answer.output
    shown = json.loads(rl("status", run, "--json").output)
    assert shown["jobs"]["7"]["is_over"] is False


def test_of_an_array_the_task_that_runs_counts(queue, tmp_path):
    run = submitted(tmp_path / "run", "7")
    states = {9: "PENDING", 8: "RUNNING", 7: "FAILED"}
    queue.show(*(SHOWN.format(job=job, state=state) for job, state in states.items()))
    assert status_of(run)[1]["7"].state == "RUNNING"
    queue.show(*(SHOWN.format(job=job, state=state) for job, state in {8: "COMPLETED", 7: "FAILED"}.items()))
    assert status_of(run)[1]["7"].is_over


def test_of_a_chain_those_that_are_not_over_count(queue, tmp_path):
    run = submitted(tmp_path / "run", "7", "8")
    queue.program("scontrol", 'echo "JobId=$4 JobState=$([[ $4 == 7 ]] && echo FAILED || echo PENDING)"')
    assert list(status_of(run)[1]) == ["8"]


def test_a_job_that_the_controller_has_forgotten_is_over(queue, tmp_path):
    run = submitted(tmp_path / "run", "7")
    queue.forget()
    queue.program("sacct", 'echo "slurm accounting storage is disabled" >&2; exit 1')
    assert "unknown to slurm; it is over" in rl("status", run).output
    queue.program("sacct", 'echo "CANCELLED by 1000|0:0|00:10:00|n1|2026-11-26T10:00:00"')
    (found,) = status_of(run)[1].values()
    assert (found.state, found.is_over, found.details["ran for"]) == ("CANCELLED", True, "00:10:00")


@pytest.mark.parametrize(
    ("state", "words", "calls"),
    [
        ("RUNNING", (), ["scancel --state=PENDING 7", "scancel --state=RUNNING --batch --signal=USR2 7"]),
        ("RUNNING", ("--now",), ["scancel 7"]),
        ("PENDING", (), ["scancel 7"]),
        ("COMPLETED", (), []),
    ],
)
def test_a_running_job_saves_before_it_ends(state, words, calls, queue, tmp_path):
    run = submitted(tmp_path / "run", "7")
    queue.show(SHOWN.format(job=7, state=state))
    assert rl("cancel", run, *words).exit_code == 0
    assert [call for call in queue.calls if call.startswith("scancel")] == calls if calls else not calls


def test_logs_are_of_the_last_attempt_or_of_another(queue, tmp_path):
    run = submitted(tmp_path / "run", "9")
    for attempt, line in (("9.0", "first"), ("10.0", "third"), ("9.1", "second")):
        (run / "jobs" / attempt).mkdir()
        (run / "jobs" / attempt / "driver.log").write_text(f"{line}\n")
    assert rl("logs", run).output == "third\n"
    assert rl("logs", run, "--attempt", "1").output == "second\n"
    absent = rl("logs", run, "--attempt", "3")
    assert absent.exit_code == 2
    assert "it has attempts 0 to 2" in absent.output


def test_logs_are_followed_into_the_next_attempt_until_the_job_is_over(queue, tmp_path):
    run = submitted(tmp_path / "run", "9")

    def write(attempt, text):
        (run / "jobs" / attempt).mkdir(exist_ok=True)
        with (run / "jobs" / attempt / "driver.log").open("a") as file:
            file.write(text)

    write("9.0", "a\nb")
    queue.show(SHOWN.format(job=9, state="RUNNING"))
    lines = log_lines(run, follows=True)
    assert next(lines) == "a"
    write("9.0", "c\n")
    write("9.1", "d\n")
    assert next(lines) == "bc"
    assert next(lines) == "d"
    queue.show(SHOWN.format(job=9, state="COMPLETED"))
    write("9.1", "e\n")
    assert list(lines) == ["e"]


def test_a_shell_is_opened_in_the_running_attempt(queue, tmp_path, monkeypatch):
    run = submitted(tmp_path / "run", "7")
    (run / "jobs" / "8.1").mkdir()
    executed = []
    monkeypatch.setattr(os, "execvp", lambda program, words: executed.append(words))
    queue.show(SHOWN.format(job=7, state="PENDING"))
    assert "no job" in rl("attach", run).output
    queue.show(SHOWN.format(job=7, state="RUNNING"))
    rl("attach", run, "--node", "n2")
    ((program, job, *options),) = executed
    assert (program, job) == ("srun", "--jobid=8")
    assert {"--overlap", "--nodelist=n2", "--pty"} <= set(options)
    assert str(run / "jobs" / "8.1" / "ray.env") in options[-1]


def test_a_run_that_was_not_submitted_is_refused(queue, tmp_path):
    for command in ("status", "logs", "cancel", "attach"):
        answer = rl(command, tmp_path)
        assert answer.exit_code == 2
        assert "was not submitted" in answer.output


def test_every_key_of_a_profile_is_explained(queue):
    answer = rl("profile", "slurm.partition=gpu")
    assert answer.exit_code == 0
    assert 'slurm.partition = "gpu"  (command line)' in answer.output
    assert "slurm.container" in answer.output
