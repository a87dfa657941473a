"""Runs as they are submitted to Kubernetes, with the settings of a site."""

from pathlib import Path

from rl_core.config import as_written
from rl_core.devices import CUDA
from rl_launch.run_config.reading import read_plan
from rl_launch.submit.kubernetes.config import KubernetesConfig
from rl_launch.submit.target import JobRequest

SITE = {
    "image": "registry.example.com/rl:0.2.0",
    "volumes": [{"claim": "shared", "path": "/shared"}],
    "workers": {"cpus": 96, "memory": "1200Gi", "shared_memory": "600Gi"},
}

EVERYTHING = {
    **SITE,
    "namespace": "research",
    "image_pull_secrets": ["registry"],
    "service_account": "rl",
    "volumes": [
        {"claim": "shared", "path": "/shared"},
        {"claim": "shared", "path": "/home/rl/.cache", "sub_path": "cache"},
        {"claim": "models", "path": "/models", "read_only": True},
    ],
    "head": {"cpus": 8, "memory": "32Gi", "node_selector": {"pool": "cpu"}},
    "workers": {
        **SITE["workers"],
        "node_selector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu"}, {"key": "team", "operator": "Equal", "value": "research"}],
        "annotations": {"k8s.v1.cni.cncf.io/networks": "roce-0"},
    },
    "rdma": {"rdma/hca_shared_devices_a": 8},
    "queue": {"scheduler": "kueue", "name": "research", "priority": "high"},
    "env_vars": {"HF_HOME": "/shared/huggingface"},
    "secrets": [{"env_var": "HF_TOKEN", "name": "rl", "key": "hf-token"}],
}


def request_of(settings=SITE, recipe="grpo-math-8b", overrides=(), run_dir="/shared/runs/8b", device=CUDA):
    """A run of a recipe on 4 nodes with 8 GPUs each."""
    plan = read_plan(str(recipe), ["cluster.num_nodes=4", "cluster.gpus_per_node=8", *overrides])
    return JobRequest(
        name=Path(run_dir).name,
        run_dir=Path(run_dir),
        recipe=str(recipe),
        overrides=("cluster.num_nodes=4", *overrides),
        is_written=lambda key: False,
        num_nodes=4,
        gpus_per_node=8,
        device=device,
        settings=KubernetesConfig.model_validate(settings),
        config=plan.config,
        tree=plan.without_unused(as_written(plan.root)),
    )
