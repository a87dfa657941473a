"""Paths of runs that do not exist are told from models of the hub."""

import pytest
from typer.testing import CliRunner

from rl_launch.cli import app
from rl_launch.model_files.absent_run import absent_run
from rl_launch.model_files.model_folder import folder_problems


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def make_run(folder):
    folder.mkdir(parents=True)
    for name in ("run.json", "config.yaml"):
        (folder / name).write_text("{}")


@pytest.mark.parametrize("name", ["runs/g", "runs/g/", "runs/g/checkpoints/step_3/hf", "./runs/g"])
def test_a_path_below_runs_names_a_run(name):
    assert absent_run(name) == "no run at runs/g; `rl runs` lists them"


def test_a_path_beside_runs_names_a_run(tmp_path):
    make_run(tmp_path / "ablations" / "sft-small")
    found = absent_run("ablations/sft-smal")
    assert found == "no run at ablations/sft-smal; did you mean ablations/sft-small?; `rl runs ablations` lists them"
    assert f"`rl runs {tmp_path}/ablations` lists them" in absent_run(f"{tmp_path}/ablations/x")


def test_other_names_are_not_runs(tmp_path):
    (tmp_path / "models").mkdir()
    make_run(tmp_path / "runs" / "g")
    for name in ("Qwen/Qwen3-0.6B", "tiny-arithmetic", "runs/mine.yaml", "models/mine", "runs/g", "runs"):
        assert absent_run(name) == "", name


def test_a_downloaded_model_of_an_owner_named_runs_is_a_model(tmp_path):
    snapshot = tmp_path / "hub" / "models--runs--g" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert absent_run("runs/g") == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["eval", "runs/g"], "error: no run at runs/g; `rl runs` lists them\n"),
        (["train", "runs/g"], "error: no run at runs/g; `rl runs` lists them\n"),
        (["eval", "runs/g:3"], "error: no run at runs/g; `rl runs` lists them\n"),
        (
            ["train", "sft-arithmetic", "policy.model_name=runs/g"],
            "error: policy.model_name (command line): no run at runs/g; `rl runs` lists them\n",
        ),
    ],
)
def test_commands_name_the_run_that_does_not_exist(arguments, says):
    answer = CliRunner().invoke(app, arguments)
    assert (answer.exit_code, answer.stderr) == (2, says)


def test_a_checkpoint_that_a_run_does_not_have_is_answered_with_those_it_has(tmp_path):
    make_run(tmp_path / "runs" / "g")
    model = tmp_path / "runs/g/checkpoints/step_2/hf"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (problem,) = folder_problems("policy.model_name", "runs/g/checkpoints/step_9/hf", ())
    assert problem.message == (
        "folder 'runs/g/checkpoints/step_9/hf' does not exist; name a model of it: runs/g/checkpoints/step_2/hf"
    )
