"""`rl config import`."""

import pytest
import yaml
from foreign_files import NEMO_RL, changed, written
from typer.testing import CliRunner

from rl_launch.cli import app
from rl_launch.run_config.reading import read_plan


def rl(*arguments):
    return CliRunner().invoke(app, ["config", "import", *map(str, arguments)])


def test_a_recipe_is_printed_with_what_to_check(tmp_path):
    answer = rl(written(tmp_path, NEMO_RL), "--from", "nemo-rl")
    assert answer.exit_code == 0, answer.output
    comments = [line for line in answer.stdout.splitlines() if line.startswith("#")]
    assert "# Check before you train:" in comments
    assert len(comments) <= 10
    assert "Check before you train:" in answer.stderr
    assert read_plan(yaml.safe_load(answer.stdout)).config.policy.model_name == "Qwen/Qwen2.5-0.5B"


def test_a_recipe_is_written_and_its_report_next_to_it(tmp_path):
    output = tmp_path / "ours.yaml"
    answer = rl(written(tmp_path, NEMO_RL), "--from", "nemo-rl", "--output", output)
    assert answer.exit_code == 0, answer.output
    assert f"Wrote {output}, and the result for each key to {output}.report.txt" in answer.stdout
    assert len(answer.stdout.splitlines()) < 15
    report = (tmp_path / "ours.yaml.report.txt").read_text()
    assert "checkpointing.checkpoint_dir -> run_dir" in report
    assert "grpo.val_batch_size" in report
    assert "engine batches automatically" in report
    shown = CliRunner().invoke(app, ["config", "show", str(output)])
    assert shown.exit_code == 0, shown.output


def test_a_feature_that_is_not_offered_writes_nothing(tmp_path):
    output = tmp_path / "ours.yaml"
    values = changed(NEMO_RL, policy__generation__bad_words=["<image>"], policy__quant_cfg="q.yaml")
    answer = rl(written(tmp_path, values), "--from", "nemo-rl", "-o", output)
    assert answer.exit_code == 2
    assert "2 features of NeMo RL not offered here" in answer.stderr
    assert (
        "words that the policy may not sample (policy.generation.bad_words): policy.generation.bad_words="
        in answer.stderr
    )
    assert "quantisation-aware training" in answer.stderr
    assert not output.exists()


def test_the_rest_can_be_written(tmp_path):
    output = tmp_path / "ours.yaml"
    values = changed(NEMO_RL, policy__quant_cfg="q.yaml")
    answer = rl(written(tmp_path, values), "--from", "nemo-rl", "-o", output, "--keep-going")
    assert answer.exit_code == 0, answer.output
    assert "policy.quant_cfg: refused and omitted: quantisation-aware training" in answer.stdout
    assert "# - policy.quant_cfg: refused and omitted: " in output.read_text()
    assert CliRunner().invoke(app, ["config", "show", str(output)]).exit_code == 0


def test_a_file_that_exists_is_kept(tmp_path):
    path = written(tmp_path, NEMO_RL)
    answer = rl(path, "--from", "nemo-rl", "-o", path)
    assert answer.exit_code == 2
    assert "exists" in answer.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gone.yaml", "gone.yaml: cannot be read: No such file or directory"),
        ("bad.yaml", "bad.yaml:1: not valid YAML: while parsing a flow sequence"),
        ("bad.toml", "bad.toml: cannot be read: "),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, says):
    path = tmp_path / name
    if not name.startswith("gone"):
        path.write_text("[1, 2")
    answer = rl(path, "--from", "nemo-rl")
    assert answer.exit_code == 2
    assert says in answer.stderr
