"""A run does not continue in the middle of other data than it began with, and a branch begins them anew."""

import json
from pathlib import Path

import pytest

from rl_core.errors import DataChanged
from rl_launch.commands.preparation import DATA_CHECKS, FOLDER, START_CHECKS, Preparation
from rl_launch.commands.start import run_of
from rl_launch.commands.train import with_local_models
from rl_launch.run_session import RunDirectory
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest, read_state, write_state

ROWS = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(8)]
OF_FILE = "data.train={data_path: rows.jsonl}"
CHECKS = [
    each
    for each in (FOLDER, *DATA_CHECKS, *START_CHECKS)
    if each.name in ("run directory", "rows", "tokenizer", "prompts", "data")
]


def write(rows):
    with open("rows.jsonl", "w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def prepared(*arguments, start=""):
    """A run as it is when all checks of its data are made."""
    run = run_of(arguments[0], arguments[1:], start)
    made = Preparation(run.plan, run.run_dir, with_local_models, branch_point=run.branch_point)
    made.take(CHECKS)
    return made


@pytest.fixture(params=["sft", "grpo"])
def run(request, tmp_path, monkeypatch):
    """A run with a checkpoint, in the middle of its data."""
    monkeypatch.chdir(tmp_path)
    write(ROWS if request.param == "sft" else [{"prompt": row["prompt"], "answer": row["response"]} for row in ROWS])
    recipe = f"{request.param}-arithmetic"
    keys = ["policy.model_name=tiny-arithmetic", OF_FILE, "data.validation=null", f"{request.param}.val_period=0"]
    keys += ["sft.stop_at_validation_loss=null"] if request.param == "sft" else ["checkpointing.metric_name=null"]
    keys += ["data.train.env_name=math"] if request.param == "grpo" else []
    made = prepared(recipe, *keys, "run_dir=run")
    directory = RunDirectory("run")
    directory.open(made.written.root)
    directory.close()
    made.data.train.take(3)
    checkpoint = directory.checkpoints / "step_2"
    position = {"prompts": made.data.train.state()} if request.param == "grpo" else made.data.train.state()
    write_state(checkpoint / "state", {"sft": "data", "grpo": "rollouts"}[request.param], position)
    CheckpointManifest.of(checkpoint, 2, {}, written={}, own=["state"]).write(checkpoint)
    return directory


def edited():
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    return [*rows[:3], {**rows[3], "prompt": "9+9="}, *rows[4:]]


def appended():
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    return [*rows, rows[0]]


@pytest.mark.parametrize(("change", "said"), [(edited, "other contents"), (appended, r"sizes was \[8\] and is \[9\]")])
def test_a_run_whose_rows_changed_is_refused_with_the_command_that_continues_with_them(run, change, said):
    assert prepared("run").branch is None
    write(change())
    with pytest.raises(DataChanged, match=rf"{said}(.|\n)*restore the data(.|\n)*\n  rl train --from run$"):
        prepared("run")


def test_a_branch_continues_in_the_data_only_if_it_is_the_same(run):
    assert prepared("run_dir=same", start="run").branch.keeps_position
    write(edited())
    assert not prepared("run_dir=other", start="run").branch.keeps_position


def test_a_checkpoint_of_a_version_without_digests_is_compared_by_its_sizes(run):
    state = run.checkpoints / "step_2" / "state"
    (file,) = state.glob("*.json")
    saved = read_state(state, file.stem)
    saved.get("prompts", saved).pop("digests")
    write_state(state, file.stem, saved)
    write(edited())
    assert prepared("run").branch is None
    write(appended())
    with pytest.raises(DataChanged, match="sizes was"):
        prepared("run")
