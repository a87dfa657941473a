"""A dumped config loads back to an equal one, holds no value of an environment variable, and is compared by keys."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.config import (
    ABSENT,
    Change,
    Config,
    Resolved,
    assemble,
    changed_to_yaml,
    diff,
    explain,
    load,
    resolve,
    to_yaml,
)

AWKWARD = ["1e5", "no", "null", "~", "", "???", "true", "007", "0x1", "12:30:00", "2026-01-01", "${a}", r"\${a}", "$"]
AWKWARD += [
    "a: b",
    "# c",
    "- d",
    "'",
    '"',
    "\n",
    "a\nb\n",
    " a\n b",
    "\t",
    "{% x %}",
    "[",
    "=",
    "<<",
    "é",
    "\x85",
    "\x07",
]
TEXT = st.sampled_from(AWKWARD) | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]))
LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(bool), inner, max_size=3)
)


class Values(Config):
    free: dict[str, Any] = {}
    text: str = ""
    texts: list[str] = []
    maybe: str | None = None
    number: float = 0.0
    count: int = 0
    flag: bool = False


ROOT = assemble("Root", {"values": Values})


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types, also where 1 == True == 1.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(free=st.dictionaries(TEXT.filter(bool), TREE, max_size=4), data=st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_dump_then_load_gives_an_equal_config(tmp_path: Path, free: dict[str, Any], data: st.DataObject) -> None:
    values = Values(
        free=free,
        text=data.draw(TEXT),
        texts=data.draw(st.lists(TEXT, max_size=3)),
        maybe=data.draw(st.none() | TEXT),
        number=data.draw(st.floats(allow_nan=False)),
        count=data.draw(st.integers()),
        flag=data.draw(st.booleans()),
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(ROOT(values=values)), encoding="utf-8", newline="")
    loaded = resolve(load(path), ROOT).config.model_dump()["values"]
    assert same(loaded, values.model_dump())


def test_the_dump_holds_every_default_in_order(run: Callable[..., Resolved[Any]], root: type[Config]) -> None:
    config = run(overrides=["policy.attention=flash", "policy.generation.stop_token_ids=[1]"]).config
    text = to_yaml(config)
    assert list(yaml.safe_load(text)) == list(root.model_fields)
    assert yaml.safe_load(text)["policy"]["attention"] == "flash"
    assert run(text).config == config


@pytest.mark.parametrize("text", AWKWARD)
def test_every_yaml_reader_takes_dumped_text_for_text(text: str) -> None:
    dumped = yaml.safe_load(to_yaml(ROOT(values=Values(text=text))))["values"]["text"]
    assert dumped.replace("\\", "") == text.replace("\\", "")


def test_equal_configs_have_no_changes(run: Callable[..., Resolved[Any]]) -> None:
    assert diff(run().config, run(overrides=["grpo.seed=42"]).config) == []


def test_each_changed_key_is_listed_with_both_values(run: Callable[..., Resolved[Any]]) -> None:
    changes = diff(
        run().config, run(overrides=["grpo.seed=7", "env.math.num_workers=2", "policy.overrides.a=1"]).config
    )
    assert changes == [
        Change("grpo.seed", 42, 7),
        Change("policy.overrides.a", ABSENT, 1),
        Change("env.math", ABSENT, {"num_workers": 2, "timeout": 10.0}),
    ]
    assert [str(change) for change in changes[:2]] == ["grpo.seed: 42 -> 7", "policy.overrides.a: (not there) -> 1"]


def test_lists_of_sections_differ_by_key_and_other_lists_as_a_whole(run: Callable[..., Resolved[Any]]) -> None:
    old = run(overrides=["data.train=[{dataset_name: a}]", "policy.generation.stop_strings=[x]"]).config
    new = run(overrides=["data.train=[{dataset_name: b}]", "policy.generation.stop_strings=[y]"]).config
    assert diff(old, new) == [
        Change("policy.generation.stop_strings", ["x"], ["y"]),
        Change("data.train[0].dataset_name", "a", "b"),
    ]


def test_a_change_of_type_alone_is_a_change(run: Callable[..., Resolved[Any]]) -> None:
    old, new = (run(overrides=[f"policy.overrides.a={value}"]).config for value in ("1", "true"))
    assert diff(old, new) == [Change("policy.overrides.a", 1, True)]


SECRET = "hunter2-of-the-test"


class Server(Config):
    url: str = ""
    token: str = ""
    port: int = 80


class Served(Config):
    server: Server = Server()
    copy_of: Server = Server()
    tokens: list[str] = []
    free: dict[str, Any] = {}
    plain: str = ""


SERVED = assemble("Root", {"values": Served})
WRITTEN = {
    "values": {
        "server": {"url": "https://${oc.env:TEST_SECRET}@host", "token": "${oc.env:TEST_SECRET}", "port": 8080},
        "copy_of": "${values.server}",
        "tokens": ["a", "${values.server.token}", "${..server.token}", "${oc.env:TEST_ABSENT,${values.tokens[1]}}"],
        "free": {"nested": {"key": "${oc.decode:${oc.env:TEST_SECRET}}"}, "number": "${values.server.port}"},
        "plain": "costs \\${price}",
    }
}


@pytest.fixture
def resolved(monkeypatch):
    monkeypatch.setenv("TEST_SECRET", SECRET)
    monkeypatch.delenv("TEST_ABSENT", raising=False)
    return resolve(load(WRITTEN), SERVED)


def test_values_are_there_and_what_is_written_holds_none_of_them(resolved):
    values = resolved.config.values
    assert values.server.token == values.copy_of.token == SECRET
    assert values.tokens == ["a", SECRET, SECRET, SECRET]
    assert values.free == {"nested": {"key": SECRET}, "number": 8080}
    text = to_yaml(resolved.config)
    assert SECRET not in text
    assert "url: https://${oc.env:TEST_SECRET}@host" in text
    assert "number: 8080" in text


def test_what_is_written_reads_back_to_the_same_config(resolved, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(resolved.config))
    again = resolve(load(tmp_path / "config.yaml"), SERVED).config
    assert again.values == resolved.config.values
    assert to_yaml(again) == to_yaml(resolved.config)


def test_another_value_of_the_variable_is_not_another_config(resolved, monkeypatch):
    monkeypatch.setenv("TEST_SECRET", "another")
    later = resolve(load(WRITTEN), SERVED).config
    assert later.values.server.token == "another"
    assert diff(resolved.config, later) == []
    literal = resolve(load(WRITTEN, ["values.server.token=x"]), SERVED).config
    changes = {change.key: (change.old, change.new) for change in diff(resolved.config, literal)}
    assert changes["values.server.token"] == ("${oc.env:TEST_SECRET}", "x")


def test_an_explanation_shows_where_the_value_comes_from(resolved):
    for key in ("values.server.token", "values.copy_of.token", "values.tokens[1]", "values.free.nested.key"):
        assert SECRET not in repr(explain(SERVED, key, resolved)), key
    assert explain(SERVED, "values.server.token", resolved).value == "${oc.env:TEST_SECRET}"
    assert explain(SERVED, "values.server.port", resolved).value == 8080


def test_references_pass_to_copies_and_other_processes(resolved):
    for copy in (resolved.config.model_copy(), pickle.loads(pickle.dumps(resolved.config))):
        assert to_yaml(copy) == to_yaml(resolved.config)


class Part(Config):
    size: int = 1
    shape: str = "round"


class Whole(Config):
    part: Part = Part(size=2)
    maybe: Part | None = None
    several: list[Part] = []
    free: dict[str, Any] = {"a": 1, "b": 2}
    name: str


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        ({}, {}),
        ({"part": {"size": 2, "shape": "round"}, "free": {"a": 1, "b": 2}}, {}),
        ({"part": {"size": 1}}, {"part": {"size": 1}}),
        ({"maybe": {}}, {"maybe": {}}),
        ({"maybe": {"size": 1}, "several": [{}, {"shape": "flat"}]}, {"maybe": {}, "several": [{}, {"shape": "flat"}]}),
        ({"free": {"a": 1}}, {"free": {"a": 1}}),
        ({"free": {}}, {"free": {}}),
    ],
)
def test_changed_keys_alone_load_back_to_an_equal_config(
    tmp_path: Path, written: dict[str, Any], changed: dict[str, Any]
) -> None:
    config = resolve(load({**written, "name": "x"}), Whole).config
    text = changed_to_yaml(config)
    assert yaml.safe_load(text) == {**changed, "name": "x"}
    (tmp_path / "again.yaml").write_text(text)
    assert resolve(load(tmp_path / "again.yaml"), Whole).config == config


def test_changed_keys_keep_the_reference_to_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hidden")
    config = resolve(load({"name": "${oc.env:A_SECRET}"}), Whole).config
    assert changed_to_yaml(config) == "name: ${oc.env:A_SECRET}\n"
