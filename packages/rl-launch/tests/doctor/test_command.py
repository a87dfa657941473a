"""`rl doctor` as it is typed."""

import json
from functools import partial

import pytest
from rl_process import rl
from typer.testing import CliRunner

from rl_core.testing.isolation import loaded_by, loaded_by_command
from rl_launch.cli import app
from rl_launch.commands.diagnosis import diagnose

HEAVY = {"datasets", "megatron", "ray", "torch", "transformers", "vllm"}
ENGINES = {"megatron", "torch", "vllm"}


doctor = partial(rl, "doctor")


def test_it_answers_at_once_and_starts_no_engine():
    assert not loaded_by_command("rl_launch.cli.app:main", "doctor") & ENGINES
    assert not loaded_by("rl_launch.doctor", "rl_launch.doctor.show") & HEAVY


def test_json_says_what_the_lines_say(monkeypatch):
    # both of one look at the machine: between two, another Ray may start or end
    report = diagnose("grpo-arithmetic")
    monkeypatch.setattr("rl_launch.commands.diagnosis.diagnose", lambda *_: report)
    plain, as_json = (CliRunner().invoke(app, ["doctor", *option]) for option in ((), ("--json",)))
    seen = json.loads(as_json.stdout)
    *lines, verdict = plain.stdout.splitlines()
    assert plain.exit_code == as_json.exit_code == (0 if seen["can_run"] else 1)
    for line, each in zip(lines, seen["checks"], strict=True):
        remedy = f" | {each['remedy']}" if each["remedy"] else ""
        assert line == f"{each['status']:<8} {each['name']}: {each['found']}{remedy}"
    assert seen["recipe"] == "grpo-arithmetic"
    assert verdict.startswith("grpo-arithmetic can")


def test_the_smallest_recipe_is_checked_by_default():
    answer = doctor()
    assert answer.returncode in {0, 1}
    assert answer.stdout.splitlines()[-1].startswith("grpo-arithmetic can")
    assert not answer.stderr


def test_a_recipe_for_gpus_cannot_run_without():
    answer = doctor("grpo-math-1b", "cluster.gpus_per_node=4", "--json", CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 1
    seen = json.loads(answer.stdout)
    assert not seen["can_run"]
    assert "gpus" in [each["name"] for each in seen["checks"] if each["status"] == "missing"]
    assert not answer.stderr


def test_overrides_alone_change_the_default_recipe():
    assert "for 400 ranks" in doctor("cluster.cpu_ranks_per_node=400", CUDA_VISIBLE_DEVICES="").stdout


def test_a_cluster_that_is_not_there_is_missing():
    answer = doctor(RAY_ADDRESS="127.0.0.1:1")
    assert answer.returncode == 1
    assert "missing  ray: " in answer.stdout
    assert "RAY_ADDRESS is 127.0.0.1:1, and nothing answers there" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonesuch"], "there is no recipe 'nonesuch'"),
        (["grpo.sede=1"], "grpo.seed?"),
        (["--timeout=5"], "Add --cluster"),
    ],
)
def test_wrong_use_is_one_message(arguments, said):
    answer = doctor(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: ")
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


BAD = """
defaults: grpo-arithmetic
policy: {model_name: nobody/nothing}
data:
  train: {dataset_name: arithmetic, prompt_file: nowhere.txt, processor: gsm9k}
  validation: {data_path: nowhere.jsonl, env_name: math}
"""


def test_models_and_data_that_cannot_be_read_are_missing_and_refused_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bad.yaml").write_text(BAD)
    keys = ["policy.model_name", "data.train.prompt_file", "data.train.processor", "data.validation.data_path"]
    answer = CliRunner().invoke(app, ["doctor", "bad.yaml", "--json"])
    assert answer.exit_code == 1
    seen = json.loads(answer.stdout)["checks"]
    assert [each["name"] for each in seen if each["status"] == "missing"][: len(keys)] == keys
    refused = CliRunner().invoke(app, ["train", "bad.yaml", "run_dir=run", "cluster.device=cpu"])
    assert refused.exit_code == 2
    assert "4 inputs cannot be read:" in refused.stderr
    assert all(f"  {key}: " in refused.stderr for key in keys)
    assert not (tmp_path / "run").exists()
