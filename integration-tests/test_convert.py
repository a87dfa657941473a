"""Checkpoints of both backends and Hugging Face files, each made of the other."""

import json
import re
import subprocess

import numpy as np
from runs import python_of
from safetensors.numpy import load_file, save_file

from rl_algos.tiny_model import make_tiny_model
from rl_core.plugins import POLICIES
from rl_core.testing.exhaustive import exhaustive


@exhaustive
def test_a_runs_checkpoint_becomes_the_files_that_the_run_exported(driver, quickstart, warm_model, tmp_path):
    target = tmp_path / "hf"
    result = driver.rl("convert", str(quickstart / "sft"), str(target))
    assert result.code == 0, result.output
    assert_same_model(target, warm_model)
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in warm_model.iterdir())


PICKLE = """
import sys
import torch
from safetensors.torch import load_file
weights = load_file(sys.argv[1])
torch.save({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, sys.argv[2])
"""


@exhaustive
def test_pickled_weights_become_safetensors(driver, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    make_tiny_model(source)
    original = source / "model.safetensors"
    original.rename(tmp_path / original.name)
    worker = [python_of(POLICIES, "dtensor"), "-c", PICKLE]
    subprocess.run([*worker, str(tmp_path / original.name), str(source / "pytorch_model.bin")], check=True)
    refused = driver.rl("train", "sft-arithmetic", f"policy.model_name={source}", f"run_dir={tmp_path / 'run'}")
    assert refused.code == 2
    assert "`rl convert FOLDER NEW_FOLDER`" in " ".join(refused.output.split())
    result = driver.rl("convert", str(source), "--to", "hf", str(target))
    assert result.code == 0, result.output
    expected = load_file(tmp_path / original.name)
    found = load_file(target / "model.safetensors")
    np.testing.assert_array_equal(found.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    assert (target / "config.json").read_text() == (source / "config.json").read_text()
    assert driver.rl("config", "show", "sft-arithmetic", f"policy.model_name={target}").code == 0


TWO_RANKS = ("cluster.cpu_ranks_per_node=2", "policy.megatron_cfg.tensor_model_parallel_size=2")


@exhaustive
def test_a_run_becomes_a_checkpoint_of_the_other_backend_and_a_model(driver, quickstart, warm_model, tmp_path):
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "hf"
    for source, made, arguments in (
        (quickstart / "sft", checkpoint, ("--to", "megatron", *TWO_RANKS)),
        (checkpoint, target, ()),
    ):
        result = driver.rl("convert", str(source), str(made), *arguments)
        assert result.code == 0, result.output
        assert agreement(result) <= 1e-5
    assert_same_model(target, warm_model)


@exhaustive
def test_a_checkpoint_of_the_other_backend_becomes_one_of_the_first_again(driver, quickstart, warm_model, tmp_path):
    checkpoint, back, target = tmp_path / "checkpoint", tmp_path / "back", tmp_path / "hf"
    result = driver.rl("convert", str(quickstart / "sft"), str(checkpoint), "--to", "megatron", *TWO_RANKS)
    assert result.code == 0, result.output
    one_rank = ("cluster.cpu_ranks_per_node=1", "policy.megatron_cfg.tensor_model_parallel_size=1")
    result = driver.rl("convert", str(checkpoint), str(back), "--to", "dtensor", *one_rank)
    assert result.code == 0, result.output
    assert agreement(result) <= 1e-5
    result = driver.rl("convert", str(back), str(target), "--verify-with", "megatron", "cluster.cpu_ranks_per_node=1")
    assert result.code == 0, result.output
    assert "starting megatron on 1 ranks" in result.output
    assert agreement(result) <= 1e-5
    assert_same_model(target, warm_model)


@exhaustive
def test_an_adapter_stays_apart_through_a_checkpoint_and_is_merged_in_the_end(driver, warm_model, tmp_path):
    adapter, first, second, target = (tmp_path / name for name in ("adapter", "first", "second", "hf"))
    expected = write_adapter(adapter, warm_model)
    for source, made, arguments in (
        (adapter, first, ("--to", "dtensor", "--adapter")),
        (first, second, ("--to", "megatron", "--adapter")),
        (second, target, ()),
    ):
        result = driver.rl("convert", str(source), str(made), *arguments)
        assert result.code == 0, result.output
        assert agreement(result) <= 1e-5
    merged = load_file(target / "model.safetensors")
    assert merged.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(merged[name], weight, atol=1e-6, err_msg=name)


def agreement(result):
    """The largest difference of logprobs that a conversion has measured."""
    (found,) = re.findall(r"logprobs of the .+? agree with the source's to (\S+)", " ".join(result.output.split()))
    return float(found)


def write_adapter(folder, base, dim=4, alpha=8):
    """Random factors for the projections of a model; its weights with their products."""
    rng = np.random.default_rng(0)
    weights, factors = load_file(base / "model.safetensors"), {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            down = rng.normal(0, 0.1, (dim, weight.shape[1])).astype(np.float32)
            up = rng.normal(0, 0.1, (weight.shape[0], dim)).astype(np.float32)
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            factors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
            weights[name] = weight + alpha / dim * up @ down
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": dim, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, folder / "adapter_model.safetensors")
    return weights


def assert_same_model(found, expected):
    weights, reference = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert weights.keys() == reference.keys()
    assert all((weights[name] == reference[name]).all() for name in reference)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (found, expected)]
    assert configs[0] == configs[1]
