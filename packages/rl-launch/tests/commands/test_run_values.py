"""Runs by the values of their keys."""

import json

import pytest
from typer.testing import CliRunner

from rl_core.errors import ConfigError
from rl_launch.cli import app
from rl_launch.commands.runs import RunValues, condition
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.run_session.directory.run_state import Labels, RunState
from rl_launch.show.report import headings
from rl_launch.show.selection import shown

CONFIG = """\
algorithm: sft
sft: {{seed: {seed}, stop_at_validation_loss: null}}
policy: {{model_name: tiny, optimizer: {{kwargs: {{lr: {lr}, betas: [0.9, 0.999]}}}}}}
"""


def make_run(path, *, lr="1e-3", seed=1, losses=(3.0, 2.0, 2.5), status="finished", **labels):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG.format(lr=lr, seed=seed))
    (path / "run.json").write_text(json.dumps({"algorithm": "sft", "model": "tiny", **Labels.read(labels).as_json()}))
    rows = [{"step": step, "val/loss": loss, "val/accuracy": 1 / loss} for step, loss in enumerate(losses, start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    RunState(status, 3, 3).write(path)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs/a", lr="1e-3", seed=1, losses=(3.0, 2.0, 2.5), tags=["baseline"], group="lr")
    make_run(tmp_path / "runs/b", lr="1e-4", seed=1, losses=(3.0, 2.8, 2.7), tags=["baseline", "slow"], group="lr")
    make_run(tmp_path / "runs/c", lr="1e-3", seed=2, losses=(), status="failed", name="the third")
    return tmp_path / "runs"


def listed(*arguments):
    answer = CliRunner().invoke(app, ["runs", "--json", *arguments])
    assert answer.exit_code == 0, answer.stderr
    return [(run["path"].removeprefix("runs/"), run["values"]) for run in json.loads(answer.stdout)["runs"]]


def names(*arguments):
    return [name for name, _ in listed(*arguments)]


@pytest.mark.usefixtures("folder")
def test_columns_are_keys_of_the_config_metrics_and_labels():
    keys = "policy.optimizer.kwargs.lr,sft.seed,val/loss,val/loss:best,tags,name"
    found = dict(listed("--keys", keys))
    assert found["a"] == {
        "policy.optimizer.kwargs.lr": 1e-3,
        "sft.seed": 1,
        "val/loss": 2.5,
        "val/loss:best": 2.0,
        "tags": ["baseline"],
        "name": "a",
    }
    assert found["c"]["val/loss"] is None
    assert found["c"]["name"] == "the third"


@pytest.mark.usefixtures("folder")
def test_the_best_value_of_a_metric_comes_first_and_runs_without_it_last():
    assert names("--sort", "val/loss") == ["a", "b", "c"]
    assert names("--sort", "val/accuracy") == ["a", "b", "c"]
    assert names("--sort", "val/loss", "--reverse") == ["c", "b", "a"]
    assert names("--sort", "policy.optimizer.kwargs.lr")[0] == "b"
    assert names("--sort", "name")[-1] == "c"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("state=finished", "ab"),
        ("state!=finished", "c"),
        ("tag=slow", "b"),
        ("tag!=slow", "ac"),
        ("tag=base*", "ab"),
        ("group=lr", "ab"),
        ("name=the*", "c"),
        ("sft.seed=1", "ab"),
        ("sft.seed>1", "c"),
        ("policy.optimizer.kwargs.lr=0.001", "ac"),
        ("policy.optimizer.kwargs.betas=[0.9, 0.999]", "abc"),
        ("val/loss<2.6", "a"),
        ("val/loss>=0", "ab"),
        ("sft.stop_at_validation_loss=null", "abc"),
        ("algorithm<3", ""),
    ],
)
def test_runs_are_filtered(condition, expected):
    assert sorted(names("--filter", condition)) == sorted(expected)


@pytest.mark.usefixtures("folder")
def test_all_conditions_hold_and_no_match_says_so():
    assert names("--filter", "tag=baseline", "--filter", "sft.seed=1", "--filter", "val/loss<2.6") == ["a"]
    answer = CliRunner().invoke(app, ["runs", "--filter", "tag=nobody", "--filter", "sft.seed=1"])
    assert answer.stdout == "No run in runs matches tags=nobody and sft.seed=1.\n"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("option", ["--keys", "--sort"])
def test_a_key_that_no_run_has_is_refused_with_the_nearest(option):
    answer = CliRunner().invoke(app, ["runs", option, "policy.optimizer.lr"])
    assert answer.exit_code == 2
    assert f"{option}: none of these runs has 'policy.optimizer.lr'; did you mean" in answer.stderr
    assert "policy.optimizer.kwargs.lr" in answer.stderr


def test_what_is_no_condition_is_refused():
    with pytest.raises(ConfigError, match="write KEY=VALUE, such as state=finished"):
        condition("finished")


@pytest.mark.usefixtures("folder")
def test_a_table_of_values_has_short_headings_and_the_state():
    answer = CliRunner().invoke(
        app, ["runs", "--keys", "policy.optimizer.kwargs.lr,sft.seed,val/loss:best", "--sort", "val/loss"]
    )
    lines = answer.stdout.splitlines()
    assert lines[0].split() == ["run", "lr", "seed", "val/loss:best", "state", "step", "age"]
    assert lines[1].split()[:6] == ["a", "0.001", "1", "2", "finished", "3/3"]


@pytest.mark.usefixtures("folder")
def test_tags_have_a_column_if_there_are_any():
    assert "baseline, slow" in CliRunner().invoke(app, ["runs"], env={"COLUMNS": "120"}).stdout


def test_headings_tell_keys_apart():
    keys = ["policy.optimizer.kwargs.lr", "critic.optimizer.kwargs.lr", "sft.seed", "val/loss"]
    assert headings(keys) == ["policy.optimizer.kwargs.lr", "critic.optimizer.kwargs.lr", "seed", "val/loss"]
    assert headings(["a.x.lr", "b.y.lr"]) == ["x.lr", "y.lr"]


def test_values_are_short():
    assert [shown(value) for value in (None, True, 1 / 3, 7, ["a", 0.5], "text")] == [
        "",
        "true",
        "0.3333",
        "7",
        "a, 0.5",
        "text",
    ]


def label(*arguments):
    answer = CliRunner().invoke(app, ["label", *arguments])
    assert answer.exit_code == 0, answer.stderr
    return answer.stdout


def test_labels_are_changed_without_the_config_or_the_age(folder):
    before, age = (folder / "a/config.yaml").read_text(), RunFolder(folder / "a").changed_at()
    text = label("runs/a", "runs/b", "--tag", "good", "--untag", "baseline", "--notes", "see the plots", "--group", "")
    assert text == (
        "runs/a:\n  tags:\n  - good\n  notes: see the plots\n"
        "runs/b:\n  tags:\n  - slow\n  - good\n  notes: see the plots\n"
    )
    assert RunFolder(folder / "a").description().labels == Labels(tags=("good",), notes="see the plots")
    assert RunFolder(folder / "a").description().algorithm == "sft"
    assert (folder / "a/config.yaml").read_text() == before
    assert RunFolder(folder / "a").changed_at() == age
    assert RunValues(RunFolder(folder / "a"))["name"] == "a"


def test_labels_are_shown_and_of_a_run_only(folder, tmp_path):
    assert label("runs/c") == "runs/c:\n  name: the third\n"
    answer = CliRunner().invoke(app, ["label", str(tmp_path), "--tag", "x"])
    assert answer.exit_code == 2
    assert "is not a run directory" in answer.stderr
