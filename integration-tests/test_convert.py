"""Checkpoints of both backends and Hugging Face files, each made of the other."""

import json

from safetensors.numpy import load_file


def test_a_runs_checkpoint_becomes_the_files_that_the_run_exported(rl, quickstart, warm_model, tmp_path):
    target = tmp_path / "hf"
    result = rl("convert", str(quickstart / "sft"), str(target))
    assert result.code == 0, result.output
    assert_same_model(target, warm_model)
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in warm_model.iterdir())


def test_a_model_becomes_a_megatron_checkpoint_and_a_model_again(rl, warm_model, tmp_path):
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "hf"
    two_ranks = ("cluster.cpu_ranks_per_node=2", "policy.megatron_cfg.tensor_model_parallel_size=2")
    result = rl("convert", str(warm_model), str(checkpoint), "--to", "megatron", *two_ranks)
    assert result.code == 0, result.output
    one_rank = ("cluster.cpu_ranks_per_node=1", "policy.megatron_cfg.tensor_model_parallel_size=1")
    result = rl("convert", str(checkpoint), str(target), *one_rank)
    assert result.code == 0, result.output
    assert_same_model(target, warm_model)


def assert_same_model(found, expected):
    weights, reference = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert weights.keys() == reference.keys()
    assert all((weights[name] == reference[name]).all() for name in reference)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (found, expected)]
    assert configs[0] == configs[1]
