"""The same run on another generator, and on devices of its own."""

import pytest


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        (["policy.generation.backend=hf"], 1e-4),
        (["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"], 1e-3),
    ],
    ids=["hf", "disaggregated"],
)
def test_trainer_and_generator_agree(settings, bound, rl, metrics, warm_model, tmp_path):
    run_dir = tmp_path / "run"
    result = rl(
        "train",
        "grpo-arithmetic",
        f"policy.model_name={warm_model}",
        f"run_dir={run_dir}",
        "grpo.max_num_steps=4",
        "grpo.val_period=0",
        "checkpointing.metric_name=null",
        *settings,
    )
    assert result.code == 0, result.output
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert max(line["mismatch/max"] for line in lines) < bound
    assert max(line["reward/mean"] for line in lines) > 0.1
