"""A run of a sweep, which shares its driver and its Ray with other runs, is the run of `rl train`."""

import json
from pathlib import Path

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
