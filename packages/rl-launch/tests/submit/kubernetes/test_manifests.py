"""The manifests of a job, read as KubeRay's operator and Kubernetes read them."""

import re

import pytest
import yaml
from job_requests import EVERYTHING, SITE, request_of
from pydantic import ValidationError

from rl_core.devices import CPU
from rl_core.errors import ConfigProblems
from rl_launch.run_config.reading import read_plan
from rl_launch.submit.kubernetes.config import KubernetesConfig
from rl_launch.submit.kubernetes.manifests import SHUTDOWN_MARGIN_S, job_name, manifests, to_text

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MOST_CHARACTERS = 47
"""Of the name of a RayJob: the names of its cluster, services and pods add to it."""


def job_of(**changed):
    return manifests(request_of(**changed))[1]


def pods_of(job):
    cluster = job["spec"]["rayClusterSpec"]
    return cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"][0]["template"]["spec"]


def problems_of(**changed):
    with pytest.raises(ConfigProblems) as found:
        manifests(request_of(**changed))
    return {problem.key for problem in found.value.problems}


def refused(**changed):
    with pytest.raises(ValidationError) as found:
        KubernetesConfig.model_validate({**SITE, **changed})
    return str(found.value)


def test_a_job_has_a_pod_for_each_node_with_its_gpus_and_a_head_without():
    head, worker = pods_of(job_of())
    group = job_of()["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert {group[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {4}
    resources = worker["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "96", "memory": "1200Gi", "nvidia.com/gpu": "8"}
    assert resources["requests"] == resources["limits"]
    assert group["rayStartParams"]["num-gpus"] == "8"
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]


def test_resources_of_networks_are_numbers_or_quantities():
    efa = {"vpc.amazonaws.com/efa": 32, "hugepages-2Mi": "5120Mi"}
    head, worker = pods_of(job_of(settings={**SITE, "rdma": efa}))
    resources = worker["containers"][0]["resources"]
    assert resources["limits"].items() >= {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi"}.items()
    assert resources["requests"] == resources["limits"]
    assert not efa.keys() & head["containers"][0]["resources"]["limits"].keys()
    assert "hugepages-2Mi" in refused(rdma={"hugepages-2Mi": "5 GB"})
    assert "vpc.amazonaws.com/efa" in refused(rdma={"vpc.amazonaws.com/efa": -1})


def test_without_gpus_the_workers_ask_for_none():
    _, worker = pods_of(job_of(device=CPU))
    assert worker["containers"][0]["resources"]["limits"] == {"cpu": "96", "memory": "1200Gi"}


def test_shared_memory_is_in_memory_and_limited_if_asked():
    head, worker = pods_of(job_of())
    (of_worker,) = [volume["emptyDir"] for volume in worker["volumes"] if "emptyDir" in volume]
    (of_head,) = [volume["emptyDir"] for volume in head["volumes"] if "emptyDir" in volume]
    assert of_worker == {"medium": "Memory", "sizeLimit": "600Gi"}
    assert of_head == {"medium": "Memory"}
    assert "/dev/shm" in [mount["mountPath"] for mount in worker["containers"][0]["volumeMounts"]]


def test_a_claim_is_one_volume_wherever_it_is_mounted():
    for pod in pods_of(job_of(settings=EVERYTHING)):
        claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
        assert claims == ["shared", "models"]
        mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["/home/rl/.cache"]["subPath"] == "cache"
        assert mounts["/models"]["readOnly"]
        assert {mount["name"] for mount in mounts.values()} == {volume["name"] for volume in pod["volumes"]}


def test_no_pod_may_become_root_or_call_kubernetes():
    for pod in pods_of(job_of(settings=EVERYTHING)):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 1000
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_pods_have_time_to_save_before_they_are_killed():
    job = job_of(settings={**SITE, "save_margin_s": 600})
    for pod in pods_of(job):
        assert pod["terminationGracePeriodSeconds"] == 600 + SHUTDOWN_MARGIN_S
        assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["bash", "/etc/rl/job/stop.sh"]
        variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "600"


def test_probes_connect_to_ports_that_ray_opens_without_a_dashboard():
    cluster = job_of()["spec"]["rayClusterSpec"]
    head, worker = pods_of(job_of())
    opened = (
        (head, cluster["headGroupSpec"]["rayStartParams"]["port"]),
        (worker, cluster["workerGroupSpecs"][0]["rayStartParams"]["node-manager-port"]),
    )
    for pod, port in opened:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert pod["containers"][0][kind]["tcpSocket"]["port"] == int(port)


def test_secrets_are_references_and_never_values(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    text = to_text(manifests(request_of(settings=EVERYTHING)))
    assert "hf_verysecret" not in text
    (variable,) = [
        each for each in pods_of(job_of(settings=EVERYTHING))[0]["containers"][0]["env"] if "valueFrom" in each
    ]
    assert variable == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "rl", "key": "hf-token"}}}
    assert "would be readable in the manifest" in refused(env_vars={"WANDB_API_KEY": "x"})


@pytest.mark.parametrize(
    ("queue", "job_labels", "pod_fields"),
    [
        ({}, {}, {}),
        ({"priority": "high"}, {}, {"priorityClassName": "high"}),
        (
            {"scheduler": "kueue", "name": "q", "priority": "high"},
            {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "high"},
            {},
        ),
        (
            {"scheduler": "kai", "name": "q", "priority": "high"},
            {"kai.scheduler/queue": "q"},
            {"schedulerName": "kai-scheduler", "priorityClassName": "high"},
        ),
        (
            {"scheduler": "volcano", "name": "q", "priority": "high"},
            {"volcano.sh/queue-name": "q", "ray.io/priority-class-name": "high"},
            {},
        ),
    ],
)
def test_a_queue_finds_its_labels(queue, job_labels, pod_fields):
    job = job_of(settings={**SITE, "queue": queue})
    labels = job["metadata"]["labels"]
    assert {name: value for name, value in labels.items() if not name.startswith("app.")} == job_labels
    for pod in pods_of(job):
        assert {name: pod[name] for name in ("schedulerName", "priorityClassName") if name in pod} == pod_fields
    template = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]
    assert template["metadata"]["labels"].get("kai.scheduler/queue") == job_labels.get("kai.scheduler/queue")


@pytest.mark.parametrize("name", ["8b", "My_Run.2026", "-", "x" * 200, "实验"])
def test_names_are_labels_that_kuberay_accepts_and_no_two_runs_share(name):
    found = job_name(request_of(run_dir=f"/shared/runs/{name}"))
    assert DNS_1035.fullmatch(found)
    assert len(found) <= MOST_CHARACTERS
    assert found != job_name(request_of(run_dir=f"/shared/other/{name}"))


def test_a_job_obeys_the_rules_that_the_operator_checks():
    for settings in (SITE, EVERYTHING):
        spec = job_of(settings=settings)["spec"]
        assert spec["submissionMode"] == "HTTPMode"
        assert "clusterSelector" not in spec
        assert "suspend" not in spec, "Kueue's webhook sets it"
        assert spec["shutdownAfterJobFinishes"], "a job that may be suspended must end its cluster"
        assert spec["backoffLimit"] >= 0
        cluster = spec["rayClusterSpec"]
        assert not cluster.get("enableInTreeAutoscaling")
        assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "for authOptions.mode: token"
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        for group in groups:
            assert "resources" not in group, "they are those of the container"
            assert "labels" not in group["rayStartParams"]
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_a_recipe_that_is_a_file_is_sent_with_the_code_that_it_names(tmp_path):
    (tmp_path / "rewards.py").write_text("def exact(completion, answer):\n    return 1.0\n")
    (tmp_path / "mine.yaml").write_text(
        "defaults: grpo-arithmetic\ndata:\n  train:\n    env_name: rewards.py:exact\ngrpo: {max_num_steps: 7}\n"
    )
    files, job = manifests(request_of(recipe=tmp_path / "mine.yaml", overrides=["grpo.seed=5"]))
    assert (
        job["spec"]["entrypoint"] == "bash /etc/rl/job/run.sh rl train /etc/rl/job/recipe.yaml run_dir=/shared/runs/8b"
    )
    there = tmp_path / "there"
    there.mkdir()
    for name, text in files["data"].items():
        (there / name).write_text(text)
    config = read_plan(str(there / "recipe.yaml")).config
    assert (config.grpo.max_num_steps, config.grpo.seed) == (7, 5)
    (code,) = there.glob("rewards-*.py")
    assert code.read_text() == (tmp_path / "rewards.py").read_text()
    assert config.data.train.env_name == f"{code}:exact"


def test_a_run_directory_of_this_machine_has_its_name_in_the_folder_of_runs():
    settings = {**SITE, "runs_folder": "/shared/runs"}
    job = job_of(settings=settings, run_dir="/home/me/runs/mine")
    assert job["spec"]["entrypoint"].endswith(" run_dir=/shared/runs/mine")
    assert job == job_of(settings=settings, run_dir="/shared/runs/mine")
    found = problems_of(settings={**SITE, "runs_folder": "/runs"}, run_dir="/home/me/mine")
    assert found == {"kubernetes.runs_folder"}


def test_an_interactive_job_is_a_cluster_that_runs_nothing():
    (cluster,) = manifests(request_of(settings={**SITE, "interactive": True}, run_dir="/tmp/anywhere"))
    assert (cluster["kind"], cluster["apiVersion"]) == ("RayCluster", "ray.io/v1")
    assert "preStop" not in to_text([cluster])


def test_a_job_that_cannot_run_is_refused_with_all_of_its_problems():
    settings = {"volumes": [{"claim": "models", "path": "/models", "read_only": True}], "head": {"cpus": 1}}
    found = problems_of(settings=settings, run_dir="/models/run", overrides=["cluster.autoscaling=true"])
    assert found == {
        "kubernetes.image",
        "kubernetes.head.memory",
        "kubernetes.workers.cpus",
        "kubernetes.workers.memory",
        "cluster.autoscaling",
        "kubernetes.runs_folder",
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"volumes": [{"claim": "Shared", "path": "/shared"}]}, "lower-case letters"),
        ({"runs_folder": "/shared/../runs"}, "must be an absolute path"),
        ({"volumes": [{"claim": "a", "path": "shared"}]}, "must be an absolute path"),
        ({"volumes": [{"claim": "a", "path": "/x"}, {"claim": "b", "path": "/x/"}]}, "the path of an earlier volume"),
        ({"workers": {"memory": "64GB"}}, "a quantity of Kubernetes"),
        ({"workers": {"tolerations": [{"key": "a", "operator": "Equal"}]}}, "needs a key and a value"),
        ({"workers": {"tolerations": [{"key": "a", "value": "b"}]}}, "has no effect with operator: Exists"),
        ({"queue": {"name": "q"}}, "has no effect with scheduler: default"),
        ({"queue": {"scheduler": "kueue"}}, "must be set with scheduler: kueue"),
        ({"interactive": True, "max_attempts": 3}, "has no effect with interactive: true"),
        ({"env_vars": {"A": "1"}, "secrets": [{"env_var": "A", "name": "s", "key": "k"}]}, "is set by secrets as well"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(changed, message):
    assert message in refused(**changed)


def test_the_text_loads_back_to_the_manifests():
    documents = manifests(request_of(settings=EVERYTHING))
    assert list(yaml.safe_load_all(to_text(documents))) == documents
