"""Runs from Python, as far as they go without starting one."""

import json
from pathlib import Path

import pytest

import rl_launch
from rl_core.errors import ConfigError
from rl_launch.api import TrainResult, result_of
from rl_launch.session.manifest import Manifest


def score(completion):
    return 1.0


@pytest.fixture
def started(monkeypatch):
    """The runs that would have been started: config and keyword arguments of each."""
    runs = []
    monkeypatch.setattr("rl_launch.commands.train.train", lambda config, **given: runs.append((config, given)))
    monkeypatch.setattr("rl_launch.api.result_of", lambda run_dir: run_dir)
    return runs


def test_a_recipe_with_overrides_as_the_command_line_has_them(started):
    rl_launch.train("sft-arithmetic", ["sft.seed=7", "run_dir=runs/mine"], fresh=True)
    ((config, given),) = started
    assert config.sft.seed == 7
    assert given == {"run_dir": Path("runs/mine"), "title": "sft-arithmetic", "fresh": True, "branch_point": None}


def test_a_mapping_inherits_and_is_overridden_by_values(started):
    config = {"defaults": "grpo-arithmetic", "grpo": {"max_num_steps": 3}}
    changed = {"policy.optimizer.kwargs": {"lr": 1e-6}, "data.train.env_name": score, "data.validation": None}
    rl_launch.train(config, changed | {"grpo.val_period": 0, "checkpointing.metric_name": None})
    ((resolved, given),) = started
    assert resolved.grpo.max_num_steps == 3
    assert resolved.grpo.num_prompts_per_step == 64
    assert resolved.policy.optimizer.kwargs == {"lr": 1e-6}
    assert resolved.data.train.env_name == f"{__file__}:score"
    assert resolved.data.validation is None
    assert str(given["run_dir"]).startswith("runs/grpo-")


def test_a_wrong_key_is_a_config_error(started):
    with pytest.raises(ConfigError, match=r"grpo\.sede .*did you mean grpo\.seed\?"):
        rl_launch.train({"defaults": "grpo-arithmetic", "grpo": {"sede": 1}})
    with pytest.raises(ConfigError, match="give a list of texts, or a mapping"):
        rl_launch.train("grpo-arithmetic", "grpo.seed=1")
    assert not started


def test_the_traceback_of_a_mistake_ends_at_the_call(started):
    with pytest.raises(ConfigError) as caught:
        rl_launch.train({"defaults": "grpo-arithmetic", "grpo": {"sede": 1}})
    inner = [entry.name for entry in caught.traceback][1:]
    assert inner == ["call"]
    assert caught.value.__suppress_context__


def test_the_result_names_the_best_checkpoint(tmp_path):
    config = "algorithm: sft\ncheckpointing: {metric_name: 'val:loss', higher_is_better: false}\n"
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "run.json").write_text("{}")
    rows = [{"step": step, "val/loss": loss} for step, loss in ((1, 2.0), (2, 0.5), (3, 0.9))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert result_of(tmp_path).best_checkpoint is None
    for row in rows:
        folder = tmp_path / "checkpoints" / f"step_{row['step']}"
        folder.mkdir(parents=True)
        Manifest.of(folder, row["step"], {"val/loss": row["val/loss"]}, written={}).write(folder)
    result = result_of(tmp_path)
    assert result.best_checkpoint == tmp_path / "checkpoints/step_2/hf"
    assert result.last_metrics == rows[-1]
    assert result.metrics == rows


def test_a_checkpoint_without_a_metric_is_the_newest(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    (tmp_path / "run.json").write_text("{}")
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        Manifest.of(folder, step, {}, written={}).write(folder)
    assert result_of(tmp_path).best_checkpoint == tmp_path / "checkpoints/step_2/hf"


def test_a_notebook_displays_results_in_a_few_lines():
    metrics = [{"step": step, "train/loss": 0.5, "val/loss": None, "time/step": 2.0} for step in range(1, 401)]
    assert repr(TrainResult(Path("runs/mine"), metrics, None, None, finished=True)) == (
        "TrainResult(\n"
        "  run_dir='runs/mine',\n"
        "  finished=True,\n"
        "  last_metrics={'step': 400, 'train/loss': 0.5} and 2 more,\n"
        "  best_checkpoint=None,\n"
        ")"
    )
