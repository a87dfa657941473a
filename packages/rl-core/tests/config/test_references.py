"""Values of environment variables reach a config, and nothing that stores or shows it."""

import pickle
from typing import Any

import pytest

from rl_core.config import Config, assemble, diff, explain, load, resolve, to_yaml

SECRET = "hunter2-of-the-test"


class Server(Config):
    url: str = ""
    token: str = ""
    port: int = 80


class Values(Config):
    server: Server = Server()
    copy_of: Server = Server()
    tokens: list[str] = []
    free: dict[str, Any] = {}
    plain: str = ""


ROOT = assemble("Root", {"values": Values})
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
    return resolve(load(WRITTEN), ROOT)


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
    again = resolve(load(tmp_path / "config.yaml"), ROOT).config
    assert again.values == resolved.config.values
    assert to_yaml(again) == to_yaml(resolved.config)


def test_another_value_of_the_variable_is_not_another_config(resolved, monkeypatch):
    monkeypatch.setenv("TEST_SECRET", "another")
    later = resolve(load(WRITTEN), ROOT).config
    assert later.values.server.token == "another"
    assert diff(resolved.config, later) == []
    literal = resolve(load(WRITTEN, ["values.server.token=x"]), ROOT).config
    changes = {change.key: (change.old, change.new) for change in diff(resolved.config, literal)}
    assert changes["values.server.token"] == ("${oc.env:TEST_SECRET}", "x")


def test_an_explanation_shows_where_the_value_comes_from(resolved):
    for key in ("values.server.token", "values.copy_of.token", "values.tokens[1]", "values.free.nested.key"):
        assert SECRET not in repr(explain(ROOT, key, resolved)), key
    assert explain(ROOT, "values.server.token", resolved).value == "${oc.env:TEST_SECRET}"
    assert explain(ROOT, "values.server.port", resolved).value == 8080


def test_references_pass_to_copies_and_other_processes(resolved):
    for copy in (resolved.config.model_copy(), pickle.loads(pickle.dumps(resolved.config))):
        assert to_yaml(copy) == to_yaml(resolved.config)
