"""Trainer and generator compute the same bits in whole runs."""

import json

import pytest

from rl_core.testing.exhaustive import exhaustive

SMALL = (
    "policy.generation.backend=hf",
    "policy.generation.exact=true",
    "policy.train_global_batch_size=16",
    "grpo.max_num_steps=20",
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "checkpointing.metric_name=null",
    "checkpointing.keep_top_k=null",
    "cluster.device=cpu",
    "logger.tensorboard_enabled=false",
)
PACKED = "policy.sequence_packing.enabled=true"
MESHES = {
    "one rank": ("cluster.cpu_ranks_per_node=1", "policy.generation.temperature=0.8", "policy.generation.top_p=0.9"),
    "fsdp2": ("cluster.cpu_ranks_per_node=2", PACKED),
    "tp2": ("cluster.cpu_ranks_per_node=2", "policy.dtensor_cfg.tensor_parallel_size=2"),
    "pp2": ("cluster.cpu_ranks_per_node=2", "policy.dtensor_cfg.pipeline_parallel_size=2", PACKED),
    "cp2": ("cluster.cpu_ranks_per_node=2", "policy.dtensor_cfg.context_parallel_size=2", PACKED),
}


@exhaustive
@pytest.mark.parametrize("mesh", MESHES)
def test_no_logprob_differs_over_twenty_updates(tmp_path, rl, mesh):
    folder = tmp_path / "run"
    done = rl("train", "grpo-arithmetic", *SMALL, *MESHES[mesh], f"run_dir={folder}")
    assert done.code == 0, done.output
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["mismatch/max"] for line in steps if "mismatch/max" in line] == [0.0] * 20
    assert len({line["weight_version"] for line in steps if "weight_version" in line}) == 20
