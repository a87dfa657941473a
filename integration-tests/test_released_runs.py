"""Runs that earlier versions made are read, resumed, branched, converted and evaluated by this one.

`released_runs/VERSION.tar.xz` holds small runs of each release: SFT, SFT with adapters, and GRPO, two steps each, with
their model, their data, and the metrics of the same runs with four steps. `released_runs/record.py` makes it; a release
adds its own (CONTRIBUTING, "Release"). `unreleased` holds runs of the present formats, made before the release.
"""

import json
import tarfile
from pathlib import Path

import pytest
from runs import SAME
from safetensors.numpy import load_file

from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_launch.commands.preparation import check_run_dir
from rl_launch.commands.start import run_of
from rl_launch.evaluation.source import evaluation_of
from rl_launch.run_config.reading import read_model_plan, read_plan
from rl_launch.run_session.directory.checkpoint_name import CheckpointName
from rl_launch.run_session.directory.run_folder import RunFolder

ARCHIVES = sorted((Path(__file__).parent / "released_runs").glob("*.tar.xz"))
VERSIONS = [path.name.removesuffix(".tar.xz") for path in ARCHIVES]
RUNS = ["sft", "lora", "grpo"]
STEPS = {"sft": "sft.max_num_steps=4", "lora": "sft.max_num_steps=4", "grpo": "grpo.max_num_steps=4"}
HERE = "@HERE@"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Return a function from a version to the folder of its runs."""
    made = {}

    def unpack(version):
        if version not in made:
            folder = made[version] = tmp_path_factory.mktemp(version)
            with tarfile.open(ARCHIVES[VERSIONS.index(version)]) as archive:
                archive.extractall(folder)
            for file in [*folder.rglob("*.yaml"), *folder.rglob("*.json")]:
                file.write_text(file.read_text().replace(HERE, str(folder)))
        return made[version]

    return unpack


def steps(path):
    """The metrics that do not depend on times, by step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: {name: row[name] for name in SAME if name in row} for row in rows if row["step"]}


def again(folder, around):
    """Take the folder by the command that started the run; return whether that begins another run."""
    from released_runs.record import ALWAYS
    from released_runs.record import RUNS as STARTED

    recipe, *overrides = [
        each.replace("=model", f"={around}/model").replace(" rows", f" {around}/rows")
        for each in (*STARTED[folder.name], *ALWAYS)
    ]
    given = run_of(recipe, [*overrides, f"run_dir={folder}"])
    return check_run_dir(given.run_dir, given.plan, fresh=False) is not None


@pytest.mark.parametrize(
    ("version", "name"),
    partly_exhaustive(
        [(version, name) for version in VERSIONS for name in RUNS],
        always=[("0.1.0", "lora"), ("0.1.0", "grpo"), ("0.2.0", "grpo")],
    ),
)
def test_every_command_that_reads_a_run_reads_it_with_one_line_about_its_version(unpacked, caplog, version, name):
    folder = unpacked(version) / name
    plan = read_plan(folder)
    assert check_run_dir(folder, plan, fresh=False) is None
    checkpoint = CheckpointName.parse(folder).checkpoint()
    assert read_model_plan(folder / "config.yaml").config.policy.model_name == str(unpacked(version) / "model")
    assert evaluation_of(f"{folder}:2", ["eval.tasks=[gsm8k]"]).plan.config.policy.model_name == str(checkpoint / "hf")
    branch = run_of("", [STEPS[name], f"run_dir={folder}.branch"], str(folder))
    assert check_run_dir(branch.run_dir, branch.plan, fresh=False, branch_point=branch.branch_point).keeps_position
    assert not again(folder, unpacked(version))
    assert RunFolder(folder).state().step == 2
    lines = [record.getMessage() for record in caplog.records if "was written by version" in record.getMessage()]
    assert len(lines) == (version in ("0.1.0", "0.2.0"))


@pytest.mark.parametrize(
    ("version", "name"),
    partly_exhaustive([(version, name) for version in VERSIONS for name in RUNS], always=[("0.1.0", "lora")]),
)
def test_it_is_resumed_to_the_numbers_that_its_version_had_without_an_interruption(driver, unpacked, version, name):
    folder = unpacked(version)
    driver.train(folder / name, str(folder / name), STEPS[name])
    found, wanted = steps(folder / name / "metrics.jsonl"), steps(folder / f"{name}.jsonl")
    assert found.keys() == wanted.keys() == {1, 2, 3, 4}
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=1e-3, abs=1e-7)


@exhaustive
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", RUNS)
def test_its_checkpoint_is_converted_to_the_files_that_it_exported(driver, unpacked, tmp_path, version, name):
    run = unpacked(version) / name
    result = driver.rl(
        "convert", f"{run}:2" if (run / "checkpoints/step_2").is_dir() else str(run), str(tmp_path / "hf")
    )
    assert result.code == 0, result.output
    exported = CheckpointName.parse(run).checkpoint() / "hf" / "model.safetensors"
    for key, values in load_file(exported).items():
        assert (load_file(tmp_path / "hf" / "model.safetensors")[key] == values).all()
