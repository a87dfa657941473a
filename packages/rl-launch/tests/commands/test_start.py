import re

import pytest

from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.commands.start import run_of
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session import RunDirectory


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_run(path, *overrides):
    directory = RunDirectory(path)
    directory.open(read_plan("sft-arithmetic", overrides).config)
    directory.close()
    return str(path)


def test_a_recipe_runs_in_a_new_folder_of_its_name():
    given = run_of("sft-arithmetic")
    assert re.fullmatch(r"runs/sft-arithmetic-\d{8}-\d{6}", str(given.run_dir))
    assert (given.name, given.branch_point) == ("sft-arithmetic", None)


def test_a_run_goes_on_in_its_own_folder_whatever_its_config_says(tmp_path):
    run = make_run(tmp_path / "moved", "run_dir=where/it/was", "sft.seed=7")
    given = run_of(run, ["sft.max_num_steps=3"])
    assert (str(given.run_dir), given.plan.config.sft.seed, given.plan.config.sft.max_num_steps) == (run, 7, 3)
    assert str(run_of(run, ["run_dir=elsewhere"]).run_dir) == "elsewhere"


@pytest.mark.parametrize(("recipe", "overrides"), [("", ["sft.seed=8"]), ("sft.seed=8", [])])
def test_a_branch_takes_the_config_of_its_run_and_a_folder_of_its_own(tmp_path, recipe, overrides):
    run = make_run(tmp_path / "first", f"run_dir={tmp_path / 'first'}", "sft.max_num_steps=3")
    given = run_of(recipe, overrides, run)
    assert (given.plan.config.sft.max_num_steps, given.plan.config.sft.seed) == (3, 8)
    assert re.fullmatch(r"runs/first-\d{8}-\d{6}", str(given.run_dir))
    assert given.branch_point is not None
    assert str(given.branch_point.run.path) == run


def test_a_branch_may_take_the_config_of_a_recipe(tmp_path):
    run = make_run(tmp_path / "first", "sft.max_num_steps=3")
    given = run_of("sft-arithmetic", ["run_dir=second"], f"{run}:2")
    assert (given.plan.config.sft.max_num_steps, str(given.run_dir)) == (400, "second")
    assert given.branch_point is not None
    assert given.branch_point.name.step == 2


def test_wrong_use_says_what_is_right(tmp_path):
    with pytest.raises(ConfigError, match=r"needs a recipe, a YAML file or a run directory: rl train RECIPE"):
        run_of("")
    with pytest.raises(ConfigError, match=r"rl train RECIPE sft\.seed=8"):
        run_of("sft.seed=8")
    with pytest.raises(RunDirectoryError, match=r" nowhere\. .*`rl runs`"):
        run_of("", [], "nowhere")
