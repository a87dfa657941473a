"""The same run on either training backend and on every kind of mesh, chosen by config alone."""

import json

import numpy as np
import pytest
from runs import assert_same, steps_of
from safetensors.numpy import load_file

from rl_core.testing.exhaustive import exhaustive, partly_exhaustive

HF = "policy.generation.backend=hf"
"""The generator of meshes that send their weights as others do: it starts sooner than vLLM."""

MESHES = {
    "megatron": ["policy.megatron_cfg.enabled=true", HF],
    "megatron, sent to vllm": ["policy.megatron_cfg.enabled=true"],
    "tp2": ["policy.dtensor_cfg.tensor_parallel_size=2"],
    "cp2": ["policy.dtensor_cfg.context_parallel_size=2", HF],
    "pp2": ["policy.dtensor_cfg.pipeline_parallel_size=2", HF],
}


@exhaustive
def test_sft_steps_on_megatron_are_those_on_dtensor(driver, sft, whole_sft, tmp_path):
    driver.train(tmp_path / "run", *sft, "sft.max_num_steps=5", "policy.megatron_cfg.enabled=true")
    assert_same(
        steps_of(tmp_path / "run"), steps_of(whole_sft)[:5], ("train/loss", "train/grad_norm", "train/lr"), 1e-4
    )


@exhaustive
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
        {"tensor_model_parallel_size": 2, "sequence_parallel": "true"},
    ],
)
def test_sft_with_images_on_megatron_is_that_on_dtensor(layout, driver, tmp_path):
    settings = [f"policy.megatron_cfg.{name}={value}" for name, value in layout.items()]
    for backend, further in (("dtensor", []), ("megatron", settings)):
        enabled = f"policy.{backend}_cfg.enabled=true"
        driver.train(tmp_path / backend, "sft-vlm-tiny", "sft.max_num_steps=5", "sft.val_period=5", enabled, *further)
    runs = [steps_of(tmp_path / backend) for backend in ("megatron", "dtensor")]
    assert_same(*runs, ("train/loss", "train/grad_norm"), 1e-4)
    assert runs[0][-1]["val/loss"] == pytest.approx(runs[1][-1]["val/loss"], rel=1e-4)


@exhaustive
@pytest.mark.parametrize("generator", ["vllm", "hf"])
def test_grpo_with_images_on_megatron_is_that_on_dtensor(generator, driver, tmp_path):
    """The weights of tower, projector and language model reach the generator after each step."""
    settings = ["policy.model_name=tiny-vision", "grpo.max_num_steps=3", "grpo.val_period=0"]
    settings += [f"policy.generation.backend={generator}", "checkpointing.metric_name=null"]
    for backend in ("dtensor", "megatron"):
        driver.train(tmp_path / backend, "grpo-clevr-count-tiny", f"policy.{backend}_cfg.enabled=true", *settings)
    found, expected = (steps_of(tmp_path / backend) for backend in ("megatron", "dtensor"))
    assert_same(found, expected, ("reward/mean", "train/loss", "train/grad_norm"), 1e-3)
    assert max(line["mismatch/max"] for line in found) < 1e-3


@exhaustive
def test_sft_goes_on_with_the_same_rows_on_another_number_of_ranks(driver, sft, whole_sft, tmp_path):
    run = tmp_path / "run"
    for steps, ranks in ((4, 2), (8, 1)):
        driver.train(run, *sft, f"sft.max_num_steps={steps}", f"cluster.cpu_ranks_per_node={ranks}")
    assert_same(steps_of(run), steps_of(whole_sft)[:8], ("train/loss", "train/grad_norm", "train/num_tokens"), 1e-4)


@exhaustive
def test_adapters_train_alike_on_both_backends_and_are_saved_for_peft(driver, sft, tmp_path):
    found, saved = {}, {}
    for backend in ("dtensor", "megatron"):
        settings = ["policy.lora_cfg.enabled=true", f"policy.{backend}_cfg.enabled=true", "sft.max_num_steps=4"]
        driver.train(tmp_path / backend, *sft, *settings)
        found[backend] = steps_of(tmp_path / backend)
        saved[backend] = tmp_path / backend / "checkpoints/step_4/adapter"
    described = [json.loads((folder / "adapter_config.json").read_text()) for folder in saved.values()]
    assert described[0] == described[1]
    assert described[0]["target_modules"] == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in saved.values())
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=1e-4, err_msg=name)
    result = driver.rl("convert", str(tmp_path / "megatron"), str(tmp_path / "adapter"), "--adapter")
    assert result.code == 0, result.output
    for path in saved["megatron"].iterdir():
        assert (tmp_path / "adapter" / path.name).read_bytes() == path.read_bytes()
    result = driver.rl("convert", str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert result.code == 0, result.output
    merged = load_file(tmp_path / "merged/model.safetensors")
    for name, weight in load_file(saved["megatron"].parent / "hf/model.safetensors").items():
        np.testing.assert_allclose(merged[name], weight, atol=1e-6, err_msg=name)
    assert_same(found["megatron"], found["dtensor"], ("train/loss", "train/grad_norm"), 1e-4)


@pytest.mark.parametrize("mesh", partly_exhaustive(MESHES, always=["megatron"]))
def test_grpo_steps_are_those_of_two_data_parallel_dtensor_ranks(mesh, driver, grpo, tmp_path, request):
    driver.train(tmp_path / "run", *grpo, "grpo.max_num_steps=4", *MESHES[mesh])
    found = steps_of(tmp_path / "run")
    whole = request.getfixturevalue("whole_hf" if HF in MESHES[mesh] else "whole_grpo")
    assert_same(found, steps_of(whole)[:4], ("reward/mean", "train/loss", "train/grad_norm"), 1e-3)
    assert max(line["mismatch/max"] for line in found) < 1e-3
