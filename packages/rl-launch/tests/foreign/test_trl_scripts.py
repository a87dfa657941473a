"""Python scripts and commands of TRL come over, and each of their lines is accounted for."""

import ast
import re

import pytest
from foreign_files import written
from trl_scripts import COMMANDS, SCRIPTS

from rl_core.errors import ConfigError
from rl_launch.foreign.importing import import_config
from rl_launch.foreign.translation import Fate
from rl_launch.foreign.trl.script import read_script
from rl_launch.foreign_keys.table import Kind
from rl_launch.run_config.reading import read_plan


def imported(folder, script, name="train.py", **options):
    return import_config(written(folder, script, name), "trl", **{"gpus": 2, **options})


def marked(text, number):
    """The result that a line is marked with."""
    line = text.splitlines()[number - 1]
    return Fate[line.partition("#: ")[2].strip().upper() or "UNRELATED"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_statement_is_accounted_for(tmp_path, name):
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n' * 1000)
    found = imported(tmp_path, SCRIPTS[name])
    fates = {line.number: line.fate for line in found.lines}
    tree = ast.parse(SCRIPTS[name])
    numbers = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    expected = {number: marked(SCRIPTS[name], number) for number in numbers}
    assert {number: fates.get(number) for number in expected} == expected
    refused = {answer.key for answer in found.answers if answer.kind is Kind.REFUSED}
    for number, fate in fates.items():
        [statement] = [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and each.lineno == number]
        places = [f"line {each}" for each in range(number, statement.end_lineno + 1)]
        if fate is Fate.REFUSED:
            assert refused & set(places)
        elif fate is Fate.CHECK:
            starts = tuple(f"{place}: " for place in places)
            computed = re.compile(rf"from lines? [\d, ]*\b{number}\b")
            assert any(note.startswith(starts) or computed.search(note) for note in found.notes)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_accounted_for(tmp_path, name):
    written(tmp_path, SCRIPTS["sft by a parser"], "train.py")
    text = COMMANDS[name]
    found = imported(tmp_path, text.replace("  #: converted", ""), "run.sh", gpus=None)
    fates = {}
    for line in found.lines:
        if not line.file:
            fates[line.number] = max(line.fate, fates.get(line.number, line.fate))
    numbers = [place for place, line in enumerate(text.splitlines(), 1) if line and not line.startswith(("#", " "))]
    assert {number: fates.get(number) for number in numbers} == {number: marked(text, number) for number in numbers}


@pytest.fixture
def recipe(tmp_path):
    def of(name):
        (tmp_path / "chats.jsonl").write_text('{"messages": []}\n' * 1000)
        return imported(tmp_path, SCRIPTS[name]).recipe

    return of


def test_a_trainer_without_arguments_has_the_defaults_of_its_class(recipe):
    found = recipe("sft in four lines")
    assert (found["algorithm"], found["policy"]["model_name"]) == ("sft", "Qwen/Qwen2.5-0.5B")
    assert found["policy"]["optimizer"]["kwargs"]["lr"] == 2e-5


def test_rows_that_the_script_holds_out_are_held_out(recipe):
    found = recipe("sft with held-out rows")
    assert found["data"]["train"] == {"data_path": "chats.jsonl", "split_validation_size": 0.1}
    assert "validation" not in found["data"]
    assert found["sft"]["val_period"] == 50
    [decay] = found["policy"]["scheduler"]
    assert decay["kwargs"]["total_iters"] == 2 * -(-900 // 16)  # two epochs of 900 rows in batches of 16


def test_constants_are_folded(recipe):
    found = recipe("sft with adapters")
    assert found["policy"]["model_name"] == "Qwen/Qwen2.5-0.5B"
    assert found["run_dir"] == "runs/sft"
    assert found["policy"]["train_global_batch_size"] == 8
    assert found["policy"]["dtensor_cfg"]["recompute"] == "full"
    adapters = found["policy"]["lora_cfg"]
    assert (adapters["dim"], adapters["dropout"], adapters["target_modules"]) == (16, 0.05, ["q_proj"])


def test_images_are_seen(recipe):
    found = recipe("sft of images")
    assert found["policy"]["vision"] == {"enabled": True, "tower": "trained", "projector": "trained"}
    assert found["sft"]["val_period"] == 0
    assert "validation" not in found["data"]


def test_arguments_of_earlier_trainers_are_taken(recipe):
    found = recipe("sft by unsloth")
    assert found["policy"]["max_total_sequence_length"] == 3000
    assert found["policy"]["optimizer"]["kwargs"]["lr"] == 5e-5  # the default of TrainingArguments
    assert found["policy"]["lora_cfg"]["dim"] == 16


def test_attributes_of_classes_trainers_and_adapters_are_followed(recipe):
    found = recipe("sft by a class")
    assert found["policy"]["lora_cfg"]["dim"] == 64
    assert found["policy"]["optimizer"]["kwargs"]["lr"] == 3e-5
    assert found["sft"]["max_num_steps"] == 7
    assert found["data"]["train"]["split"] == "train[:90%]"


def test_loops_over_constants_are_followed(recipe):
    found = recipe("simpo by a loop")
    assert found["dpo"]["loss"] == {"name": "simpo", "beta": 2.5, "gamma": 0.5}
    assert found["dpo"]["sft_loss_weight"] == 0.0


def test_datasets_are_concatenated(recipe):
    names = [each["dataset_name"] for each in recipe("sft in main")["data"]["train"]]
    assert names == ["a/b", "c/d"]


def test_slices_and_shares_of_datasets(recipe):
    first, second = recipe("dpo by arguments")["data"]["train"]
    assert (first["split"], first["weight"], second["weight"]) == ("train[10:]", 0.7, 0.3)


def test_grpo(tmp_path):
    (tmp_path / "rewards.py").touch()
    found = imported(tmp_path, SCRIPTS["grpo"])
    assert found.features == {}
    config = read_plan(found.recipe).config
    assert config.data.train.input_key == "question"
    assert config.data.train.split == "train[:500]"
    assert (config.policy.generation.temperature, config.logger.name) == (0.9, "run-200")
    # TRL corrects what vLLM samples unless it is told not to, by whole sequences
    importance = config.loss_fn.importance
    assert (importance.truncation, importance.level, importance.high) == ("icepop", "sequence", 3.0)
    assert config.loss_fn.kl.unbiased
    [note] = [note for note in found.notes if note.startswith("data.train.env_name")]
    assert "[rewards.py:reward_len, rewards.py:format_reward]" in note


def test_a_reward_model_is_named(tmp_path):
    notes = imported(tmp_path, SCRIPTS["grpo with a reward model"]).notes
    assert any("trl-lib/Qwen2-0.5B-Reward" in note and "env.reward_model.model" in note for note in notes)


def test_adapters_that_are_trained_further_and_renamed_columns(tmp_path):
    found = imported(tmp_path, SCRIPTS["dpo of an adapter"])
    assert found.recipe["data"]["train"]["columns"] == {"chosen": "good", "rejected": "bad"}
    [feature] = found.features
    assert feature.startswith("policy.lora_cfg.adapter: sft-adapter has no adapter_config.json")


def test_defaults_are_not_claimed_for_values_that_the_script_sets(tmp_path):
    found = imported(tmp_path, SCRIPTS["grpo with a trainer of its own"])
    [taken] = [note for note in found.notes if note.startswith("defaults of TRL")]
    assert "learning_rate" not in taken
    assert "num_generations" not in taken
    assert any(note.startswith("values that the script computes") and "learning_rate" in note for note in found.notes)


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ("x = 3 * 1e-5 / 3", 1e-5),
        ("n = 7\nx = f'{n:03d}-{n!r}'", "007-7"),
        ("import os\nx = os.path.join('a', 'b')", "a/b"),
        ("from pathlib import Path\nx = str(Path('a') / 'b')", "a/b"),
        ("class C:\n    lr = 4\nx = C().lr", 4),
        ("from dataclasses import dataclass\n@dataclass\nclass C:\n    lr: float = 1\nx = C(lr=2).lr", 2),
        ("from functools import partial\ndef f(a, b=1): return a + b\nx = partial(f, b=4)(3)", 7),
        ("x = (lambda a: a + 1)(2) if False else 5", 5),
        ("def f(*a, **k): return [*a, k['z']]\nx = f(1, z=2)", [1, 2]),
        ("d = {'a': 1}\nd['b'] = 2\nd.update(c=3)\nx = {**d, 'a': 4}", {"a": 4, "b": 2, "c": 3}),
        ("x = None\ndef f():\n    global x\n    x = 6\nf()", 6),
        ("x = []\nfor i in range(3):\n    x.append(i)", [0, 1, 2]),
        ("x = [i * 2 for i in (1, 2)]", [2, 4]),
        ("a, (b, x) = 1, (2, 3)", 3),
        ("import os\nx = os.environ.get('X', '8')", "8"),
        ("x = 1\nif __name__ == '__main__':\n    x = 2", 2),
        ("x = 1\nif not x:\n    x = 2", 1),
    ],
)
def test_constants_of_a_script(tmp_path, lines, value):
    script = f"{lines}\nSFTTrainer('x/y', args=SFTConfig('out', run_name=x))"
    assert read_script(written(tmp_path, script, "train.py")).values["run_name"] == value


@pytest.mark.parametrize(
    "line",
    [
        *[
            f"SFTTrainer('x/y', {name}=mine)"
            for name in (
                "compute_loss_func", "data_collator", "environment_factory", "formatting_func",
                "optimizer_cls_and_kwargs", "optimizers", "quantization_config", "rollout_func", "tools", "unheard_of",
            )
        ],
        "SFTTrainer('x/y', peft_config=IA3Config())",
        "DPOTrainer('x/y', ref_model='x/z')",
        "DPOTrainer('x/y', ref_model=AutoModelForCausalLM.from_pretrained('x/z'))",
        "SFTTrainer('x/y', args=SFTConfig('o', model_init_kwargs={'quantization_config': mine}))",
        "SFTTrainer(AutoModelForCausalLM.from_pretrained('x/y', load_in_8bit=True))",
        "SFTTrainer('x/y', peft_config=LoraConfig(r=8, bias='all'))",
    ],
)  # fmt: skip
def test_arguments_that_matter_are_refused_with_their_line(tmp_path, line):
    found = read_script(written(tmp_path, f"a = 1\n{line}", "train.py"))
    assert {each.number for each in found.refused} == {2}
    if "ref_model" not in line:
        none = re.sub(r"=(mine|True|IA3Config\(\))", "=None", line).replace("bias='all'", "bias='none'")
        assert not read_script(written(tmp_path, none.replace(": mine", ": None"), "none.py")).refused


def test_a_script_that_trains_twice_is_refused(tmp_path):
    script = "t = SFTTrainer('x/y')\nt.train()\nt.args = 3\nt.train()"
    [line] = read_script(written(tmp_path, script, "train.py")).refused
    assert (line.number, line.reason) == (4, "training more than once in a script")


@pytest.mark.parametrize(
    ("edit", "value"),
    [
        ('ds = load_dataset("a/b", split="train").select(range(10, 20))', "train[10:20]"),
        ('ds = load_dataset("a/b")["train"].take(5)', "train[:5]"),
        ('ds = load_dataset("a/b", split="train").map(f).take(5)', "train[:5]"),
    ],
)
def test_slices_of_rows_are_slices_of_the_split(tmp_path, edit, value):
    script = (
        f"from datasets import load_dataset\nfrom trl import SFTTrainer\n{edit}\nSFTTrainer('x/y', train_dataset=ds)"
    )
    assert imported(tmp_path, script).recipe["data"]["train"]["split"] == value


@pytest.mark.parametrize(
    "change",
    [
        "filter(f)",
        "shuffle(seed=1).select(range(10))",
        "select(indices)",
        "map(f)",
        "filter(f).take(5)",
        "class_encode_column('label')",
        "rename_column(old, 'prompt')",
        "train_test_split(test_size=n)['train']",
        "unheard_of()",
        "sort('x').take(3)",
    ],
)
@pytest.mark.parametrize(
    "form", ["ds = load_dataset('a/b', split='train').{}", "ds = load_dataset('a/b', split='train')\nds = ds.{}"]
)
def test_changes_of_rows_are_listed(tmp_path, form, change):
    form = form.replace("'a/b'", "'a/b', split='train'")
    script = f"from datasets import load_dataset\nfrom trl import SFTTrainer\n{form.format(change)}\n"
    number = len(script.splitlines())
    found = imported(tmp_path, f"{script}SFTTrainer('x/y', train_dataset=ds)")
    assert any(note.startswith(f"line {number}: ") for note in found.notes)


def test_files_by_split(tmp_path):
    script = SCRIPTS["sft with held-out rows"].replace(
        'data_files="chats.jsonl", split="train").train_test_split(test_size=0.1)',
        'data_files={"train": "a.jsonl", "test": "b.jsonl"})',
    )
    data = imported(tmp_path, script).recipe["data"]
    assert (data["train"], data["validation"]) == ({"data_path": "a.jsonl"}, {"data_path": "b.jsonl"})


def test_a_command_gives_its_script_the_arguments(tmp_path):
    written(tmp_path, SCRIPTS["sft by a parser"], "train.py")
    found = imported(tmp_path, COMMANDS["accelerate"].replace("  #: converted", ""), "run.sh", gpus=None)
    assert found.features == {}
    config = read_plan(found.recipe).config
    assert (config.policy.model_name, config.policy.lora_cfg.dim, config.cluster.gpus_per_node) == ("x/y", 4, 8)
    assert config.data.train.split == "train[:50]"


def test_a_command_of_trl(tmp_path):
    found = imported(tmp_path, COMMANDS["trl"].replace("  #: converted", ""), "run.sh", gpus=None)
    config = read_plan(found.recipe).config
    assert (config.policy.model_name, config.policy.optimizer.kwargs["lr"]) == ("Qwen/Qwen2.5-0.5B", 3e-5)
    assert (config.run_dir, config.cluster.gpus_per_node, config.sft.max_num_steps) == ("out", 4, 7)


def test_weight_decay_spares_norms_and_biases_as_in_trl(tmp_path):
    script = SCRIPTS["kto"].replace('"out", ', '"out", weight_decay=0.1, ')
    optimizer = imported(tmp_path, script).recipe["policy"]["optimizer"]
    assert optimizer["decay_norms_and_biases"] is False
    assert optimizer["kwargs"]["weight_decay"] == 0.1
    assert "decay_norms_and_biases" not in imported(tmp_path, SCRIPTS["orpo"]).recipe["policy"]["optimizer"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print(1)", "found none"),
        ("a = SFTConfig()\nb = DPOConfig()", "found SFTConfig in line 1, DPOConfig in line 2"),
        ("SFTTrainer('a')\nDPOTrainer('b')", "found SFTTrainer in line 1, DPOTrainer in line 2"),
        (
            "trainer = trl.GKDTrainer('a')",
            "GKDTrainer .line 1. is not imported: write a recipe of algorithm distillation",
        ),
        ("def (", "is not valid Python: line 1"),
        (f"x = {'+'.join(['1'] * 3000)}", "nested too deeply"),
    ],
)
def test_a_script_that_does_not_train_once_is_refused(tmp_path, script, said):
    with pytest.raises(ConfigError, match=said):
        imported(tmp_path, script)
