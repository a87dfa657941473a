"""Runs from Python, as far as they go without starting one."""

import json
import re
import signal
from pathlib import Path

import pytest

import rl_launch
from rl_core.errors import ConfigError, DataError
from rl_launch.api.api import TrainResult, result_of
from rl_launch.commands.train import TrainOutcome
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest


def score(completion):
    return 1.0


@pytest.fixture
def started(monkeypatch):
    """The runs that would have been started: config and keyword arguments of each."""
    runs = []

    def train(plan, **given):
        runs.append((plan.config, given))
        return TrainOutcome({})

    monkeypatch.setattr("rl_launch.commands.train.train", train)
    monkeypatch.setattr("rl_launch.api.api.result_of", lambda run_dir: run_dir)
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
    with pytest.raises(ConfigError, match=r"grpo\.sede .* grpo\.seed\?"):
        rl_launch.train({"defaults": "grpo-arithmetic", "grpo": {"sede": 1}})
    with pytest.raises(ConfigError, match="give a list of strings, or a mapping"):
        rl_launch.train("grpo-arithmetic", "grpo.seed=1")
    assert not started


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGINT, pytest.raises(KeyboardInterrupt, match="the same call resumes it")),
        (signal.SIGTERM, pytest.raises(SystemExit)),
    ],
)
def test_what_follows_an_interrupted_run_does_not_run(monkeypatch, number, error):
    monkeypatch.setattr(
        "rl_launch.commands.train.train", lambda plan, **given: TrainOutcome({}, number, is_finished=False)
    )
    with error:
        rl_launch.train("sft-arithmetic")


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def test_rows_in_memory_are_a_file_of_the_run_for_the_time_of_its_start(tmp_path, monkeypatch):
    seen = []

    def start(plan, *, run_dir, **given):
        path = Path(plan.config.data.train.data_path)
        assert path.parent == Path(run_dir) / "data"
        seen.append((path.name, [json.loads(line) for line in path.read_text().splitlines()]))
        raise DataError("row 0 is wrong")

    monkeypatch.setattr("rl_launch.commands.train.train", start)
    for rows in (ROWS, tuple(ROWS), lambda: iter(ROWS), (row for row in ROWS)):
        with pytest.raises(DataError):
            rl_launch.train("grpo-arithmetic", {"data.train": rows, "run_dir": tmp_path / "run"})
    # the same rows, the same config
    assert {name for name, _ in seen} == {seen[0][0]}
    assert all(rows == ROWS for _, rows in seen)
    # a start that failed leaves nothing behind
    assert not (tmp_path / "run").exists()


def test_rows_stay_with_a_run_that_started(tmp_path, monkeypatch):
    def start(plan, *, run_dir, **given):
        (run_dir / "config.yaml").write_text(plan.config.data.train.data_path)
        raise KeyboardInterrupt

    monkeypatch.setattr("rl_launch.commands.train.train", start)
    with pytest.raises(KeyboardInterrupt):
        rl_launch.train("grpo-arithmetic", {"data.train": ROWS, "run_dir": tmp_path / "run"})
    [file] = (tmp_path / "run" / "data").iterdir()
    assert file.name.startswith("train-")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_rows_replace_a_dataset_of_a_name_and_keep_the_settings_of_one_with_a_path(started, tmp_path):
    rl_launch.train("grpo-arithmetic", {"data.train": ROWS, "data.train.env_name": score, "run_dir": tmp_path / "a"})
    by_path = {"defaults": "grpo-arithmetic", "data": {"train": {"data_path": "x.jsonl", "env_name": score}}}
    rl_launch.train(by_path, {"data.train": ROWS, "data.validation": ROWS[:1], "run_dir": tmp_path / "b"})
    for config, _ in started:
        assert config.data.train.dataset_name is None
        assert config.data.train.settings == {}
        assert config.data.train.env_name == f"{__file__}:score"
    assert started[1][0].data.validation.data_path.startswith(str(tmp_path / "b" / "data" / "validation-"))


def test_rows_without_a_run_dir_have_the_folder_that_the_run_gets(started, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rl_launch.train({"defaults": "grpo-arithmetic", "data": {"train": [ROWS, {"data_path": ROWS, "env_name": score}]}})
    ((config, given),) = started
    folders = {Path(each.data_path).parent for each in config.data.train}
    assert folders == {given["run_dir"] / "data"}


def test_an_evaluation_takes_rows_as_validation_data_and_as_a_task(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        "rl_launch.commands.evaluate.evaluate", lambda plan, folder, trained: seen.append((plan.config, folder))
    )
    tasks = [{"name": "mine", "dataset": {"data_path": iter(ROWS), "env_name": score}}]
    rl_launch.evaluate("tiny-arithmetic", {"eval.tasks": tasks, "run_dir": tmp_path / "eval"})
    rl_launch.evaluate("grpo-arithmetic", {"data.validation": ROWS, "run_dir": tmp_path / "eval"})
    (by_task, folder), (by_data, _) = seen
    assert folder == tmp_path / "eval"
    assert Path(by_task.eval.tasks[0].dataset.data_path).parent == folder / "data"
    assert Path(by_data.data.validation.data_path).name.startswith("validation-")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("grpo.seed", object(), r"^grpo\.seed: a object cannot be a value of a config"),
        ("grpo.seed", {1, 2}, r"^grpo\.seed: a set cannot be"),
        (
            "data.train",
            [{"prompt": "a", "image": b"x"}],
            r"^data\.train: row 0 .from 0., column 'image': a bytes cannot",
        ),
        ("data.train", [{"prompt": "a"}, {"b": {1: 2}}], r"row 1 .from 0., column 'b': has the key 1"),
        ("data.train", ["a"], r"data\.train"),
        ("data.train", iter([]), r"^data\.train: got no rows"),
        ("data.train", 5, r"^data\.train: got 5; give a dataset"),
        ("data.train.data_path", iter(["a"]), r"row 0 .from 0. is a str; every row must be a dict"),
    ],
)
def test_values_that_no_config_can_hold_are_refused_by_their_key(started, key, value, says):
    with pytest.raises(ConfigError, match=says):
        rl_launch.train("grpo-arithmetic", {key: value})
    assert not started


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rl_launch.train("sft-arithmetic", {"sft.sede": 3}), r"sft\.sede \(overrides\): "),
        (lambda: rl_launch.train("sft-arithmetic", ["sft.seed"]), r"'sft\.seed' \(overrides\): .* sft\.seed=VALUE"),
        (lambda: rl_launch.train("sft-arithmetic", {"data.train": "p.jsonl"}), r"data\.train\.data_path=p\.jsonl"),
        (lambda: rl_launch.evaluate("sft-arithmetic", {"data.validation": None}), r"tasks=\['gsm8k'\]"),
        (lambda: rl_launch.evaluate("rows.jsonl"), r"evaluate\(MODEL, tasks=\['rows\.jsonl'\]\)"),
        (lambda: rl_launch.train("rows.jsonl"), r"rows\.jsonl is data\. .*data\.train\.data_path=rows\.jsonl"),
    ],
)
def test_messages_name_arguments_of_python_and_no_options(call, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=says) as refused:
        call()
    assert not re.search(r"--\w|command line|rl (train|eval) ", str(refused.value))


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
        (folder / "hf").mkdir(parents=True)
        CheckpointManifest.of(folder, row["step"], {"val/loss": row["val/loss"]}, written={}).write(folder)
    result = result_of(tmp_path)
    assert result.best_checkpoint == tmp_path / "checkpoints/step_2/hf"
    assert result.last_metrics == rows[-1]
    assert result.metrics == rows


def test_a_checkpoint_without_a_metric_is_the_newest(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    (tmp_path / "run.json").write_text("{}")
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        (folder / "hf").mkdir(parents=True)
        CheckpointManifest.of(folder, step, {}, written={}).write(folder)
    assert result_of(tmp_path).best_checkpoint == tmp_path / "checkpoints/step_2/hf"


def test_a_checkpoint_without_files_is_no_model(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    (tmp_path / "run.json").write_text("{}")
    folder = tmp_path / "checkpoints" / "step_1"
    folder.mkdir(parents=True)
    CheckpointManifest.of(folder, 1, {}, written={}).write(folder)
    assert result_of(tmp_path).best_checkpoint is None


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
