"""Typed values from plain ones: text as typed, numbers as numbers, interpolation over defaults."""

import cProfile
import os
import pstats
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from rl_core.config import Config, Resolved, assemble, load, locale_problem, resolve
from rl_core.errors import ConfigError, ConfigProblems

Run = Callable[..., Resolved[Any]]


@pytest.mark.parametrize("text", ["1e5", "007", "7", "1.10", "true", "True", "no", "0x10", "1_000", ".inf"])
def test_a_text_field_receives_what_was_typed(run: Run, text: str) -> None:
    overrides = [
        f"policy.model_name={text}",
        "policy.tokenizer.name=${policy.model_name}",
        "policy.tokenizer.chat_template=x/${policy.model_name}",
        f"policy.layer_names.a={text}",
        f"policy.generation.stop_strings=[{text}]",
    ]
    policy = run(overrides=overrides).config.policy
    assert (policy.model_name, policy.tokenizer.name, policy.tokenizer.chat_template) == (text, text, f"x/{text}")
    assert policy.layer_names == {"a": text}
    assert policy.generation.stop_strings == [text]


def test_scientific_notation_is_a_number_in_files_and_on_the_command_line(run: Run) -> None:
    text = "algorithm: grpo\npolicy: {model_name: m, overrides: {lr: 1e-5}}\nloss_fn: {ratio_clip_min: 1e-5}\n"
    config = run(text, ["loss_fn.ratio_clip_max=1e5", "loss_fn.reference_policy_kl_penalty=2"]).config
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (1e-5, 1e5)
    assert type(config.loss_fn.reference_policy_kl_penalty) is float
    assert type(config.policy.overrides["lr"]) is float
    assert config.policy.overrides == {"lr": 1e-5}


def test_null_stands_for_an_empty_list_or_mapping_that_is_the_default(run: Run) -> None:
    text = "algorithm: grpo\npolicy:\n  model_name: m\n  overrides:\n  generation: {stop_strings: null}\n"
    policy = run(text, ["policy.layer_names=null"]).config.policy
    assert (policy.generation.stop_strings, policy.overrides, policy.layer_names) == ([], {}, {})


class Ambiguous(Config):
    filled: list[int] = [1]
    required: list[int]
    nullable: list[int] | None = []


@pytest.mark.parametrize("key", ["filled", "required"])
def test_null_that_could_mean_something_else_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} \(.*\): got null; allowed: list of int"):
        resolve(load({"required": [], key: None}), Ambiguous)
    assert resolve(load({"required": [], "nullable": None}), Ambiguous).config.nullable is None


def test_choices_paths_and_tuples_come_from_text_and_lists(run: Run) -> None:
    overrides = ["policy.attention=flash", "policy.folder=a/b", "policy.generation.stop_token_ids=[1, 2]"]
    policy = run(overrides=overrides).config.policy
    assert (policy.attention.value, policy.folder, policy.generation.stop_token_ids) == ("flash", Path("a/b"), (1, 2))


def test_an_interpolation_reaches_keys_that_only_have_a_default(run: Run) -> None:
    overrides = ["policy.generation.max_new_tokens=${policy.max_total_sequence_length}", "env.a={}"]
    resolved = run(overrides=[*overrides, "grpo.max_num_steps=${env.a.num_workers}"])
    assert resolved.config.policy.generation.max_new_tokens == 2048
    assert resolved.config.grpo.max_num_steps == 1


def test_an_interpolated_section_comes_from_where_the_interpolation_stands(run: Run) -> None:
    resolved = run(overrides=["env.a.num_workers=3", "env.b=${env.a}"])
    assert resolved.config.env["b"].num_workers == 3
    assert str(resolved.origin("env.b.num_workers")) == "command line"


def test_environment_variables_and_escapes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "there")
    config = run(overrides=["policy.model_name=${oc.env:WHERE}/m", r"policy.tokenizer.name=\${kept}"]).config
    assert config.policy.model_name == "there/m"
    assert config.policy.tokenizer.name == "${kept}"


def test_one_dataset_or_a_list_of_them(run: Run) -> None:
    one = run(overrides=["data.train.dataset_name=5"]).config.data.train
    many = run(overrides=["data.train=[{dataset_name: 5}, {dataset_name: b, weight: 2}]"]).config.data.train
    assert one.dataset_name == "5"
    assert [(entry.dataset_name, entry.weight) for entry in many] == [("5", 1.0), ("b", 2.0)]


def test_a_section_keeps_what_its_default_sets_where_the_user_writes_another_key() -> None:
    class Inner(Config):
        a: int = 0
        b: int = 0

    class Outer(Config):
        inner: Inner = Inner(a=1)
        c: str = "c"

    root = assemble("Root", {"outer": (Outer, Outer(c="${d}"))})
    resolved = resolve(load({}, ["outer.inner.b=2"]), root)
    assert resolved.config.model_dump() == {"outer": {"inner": {"a": 1, "b": 2}, "c": "${d}"}}
    assert str(resolved.origin("outer.inner.a")) == "default"


def test_an_entry_of_a_mapping_keeps_what_defaults_inside_it_set() -> None:
    class Pool(Config):
        size: int = 1
        name: str = ""

    class Env(Config):
        pool: Pool = Pool(size=4)

    class Root(Config):
        env: dict[str, Env] = {}
        envs: list[Env] = []

    config = resolve(load({}, ["env.math.pool.name=a", "envs=[{pool: {name: b}}]"]), Root).config
    assert [entry.pool for entry in (config.env["math"], config.envs[0])] == [
        Pool(size=4, name="a"),
        Pool(size=4, name="b"),
    ]


def test_each_entry_of_a_tuple_is_read_as_its_own_type() -> None:
    class Root(Config):
        pair: tuple[int, str] = (0, "")
        either: tuple[int, int] | tuple[str, str, str] = (0, 0)

    config = resolve(load({}, ["pair=[1, 1]", "either=[1, 2, 3]"]), Root).config
    assert (config.pair, config.either) == ((1, "1"), ("1", "2", "3"))
    with pytest.raises(ConfigError, match=r'pair\[0\] \(command line\): got "x"; allowed: int$'):
        resolve(load({}, ["pair=[x, y]"]), Root)


def test_of_a_tagged_union_only_the_chosen_member_is_blamed() -> None:
    class A(Config):
        kind: Literal["a"] = "a"
        size: int = 1

    class B(Config):
        kind: Literal["b"] = "b"
        name: str = ""

    class Root(Config):
        item: A | B = Field(default=A(), discriminator="kind")

    assert resolve(load({}, ["item={kind: b, name: 5}"]), Root).config.item == B(name="5")
    with pytest.raises(ConfigProblems) as refused:
        resolve(load({}, ["item={kind: b, nam: x}"]), Root)
    (problem,) = refused.value.problems
    assert problem.key == "item.nam"
    assert "item.name" in problem.remedy


def test_a_config_cannot_be_changed(run: Run) -> None:
    with pytest.raises(ValueError, match="frozen"):
        run().config.grpo.seed = 3


def test_what_a_recipe_takes_to_load_and_check_grows_with_its_length_alone(run: Run) -> None:
    def num_calls(length: int) -> int:
        lines = "\n".join(f"  e{index}: {{num_workers: {index}, timeout: 1e1}}" for index in range(length))
        recipe = f"algorithm: grpo\npolicy: {{model_name: m}}\nenv:\n{lines}\n"
        overrides = ["policy.generation.max_new_tokens=${policy.max_total_sequence_length}"]
        with cProfile.Profile(builtins=False) as profile:
            run(recipe, overrides)
        return pstats.Stats(profile).total_calls

    num_calls(1)  # imports the grammar
    assert num_calls(200) < 2.5 * num_calls(100)


def test_a_config_without_interpolations_does_not_wait_for_omegaconf() -> None:
    code = (
        "import sys; from rl_core.config import Config, load, resolve\n"
        "class Root(Config):\n    a: int = 1\n"
        "assert resolve(load({}, ['a=2']), Root).config.a == 2\n"
        "assert not {'omegaconf', 'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)


def test_a_path_that_the_locale_cannot_decode_names_the_locale():
    path = "läufe/日本".encode().decode("ascii", "surrogateescape")
    problem = locale_problem(path)
    assert problem is not None
    assert problem.got == "läufe/日本"
    assert "locale" in problem.reason
    assert "LC_ALL" in problem.remedy
    # a lone surrogate of a file is another fault
    assert locale_problem("\ud83d") is locale_problem("läufe") is None


def test_a_section_that_is_not_used_may_be_wrong_and_be_referred_to() -> None:
    class Queue(Config):
        size: int = 1

    written = {"one": {"size": "${other.size}"}, "other": {"size": 3, "unknown": "${oc.env:NOT_SET_ANYWHERE}"}}
    root = assemble("Root", {"one": Queue})
    config: Any = resolve(load(written), root, unused=["other"]).config
    assert config.one.size == 3
    with pytest.raises(ConfigError, match="other"):
        resolve(load(written), root)
