"""Paths of runs that do not exist are distinguished from hub models."""

import pytest
from typer.testing import CliRunner

from rl_core.errors import RunDirectoryError
from rl_launch.cli import app
from rl_launch.model_files.local_models import absent_run
from rl_launch.model_files.model_folder import folder_problems
from rl_launch.run_session.directory.run_folder import RunFolder


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
def test_a_path_below_runs_is_the_path_of_a_run(name):
    found = absent_run(name)
    assert found.reason.endswith(" runs/g")
    assert "`rl runs`" in found.remedy


def test_a_path_beside_runs_names_a_run(tmp_path):
    make_run(tmp_path / "ablations" / "sft-small")
    found = absent_run("ablations/sft-smal")
    assert found.reason.endswith(" ablations/sft-smal")
    assert "ablations/sft-small?" in found.remedy
    assert "`rl runs ablations`" in found.remedy
    assert f"`rl runs {tmp_path}/ablations`" in absent_run(f"{tmp_path}/ablations/x").remedy


def test_a_run_folder_that_does_not_exist_has_the_same_message(tmp_path):
    make_run(tmp_path / "ablations" / "sft-small")
    for name in ("runs/g", "ablations/sft-smal"):
        with pytest.raises(RunDirectoryError) as refused:
            RunFolder(name)
        assert str(refused.value) == f"{absent_run(name).message}."


def test_other_names_are_not_runs(tmp_path):
    (tmp_path / "models").mkdir()
    make_run(tmp_path / "runs" / "g")
    for name in ("Qwen/Qwen3-0.6B", "tiny-arithmetic", "runs/mine.yaml", "models/mine", "runs/g", "runs"):
        assert absent_run(name) is None, name


def test_a_downloaded_model_of_an_owner_named_runs_is_a_model(tmp_path):
    snapshot = tmp_path / "hub" / "models--runs--g" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert absent_run("runs/g") is None


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["eval", "runs/g"], ""),
        (["train", "runs/g"], ""),
        (["eval", "runs/g:3"], ""),
        (["train", "sft-arithmetic", "policy.model_name=runs/g"], "policy.model_name (command line): "),
    ],
)
def test_commands_show_the_run_that_does_not_exist(arguments, key):
    answer = CliRunner().invoke(app, arguments)
    assert (answer.exit_code, answer.stderr) == (2, f"error: {key}{absent_run('runs/g').message}\n")


def test_a_checkpoint_that_a_run_does_not_have_is_answered_with_those_it_has(tmp_path):
    make_run(tmp_path / "runs" / "g")
    model = tmp_path / "runs/g/checkpoints/step_2/hf"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (problem,) = folder_problems("policy.model_name", "runs/g/checkpoints/step_9/hf", ())
    assert problem.got == "runs/g/checkpoints/step_9/hf"
    assert problem.remedy.endswith(" runs/g/checkpoints/step_2/hf")
