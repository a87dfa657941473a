"""`rl config import`."""

import pytest
import yaml
from foreign_files import NEMO_RL, changed, written
from typer.testing import CliRunner

from rl_launch.cli import app
from rl_launch.run_config.reading import read_plan


def rl(*arguments):
    return CliRunner().invoke(app, ["config", "import", *map(str, arguments)])


def test_a_recipe_is_printed_with_the_report_as_comments(tmp_path):
    answer = rl(written(tmp_path, NEMO_RL), "--from", "nemo-rl")
    assert answer.exit_code == 0, answer.output
    assert "# - grpo.val_batch_size" in answer.stdout
    assert "engine batches automatically" in answer.stdout
    assert read_plan(yaml.safe_load(answer.stdout)).config.policy.model_name == "Qwen/Qwen2.5-0.5B"


def test_a_recipe_is_written_and_the_report_printed(tmp_path):
    output = tmp_path / "ours.yaml"
    answer = rl(written(tmp_path, NEMO_RL), "--from", "nemo-rl", "--output", output)
    assert answer.exit_code == 0, answer.output
    assert "checkpointing.checkpoint_dir -> run_dir" in answer.stdout
    assert f"Wrote {output}" in answer.stdout
    shown = CliRunner().invoke(app, ["config", "show", str(output)])
    assert shown.exit_code == 0, shown.output


def test_a_feature_that_is_not_offered_writes_nothing(tmp_path):
    output = tmp_path / "ours.yaml"
    values = changed(NEMO_RL, policy__generation__backend="dynamo", policy__quant_cfg="q.yaml")
    answer = rl(written(tmp_path, values), "--from", "nemo-rl", "-o", output)
    assert answer.exit_code == 2
    assert "2 features of NeMo RL not offered here" in answer.stderr
    assert "generation by Dynamo: policy.generation.backend=" in answer.stderr
    assert "quantisation-aware training" in answer.stderr
    assert not output.exists()


def test_the_rest_can_be_written(tmp_path):
    output = tmp_path / "ours.yaml"
    values = changed(NEMO_RL, policy__quant_cfg="q.yaml")
    answer = rl(written(tmp_path, values), "--from", "nemo-rl", "-o", output, "--keep-going")
    assert answer.exit_code == 0, answer.output
    assert "Refused:" in answer.stdout
    assert "# Refused and omitted:" in output.read_text()
    assert CliRunner().invoke(app, ["config", "show", str(output)]).exit_code == 0


def test_a_file_that_exists_is_kept(tmp_path):
    path = written(tmp_path, NEMO_RL)
    answer = rl(path, "--from", "nemo-rl", "-o", path)
    assert answer.exit_code == 2
    assert "exists" in answer.stderr


@pytest.mark.parametrize("name", ["gone.yaml", "bad.yaml", "bad.toml"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    path = tmp_path / name
    if not name.startswith("gone"):
        path.write_text("[1, 2")
    answer = rl(path, "--from", "nemo-rl")
    assert answer.exit_code == 2
    assert "cannot be read" in answer.stderr
