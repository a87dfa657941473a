import io
import json
import os
from datetime import UTC, datetime

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rl_launch.cli import app
from rl_launch.commands.runs import age, list_runs, short_model, show
from rl_launch.run_session.directory.run_state import Best, RunState


def make_run(path, state, *, algorithm="grpo", model="Qwen/Qwen2.5-1.5B"):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"algorithm: {algorithm}\n")
    (path / "run.json").write_text(json.dumps({"algorithm": algorithm, "model": model, "created": "then"}))
    state.write(path)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = RunState("finished", 10, 10, goals={"grpo.max_num_steps": 10}, best=Best("val/accuracy", 0.75, 8))
    make_run(tmp_path / "runs/done", done)
    make_run(tmp_path / "runs/deep/stopped", RunState("interrupted", 4, 10, "SIGTERM"), algorithm="sft")
    make_run(tmp_path / "runs/broken", RunState("failed", 2, 10, "no space left"))
    for seconds, name in ((3, "done"), (2, "deep/stopped"), (1, "broken")):
        for file in (tmp_path / "runs" / name).iterdir():
            os.utime(file, (seconds, seconds))
    return tmp_path / "runs"


def test_runs_are_listed_with_how_to_go_on_the_newest_first(folder):
    found = {run.path: run for run in list_runs(folder)}
    assert list(found) == ["runs/done", "runs/deep/stopped", "runs/broken"]
    assert found["runs/done"].go_on == "rl train runs/done grpo.max_num_steps=20"
    assert found["runs/deep/stopped"].go_on == "rl train runs/deep/stopped"
    assert found["runs/broken"].reason == "no space left"


def test_a_listing_fits_eighty_columns(folder):
    text = io.StringIO()
    now = datetime.fromtimestamp(3 + 7200, UTC)
    show(list_runs(folder), folder, Console(file=text, width=80), now=now)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["done", "grpo", "Qwen2.5-1.5B", "finished", "10/10", "val/accuracy", "0.75", "2", "h"]
    assert "  rl train runs/deep/stopped" in lines
    assert any("broken failed (no space left)" in line for line in lines)


def test_the_name_of_a_run_stays_whole(folder):
    name = "an-ablation-of-the-learning-rate"
    (folder / "done").rename(folder / name)
    text = io.StringIO()
    show(list_runs(folder), folder, Console(file=text, width=80), now=datetime.fromtimestamp(7200, UTC))
    lines = text.getvalue().splitlines()
    assert any(line.startswith(f"{name} ") for line in lines)
    assert max(map(len, lines)) <= 80


def test_runs_of_the_recipes_for_a_first_hour_take_a_line_each(tmp_path):
    state = RunState("finished", 3, 3, best=Best("reward/mean", 0.2, 3))
    for name in ("talks-gentle", "notebook"):
        make_run(tmp_path / name, state, model="/home/me/tiny-arithmetic-sft")
    text = io.StringIO()
    show(list_runs(tmp_path), tmp_path, Console(file=text, width=80), now=datetime.now(UTC))
    assert len(text.getvalue().splitlines()) == 3


def test_the_command_lists_as_json(folder):
    answer = CliRunner().invoke(app, ["runs", "--json"])
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert found["schema"] == 1
    assert [run["status"] for run in found["runs"]] == ["finished", "interrupted", "failed"]
    assert found["runs"][0]["best"] == {"metric": "val/accuracy", "value": 0.75, "step": 8}


def test_a_folder_without_runs_says_so_and_one_that_is_missing_is_refused(tmp_path):
    empty = tmp_path / ("a-long-name" * 20)
    empty.mkdir()
    assert f"{empty} does not contain runs" in CliRunner().invoke(app, ["runs", str(empty)]).stdout
    answer = CliRunner().invoke(app, ["runs", str(tmp_path / "nowhere")])
    assert answer.exit_code == 2
    assert "is not a folder" in answer.stderr


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Qwen/Qwen2.5-1.5B", "Qwen2.5-1.5B"),
        ("/data/models/tiny/", "tiny"),
        ("/home/me/runs/sft/checkpoints/step_150/hf", "sft/step_150"),
        ("", ""),
    ],
)
def test_a_model_is_shown_by_its_name(name, short):
    assert short_model(name) == short


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0 s"), (59, "59 s"), (61, "1 min"), (7200, "2 h"), (3e5, "3 d")])
def test_an_age_has_one_unit(seconds, text):
    assert age(seconds) == text
