"""Files, inheritance and overrides: which layer wins, and where each value is said to come from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import DEFAULT, Config, Origin, Resolved, load, resolve
from rl_core.errors import ConfigError

RECIPE = "algorithm: grpo\npolicy:\n  model_name: m\n"


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_each_value_names_the_layer_that_set_it(folder: Path, root: type[Config]) -> None:
    write(
        folder,
        base="algorithm: grpo\ngrpo:\n  seed: 1\n  max_num_steps: 5\npolicy:\n  model_name: a\n",
        child="defaults: base.yaml\n\ngrpo:\n  max_num_steps: 6\n",
    )
    resolved = resolve(load("child.yaml", ["policy.model_name=b"]), root)
    assert resolved.config.model_dump()["grpo"]["max_num_steps"] == 6
    expected = {
        "algorithm": "base.yaml:1",
        "grpo.seed": "base.yaml:3",
        "grpo.max_num_steps": "child.yaml:4",
        "policy.model_name": "command line",
        "grpo.num_prompts_per_step": "default",
        "policy.generation.temperature": "default",
    }
    assert {key: str(resolved.origin(key)) for key in expected} == expected


def test_later_defaults_win_and_the_file_wins_over_them(folder: Path) -> None:
    write(
        folder,
        one="a: 1\nb: 1\nc: 1\nx: {p: 1, q: 1}\nl: [1, 2]\n",
        two="b: 2\nc: 2\nx: {q: 2}\nl: [3]\n",
        top="defaults: [one, two]\nc: 3\n",
    )
    raw = load("top.yaml")
    assert {key: raw.select(key) for key in "abcxl"} == {"a": 1, "b": 2, "c": 3, "x": {"p": 1, "q": 2}, "l": [3]}
    assert raw.origin("x.q") == Origin("two.yaml", 3)
    assert [file.name for file in raw.files] == ["one.yaml", "two.yaml", "top.yaml"]


def test_two_parents_may_share_one_of_their_own(folder: Path) -> None:
    write(folder, base="a: 1\n", one="defaults: base\n", two="defaults: base\nb: 2\n", top="defaults: [one, two]\n")
    raw = load("top.yaml")
    assert (raw.select("a"), raw.select("b")) == (1, 2)


def test_recipes_are_found_by_name_beside_the_file_in_folders_and_by_a_function(folder: Path) -> None:
    recipes = folder / "recipes"
    recipes.mkdir()
    write(recipes, base="a: recipe\n", child="defaults: base\n")
    assert load("child", search=[folder / "empty", recipes]).select("a") == "recipe"
    write(folder, top="defaults: base\n")
    assert load("top.yaml", search=lambda name: recipes / f"{name}.yaml").select("a") == "recipe"
    write(folder, base="a: sibling\n")
    assert load("top.yaml", search=[recipes]).select("a") == "sibling"
    with pytest.raises(ConfigError, match="no recipe 'nothing'"):
        load("nothing", search=lambda name: None)


def test_a_circle_of_defaults_is_shown_whole(folder: Path) -> None:
    write(folder, a="defaults: b\n", b="defaults: c\n", c="defaults: b\n")
    with pytest.raises(ConfigError, match=r"b\.yaml -> c\.yaml -> b\.yaml"):
        load("a.yaml")


def test_an_empty_file_is_an_empty_config(folder: Path) -> None:
    write(folder, empty="# nothing\n")
    assert load("empty.yaml").select("a", "none") == "none"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1_000", 1000),
        ("0x10", 16),
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("true", True),
        ("null", None),
        ("", ""),
        ("no", "no"),
        ("007", "007"),
        ("00:03:30:00", "00:03:30:00"),
        ("2026-01-01", "2026-01-01"),
        ("a=b=c", "a=b=c"),
        ("a: b # c", "a: b # c"),
        ("'3'", "3"),
        ("[1, 'a b', {c: 1e-5}]", [1, "a b", {"c": 1e-5}]),
        ("{a: [x], b: null}", {"a": ["x"], "b": None}),
        ("*star", "*star"),
        ("100%|x", "100%|x"),
    ],
)
def test_an_override_is_read_as_yaml_and_plain_text_as_it_stands(text: str, value: object) -> None:
    read = load({}, [f"a.b={text}"]).select("a.b")
    assert read == value
    assert type(read) is type(value)


def test_overrides_change_list_entries_and_clear_values() -> None:
    source = {"train": [{"name": "a"}, {"name": "b"}], "x": {"y": 1}}
    raw = load(source, ["train[1].name=c", "train.0.split=s", "x=null"])
    assert raw.select("train") == [{"name": "a", "split": "s"}, {"name": "c"}]
    assert raw.select("x", "default") is None
    assert str(raw.origin("train[1].name")) == "command line"
    assert str(raw.origin("train[0].name")) == "config"


def test_of_two_overrides_of_one_key_the_later_wins() -> None:
    assert load({}, ["a=1", "a=2"]).select("a") == 2


NAMED = {"data": {"train": {"dataset_name": "a", "settings": {"x": 1}, "split": "train"}, "shuffle": False}}


@pytest.mark.parametrize(
    ("overrides", "train"),
    [
        (["data.train.data_path=b"], {"data_path": "b"}),
        (["data.train.split=s", "data.train.data_path=b"], {"split": "s", "data_path": "b"}),
        (["data.train.dataset_name=null", "data.train.data_path=b"], {"dataset_name": None, "data_path": "b"}),
        (["data.train.data_path=null"], {**NAMED["data"]["train"], "data_path": None}),
        (["data.train.dataset_name=c"], {"dataset_name": "c", "split": "train"}),
        (
            ["data.train.settings.y=2", "data.train.dataset_name=c"],
            {"dataset_name": "c", "split": "train", "settings": {"y": 2}},
        ),
        (["data.train.dataset_name=a"], NAMED["data"]["train"]),
        (["data.train.data_path=b", "data.train.dataset_name=c"], {"data_path": "b", "dataset_name": "c"}),
    ],
)
def test_an_override_replaces_a_dataset_of_the_other_kind_with_its_settings(
    overrides: list[str], train: dict[str, Any]
) -> None:
    assert load(NAMED, overrides).plain() == {"data": {"train": train, "shuffle": False}}


def test_an_override_replaces_a_list_of_datasets_by_one() -> None:
    several = {"data": {"train": [{"dataset_name": "a"}, {"data_path": "b"}]}}
    assert load(several, ["data.train.data_path=c"]).plain() == {"data": {"train": {"data_path": "c"}}}
    with pytest.raises(ConfigError, match=r"split.* the list has 2 entries"):
        load(several, ["data.train.split=s"])


def test_a_key_is_written_if_it_has_a_value_or_null() -> None:
    raw = load({"a": {"b": None}})
    assert raw.is_written("a.b")
    assert not raw.is_written("a.c")


def test_new_keys_below_free_keys_need_no_mark(run: Callable[..., Resolved[Any]]) -> None:
    config = run(overrides=["policy.overrides.rope.theta=1e6", "env.math.num_workers=4"]).config
    assert config.policy.overrides == {"rope": {"theta": 1e6}}
    assert config.env["math"].num_workers == 4


def test_select_interpolates_and_blames_only_what_was_asked_for() -> None:
    raw = load({"a": "${b.c}", "b": {"c": "x"}, "bad": "${nowhere}"})
    assert raw.select("a") == "x"
    with pytest.raises(ConfigError, match=r"bad \(config\).*nowhere"):
        raw.select("bad")


def test_values_laid_over_in_code_carry_their_name() -> None:
    raw = load({"a": {"b": 1, "c": 1}}).with_values({"a": {"b": 2}}, "quickstart")
    assert (raw.select("a"), str(raw.origin("a.b"))) == ({"b": 2, "c": 1}, "quickstart")
    assert raw.origin("z") == DEFAULT


def test_nested_values_inherit_as_files_do(folder: Path) -> None:
    (folder / "base.yaml").write_text("grpo: {seed: 1, max_num_steps: 5}\n")
    raw = load({"defaults": "base", "grpo": {"seed": 2}}, ["grpo.num_prompts_per_step=3"], search=[folder])
    assert raw.plain() == {"grpo": {"seed": 2, "max_num_steps": 5, "num_prompts_per_step": 3}}
    assert str(raw.origin("grpo.max_num_steps")) == "base.yaml:1"
    assert raw.select("defaults") is None
