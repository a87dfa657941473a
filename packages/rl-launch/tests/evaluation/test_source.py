import json
import shutil
import time
from pathlib import Path

import pytest

from rl_algos.tiny_model import make_tiny_model
from rl_core.config import to_yaml
from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.commands import evaluate as evaluation
from rl_launch.evaluation.source import evaluation_of, is_model
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.directory.lock import DirectoryLock
from rl_launch.run_session.directory.run_state import RunState


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder)
    return folder


@pytest.fixture
def run(tmp_path, model):
    """A run of GRPO with checkpoints of two steps."""
    return make_run(tmp_path / "mine", "grpo-arithmetic", model)


def make_run(folder, recipe, model):
    config = read_plan(recipe, [f"policy.model_name={model}", f"run_dir={folder}"]).config
    for step in (2, 4):
        checkpoint = folder / "checkpoints" / f"step_{step}"
        (checkpoint / "hf").mkdir(parents=True)
        for file in Path(model).iterdir():
            (checkpoint / "hf" / file.name).write_bytes(file.read_bytes())
        CheckpointManifest(step, {}, {}).write(checkpoint)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "run.json").write_text(json.dumps({"algorithm": config.algorithm, "model": str(model)}))
    return folder


def test_a_model_is_evaluated_on_named_tasks_without_a_run(model):
    given = evaluation_of(str(model), ["eval.num_samples=4", "eval.temperature=0.8"], ["arithmetic", "gsm8k"])
    assert (given.plan.config.algorithm, given.plan.config.eval.tasks) == ("evaluation", ["arithmetic", "gsm8k"])
    assert given.plan.config.policy.model_name == str(model)
    assert given.plan.config.policy.max_total_sequence_length == 1024  # the model's positions, fewer than the default
    assert given.folder.parent == Path("runs")
    assert given.folder.name.startswith("eval-tiny-")


def test_a_run_is_evaluated_at_its_newest_checkpoint_with_its_own_settings(run):
    given = evaluation_of(str(run))
    assert given.plan.config.policy.model_name == str(run / "checkpoints" / "step_4" / "hf")
    assert given.plan.config.data.validation.dataset_name == "arithmetic"
    assert given.folder != run
    assert given.folder.name.startswith("eval-mine-step_4-")


def test_the_training_rows_are_those_of_the_run_or_recipe(run, model, tmp_path):
    assert evaluation_of(str(run)).training().config.data.train.dataset_name == "arithmetic"
    sft = make_run(tmp_path / "sft", "sft-arithmetic", model)
    given = evaluation_of(str(sft), tasks=["arithmetic"])
    assert given.plan.config.algorithm == "evaluation"
    assert given.training().config.algorithm == "sft"
    with pytest.raises(ConfigError, match="--contamination compares prompts with training rows"):
        evaluation_of(str(model), tasks=["arithmetic"]).training()


def test_a_checkpoint_of_a_run_is_named_by_its_step_or_folder(run):
    for source in (f"{run}:2", f"{run}/checkpoints/step_2"):
        assert evaluation_of(source).plan.config.policy.model_name == str(run / "checkpoints" / "step_2" / "hf")
    with pytest.raises(RunDirectoryError, match="no checkpoint of step 3; it has step_2, step_4"):
        evaluation_of(f"{run}:3")


def test_other_weights_and_another_folder_can_be_given_for_a_run(run, model, tmp_path):
    given = evaluation_of(str(run), [f"policy.model_name={model}", f"run_dir={tmp_path / 'results'}"])
    assert (given.plan.config.policy.model_name, given.folder) == (str(model), tmp_path / "results")


def test_a_run_that_generates_nothing_is_evaluated_on_tasks_with_its_model(tmp_path, model):
    folder = make_run(tmp_path / "sft", "sft-arithmetic", model)
    config = evaluation_of(str(folder), tasks=["arithmetic"]).plan.config
    assert config.algorithm == "evaluation"
    assert config.policy.model_name == str(folder / "checkpoints" / "step_4" / "hf")
    assert config.policy.precision == "float32"


def test_a_recipe_keeps_its_model_and_does_not_write_into_the_folder_of_its_run(tmp_path, model):
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: grpo-arithmetic\nrun_dir: {tmp_path / 'run'}\npolicy: {{model_name: {model}}}\n")
    given = evaluation_of(str(path))
    assert given.plan.config.policy.model_name == str(model)
    assert given.folder.name.startswith("eval-mine-")


def test_an_evaluation_goes_on_in_its_own_folder(tmp_path, model):
    config = evaluation_of(str(model), tasks=["arithmetic"]).plan.config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "plan.json").write_text("{}")
    given = evaluation_of(str(tmp_path))
    assert given.folder == tmp_path
    assert to_yaml(given.plan.root) == to_yaml(config).replace("run_dir: null", f"run_dir: {tmp_path}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [("Qwen/Qwen3-0.6B", True), ("tiny-arithmetic", True), ("grpo-arithmetic", False), ("recipes/mine.yaml", False)],
)
def test_a_model_is_told_from_a_recipe_by_its_name(source, expected):
    assert is_model(source) is expected


@pytest.mark.parametrize("source", ["", "eval.seed=3"])
def test_a_missing_source_is_named(source):
    with pytest.raises(ConfigError, match="needs a model, a run, a recipe or a YAML file"):
        evaluation_of(source)


def test_an_address_is_refused_with_the_keys_of_a_server():
    with pytest.raises(ConfigError, match=r"server_cfg\.urls=\[http://10\.0\.0\.5:8000/v1\]"):
        evaluation_of("http://10.0.0.5:8000/v1", tasks=["gsm8k"])


def test_checkpoints_are_evaluated_as_they_are_saved_until_the_run_ends(run, tmp_path, monkeypatch, caplog):
    def save(step):
        checkpoint = run / "checkpoints" / f"step_{step}"
        shutil.copytree(run / "checkpoints" / "step_2", checkpoint)
        CheckpointManifest(step, {}, {}).write(checkpoint)

    def sleep(_):
        waits.append(len(waits))
        if len(waits) == 1:
            save(6)
            shutil.rmtree(run / "checkpoints" / "step_4")  # after it was evaluated
        elif len(waits) == 3:
            save(8)
            RunState("finished", step=8).write(run)

    waits, scored = [], []

    def evaluate(plan, *, folder, trained):
        scored.append((Path(plan.config.policy.model_name).parent.name, folder, plan.config.eval.tasks, trained))
        if len(scored) == 3:
            shutil.rmtree(run / "checkpoints" / "step_6")
            raise OSError("the weights are gone")
        return len(scored)

    lock = DirectoryLock(run)
    lock.acquire()
    RunState("running", step=4).write(run)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    assert list(evaluation.follow(str(run), [], ["arithmetic"])) == [1, 2, 4]
    lock.release()
    folder = tmp_path / "eval-mine"
    steps = ["step_2", "step_4", "step_6", "step_8"]
    assert scored == [(step, folder / step, ["arithmetic"], None) for step in steps]
    assert "step 6: the run has removed the checkpoint" in caplog.text
    assert len(waits) == 3


def test_a_failure_that_is_not_of_a_removed_checkpoint_ends_the_evaluations(run, monkeypatch):
    def evaluate(plan, *, folder, trained):
        raise OSError("no space left")

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    with pytest.raises(OSError, match="no space"):
        list(evaluation.follow(str(run), [f"run_dir={run.parent / 'results'}"]))


def test_a_run_that_ends_without_a_checkpoint_cannot_be_followed(run):
    shutil.rmtree(run / "checkpoints")
    RunState("failed", step=1).write(run)
    with pytest.raises(RunDirectoryError, match="has ended without a checkpoint with Hugging Face files"):
        list(evaluation.follow(str(run)))
