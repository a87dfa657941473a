import os
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field

from rl_core.config import (
    Config,
    PathText,
    WhenChanged,
    as_written,
    assemble,
    changed_keys,
    keys_when_changed,
    load,
    resolve,
    rule_of,
    to_override,
    with_absolute_paths,
)
from rl_core.config.tree import parse_path


class Inner(Config):
    color: str = "red"


class Logs(Config):
    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    inner: Inner = Inner()
    project: Annotated[str, WhenChanged.BRANCH] = "mine"


class Loop(Config):
    steps: Annotated[int | None, WhenChanged.GOAL] = Field(default=10, gt=0)
    epochs: Annotated[int | None, WhenChanged.GOAL] = None
    rate: float = 0.1
    settings: Annotated[dict[str, Any], WhenChanged.RESUME] = {}


class Source(Config):
    path: PathText | None = None
    name: str = ""


class Base(Config):
    model: Annotated[PathText, WhenChanged.NEW_RUN] = "hub/name"
    sources: Source | list[Source] = Source()


ROOT = assemble("Root", {"logs": Logs, "loop": Loop}, base=Base)


def changes(old, new):
    trees = [as_written(resolve(load(written), ROOT).config) for written in (old, new)]
    return {each.change.key: each.rule for each in changed_keys(ROOT, *trees)}


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("loop.rate", WhenChanged.BRANCH),
        ("loop.steps", WhenChanged.GOAL),
        ("loop.settings", WhenChanged.RESUME),
        ("loop.settings.deep.key", WhenChanged.RESUME),
        ("logs", WhenChanged.RESUME),
        ("logs.inner.color", WhenChanged.RESUME),
        ("logs.project", WhenChanged.BRANCH),
        ("model", WhenChanged.NEW_RUN),
        ("sources.path", WhenChanged.BRANCH),
        ("nowhere.at.all", WhenChanged.BRANCH),
    ],
)
def test_the_rule_that_was_said_closest_to_a_key_holds(key, rule):
    assert rule_of(ROOT, parse_path(key), {}) is rule


def test_changes_come_with_their_rules():
    old = {"loop": {"rate": 0.1, "settings": {"a": 1}}}
    new = {"loop": {"rate": 0.2, "steps": 20, "settings": {"b": 1}}, "logs": {"project": "yours"}}
    assert changes(old, new) == {
        "logs.project": WhenChanged.BRANCH,
        "loop.steps": WhenChanged.GOAL,
        "loop.rate": WhenChanged.BRANCH,
        "loop.settings.a": WhenChanged.RESUME,
        "loop.settings.b": WhenChanged.RESUME,
    }


def test_a_section_that_only_one_config_has_needs_what_its_keys_need():
    tree = as_written(resolve(load({}), ROOT).config)
    without = {key: value for key, value in tree.items() if key != "loop"}
    (gone,), (come,) = changed_keys(ROOT, tree, without), changed_keys(ROOT, without, tree)
    assert (gone.change.key, gone.rule) == (come.change.key, come.rule) == ("loop", WhenChanged.BRANCH)
    deep = assemble("Deep", {"base": ROOT})
    (found,) = changed_keys(deep, {}, {"base": tree})
    assert (found.change.key, found.change.new, found.rule) == ("base.model", "hub/name", WhenChanged.NEW_RUN)


def test_paths_are_compared_by_what_they_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").touch()
    (tmp_path / "link").symlink_to("data")
    same = ["data/rows.jsonl", "./data/rows.jsonl", str(tmp_path / "data/rows.jsonl"), "~/data/rows.jsonl"]
    same.append("link/rows.jsonl")
    for path in same:
        assert changes({"sources": {"path": "data/rows.jsonl"}}, {"sources": {"path": path}}) == {}
        assert changes({"sources": [{"path": "data/rows.jsonl"}]}, {"sources": [{"path": path}]}) == {}
        assert changes({"model": "data/rows.jsonl"}, {"model": path}) == {}
    assert changes({"sources": {"path": "data/rows.jsonl"}}, {"sources": {"path": "data/others.jsonl"}})
    assert not changes(
        {"sources": {"name": f"{tmp_path}/data/a.py:f"}}, {"sources": {"name": f"{tmp_path}/link/a.py:f"}}
    )
    assert changes({"sources": {"name": "data/a.py:f"}}, {"sources": {"name": "data/a.py:g"}})
    # text that is no path is compared as text
    assert changes({"sources": {"name": "data"}}, {"sources": {"name": "./data"}}) == {
        "sources.name": WhenChanged.BRANCH
    }


def test_what_is_kept_of_a_config_names_files_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "name"):
        (tmp_path / name).touch()
    written = {"sources": [{"path": "a.jsonl"}, {"path": "*.jsonl"}, {"path": "gone.jsonl", "name": "name"}]}
    tree = with_absolute_paths(resolve(load(written), ROOT).config)
    assert tree["sources"] == [
        {"path": f"{tmp_path}/a.jsonl", "name": ""},
        {"path": f"{tmp_path}/*.jsonl", "name": ""},
        {"path": "gone.jsonl", "name": "name"},
    ]
    assert tree["model"] == "hub/name"


@pytest.mark.parametrize("text", ["{% for m in messages %}a.txt{% endfor %}", "a.txt\n", "${oc.env:PWD}/a.txt"])
def test_text_that_is_no_path_is_kept_as_it_is(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    monkeypatch.setenv("PWD", os.fspath(tmp_path))
    config = resolve(load({"sources": {"path": text}}), ROOT).config
    assert with_absolute_paths(config)["sources"]["path"] == text


def test_the_keys_of_a_rule_have_their_values():
    config = resolve(load({"loop": {"steps": 7}}), ROOT).config
    assert keys_when_changed(config, WhenChanged.GOAL) == {"loop.steps": 7, "loop.epochs": None}
    assert keys_when_changed(config, WhenChanged.NEW_RUN) == {"model": "hub/name"}


@pytest.mark.parametrize(
    "value", [1e-05, 3, True, None, "a b", "1e5", "no", "", "[", "a: b, c", "'", {"lr": 0.1, "betas": [0.9, "x, y"]}]
)
def test_an_override_reads_back_as_its_value(value):
    text = to_override("loop.settings", {"value": value})
    assert resolve(load({}, [text]), ROOT).config.loop.settings == {"value": value}
    if not isinstance(value, str | dict) or value == "a: b, c":
        name = to_override("loop.settings.key", value)
        assert resolve(load({}, [name]), ROOT).config.loop.settings == {"key": value}
