"""The same run on either training backend, chosen by config alone."""

import pytest

BACKENDS = ("dtensor", "megatron")


def run_both(rl, metrics, tmp_path, recipe, *settings):
    """Metrics of each backend's run."""
    found = {}
    for backend in BACKENDS:
        run_dir = tmp_path / backend
        result = rl("train", recipe, f"run_dir={run_dir}", f"policy.{backend}_cfg.enabled=true", *settings)
        assert result.code == 0, result.output
        found[backend] = metrics(run_dir)
    return [found[backend] for backend in BACKENDS]


def test_sft_steps_are_the_same(rl, metrics, tmp_path):
    dtensor, megatron = run_both(rl, metrics, tmp_path, "sft-arithmetic", "sft.max_num_steps=5")
    assert len(dtensor) == len(megatron) == 5
    for expected, found in zip(dtensor, megatron, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/lr"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name


def test_grpo_steps_are_the_same(rl, metrics, warm_model, tmp_path):
    settings = (
        f"policy.model_name={warm_model}",
        "grpo.max_num_steps=5",
        "grpo.val_period=0",
        "checkpointing.metric_name=null",
    )
    dtensor, megatron = run_both(rl, metrics, tmp_path, "grpo-arithmetic", *settings)
    assert len(dtensor) == len(megatron) == 5
    for expected, found in zip(dtensor, megatron, strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-3), name
        assert found["mismatch/max"] < 1e-3
