"""The JSON Schema of recipes, held against an editor's validator."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_core.errors import ConfigError
from rl_launch.cli import app
from rl_launch.commands.recipe_files import recipe_schema
from rl_launch.recipes import RECIPES

pytest.importorskip("check_jsonschema")


@pytest.fixture(scope="module")
def schema_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("schema") / "recipe.schema.json"
    path.write_text(json.dumps(recipe_schema()))
    return path


def validate(schema_file, *files):
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(schema_file), "--verbose"]
    return subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)


def test_the_schema_is_one():
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(recipe_schema())


def test_a_recipe_names_the_written_schema_in_its_first_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = CliRunner().invoke(app, ["config", "schema", "sft", "-o", "sft.schema.json"])
    assert written.exit_code == 0, written.output
    hint = written.output.splitlines()[-1]
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{hint}\ndefaults: sft-arithmetic\nsft: {{max_num_steps: 5}}\n")
    assert CliRunner().invoke(app, ["config", "show", "mine.yaml"]).exit_code == 0
    named = tmp_path / hint.partition("yaml-language-server: $schema=")[2]
    assert validate(named, recipe).returncode == 0
    recipe.write_text(recipe.read_text().replace("max_num_steps", "max_nm_steps"))
    assert validate(named, recipe).returncode == 1


def test_a_schema_file_that_cannot_be_written_is_refused(tmp_path):
    answer = CliRunner().invoke(app, ["config", "schema", "-o", str(tmp_path / "absent" / "recipe.schema.json")])
    assert answer.exit_code == 2
    assert "recipe.schema.json cannot be written: No such file or directory. Choose another file." in answer.stderr


def test_every_shipped_recipe_is_valid(schema_file):
    answer = validate(schema_file, *sorted(RECIPES.glob("*.yaml")))
    assert answer.returncode == 0, answer.stdout


BROKEN = {
    "an unknown key": "defaults: grpo-arithmetic\ngrpo: {num_promts_per_step: 3}\n",
    "a wrong type": "defaults: grpo-arithmetic\ngrpo: {num_prompts_per_step: many}\n",
    "a value out of bounds": "defaults: grpo-arithmetic\ngrpo: {num_prompts_per_step: 0}\n",
    "a wrong choice": "algorithm: sft\npolicy: {model_name: x, precision: half}\ndata: {train: {}}\n",
    "no algorithm": "policy: {model_name: x}\n",
    "an unknown algorithm": "algorithm: gpro\npolicy: {model_name: x}\ndata: {train: {}}\n",
    "no model": "algorithm: sft\npolicy: {}\ndata: {train: {}}\n",
    "a section of another algorithm": "algorithm: sft\npolicy: {model_name: x}\ndata: {train: {}}\ngrpo: {seed: 1}\n",
    "an unknown setting of a backend": "defaults: grpo-arithmetic\npolicy: {dtensor_cfg: {tensor_parallel: 2}}\n",
    "an unknown setting of an environment": "defaults: grpo-arithmetic\nenv: {math: {format: numeric}}\n",
    "an unknown setting of an agent": "defaults: grpo-arithmetic\ngrpo: {agents: {first: {wieght: 2.0}}}\n",
    "an unknown setting of a teacher": "defaults: distill-tiny\nteachers: {math: {model: x}}\n",
    "a judge of an unknown kind": "defaults: grpo-arithmetic\njudges: {critic: {kind: oracle}}\n",
    "an unknown setting of a judge": (
        "defaults: grpo-arithmetic\njudges: {critic: {kind: generator, model_name: policy, base_url: x}}\n"
    ),
    "an unknown setting of a reward by a judge": (
        "defaults: grpo-arithmetic\nenv: {mine: {rewards: {right: {judge: critic, forms: number}}}}\n"
    ),
    "an environment of no type": "defaults: grpo-arithmetic\nenv: {mine: {deadline_s: 2}}\n",
    "an unknown setting of a dataset": (
        "defaults: sft-arithmetic\ndata: {train: {dataset_name: arithmetic, settings: {max_operant: 9}}}\n"
    ),
}

VALID = {
    "interpolations": "defaults: sft-squad\npolicy: {train_global_batch_size: '${policy.train_micro_batch_size}'}\n"
    "data: {train: {dataset_name: arithmetic, settings: '${data.validation.settings}'}}\n",
    "a key that its user must set": "defaults: grpo-arithmetic\ngrpo:\n  max_num_steps: ???\n",
    "an algorithm in a file": "algorithm: mine.py:PLUGIN\nmine: {max_num_steps: 3}\n",
    "an estimator by name": "defaults: grpo-arithmetic\ngrpo: {adv_estimator: rloo}\n",
    "settings of an estimator": "defaults: grpo-arithmetic\ngrpo: {adv_estimator: {name: pass_at_k, k: 2}}\n",
    "a surrogate by name": "defaults: grpo-arithmetic\nloss_fn: {surrogate: sapo, aggregation: sequence-mean}\n",
    "settings of a surrogate": "defaults: grpo-arithmetic\nloss_fn: {surrogate: {name: kl-cov, share: 0.01}}\n",
    "settings of a loss in a file": "defaults: grpo-arithmetic\nloss_fn: {name: 'mine.py:Loss', sharpness: 2}\n",
    "an environment in a file": "defaults: grpo-arithmetic\nenv: {mine: {type: 'mine.py:Game', size: 5}}\n",
    "several datasets": "defaults: sft-squad\ndata: {train: [{data_path: a.jsonl, weight: 1}, {data_path: b.jsonl}]}\n",
    "an unquoted number as text": "defaults: sft-squad\ncluster: {env_vars: {NCCL_NVLS_ENABLE: 0}}\n",
    "several teachers": "defaults: distill-tiny\nteachers: {math: {model_name: x}}\n",
    "judges of each kind": (
        "defaults: grpo-arithmetic\njudges:\n  own: {kind: generator, model_name: policy}\n"
        "  out: {kind: endpoint, base_url: 'http://x/v1', model: m, api_key: '${oc.env:KEY}'}\n"
        "  rm: {kind: reward_model, model_name: x, dtensor_cfg: {tensor_parallel_size: 2}}\n"
    ),
    "rewards by judges": (
        "defaults: grpo-arithmetic\nenv:\n  mine:\n    rewards:\n"
        "      right: {judge: out, rubric: a.md, range: [0, 2]}\n      long: rl_core:length_penalty\n"
    ),
    "a drafter": "defaults: grpo-arithmetic\ndrafter: {model_name: x}\n",
    "several parents": "defaults: [sft-squad, sft-megatron]\nrun_dir: runs/mine\n",
}


@pytest.fixture(scope="module")
def refused(schema_file, tmp_path_factory):
    """The broken recipes that the validator refuses, all looked at by one process of it."""
    folder = tmp_path_factory.mktemp("broken")
    for case, text in BROKEN.items():
        (folder / f"{case}.yaml").write_text(text)
    answer = validate(schema_file, "--output-format=json", *sorted(folder.glob("*.yaml")))
    return {Path(error["filename"]).stem for error in json.loads(answer.stdout)["errors"]}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_recipe_is_refused(refused, case):
    assert case in refused


def test_what_configs_take_is_valid(schema_file, tmp_path):
    for number, text in enumerate(VALID.values()):
        (tmp_path / f"{number}.yaml").write_text(text)
    answer = validate(schema_file, *sorted(tmp_path.glob("*.yaml")))
    assert answer.returncode == 0, answer.stdout


def test_the_schema_of_one_algorithm_has_no_section_of_others():
    properties = [definition.get("properties", {}) for definition in recipe_schema("sft")["$defs"].values()]
    assert not any("grpo" in each for each in properties)
    assert recipe_schema("sft-squad") == recipe_schema("sft")


def test_a_schema_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="gpro"):
        recipe_schema("gpro")


def test_the_schema_of_an_algorithm_in_a_file_is_refused():
    with pytest.raises(ConfigError, match=r"an algorithm in a file.*rl\.algorithms"):
        recipe_schema("mine.py:PLUGIN")
