"""`rl config upgrade`: files of version 0.1.0 under today's keys."""

import pytest
from typer.testing import CliRunner

from rl_core.config import load
from rl_launch.cli import app
from rl_launch.run_config.reading import read_plan

RECIPE = """\
# my recipe
defaults: grpo-arithmetic
policy:
  model_name: tiny-arithmetic   # small
  dtensor_cfg: {activation_checkpointing: true}
loss_fn:
  ratio_clip_max: 0.28
  use_cispo: false
  token_level_loss: false
  reference_policy_kl_penalty: 1.0e-3

# the end
grpo: {max_num_steps: 4}
"""
UPGRADED = """\
# my recipe
defaults: grpo-arithmetic
policy:
  model_name: tiny-arithmetic   # small
  dtensor_cfg: {recompute: full}
loss_fn:
  surrogate:
    clip_high: 0.28
  aggregation:
    name: sequence-mean
  kl:
    weight: 0.001

# the end
grpo: {max_num_steps: 4}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def test_a_file_is_refused_with_the_command_that_rewrites_it(recipe):
    result = CliRunner().invoke(app, ["config", "show", str(recipe)])
    assert result.exit_code == 2
    assert f"rl config upgrade {recipe} --output FILE" in result.stderr


def test_sections_with_earlier_keys_are_written_again_and_nothing_else(recipe):
    result = CliRunner().invoke(app, ["config", "upgrade", str(recipe)])
    assert result.stdout == UPGRADED
    assert "5 keys of an earlier version: " in result.stderr
    assert CliRunner().invoke(app, ["config", "upgrade", str(recipe), "-o", str(recipe)]).exit_code == 0
    assert recipe.read_text() == UPGRADED
    config = read_plan(recipe).config
    assert (config.loss_fn.surrogate.clip_high, config.loss_fn.kl.weight) == (0.28, 1e-3)
    assert CliRunner().invoke(app, ["config", "upgrade", str(recipe)]).stdout == UPGRADED


@pytest.mark.parametrize("text", ["algorithm: sft\npolicy:\n  dtensor_cfg: {recompute_granularity: full}\n"])
def test_a_section_may_be_left_with_nothing(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    result = CliRunner().invoke(app, ["config", "upgrade", str(tmp_path / "a.yaml")])
    assert result.stdout == "algorithm: sft\npolicy:\n  dtensor_cfg: {}\n"
    (tmp_path / "b.yaml").write_text(result.stdout)
    assert load(tmp_path / "b.yaml").plain() == {"algorithm": "sft", "policy": {"dtensor_cfg": {}}}


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    for name in ("a.json", "nothing.yaml"):
        assert CliRunner().invoke(app, ["config", "upgrade", str(tmp_path / name)]).exit_code == 2
