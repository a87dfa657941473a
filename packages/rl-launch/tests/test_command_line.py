import subprocess

import pytest
import typer
from rl_process import PYTHON, rl
from typer.testing import CliRunner

from rl_core.errors import DataError, FailureOrigin, RunDirectoryError, WorkerError
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.isolation import loaded_by_command
from rl_launch.cli import app
from rl_launch.cli.failure import reported
from rl_launch.commands.train import TrainOutcome
from rl_launch.recipes import recipe_names

RL = "rl_launch.cli.app:main"
HEAVY = {"datasets", "megatron", "ray", "torch", "transformers", "vllm"}

# prints the modules that a command has loaded when it ends
REPORTING = """
import atexit, sys
from rl_launch.cli import main
atexit.register(lambda: print(*sys.modules))
main()
"""


def test_help_answers_at_once():
    assert not loaded_by_command(RL, "--help") & (HEAVY | {"numpy", "omegaconf", "rl_algos", "rl_envs"})
    answer = rl("--help")
    assert answer.returncode == 0
    assert all(command in answer.stdout for command in ("train", "quickstart", "config"))


@pytest.mark.parametrize(("is_finished", "code"), [(True, 0), (False, 75)])
def test_a_run_ends_with_the_commands_to_type_next(monkeypatch, tmp_path, is_finished, code):
    monkeypatch.setattr(
        "rl_launch.commands.train.train", lambda plan, **given: TrainOutcome({}, is_finished=is_finished)
    )
    answer = CliRunner().invoke(app, ["train", "sft-tiny", f"run_dir={tmp_path}/my run"])
    assert answer.exit_code == code
    # a pipe gets the folder only
    assert answer.stdout == f"{tmp_path}/my run\n"
    assert f"next: rl show '{tmp_path}/my run', or rl view" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nonesuch"], "there is no recipe 'nonesuch'"),
        (["train", "grpo-arithmetic", "grpo.sede=1"], "grpo.seed?"),
        (["train", "grpo-arithmetic", "grpo.seed"], "an override is written key=value"),
        (["train", "run_dir=x"], "rl train RECIPE run_dir=x"),
        (["train", "grpo-arithmetic", "policy.model_name=./nowhere"], "nowhere"),
        (["quickstart", "steps=3"], "allowed: run_dir=DIR and cluster.KEY=VALUE"),
        (["config", "explain", "grpo-arithmetic", "grpo.sed"], "grpo.seed?"),
    ],
)
def test_wrong_use_is_one_message_at_once_and_leaves_nothing(tmp_path, arguments, message):
    answer = subprocess.run(
        [*PYTHON, "-c", REPORTING, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert not set(answer.stdout.split()) & HEAVY
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: ")
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not list(tmp_path.iterdir())


def test_a_foreign_run_directory_is_refused_before_anything_starts(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("words")
    answer = rl("train", "sft-arithmetic", f"run_dir={foreign}", "data.train.settings={num_rows: 64}")
    assert answer.returncode == 2
    assert "holds files that do not belong to a run" in answer.stderr
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]


def test_show_prints_a_config_that_resolves_to_itself(tmp_path):
    shown = CliRunner().invoke(app, ["config", "show", "grpo-arithmetic", "grpo.seed=7"])
    assert shown.exit_code == 0
    (tmp_path / "again.yaml").write_text(shown.stdout)
    again = CliRunner().invoke(app, ["config", "show", str(tmp_path / "again.yaml")])
    assert again.stdout == shown.stdout
    assert "seed: 7" in shown.stdout


@pytest.mark.parametrize(
    "recipe",
    partly_exhaustive(
        recipe_names(),
        always=["dpo-tiny", "grpo-arithmetic", "grpo-self-play-tiny", "ppo-tiny", "sft-arithmetic", "distill-tiny"],
    ),
)
def test_show_changed_prints_a_short_config_that_resolves_to_the_same(tmp_path, recipe):
    changed = CliRunner().invoke(app, ["config", "show", "--changed", recipe]).stdout
    whole = CliRunner().invoke(app, ["config", "show", recipe]).stdout
    (tmp_path / "changed.yaml").write_text(changed)
    assert CliRunner().invoke(app, ["config", "show", str(tmp_path / "changed.yaml")]).stdout == whole
    assert len(changed.splitlines()) < len(whole.splitlines()) / 2


def test_show_changed_leaves_out_a_key_that_is_written_with_its_default():
    changed = CliRunner().invoke(
        app, ["config", "show", "--changed", "grpo-math-1b", "grpo.seed=42", "grpo.max_val_samples=9"]
    )
    assert "seed" not in changed.stdout
    assert "max_val_samples: 9" in changed.stdout


def test_explain_says_meaning_value_and_origin():
    answer = CliRunner().invoke(app, ["config", "explain", "grpo-arithmetic", "grpo.seed", "grpo.seed=7"]).stdout
    assert "grpo.seed: 7  (command line)" in answer
    assert "data order" in answer
    assert "default: 42" in answer
    assert "once a run has begun: a change needs a branch" in answer


@pytest.mark.parametrize(
    ("key", "says"), [("grpo.num_prompts_per_step", "Number of prompts"), ("sft.max_num_steps", "optimizer steps")]
)
def test_explain_needs_no_recipe(key, says):
    answer = CliRunner().invoke(app, ["config", "explain", key])
    assert answer.exit_code == 0
    assert answer.stdout.startswith(f"{key}: ")
    assert says in answer.stdout


def test_explain_lists_what_is_below_a_section():
    answer = CliRunner().invoke(app, ["config", "explain", "grpo-arithmetic", "cluster"]).stdout
    assert "cluster.worker_envs" in answer
    assert "grpo-arithmetic.yaml:" in answer


def test_diff_names_what_differs():
    answer = CliRunner().invoke(app, ["config", "diff", "grpo-arithmetic", "grpo-arithmetic", "grpo.seed=7"])
    assert answer.stdout == "grpo.seed: 42 -> 7\n"


@pytest.mark.parametrize(
    ("error", "code", "first"),
    [
        (DataError("row 7 has no answer"), 2, "error: row 7 has no answer"),
        (RunDirectoryError("busy"), 2, "error: busy"),
        (
            WorkerError(
                "builtins.RuntimeError", "boom", "far away", FailureOrigin("policy", 1, "node-a", "train_step")
            ),
            1,
            "error: policy rank 1 on node-a during train_step: builtins.RuntimeError: boom",
        ),
        (OSError("disk full"), 1, "error: OSError: disk full"),
        (KeyboardInterrupt(), 1, "error: interrupted"),
    ],
)
def test_how_a_failure_ends(tmp_path, capsys, error, code, first):
    (tmp_path / "logs").mkdir()

    def failing():
        with reported() as failure:
            failure.run_dir = tmp_path
            raise error

    with pytest.raises(typer.Exit) as caught:
        failing()
    assert caught.value.exit_code == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == first
    assert "Traceback" not in "\n".join(lines)
    if code == 1 and not isinstance(error, KeyboardInterrupt):
        log = (tmp_path / "logs/error.log").read_text()
        assert "Traceback" in log
        assert "far away" in log or not isinstance(error, WorkerError)


def test_a_full_disk_is_named_with_the_remedy(tmp_path, capsys):
    def save():
        with reported() as failure:
            failure.run_dir = tmp_path
            raise WorkerError("SafetensorError", "I/O error: No space left on device (os error 28)", "trace")

    with pytest.raises(typer.Exit) as ended:
        save()
    assert ended.value.exit_code == 1
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert "no space left" in said
