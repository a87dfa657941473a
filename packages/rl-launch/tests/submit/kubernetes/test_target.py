"""Jobs are submitted, followed and deleted, with a stand-in for kubectl that answers from files."""

import json
import os

import pytest
import yaml
from job_requests import SITE, request_of
from typer.testing import CliRunner

from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.cli import app
from rl_launch.submit.kubernetes.target import Job, KubectlError, KubernetesTarget
from rl_launch.submit.target import record_submission

KUBECTL = """#!/bin/bash
echo "$*" >> {folder}/calls
show() {{ cat {folder}/"$1" 2> /dev/null || true; }}
case "$*" in
    *"config view"*) echo team ;;
    *"get pods"*) show head ;;
    *"get ray"*) show job ;;
    *" create "*) echo '{{"metadata": {{"uid": "u-1"}}, "status": {{}}}}' > {folder}/job ;;
    *" exec "*)
        export RL_RUN_DIR={folder}/volume RL_JOB=$(show name)
        while [[ $1 != -- ]]; do shift; done
        shift
        exec "$@" ;;
    *" delete "*) [[ ! -e {folder}/refuses ]] || {{ echo forbidden >&2; exit 1; }} ;;
esac
"""
TARGET = KubernetesTarget()
RUNNING = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "rayClusterName": "rl-8b-x"}


class Kubectl:
    """The stand-in and its answers."""

    def __init__(self, folder):
        self.folder = folder
        path = folder / "kubectl"
        path.write_text(KUBECTL.format(folder=folder))
        path.chmod(0o755)

    def show(self, status):
        """The job has this status."""
        (self.folder / "job").write_text(json.dumps({"metadata": {"uid": "u-1"}, "status": status}))

    def run_head(self, job, logs):
        """The head of the job runs, with these logs on its volume."""
        (self.folder / "head").write_text("pod/head\n")
        (self.folder / "name").write_text(job.name)
        for name, text in logs.items():
            path = self.folder / "volume" / "jobs" / f"{job.name}.{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)

    @property
    def changes(self):
        """The commands that have changed something, each without the namespace."""
        calls = (self.folder / "calls").read_text().splitlines()
        return [
            " ".join(call.split()[1:])
            for call in calls
            if any(f" {word} " in call for word in ("create", "delete", "patch"))
        ]


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Kubectl(tmp_path / "bin")


def submitted(tmp_path, settings=SITE):
    request = request_of(settings={**settings, "namespace": "research"})
    file = tmp_path / "kubernetes.yaml"
    file.write_text(TARGET.render(request))
    (id,) = TARGET.submit(file, request)
    return Job.parse(id), file


def test_a_recipe_is_submitted_from_the_command_line_with_the_settings_of_a_profile(kubectl, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "rl").mkdir()
    profile = {"kubernetes": {**SITE, "runs_folder": "/shared/runs", "namespace": "research"}}
    (tmp_path / "rl" / "submit.yaml").write_text(yaml.safe_dump(profile))
    run = tmp_path / "runs" / "mine"

    def rl(*words):
        answer = CliRunner().invoke(app, ["submit", *map(str, words)])
        assert answer.exit_code == 0, answer.output
        return answer.stdout

    words = ("kubernetes", "grpo-math-8b", f"run_dir={run}", "kubernetes.max_attempts=5", "grpo.seed=3")
    files, job = yaml.safe_load_all(rl(*words, "--dry-run"))
    assert not run.exists()
    assert job["spec"]["backoffLimit"] == 4
    assert job["spec"]["entrypoint"].endswith("rl train grpo-math-8b grpo.seed=3 run_dir=/shared/runs/mine")
    id = f"research/rayjob/{job['metadata']['name']}"
    assert rl(*words) == f"job {id}\n{run}\n"
    assert list(yaml.safe_load_all((run / "jobs" / "kubernetes.yaml").read_text())) == [files, job]
    kubectl.show(RUNNING)
    assert f"job {id}: RUNNING (cluster rl-8b-x)" in rl("status", run)
    assert f"{id} is deleted" in rl("cancel", run)


def test_a_job_replaces_one_that_is_over_and_owns_its_files(kubectl, tmp_path):
    kubectl.show({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED"})
    job, file = submitted(tmp_path)
    assert job.id == f"research/rayjob/{job.name}"
    assert job.name in [document["metadata"]["name"] for document in yaml.safe_load_all(file.read_text())]
    deleted, created, patched = kubectl.changes
    assert deleted == f"delete --ignore-not-found --filename={file}"
    assert created == f"create --validate=strict --filename={file}"
    assert patched.startswith(f"patch configmap {job.name} ")
    assert '"kind": "RayJob"' in patched
    assert '"uid": "u-1"' in patched


def test_a_run_whose_job_is_not_over_is_not_submitted_again(kubectl, tmp_path):
    kubectl.show(RUNNING)
    with pytest.raises(RunDirectoryError, match="has a job already"):
        submitted(tmp_path)
    assert not kubectl.changes


def test_the_namespace_and_the_context_are_kubectls_if_they_are_not_set(kubectl, tmp_path):
    (id,) = TARGET.submit(tmp_path / "file", request_of(settings={**SITE, "context": "gpus"}))
    job = Job.parse(id)
    assert (job.namespace, job.context) == ("team", "gpus")
    assert job.command("get") == ["kubectl", "--context=gpus", "--namespace=team", "get"]


@pytest.mark.parametrize(
    ("status", "state", "is_waiting", "is_over"),
    [
        ({}, "New", True, False),
        ({"jobDeploymentStatus": "Initializing"}, "Initializing", True, False),
        ({"jobDeploymentStatus": "Suspended"}, "Suspended", True, False),
        ({"jobDeploymentStatus": "Retrying", "jobStatus": "FAILED", "failed": 2}, "Retrying", True, False),
        (RUNNING, "RUNNING", False, False),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "SUCCEEDED", False, True),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "STOPPED", False, True),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED"}, "FAILED", False, True),
        ({"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, "Failed", False, True),
    ],
)
def test_the_state_of_a_job_is_that_of_its_driver_once_there_is_one(kubectl, status, state, is_waiting, is_over):
    kubectl.show(status)
    found = TARGET.status("research/rayjob/rl-8b")
    assert (found.state, found.is_waiting, found.is_over) == (state, is_waiting, is_over)
    assert found.details.get("failed attempts") == (str(status["failed"]) if "failed" in status else None)


def test_a_job_that_was_deleted_is_over(kubectl):
    assert TARGET.status("research/rayjob/rl-8b").is_over


def test_an_interactive_cluster_runs_until_it_is_deleted(kubectl):
    kubectl.show({"state": "ready", "readyWorkerReplicas": 4})
    found = TARGET.status("research/raycluster/rl-8b")
    assert (found.state, found.is_waiting, found.is_over) == ("ready", False, False)
    kubectl.show({})
    assert TARGET.status("research/raycluster/rl-8b").is_waiting


def test_a_cancelled_job_has_time_to_save_unless_it_is_ended_at_once(kubectl):
    TARGET.cancel("research/rayjob/rl-8b", at_once=False)
    assert kubectl.changes == ["delete rayjob rl-8b --ignore-not-found --wait=false"]
    TARGET.cancel("research/rayjob/rl-8b", at_once=True)
    assert kubectl.changes[2:] == [
        "delete pods --selector=app.kubernetes.io/instance=rl-8b --grace-period=1 --wait=false"
    ]


def test_logs_are_copied_as_they_grow_and_stay_when_the_head_is_gone(kubectl, tmp_path):
    job = Job("rayjob", "rl-8b", "research")
    jobs = tmp_path / "run" / "jobs"
    jobs.mkdir(parents=True)
    record_submission(jobs.parent, "kubernetes", (job.id,))
    assert TARGET.attempts(jobs) == []
    first = "step 1: ä\n".encode()
    kubectl.run_head(job, {"0/driver.log": first, "0/job.log": b"attempt 0\n"})
    assert TARGET.attempts(jobs) == [jobs / "rl-8b.0"]
    kubectl.run_head(job, {"0/driver.log": first + b"step 2\n", "10/driver.log": b"", "2/driver.log": b"again\n"})
    assert TARGET.attempts(jobs) == [jobs / "rl-8b.0", jobs / "rl-8b.2"]
    (kubectl.folder / "head").unlink()
    TARGET.attempts(jobs)
    assert (jobs / "rl-8b.0" / "driver.log").read_bytes() == first + b"step 2\n"
    assert (jobs / "rl-8b.0" / "job.log").read_bytes() == b"attempt 0\n"


def test_a_shell_opens_on_the_head_or_on_a_pod(kubectl, tmp_path):
    job = Job("rayjob", "rl-8b", "research")
    attempt = tmp_path / "run" / "jobs" / "rl-8b.0"
    attempt.mkdir(parents=True)
    record_submission(tmp_path / "run", "kubernetes", (job.id,))
    with pytest.raises(RunDirectoryError, match=r"the head of research/rayjob/rl-8b is not running"):
        TARGET.attach(attempt, "")
    kubectl.run_head(job, {})
    shell = ["kubectl", "--namespace=research", "exec", "--stdin", "--tty", "pod/head", "--", "bash"]
    assert TARGET.attach(attempt, "") == shell
    assert TARGET.attach(attempt, "worker-3")[5] == "worker-3"


def test_what_kubectl_says_is_the_message(kubectl):
    (kubectl.folder / "refuses").touch()
    with pytest.raises(KubectlError, match="forbidden"):
        TARGET.cancel("research/rayjob/rl-8b", at_once=False)


def test_without_kubectl_the_remedy_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="kubectl is not on the PATH"):
        TARGET.status("research/rayjob/rl-8b")
