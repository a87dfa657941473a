"""A run of a sweep, which shares its driver, its Ray or its base model with other runs, is the run of `rl train`."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl_core.testing.exhaustive import exhaustive

KEYS = ("sft.max_num_steps=3", "sft.val_period=3", "cluster.cpu_ranks_per_node=1")


@exhaustive
def test_the_runs_of_a_sweep_are_those_of_rl_train_to_the_last_bit(driver, rl, metrics, tmp_path):
    result = driver.rl("sweep", "sft-arithmetic", "sft.seed=1,2", *KEYS, f"run_dir={tmp_path / 'sweep'}")
    assert result.code == 0, result.output
    result = rl("train", "sft-arithmetic", "sft.seed=2", *KEYS, f"run_dir={tmp_path / 'alone'}")
    assert result.code == 0, result.output
    swept, alone = tmp_path / "sweep" / "seed-2", tmp_path / "alone"
    assert untimed(metrics(swept)) == untimed(metrics(alone))
    assert config(swept) == config(alone)
    model = Path("checkpoints/step_3/hf/model.safetensors")
    assert weights(swept / model) == weights(alone / model)


LORA = ("policy.lora_cfg.use_rslora=false", "sft.max_num_steps=4", "sft.val_period=2", "sft.val_batches=1")
SWEPT = ("policy.optimizer.kwargs.lr=1e-3,3e-3", "policy.lora_cfg.dim=4,8", "checkpointing.save_period=2")


@exhaustive
def test_runs_on_one_base_are_those_of_rl_train(driver, metrics, tmp_path):
    """Four runs on a base with three places; the first is resumed from a checkpoint."""
    shared = ("sweep", "sft-lora-tiny", *LORA, *SWEPT, "policy.lora_cfg.max_adapters=3", f"run_dir={tmp_path / 'base'}")
    result = driver.rl(*shared, "sft.max_num_steps=2")
    assert result.code == 0, result.output
    result = driver.rl(*shared)
    assert result.code == 0, result.output
    result = driver.rl("sweep", "sft-lora-tiny", *LORA, *SWEPT, f"run_dir={tmp_path / 'alone'}")
    assert result.code == 0, result.output
    names = [path.parent.name for path in (tmp_path / "alone").glob("*/metrics.jsonl")]
    assert len(names) == 4
    for name in names:
        found, expected = (untimed(metrics(tmp_path / each / name)) for each in ("base", "alone"))
        assert [row["step"] for row in found] == [row["step"] for row in expected]
        for one, other in zip(found, expected, strict=True):
            for key in ("train/loss", "train/grad_norm", "train/lr", "train/num_tokens", "val/loss"):
                assert one.get(key) == pytest.approx(other.get(key), abs=1e-5), (name, key)
        for file in ("hf/model.safetensors", "adapter/adapter_model.safetensors"):
            one, other = (load_file(tmp_path / each / name / "checkpoints/step_4" / file) for each in ("base", "alone"))
            assert one.keys() == other.keys()
            for tensor, value in other.items():
                np.testing.assert_allclose(one[tensor], value, atol=1e-5)


def weights(path):
    """The header of a file of weights, whose metadata has no fixed order, and its bytes."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:begin]), data[begin:]


def untimed(rows):
    timed = ("time/", "per_second", "mfu")
    return [{name: value for name, value in row.items() if not any(part in name for part in timed)} for row in rows]


def config(folder):
    return [line for line in (folder / "config.yaml").read_text().splitlines() if not line.startswith("run_dir:")]
