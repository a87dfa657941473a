"""Everything a user can get wrong ends in one message that names the key, where it was written, and the remedy."""

# ruff: noqa: E501  # a case stands on one line

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core.config import (
    Config,
    Origin,
    Problem,
    Rename,
    Resolved,
    all_keys,
    chosen,
    explain,
    load,
    moved,
    nearest,
    resolve,
    show,
)
from rl_core.config.messages import report
from rl_core.config.tree import Entry
from rl_core.errors import ConfigError, ConfigProblems

HEAD = "algorithm: grpo\npolicy:\n  model_name: m\n"

# text after HEAD, overrides, the key and its origin, fields of the problem, and what its reason and remedy mention
PROBLEMS: dict[str, tuple[str, list[str], str, dict[str, str], list[str]]] = {
    "typo": ("grpo:\n  num_promts_per_step: 4\n", [], "grpo.num_promts_per_step (recipe.yaml:5)", {}, ["grpo.num_prompts_per_step"]),
    "typo on the command line": ("", ["grpo.sed=1"], "grpo.sed (command line)", {}, ["grpo.seed"]),
    "wrong section": ("", ["policy.num_prompts_per_step=3"], "policy.num_prompts_per_step (command line)", {}, ["grpo.num_prompts_per_step"]),
    "no section": ("num_generations_per_prompt: 3\n", [], "num_generations_per_prompt (recipe.yaml:4)", {}, ["grpo.num_generations_per_prompt"]),
    "section misspelt": ("los_fn:\n  ratio_clip_min: 0.1\n", [], "los_fn (recipe.yaml:4)", {}, ["loss_fn"]),
    "section of another name": ("objective:\n  ratio_clip_min: 0.1\n", [], "objective (recipe.yaml:4)", {}, ["loss_fn.ratio_clip_min"]),
    "nothing near": ("", ["grpo.zzz=1"], "grpo.zzz (command line)", {"allowed": "max_num_steps, num_generations_per_prompt, num_prompts_per_step, reward_scaling, seed, use_leave_one_out_baseline"}, []),
    "dots in YAML": ("grpo.seed: 3\n", [], "grpo.seed (recipe.yaml:4)", {}, ["grpo.seed=VALUE"]),
    "text for int": ("grpo:\n  seed: four\n", [], "grpo.seed (recipe.yaml:5)", {"got": '"four"', "allowed": "int"}, []),
    "quoted number": ("grpo:\n  seed: '4'\n", [], "grpo.seed (recipe.yaml:5)", {"got": '"4"'}, ["quotes"]),
    "leading zero": ("grpo:\n  seed: 010\n", [], "grpo.seed (recipe.yaml:5)", {}, ["zeros"]),
    "quoted bool": ("grpo:\n  use_leave_one_out_baseline: 'true'\n", [], "grpo.use_leave_one_out_baseline (recipe.yaml:5)", {"got": '"true"'}, [" true "]),
    "yes for bool": ("", ["grpo.use_leave_one_out_baseline=yes"], "grpo.use_leave_one_out_baseline (command line)", {"got": '"yes"', "allowed": "true or false"}, [" true "]),
    "number for bool": ("", ["grpo.use_leave_one_out_baseline=1"], "grpo.use_leave_one_out_baseline (command line)", {"got": "1", "allowed": "true or false"}, []),
    "bool for int": ("", ["grpo.seed=true"], "grpo.seed (command line)", {"got": "true", "allowed": "int"}, []),
    "float for int": ("", ["grpo.seed=1.5"], "grpo.seed (command line)", {"got": "1.5", "allowed": "int"}, []),
    "scientific for int": ("", ["grpo.num_prompts_per_step=1e2"], "grpo.num_prompts_per_step (command line)", {"got": "100.0", "allowed": "int > 0"}, [" 100"]),
    "text for float": ("", ["policy.generation.temperature=warm"], "policy.generation.temperature (command line)", {"got": '"warm"', "allowed": "float > 0"}, []),
    "flow list for text": ("", ["policy.model_name=[a, b]"], "policy.model_name (command line)", {"allowed": "str"}, ["policy.model_name: '...'"]),
    "scalar for list": ("", ["policy.generation.stop_strings=END"], "policy.generation.stop_strings (command line)", {"allowed": "list of str"}, ['["END"]']),
    "wrong entry": ("", ["policy.generation.stop_token_ids=[1, x]"], "policy.generation.stop_token_ids[1] (command line)", {"got": '"x"'}, []),
    "scalar for section": ("", ["grpo=3"], "grpo (command line)", {"got": "3", "allowed": "section"}, ["grpo.KEY"]),
    "empty section": ("grpo:\n", [], "grpo (recipe.yaml:4)", {"got": "null", "allowed": "section"}, ["empty"]),
    "null for int": ("", ["grpo.seed=null"], "grpo.seed (command line)", {"got": "null"}, ["42"]),
    "not a choice": ("", ["policy.precision=fp16"], "policy.precision (command line)", {"got": '"fp16"', "allowed": "one of: float32, bfloat16"}, []),
    "not a member": ("", ["policy.attention=slow"], "policy.attention (command line)", {"allowed": "one of: sdpa, flash"}, []),
    "neither of a union": ("", ["env.math.timeout=soon"], "env.math.timeout (command line)", {"allowed": "float or never"}, []),
    "out of range": ("grpo:\n  num_prompts_per_step: 0\n", [], "grpo.num_prompts_per_step (recipe.yaml:5)", {"got": "0", "allowed": "int > 0", "reason": "", "remedy": ""}, []),
    "entry's key": ("data:\n  train:\n    - dataset_name: a\n      splt: b\n", [], "data.train[0].splt (recipe.yaml:7)", {}, ["data.train[0].split"]),
    "key of one dataset": ("data:\n  train:\n    dataset_name: a\n    wieght: 2\n", [], "data.train.wieght (recipe.yaml:7)", {}, ["data.train.weight"]),
    "entry lacks a key": ("data:\n  train:\n    - split: b\n", [], "data.train[0].dataset_name (recipe.yaml:6)", {"allowed": "str"}, []),
    "key of an environment": ("", ["env.math.num_worker=2"], "env.math.num_worker (command line)", {}, ["env.math.num_workers"]),
    "section's own rule": ("", ["grpo.reward_scaling.source_min=2"], "grpo.reward_scaling.source_min (command line)", {"got": "2.0", "allowed": "less than source_max"}, []),
    "marked as missing": ("grpo:\n  seed: ???\n", [], "grpo.seed (recipe.yaml:5)", {}, ["grpo.seed=VALUE"]),
    "interpolation to nothing": ("", ["grpo.seed=${policy.max_total_sequence_lenght}"], "grpo.seed (command line)", {}, ["policy.max_total_sequence_length?"]),
    "interpolation in a circle": ("grpo:\n  seed: ${grpo.max_num_steps}\n  max_num_steps: ${grpo.seed}\n", [], "grpo.max_num_steps (recipe.yaml:6)", {}, ["itself"]),
    "interpolation of no key": ("grpo:\n  seed: ${\n", [], "grpo.seed (recipe.yaml:5)", {}, ["not a valid interpolation"]),
    "interpolation by nobody": ("grpo:\n  seed: ${times:2}\n", [], "grpo.seed (recipe.yaml:5)", {}, ["'times'"]),
    "variable not set": ("grpo:\n  seed: ${oc.env:NOT_SET_ANYWHERE}\n", [], "grpo.seed (recipe.yaml:5)", {}, ["NOT_SET_ANYWHERE"]),
    "interpolation of wrong type": ("grpo:\n  seed: ${policy.model_name}\n", [], "grpo.seed (recipe.yaml:5, written as ${policy.model_name})", {"got": '"m"'}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_problem_has_the_key_its_origin_the_value_and_a_remedy(case: str, run: Callable[..., Resolved[Any]]) -> None:
    text, overrides, place, fields, mentions = PROBLEMS[case]
    with pytest.raises(ConfigProblems) as caught:
        run(HEAD + text, overrides)
    key = place.partition(" (")[0]
    (problem,) = (problem for problem in caught.value.problems if problem.key == key)
    assert f"{place}: {problem.message}" in str(caught.value)
    assert {name: show(problem.got) if name == "got" else getattr(problem, name) for name in fields} == fields
    said = f"{problem.reason}. {problem.remedy} "
    assert not [mention for mention in mentions if mention not in said], problem
    assert "pydantic" not in str(caught.value)
    assert "http" not in str(caught.value)
    assert caught.value.__cause__ is None


# text after HEAD, overrides, and what the message must hold
ERRORS: dict[str, tuple[str, list[str], list[str]]] = {
    "list for text": ("policy:\n", [], ["recipe.yaml:4", "the key policy is there twice, first in line 2"]),
    "duplicate": ("grpo:\n  seed: 1\n  seed: 2\n", [], ["recipe.yaml:6", "the key grpo.seed is there twice, first in line 5"]),
    "duplicate in a list": ("data:\n  train:\n    - split: a\n      split: b\n", [], ["recipe.yaml:7", "the key data.train[0].split is there twice, first in line 6"]),
    "control character": ("", ["policy.model_name='\x01'"], ["(command line): not valid YAML", "special characters"]),
    "tab": ("grpo:\n\tseed: 1\n", [], ["recipe.yaml:5", "indent with spaces"]),
    "colon in a value": ("grpo: a: b\n", [], ["recipe.yaml:4", "not valid YAML", "quote a value"]),
    "unclosed": ("grpo: {seed: 1\n", [], ["recipe.yaml:4", "not valid YAML", "close the { of this line with }"]),
    "unclosed before others": ("data:\n  train: {split: a\ngrpo: {seed: 1}\n", [], ["recipe.yaml:5", "close the {"]),
    "unclosed quote": ("data:\n  train: \"a\ngrpo: {seed: 1}\n", [], ["recipe.yaml:5", "close the \""]),
    "section without a colon": ("grpo\n  seed: 1\n", [], ["recipe.yaml:4", "not valid YAML", "as in grpo:"]),
    "section without a colon after others": ("data: {}\n# words\ngrpo\n  seed: 1\n", [], ["recipe.yaml:6", "as in grpo:"]),
    "key without a colon": ("grpo:\n  seed 1\n  max_num_steps: 3\n", [], ["recipe.yaml:5", "as in seed: 1"]),
    "colon without a space": ("grpo:\n  seed:1\n\n  max_num_steps: 3\n", [], ["recipe.yaml:5", "as in seed: 1"]),
    "only a colon without a space": ("grpo:\n  seed:1\n", [], ["grpo (recipe.yaml:4)", "seed: 1"]),
    "value with a colon": ("grpo:\n  seed: 1: 2\n", [], ["recipe.yaml:5", "quote a value"]),
    "less indented": ("grpo:\n    seed: 1\n  max_num_steps: 3\n", [], ["recipe.yaml:6", "equally"]),
    "tag": ("grpo:\n  seed: !!python/name:os.system x\n", [], ["recipe.yaml:5", "tag !!python/name:os.system is not allowed"]),
    "merge key": ("a: &a {seed: 1}\ngrpo:\n  <<: *a\n", [], ["recipe.yaml:6", "use `defaults:`"]),
    "alias in itself": ("grpo: &a\n  seed: *a\n", [], ["recipe.yaml:5", "anchor"]),
    "key that is no name": ("grpo:\n  ? [a, b]\n  : 1\n", [], ["recipe.yaml:5", "a key must be a name"]),
    "no equals sign": ("", ["grpo.seed"], ["'grpo.seed' (command line)", "key=value: grpo.seed=VALUE"]),
    "a colon for the equals sign": ("", ["grpo.seed: 3"], ["(command line)", "key=value: grpo.seed=3"]),
    "spaces around the equals sign": ("", ["grpo.seed", "=", "3"], ["without spaces: grpo.seed=3"]),
    "an empty argument": ("", [""], ["'' (command line)", "key=value"]),
    "Hydra's plus": ("", ["+grpo.seed=3"], ["'+grpo.seed=3' (command line)", "without '+'"]),
    "empty segment": ("", ["grpo..seed=3"], ["'grpo..seed=3' (command line)", "names joined by dots"]),
    "list entry that is not there": ("data:\n  train:\n    - dataset_name: a\n", ["data.train[1].split=b"], ["'data.train[1].split=b' (command line)", "1 entries"]),
    "unclosed on the command line": ("", ["policy.generation.stop_strings=[a"], ["stop_strings=[a' (command line): not valid YAML", "quote the value"]),
    "defaults not there": ("defaults: bse\n", [], ["recipe.yaml:4", "no recipe 'bse'"]),
    "defaults file not there": ("defaults: recpie.yaml\n", [], ["recipe.yaml:4", "no file recpie.yaml", "did you mean", "recipe.yaml?"]),
    "defaults of wrong type": ("defaults: {a: b}\n", [], ["defaults (recipe.yaml:4)", "a recipe name or file"]),
    "defaults in a circle": ("defaults: recipe\n", [], ["recipe.yaml -> recipe.yaml"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_a_file_or_an_override_that_cannot_be_read_is_refused_with_its_place(
    case: str, run: Callable[..., Resolved[Any]]
) -> None:
    text, overrides, parts = ERRORS[case]
    with pytest.raises(ConfigError) as caught:
        run(HEAD + text, overrides)
    message = str(caught.value)
    assert not [part for part in parts if part not in message], message
    assert "pydantic" not in message
    assert "http" not in message
    assert caught.value.__cause__ is None


def test_required_keys_and_sections_are_asked_for_where_they_belong(run: Callable[..., Resolved[Any]]) -> None:
    with pytest.raises(ConfigProblems, match=r"^policy\.model_name \(recipe.yaml:2\): ") as key:
        run("algorithm: grpo\npolicy:\n  precision: float32\n")
    with pytest.raises(ConfigProblems, match=r"^policy \(recipe.yaml:1\): ") as section:
        run("algorithm: grpo\n")
    assert [(each.key, each.allowed) for each in key.value.problems] == [("policy.model_name", "str")]
    assert [(each.key, each.allowed) for each in section.value.problems] == [("policy", "")]


def test_every_problem_is_in_the_one_message(run: Callable[..., Resolved[Any]]) -> None:
    with pytest.raises(ConfigError) as caught:
        run("polcy:\n  model_name: m\ngrpo:\n  seed: x\n  max_num_steps: ${nowhere}\n", ["loss_fn.kind=tsi", "a=1"])
    first, *lines = str(caught.value).splitlines()
    assert first == "7 problems in recipe.yaml:"
    keys = {line.split()[0] for line in lines}
    assert keys == {"algorithm", "policy", "polcy", "grpo.seed", "grpo.max_num_steps", "loss_fn.kind", "a"}


def test_every_bad_override_is_in_the_one_message(run: Callable[..., Resolved[Any]]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'a'.*'\+b=1'"):
        run(HEAD, ["a", "+b=1"])


def test_a_check_across_sections_gets_the_origin_of_its_key(folder: Path, root: type[Config]) -> None:
    (folder / "recipe.yaml").write_text(HEAD + "grpo:\n  num_prompts_per_step: 3\n")

    def divisible(config: Any) -> list[Problem]:
        rows = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
        if rows % config.policy.train_global_batch_size == 0:
            return []
        return [Problem("grpo.num_prompts_per_step", f"{rows} rows do not divide"), Problem("", "change one of them")]

    with pytest.raises(ConfigError) as caught:
        resolve(load("recipe.yaml"), root, checks=[divisible])
    assert "grpo.num_prompts_per_step (recipe.yaml:5): 48 rows do not divide" in str(caught.value)
    assert "config (recipe.yaml:1): change one of them" in str(caught.value)
    config = resolve(load("recipe.yaml", ["policy.train_global_batch_size=48"]), root, checks=[divisible]).config
    assert config.model_dump()["policy"]["train_global_batch_size"] == 48


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("absent.yaml", ["there is no file absent.yaml"]),
        ("recpie.yaml", ["there is no file recpie.yaml", "did you mean recipe.yaml?"]),
        ("grpo-mth", ["there is no recipe 'grpo-mth'", "did you mean grpo-math?"]),
        ("list.yaml", ["list.yaml:1", "`key: value` lines"]),
        ("binary.yaml", ["binary.yaml", "not a text file"]),
        ("control.yaml", ["control.yaml:2", "not valid YAML"]),
        ("two.yaml", ["two.yaml:2", "not valid YAML", "expected a single document"]),
    ],
)
def test_a_file_that_cannot_be_used_is_named(folder: Path, source: str, parts: list[str]) -> None:
    recipes = folder / "recipes"
    recipes.mkdir()
    for name in ("sft", "grpo-math"):
        (recipes / f"{name}.yaml").write_text(HEAD)
    (folder / "recipe.yaml").write_text(HEAD)
    (folder / "list.yaml").write_text("- a\n")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "control.yaml").write_text("a: 1\nb: \x01\n")
    (folder / "two.yaml").write_text("a: 1\n---\nb: 2\n")
    with pytest.raises(ConfigError) as caught:
        load(source, search=[recipes])
    assert not [part for part in parts if part not in str(caught.value)], str(caught.value)


@pytest.fixture(scope="module")
def keys(root: type[Config]) -> list[str]:
    return list(all_keys(root, {"env": {"math": {}}, "data": {"train": [{}]}}))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("grpo.num_promts_per_step", "grpo.num_prompts_per_step"),
        ("grpo.nun_generations_per_prompt", "grpo.num_generations_per_prompt"),
        ("grpo.num_generation_per_prompts", "grpo.num_generations_per_prompt"),
        ("grpo.num_prompts", "grpo.num_prompts_per_step"),
        ("grpo.prompts_per_step", "grpo.num_prompts_per_step"),
        ("grpo.num-prompts-per-step", "grpo.num_prompts_per_step"),
        ("grpo.max_steps", "grpo.max_num_steps"),
        ("grpo.NUM_PROMPTS_PER_STEP", "grpo.num_prompts_per_step"),
        ("policy.num_prompts_per_step", "grpo.num_prompts_per_step"),
        ("num_prompts_per_step", "grpo.num_prompts_per_step"),
        ("grop", "grpo"),
        ("grop.seed", "grpo.seed"),
        ("polcy", "policy"),
        ("loss", "loss_fn"),
        ("loss_fn.clip_ratio_min", "loss_fn.ratio_clip_min"),
        ("loss_fn.kl_penalty", "loss_fn.reference_policy_kl_penalty"),
        ("grpo.kl_penalty", "loss_fn.reference_policy_kl_penalty"),
        ("policy.model", "policy.model_name"),
        ("policy.modelname", "policy.model_name"),
        ("policy.max_sequence_length", "policy.max_total_sequence_length"),
        ("policy.temperature", "policy.generation.temperature"),
        ("generation.temperature", "policy.generation.temperature"),
        ("policy.generation.temprature", "policy.generation.temperature"),
        ("dtensor_cfg", "policy.dtensor_cfg"),
        ("policy.vllm_cfg", "policy.generation.vllm_cfg"),
        ("policy.dtensor_cfg.tensor_parallel", "policy.dtensor_cfg.tensor_parallel_size"),
        ("policy.generation.vllm_cfg.tensor_parallell_size", "policy.generation.vllm_cfg.tensor_parallel_size"),
        ("env.math.num_worker", "env.math.num_workers"),
        ("data.train[0].spilt", "data.train[0].split"),
        ("data.dataset_name", "data.train[0].dataset_name"),
    ],
)
def test_the_key_that_was_meant_is_named_first(keys: list[str], typed: str, meant: str) -> None:
    assert nearest(typed, keys)[:1] == [meant]


@pytest.mark.parametrize("typed", ["grpo.zzz", "foo", "policy.qlora", "x.y.z"])
def test_what_is_like_nothing_names_nothing(keys: list[str], typed: str) -> None:
    assert nearest(typed, keys) == []


def test_a_name_that_several_sections_have_names_them(keys: list[Any]) -> None:
    assert set(nearest("policy.tensor_parallel_size", keys)) == {
        "policy.dtensor_cfg.tensor_parallel_size",
        "policy.generation.vllm_cfg.tensor_parallel_size",
    }


def test_a_key_of_the_section_that_was_written_comes_alone() -> None:
    assert nearest("grpo.num_step", ["grpo.num_steps", "ppo.num_steps"]) == ["grpo.num_steps"]
    assert nearest("grop", ["grpo", "logger.group"]) == ["grpo"]
    assert set(nearest("x.num_step", ["a.num_steps", "b.num_steps"])) == {"a.num_steps", "b.num_steps"}


class Counted(Config):
    also_called = {"num_samples": "num_rollouts"}

    num_rollouts: int = 1
    """Rollouts of each prompt.

    More text.
    """


class CountedRoot(Config):
    part: Counted = Counted()
    several: list[Counted] = []


@pytest.mark.parametrize(
    ("written", "key"), [({"part": {"num_samples": 2}}, "part"), ({"several": [{}, {"num_samples": 2}]}, "several[1]")]
)
def test_a_name_that_a_key_has_elsewhere_is_answered_with_the_key_and_its_meaning(
    written: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigProblems) as refused:
        resolve(load(written), CountedRoot)
    (problem,) = refused.value.problems
    assert problem.key == f"{key}.num_samples"
    assert f"{key}.num_rollouts" in problem.reason
    assert problem.reason.endswith(": Rollouts of each prompt.")
    if key == "part":
        with pytest.raises(ConfigError, match=re.escape(problem.reason)):
            explain(CountedRoot, "part.num_samples")


class Weighed(Config):
    weight: float = 0.1


class Renamed(Config):
    renamed: ClassVar = {
        "penalty": moved("kl.weight"),
        "use_x": chosen("kind", "x"),
        "use_z": chosen("kind", "z"),
        "is_on": Rename("kl: a section if true, null if false", lambda on, _: {"kl": {} if on else None}),
    }

    kl: Weighed | None = None
    kind: str = "y"


class RenamedRoot(Config):
    part: Renamed = Renamed()


@pytest.mark.parametrize(
    ("name", "now", "in_general"),
    [
        ("penalty", "part.kl.weight=1.0", "part.kl.weight"),
        ("use_x", "part.kind=x", "part.kind=x if true"),
        ("is_on", "part.kl={}", "part.kl: a section if true, null if false"),
    ],
)
def test_a_key_of_an_earlier_version_is_answered_with_the_new_one(name: str, now: str, in_general: str) -> None:
    def of_the_new_key(config: Any) -> list[Problem]:
        return [Problem("part.kl", "must be set")] if config.part.kl is None else []

    with pytest.raises(ConfigProblems) as refused:
        resolve(load({"part": {name: 1.0}}), RenamedRoot, checks=[of_the_new_key])
    first, *others = refused.value.problems
    assert (first.key, first.message) == (f"part.{name}", f"is now {now}")
    # the check is of another key than `kind`
    assert others == ([Problem("part.kl", "must be set")] if name == "use_x" else [])
    with pytest.raises(ConfigError, match=rf"part\.{name}: is now {re.escape(in_general)}$"):
        explain(RenamedRoot, f"part.{name}")


@pytest.mark.parametrize(
    ("written", "answers"),
    [
        ({"use_x": False}, {"use_x": "Remove this line"}),
        ({"use_x": True, "use_z": False}, {"use_x": "is now part.kind=x", "use_z": "Remove this line"}),
        ({"use_x": True, "use_z": True}, {"use_x": "use_z is part.kind=z. Keep one", "use_z": "use_x is part.kind=x"}),
        ({"use_x": True, "kind": "y"}, {"use_x": "is now part.kind=x, and kind is part.kind=y. Keep one of the two"}),
        ({"use_x": True, "kind": "x"}, {"use_x": "is now part.kind=x"}),
    ],
)
def test_answers_about_earlier_keys_follow_from_their_values(written: Any, answers: dict[str, str]) -> None:
    with pytest.raises(ConfigProblems) as refused:
        resolve(load({"part": written}), RenamedRoot)
    found = {problem.key.removeprefix("part."): problem.message for problem in refused.value.problems}
    assert found.keys() == answers.keys()
    for name, answer in answers.items():
        assert answer in found[name]


@pytest.mark.parametrize(
    ("key", "reason", "place"),
    [
        ("part.name", "is unknown", "f.yaml:2"),  # the short form of a section
        ("section.left_out", "contradicts another key", "default"),
        ("section.left_out", "must be set", "f.yaml:2"),
        ("section", "has too many keys", "f.yaml:2"),
        ("nowhere.at_all", "contradicts another key", "default"),
        ("", "needs one of two keys", "f.yaml:1"),
    ],
)
def test_a_problem_is_placed_at_what_was_written_or_at_the_default(key: str, reason: str, place: str) -> None:
    inside = Entry.of({"part": "short", "section": {"given": 1}}, Origin("f.yaml", 2))
    assert f"({place}): {reason}" in report([Problem(key, reason)], "f.yaml", Entry(inside.value, Origin("f.yaml", 1)))
