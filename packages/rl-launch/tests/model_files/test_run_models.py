"""Models that are named by the run that made them."""

import pytest

from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.evaluation.source import evaluation_of
from rl_launch.model_files.local_models import model_of_run
from rl_launch.run_config.reading import read_raw
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest

CONFIG = "algorithm: sft\npolicy: {model_name: m}\ncheckpointing: {metric_name: 'val:loss', higher_is_better: false}\n"
LOSSES = {2: 0.5, 4: 0.3, 6: 0.4}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "sft"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"model": "m"}')
    (folder / "config.yaml").write_text(CONFIG)
    for step, loss in LOSSES.items():
        checkpoint = folder / "checkpoints" / f"step_{step}"
        (checkpoint / "hf").mkdir(parents=True)
        CheckpointManifest(step, {"val/loss": loss}, {}).write(checkpoint)
    return folder


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("runs/sft", 6),
        ("runs/sft:4", 4),
        ("runs/sft:step_2", 2),
        ("runs/sft:best", 4),
        ("runs/sft/checkpoints/step_2", 2),
    ],
)
def test_a_run_stands_for_the_files_of_a_checkpoint(run, name, step):
    assert model_of_run(name).resolve() == run / "checkpoints" / f"step_{step}" / "hf"


def test_a_run_without_values_of_its_metric_has_its_newest_as_the_best(run):
    (run / "config.yaml").write_text("algorithm: sft\n")
    assert model_of_run("runs/sft:best").parent.name == "step_6"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "runs/other", "runs/sft/checkpoints/step_2/hf"])
def test_other_names_stay(run, name):
    assert model_of_run(name) is None


def test_every_model_of_a_config_may_be_named_so(run):
    overrides = ["policy.model_name=runs/sft:2", "teacher.model_name=runs/sft:best", "value.model_name=Qwen/Qwen3-0.6B"]
    raw = read_raw("distill-tiny", overrides)
    assert raw.select("policy.model_name").endswith("runs/sft/checkpoints/step_2/hf")
    assert raw.select("teacher.model_name").endswith("runs/sft/checkpoints/step_4/hf")
    assert raw.select("value.model_name") == "Qwen/Qwen3-0.6B"
    assert "runs/sft:2" in str(raw.origin("policy.model_name"))


def test_a_checkpoint_that_is_not_there_is_refused_by_key(run):
    with pytest.raises(ConfigError, match=r"policy\.model_name: .*step 3.* step_2, step_4, step_6"):
        read_raw("sft-arithmetic", ["policy.model_name=runs/sft:3"])


def test_an_evaluation_takes_the_best(run):
    # the files themselves are not there
    with pytest.raises(ConfigError, match=r'policy\.model_name .*got "runs/sft/checkpoints/step_4/hf".* config\.json'):
        evaluation_of("runs/sft:best", ["eval.tasks=[gsm8k]"])
    with pytest.raises(RunDirectoryError, match=r"runs/nothing\. "):
        evaluation_of("runs/nothing:best")


def test_a_checkpoint_without_files_names_those_that_have_them_and_the_remedy(run):
    (run / "checkpoints/step_6/hf").rmdir()
    with pytest.raises(RunDirectoryError, match=r"step_6 has no Hugging Face files.*step_2 or step_4, or convert it: "):
        model_of_run("runs/sft")
    with pytest.raises(ConfigError, match=r"policy.model_name: .*checkpointing.export_period"):
        read_raw("sft-tiny", ["policy.model_name=runs/sft"])
    for step in (2, 4):
        (run / f"checkpoints/step_{step}/hf").rmdir()
    with pytest.raises(RunDirectoryError, match=r"Convert it: rl convert runs/sft/checkpoints/step_6 FOLDER"):
        model_of_run("runs/sft")
