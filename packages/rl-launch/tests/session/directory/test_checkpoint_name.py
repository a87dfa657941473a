"""Every way to name a checkpoint of a run names the same one, in every command that takes one."""

import re
import shutil
from pathlib import Path

import pytest

from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.commands.conversion.convert import named_source
from rl_launch.commands.start import run_of
from rl_launch.doctor.family import check_model
from rl_launch.evaluation.source import evaluation_of
from rl_launch.model_files.local_models import adapter_of_run, model_of_run
from rl_launch.run_config.reading import read_raw
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.directory.branch import BranchPoint
from rl_launch.run_session.directory.checkpoint_name import CheckpointName
from rl_launch.run_session.directory.run_folder import RunFolder

LOSSES = {2: 0.5, 4: 0.3, 6: 0.4}
FORMS = {
    "runs/sft": 6,
    "runs/sft/": 6,
    "./runs/../runs/sft": 6,
    "runs/sft:last": 6,
    "runs/sft/:last": 6,
    "runs/sft:best": 4,
    "runs/sft:4": 4,
    "runs/sft:step_2": 2,
    "runs/sft/checkpoints": 6,
    "runs/sft/checkpoints/step_2": 2,
    "runs/sft/checkpoints/step_2/": 2,
    "linked": 2,
}
"""Names from the folder of the runs, and the steps that they name."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "sft"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"model": "m"}')
    (folder / "config.yaml").write_text(
        "algorithm: sft\npolicy: {model_name: m}\nsft: {max_num_steps: 9}\n"
        "checkpointing: {metric_name: 'val:loss', higher_is_better: false}\ndata: {train: {dataset_name: arithmetic}}\n"
    )
    for step, loss in LOSSES.items():
        checkpoint = folder / "checkpoints" / f"step_{step}"
        for part in ("hf", "adapter", "policy"):
            (checkpoint / part).mkdir(parents=True)
        CheckpointManifest(step, {"val/loss": loss}, {}).write(checkpoint)
    (tmp_path / "linked").symlink_to(folder / "checkpoints" / "step_2")
    return folder


def step_in(path):
    return int(re.findall(r"step_(\d+)", str(Path(path).resolve()))[-1])


def evaluated(name):
    # the checkpoint has no files to load
    with pytest.raises(ConfigError, match=r"config\.json") as refused:
        evaluation_of(name, ["eval.tasks=[gsm8k]"])
    return step_in(re.search(r'got "(\S+)"', str(refused.value))[1])


def examined(name):
    with pytest.raises(ConfigError, match=r"config\.json") as refused:
        next(check_model(name, "dtensor"))
    return step_in(re.search(r'got "(\S+)"', str(refused.value))[1])


COMMANDS = {
    "train --from": lambda name: step_in(BranchPoint.parse(name).name.checkpoint()),
    "eval, chat": evaluated,
    "convert": lambda name: step_in(named_source(name)),
    "convert --quantize": lambda name: step_in(model_of_run(name)),
    "doctor model": examined,
    "policy.model_name": lambda name: step_in(
        read_raw("sft-tiny", [f"policy.model_name={name}"]).select("policy.model_name")
    ),
    "policy.tokenizer.name": lambda name: step_in(
        read_raw("sft-tiny", [f"policy.tokenizer.name={name}"]).select("policy.tokenizer.name")
    ),
    "lora_cfg.adapter": lambda name: step_in(adapter_of_run(name)),
}


@pytest.mark.parametrize(("form", "step"), FORMS.items())
def test_a_checkpoint_is_named_in_several_ways(run, form, step):
    assert step_in(CheckpointName.parse(form).checkpoint()) == step


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", ["runs/sft", "runs/sft:last", "runs/sft:best", "runs/sft/checkpoints/step_2/"])
def test_every_command_takes_every_form(run, command, form):
    assert COMMANDS[command](form) == FORMS[form]


@pytest.mark.parametrize("form", ["runs/sft", "runs/sft:4", "linked", "runs/sft/checkpoints/step_4/hf"])
def test_a_config_is_that_of_the_run_whichever_checkpoint_is_named(run, form):
    assert read_raw(form).select("sft.max_num_steps") == 9


@pytest.mark.parametrize(
    ("folder", "name", "step"),
    [
        (".", "runs/sft/checkpoints/step_4/hf", 4),
        ("runs/sft", ".", 6),
        ("runs/sft", "checkpoints/step_4", 4),
        ("runs/sft/checkpoints", "step_2", 2),
        ("runs/sft/checkpoints/step_2", ".", 2),
        ("runs/sft/checkpoints/step_2/hf", "..", 2),
    ],
)
def test_a_path_is_read_from_the_current_folder(run, tmp_path, monkeypatch, folder, name, step):
    monkeypatch.chdir(tmp_path / folder)
    named = CheckpointName.parse(name)
    assert step_in(named.checkpoint().resolve()) == step
    assert named.run.resolve() == run


@pytest.mark.parametrize("command", ["train --from", "eval, chat", "convert", "policy.model_name", "lora_cfg.adapter"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/sft:3", "has no checkpoint of step 3; it has step_2, step_4, step_6"),
        ("runs/sft/checkpoints/step_3", "has no checkpoint of step 3; it has step_2, step_4, step_6"),
        ("runs/sft:latest", "Write runs/sft:last, runs/sft:best or runs/sft:STEP; it has checkpoints of steps 2, 4, 6"),
        ("runs/sft:", "Write runs/sft:last"),
    ],
)
def test_a_checkpoint_that_does_not_exist_is_refused_with_those_that_do(run, command, name, message):
    with pytest.raises((ConfigError, RunDirectoryError), match=message):
        COMMANDS[command](name)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "runs/other:best", "recipe.yaml", "runs", "runs/sft/logs"])
def test_other_names_are_left_alone(run, name):
    assert CheckpointName.parse(name) is None


def test_training_resumes_the_newest_checkpoint_and_branches_from_others(run):
    of_model = ["policy.model_name=tiny-arithmetic", "checkpointing.metric_name=null"]
    assert run_of("runs/sft:last", of_model).run_dir.resolve() == run
    with pytest.raises(ConfigError, match=r"rl train --from runs/sft:4"):
        run_of("runs/sft:4")


def test_a_run_without_adapters_is_refused_by_key(run):
    (run / "checkpoints/step_6/adapter").rmdir()
    with pytest.raises(ConfigError, match=r"policy\.lora_cfg\.adapter: .*step_6 has no adapters"):
        read_raw("sft-tiny", ["policy.lora_cfg.adapter=runs/sft"])


def test_what_takes_a_run_says_which_run_a_checkpoint_is_of(run):
    with pytest.raises(RunDirectoryError, match=r"is a part of the run \S+/runs/sft\. Pass that folder"):
        RunFolder("runs/sft/checkpoints/step_4")
    with pytest.raises(RunDirectoryError, match=r"there is no run at runs/sft:4\. Did you mean runs/sft\?"):
        RunFolder("runs/sft:4")


def test_the_config_of_a_copied_run_has_the_folder_that_it_is_in(run, tmp_path):
    config = run / "config.yaml"
    config.write_text(f"run_dir: {run}\n{config.read_text()}")
    shutil.copytree(run, tmp_path / "copy")
    assert read_raw("copy").select("run_dir") == str(tmp_path / "copy")
    assert read_raw("copy", ["run_dir=elsewhere"]).select("run_dir") == "elsewhere"
