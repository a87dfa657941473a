"""Finding recipes, environments, datasets and keys from the command line, without a run and without an engine."""

import re
import subprocess
import sys

import pytest
from rl_process import PYTHON
from typer.testing import CliRunner

from rl_core.config import all_keys
from rl_core.plugins import DATASETS, ENVIRONMENTS, names
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.isolation import loaded_by
from rl_launch.cli import app
from rl_launch.recipes import recipe_names
from rl_launch.run_config.reading import read_raw
from rl_launch.run_config.root_types import type_of

HEAVY = {"datasets", "ray", "reasoning_gym", "tensorboardX", "tokenizers", "torch", "transformers", "vllm"}


def rl(*arguments):
    answer = CliRunner().invoke(app, list(arguments))
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def refusal(*arguments):
    answer = CliRunner().invoke(app, list(arguments))
    assert answer.exit_code == 2
    return answer.stderr


def test_recipes_are_listed_by_purpose_with_algorithm_model_and_size():
    answer = rl("recipes")
    for name in recipe_names():
        assert f"  {name}  ({read_raw(name).select('algorithm')}, " in answer
    assert "Sums of two numbers by GRPO" in answer
    purposes = ["To learn and to test, on a CPU:", "On one GPU:", "On one node:", "On a cluster:"]
    groups = re.split("|".join(map(re.escape, purposes)), answer)
    assert [purpose for purpose in answer.splitlines() if purpose in purposes] == purposes
    for group, line in zip(
        groups[1:],
        [
            "grpo-arithmetic  (grpo, tiny-arithmetic-sft, CPU)",
            "grpo-math-1b  (grpo, Qwen2.5-1.5B, 1 GPU)",
            "grpo-math-8b  (grpo, Llama-3.1-8B-Instruct, 8 GPUs)",
            "grpo-math-32b  (grpo, Qwen2.5-32B, 32 GPUs on 4 nodes)",
        ],
        strict=True,
    ):
        assert f"  {line}\n" in group


def test_a_recipe_is_printed_by_its_name():
    answer = rl("recipes", "grpo-math-1b")
    assert answer.startswith("# Grade-school mathematics by GRPO")
    assert "algorithm: grpo\n" in answer


def test_recipes_are_filtered_by_words():
    names = [line.split()[0] for line in rl("recipes", "MEGATRON", "sft").splitlines() if "  (" in line]
    assert names == ["sft-megatron"]
    assert "no recipe mentions 'grpo-maths-1b'; did you mean grpo-math-1b" in refusal("recipes", "grpo-maths-1b")


def test_init_copies_a_recipe_that_reads_as_the_original(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rl("init", "grpo-math-8b").startswith(
        "Wrote grpo-math-8b.yaml. Change it, then train: rl train grpo-math-8b.yaml"
    )
    assert rl("config", "diff", "grpo-math-8b", "grpo-math-8b.yaml") == ""
    assert "grpo-math-8b.yaml already exists" in refusal("init", "grpo-math-8b")
    rl("init", "sft-tiny", "--output", "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == rl("recipes", "sft-tiny")


def test_init_refuses_what_it_cannot_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean grpo-math-1b" in refusal("init", "grpo-math-1")
    assert "a recipe's file ends in .yaml" in refusal("init", "sft-tiny", "-o", "mine")
    assert "cannot be written: No such file or directory" in refusal("init", "sft-tiny", "-o", "no/mine.yaml")
    assert "grpo-math-1b.yaml -> grpo-math-1b.yaml" in refusal("init", "grpo-math-8b", "-o", "grpo-math-1b.yaml")
    assert not list(tmp_path.iterdir())


def test_the_bare_command_says_how_to_find_recipes():
    assert "rl recipes lists the recipes" in CliRunner().invoke(app, []).output


def test_versions_of_all_packages_and_of_python():
    lines = dict(line.split(None, 1) for line in rl("--version").splitlines())
    assert {"rl-core", "rl-launch", "rl-algos", "rl-dtensor", "python", "ray"} <= set(lines)
    assert lines["python"].startswith(".".join(map(str, sys.version_info[:3])))


def test_environments_and_datasets_are_listed_with_a_line_each(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = rl("env", "list").splitlines()
    assert [line.split()[0] for line in lines[:-2]] == names(ENVIRONMENTS)
    math = next(line for line in lines if line.startswith("math "))
    assert len(math.split()) > 3
    assert lines[-1] == "rl env list NAME shows the settings of one, rl env list --all those of all"
    answer = rl("data", "list")
    listed = [line.split()[0] for line in answer.splitlines() if line.startswith("  ")]
    assert listed[: len(names(DATASETS))] == names(DATASETS)
    assert "openai/gsm8k" in listed
    assert "max_operand" not in answer
    assert all(len(line) <= 80 for line in [*lines, *answer.splitlines()])


def test_all_environments_are_listed_with_their_settings():
    answer = rl("env", "list", "--all")
    assert "env.math.answer_format" in answer
    assert "env.code.sandbox.isolation" in answer
    assert "env.reasoning_gym.format_reward" in answer
    assert "one of: auto, boxed" in answer
    assert answer.count("deadline_s") == 1
    one = rl("env", "list", "math")
    assert "env.math.deadline_s = 30.0" in one
    assert "env.reasoning_gym" not in one


def test_an_unknown_environment_names_the_nearest():
    assert "there is no environment 'maths'; did you mean math?" in refusal("env", "list", "maths")


def test_datasets_of_the_hub_are_listed_with_the_keys_that_their_names_stand_for():
    for answer in (rl("data", "list", "--all"), rl("data", "list", "openai/gsm8k")):
        assert "openai/gsm8k\n  grade-school word problems\n" in answer
        assert "  processor: gsm8k, subset: main, env_name: math, split: test for validation\n" in answer
    both = rl("data", "list", "HuggingFaceH4/ultrafeedback_binarized")
    assert "split: train_sft for train" in both
    assert "  preferences: two responses each, scored by GPT-4\n" in both


def test_datasets_are_listed_with_their_settings():
    answer = rl("data", "list", "--all")
    assert "max_operand = 99" in answer
    assert "task  (must be set)" in answer
    assert "max_operand = 99" in rl("data", "list", "arithmetic")
    assert "did you mean openai/gsm8k?" in refusal("data", "list", "gsm8k")


def test_every_line_of_a_listing_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in (
        ["recipes"],
        ["data", "list", "--all"],
        ["env", "list", "math"],
        ["config", "explain", "policy.generation"],
        ["config", "explain", "temperature"],
    ):
        assert max(map(len, rl(*command).splitlines())) <= 80, command


def test_tasks_of_a_dataset_and_their_settings():
    pytest.importorskip("reasoning_gym")
    assert "chain_sum" in rl("data", "list", "reasoning_gym")
    assert "config.min_terms = 2  int" in rl("data", "list", "reasoning_gym", "chain_sum")
    assert "did you mean chain_sum?" in refusal("data", "list", "reasoning_gym", "chain_sums")


def test_explain_says_which_algorithms_have_a_key():
    assert "only with algorithm: grpo" in rl("config", "explain", "grpo.seed")
    assert "only with" not in rl("config", "explain", "policy.precision")
    assert "only with algorithm: sft" in rl("config", "explain", "sft.max_num_steps")


def test_explain_lists_the_keys_of_all_functions_that_a_section_can_name():
    for section, key, function in (
        ("loss_fn.surrogate", "tau_positive", "sapo"),
        ("grpo.adv_estimator", "k", "pass_at_k"),
    ):
        _, _, after = rl("config", "explain", section).partition(f"{section}.{key} ")
        assert f"only with name: {function}" in after.partition(f"{section}.")[0]
        assert f"only with {section}.name: {function}" in rl("config", "explain", f"{section}.{key}")
    found = rl("config", "explain", "loss_fn.surrogate")
    assert "only with name" not in found.partition("clip_low")[0]
    assert "only with name: clip or gspo\n" in found.partition("dual_clip =")[2]


def test_explain_without_recipe_and_key_lists_the_sections_of_all_algorithms_once():
    answer = rl("config", "explain")
    sections = [line.strip() for line in answer.splitlines() if line.startswith("  ") and line[2] != " "]
    assert {"dpo", "distillation", "grpo", "ppo", "rm", "sft", "eval", "value"} <= set(sections)
    assert "  teacher = null  section or null" in answer
    assert sections.count("policy") == 1
    assert "  sft\n      Supervised fine-tuning" in answer
    assert "      only with algorithm: sft\n" in answer
    policy = rl("config", "explain", "policy")
    assert policy.count("policy.precision = ") == 1
    assert "policy.generation\n" in policy


def test_explain_shows_the_default_of_an_optimizer_argument():
    answer = rl("config", "explain", "policy.optimizer.kwargs.lr")
    for default, algorithms in (("1e-06", "evaluation or grpo or ppo"), ("2e-05", "offline_distillation or sft")):
        assert re.search(
            rf"^policy.optimizer.kwargs.lr: {default}  \(default\)\n(  .*\n)*  only with algorithm: {algorithms}$",
            answer,
            re.MULTILINE,
        )
    assert "this default applies if no entry of policy.optimizer.kwargs is set" in answer
    changed = rl("config", "explain", "sft-arithmetic", "policy.optimizer.kwargs.lr")
    assert "sft-arithmetic.yaml:" in changed


def test_explain_finds_keys_by_their_last_name():
    answer = rl("config", "explain", "temperature")
    for key in ("policy.generation.temperature", "eval.temperature", "loss_fn.temperature"):
        assert f"  {key} = " in answer
    assert "Divides the logits when sampling, and in every training pass." in answer
    assert "policy.generation.val_temperature" in answer
    assert "  policy.optimizer.kwargs.lr = 1e-06" in rl("config", "explain", "lr")


def test_explain_finds_keys_by_words_of_their_descriptions():
    answer = rl("config", "explain", "learning_rate")
    assert "  policy.optimizer.kwargs = " in answer
    assert "  policy.scheduler = " in answer
    assert answer.count("  policy.optimizer.kwargs = ") == 5
    assert answer.count("comes from the algorithm and is ten times") == 1
    assert rl("config", "explain", "--search", "learning", "rate").splitlines()[1:] == answer.splitlines()[2:]


def test_explain_shows_values_of_a_recipe_in_what_it_finds():
    answer = rl("config", "explain", "grpo-arithmetic", "max_new_tokens", "policy.generation.max_new_tokens=9")
    assert "policy.generation.max_new_tokens = 9  (command line)" in answer
    assert "sft." not in rl("config", "explain", "-s", "grpo-arithmetic", "epochs")


def test_explain_finds_a_key_though_a_file_of_its_name_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert "Training and validation data" in rl("config", "explain", "data")


def test_explain_answers_while_other_keys_are_wrong(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: grpo-arithmetic\ngrpo: {seed: 7, num_promts_per_step: 3}\n")
    answer = CliRunner().invoke(app, ["config", "explain", str(recipe), "grpo.seed"])
    assert answer.exit_code == 0
    assert answer.stdout.startswith("grpo.seed: 7")
    assert "mine.yaml:2" in answer.stdout
    assert "grpo.num_prompts_per_step" in answer.stderr


def test_explain_knows_the_settings_of_datasets():
    answer = rl("config", "explain", "data.train.settings")
    assert "data.train.settings.max_operand = 99" in answer
    assert "only with data.train.dataset_name: arithmetic" in answer
    answer = rl("config", "explain", "grpo-arithmetic", "data.train.settings.max_operand")
    assert answer.startswith("data.train.settings.max_operand: 49  (")
    assert "grpo-arithmetic.yaml:" in answer
    assert "did you mean max_operand?" in refusal("config", "explain", "data.train.settings.max_operant")


def test_explain_knows_the_settings_of_tasks():
    pytest.importorskip("reasoning_gym")
    assert "rl data list reasoning_gym" in rl("config", "explain", "data.train.settings.task")
    assert "chain_sum" in rl("config", "explain", "data.train.settings.config.min_terms")
    settings = "data.train={dataset_name: reasoning_gym, settings: {task: chain_sum}}"
    answer = rl("config", "explain", "grpo-arithmetic", "data.train.settings.config", settings)
    assert "data.train.settings.config.min_terms = " in answer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo.num_prompt_per_step"], "did you mean grpo.num_prompts_per_step?"),
        (["grpo.seed", "grpo.seed=7"], "write rl config explain RECIPE grpo.seed grpo.seed=7"),
        (["a", "b", "c"], "write rl config explain RECIPE KEY"),
        (["a", "b", "c"], "rl config explain --search a b c"),
        (["grpo.num_samples"], "grpo.num_samples: no such key; here it is grpo.num_generations_per_prompt"),
        (["nonesuchatall"], "nonesuchatall: no such key"),
        (["--search", "nonesuch", "temperature"], "no key has 'nonesuch temperature' in its name or description"),
    ],
)
def test_explain_refuses_what_it_cannot_explain(words, message):
    assert message in refusal("config", "explain", *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["learning_rate"], "learning_rate is a TRL and OpenRLHF key. Write policy.optimizer.kwargs.lr\n"),
        (["grpo.val_batch_size"], "grpo.val_batch_size is a NeMo RL key "),
        (["per_device_train_batch_size"], "is a TRL key. Write policy.train_micro_batch_size, and policy.train_gl"),
        (["num_train_epochs"], "Write ALGORITHM.max_num_epochs, where ALGORITHM is the section of the algorithm"),
        (["sft-arithmetic", "num_train_epochs"], "Write sft.max_num_epochs\n\nsft.max_num_epochs: null  (default)\n"),
        (["num_val_samples_to_print"], "logger.num_val_samples_to_print is a NeMo RL key "),
        (["data.train_batch_size"], "data.train_batch_size is a verl key. Write ALGORITHM.num_prompts_per_step"),
    ],
)
def test_a_key_of_another_system_is_explained_by_what_it_is_here(words, says):
    assert says in rl("config", "explain", *words)


def test_words_that_no_key_is_about_lead_to_their_guide():
    assert rl("config", "explain", "freeze").endswith("\nguide: docs/freezing.md\n")
    said = refusal("config", "explain", "policy.freeze_layers")
    assert "no such key; did you mean policy.freeze? See docs/freezing.md" in said


def test_a_name_that_is_a_key_here_is_not_explained_as_one_of_others():
    assert " key. Write " not in rl("config", "explain", "temperature")
    assert "no such key" in refusal("config", "explain", "nonsense.key")


def test_listings_load_no_engine():
    commands = ("catalog", "explain", "recipe_files")
    assert not loaded_by("rl_launch.cli", *(f"rl_launch.commands.{name}" for name in commands)) & HEAVY


COMPLETE = """
import os, sys
sys.argv[0] = "rl"
os.environ |= {"_RL_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(sys.argv), "COMP_CWORD": str(len(sys.argv) - 1)}
from rl_launch.cli import main
try:
    main()
finally:
    sys.stderr.write(" ".join({name.partition(".")[0] for name in sys.modules}))
"""


def _completed(*words):
    """What the shell is offered for the last of the words after `rl`; the completion has loaded no engine."""
    done = subprocess.run([*PYTHON, "-c", COMPLETE, *words], capture_output=True, text=True, check=False)
    assert not set(done.stderr.split()) & HEAVY
    return done.stdout.split()


def test_the_shell_completes_recipes_and_keys():
    assert _completed("train", "sft-") == [name for name in recipe_names() if name.startswith("sft-")]
    keys = set(all_keys(type_of(read_raw("grpo-arithmetic")), {}))
    offered = _completed("train", "grpo-arithmetic", "grpo.val")
    assert "grpo.val_period=" in offered
    assert {each.removesuffix("=") for each in offered} <= keys


COMPLETED = [
    # zsh and fish give the word as it is, bash breaks it at `=`
    (
        ["train", "grpo-arithmetic", "policy.precision="],
        ["policy.precision=float32", "policy.precision=bfloat16", "policy.precision=float16"],
    ),
    (["train", "grpo-arithmetic", "policy.precision", "=", "bf"], ["bfloat16"]),
    (["train", "grpo-arithmetic", "grpo.seed", "=", "3", "policy.precision", "="], ["float32", "bfloat16"]),
    (["train", "grpo-arithmetic", "grpo.overlong_filtering=t"], ["grpo.overlong_filtering=true"]),
    (["train", "grpo-arithmetic", "grpo.seed="], []),
    (["train", "grpo-arithmetic", "grpo.nonesuch="], []),
    (["config", "explain", "policy.generation.temp"], ["policy.generation.temperature"]),
    (["config", "explain", "polic"], ["policy"]),
    (["config", "explain", "sft.lea"], ["sft.learn"]),
    (["config", "explain", "sft-arithmetic", "sft.lea"], ["sft.learn"]),
    (["config", "show", "sft-sq"], ["sft-squad"]),
    (["recipes", "sft-sq"], ["sft-squad"]),
    (["init", "sft-sq"], ["sft-squad"]),
    (["env", "list", "mat"], ["match", "math"]),
    (["env", "check", "guess"], ["guess_number"]),
    (["data", "list", "openai"], ["openai/gsm8k"]),
    (["data", "list", "arithmetic_"], ["arithmetic_preference"]),
    (["eval", "grpo-arithmetic", "--tasks", "gsm"], ["gsm8k"]),
    (["eval", "grpo-arithmetic", "--tasks", "gsm8k,math_"], ["gsm8k,math_500"]),
]


@pytest.mark.parametrize(
    ("words", "offered"),
    partly_exhaustive(COMPLETED, always=[COMPLETED[each] for each in (0, 1, 5, 6, 10, 13, 15, 18)]),
)
def test_the_shell_completes_names_and_values(words, offered):
    assert _completed(*words) == offered


def test_the_shell_completes_tasks_of_a_dataset():
    pytest.importorskip("reasoning_gym")
    assert _completed("data", "list", "reasoning_gym", "chain_s") == ["chain_sum"]
    offered = _completed("eval", "x", "--tasks", "reasoning_gym/chain_s")
    assert offered == ["reasoning_gym/chain_sum"]
