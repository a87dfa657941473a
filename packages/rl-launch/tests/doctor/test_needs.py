"""What is read from a recipe."""

import pytest

from rl_core.devices import CPU, CUDA
from rl_core.errors import ConfigError
from rl_launch.doctor import needs_of


def names(needs):
    return {role: str(spec.wanted[0]) for role, spec in needs.workers.items()}


def test_the_device_follows_the_machine_unless_the_recipe_says():
    assert needs_of("grpo-arithmetic", [], num_gpus=0).device == CPU
    assert needs_of("grpo-arithmetic", [], num_gpus=8).device == CUDA
    assert needs_of("grpo-arithmetic", ["cluster.device=cpu"], num_gpus=8).device == CPU
    assert needs_of("grpo-math-1b", [], num_gpus=0).device == CUDA


def test_workers_bring_the_builds_for_the_device():
    on_cpu = needs_of("grpo-arithmetic", [], num_gpus=0)
    assert names(on_cpu) == {"policy": "rl-dtensor[worker]", "generation": "rl-vllm[cpu]", "env.math": "rl-envs"}
    assert names(needs_of("grpo-math-1b", [], num_gpus=0))["generation"] == "rl-vllm[cuda]"
    assert set(names(needs_of("sft-arithmetic", [], num_gpus=0))) == {"policy"}


def test_environments_that_datasets_name_are_needed():
    needs = needs_of("grpo-arithmetic", ["data.train.env_name=reasoning_gym"], num_gpus=0)
    assert "env.reasoning_gym" in names(needs)


def test_ranks_and_the_folder_of_runs_come_from_the_config():
    needs = needs_of("grpo-arithmetic", ["cluster.cpu_ranks_per_node=4", "run_dir=/data/runs/one"], num_gpus=0)
    assert needs.ranks_per_node == 4
    assert str(needs.runs) == "/data/runs"


def test_a_rehearsal_counts_the_engines_of_all_nodes_and_the_cpu_one():
    rehearsed = ["cluster.device=rehearsal", "cluster.gpus_per_node=4", "cluster.num_nodes=2"]
    needs = needs_of("grpo-arithmetic", rehearsed, num_gpus=0)
    assert (needs.num_ranks, needs.num_engines) == (8, 8)
    assert (needs_of("grpo-arithmetic", [], num_gpus=0).num_engines, needs.num_nodes) == (1, 2)
    assert needs_of("sft-arithmetic", rehearsed, num_gpus=0).num_engines == 0


def test_a_wrong_config_is_refused():
    with pytest.raises(ConfigError, match=r"grpo\.sede .* grpo\.seed\?"):
        needs_of("grpo-arithmetic", ["grpo.sede=1"], num_gpus=0)
