"""The token of Ray clusters: who can read it, and when it is sent."""

import os
import stat
from pathlib import Path

import pytest

from rl_core.errors import ConfigError
from rl_launch.cluster import (
    ray_start,
    virtual_cluster,  # noqa: F401  # sets what Ray reads when it is imported
)
from rl_launch.cluster.ray_files import default_token_file, has_token, token_problem
from rl_launch.cluster.ray_start import create_token_file, protect_token_file, use_token_of


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_a_new_token_is_readable_by_its_user_alone_whatever_the_umask(umask):
    path = default_token_file()
    before = os.umask(umask)
    try:
        create_token_file(path)
    finally:
        os.umask(before)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert len(path.read_text()) == 64
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert token_problem() is None


def test_the_token_of_the_process_that_was_first_stays():
    path = default_token_file()
    create_token_file(path)
    first = path.read_text()
    create_token_file(path)
    assert path.read_text() == first


def test_a_readable_token_is_a_problem_until_it_is_protected():
    path = default_token_file()
    create_token_file(path)
    path.chmod(0o644)
    problem, remedy = token_problem()
    assert str(path) in problem
    assert remedy == f"Run: chmod 600 {path}"
    protect_token_file()
    assert mode(path) == 0o600


def test_a_file_that_the_user_names_is_reported_but_not_changed(home, monkeypatch, caplog):
    named = home / "named"
    named.write_text("token")
    named.chmod(0o640)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(named))
    protect_token_file()
    assert mode(named) == 0o640
    assert f"chmod 600 {named}" in caplog.text


def test_a_token_in_a_variable_needs_no_file(monkeypatch):
    assert not has_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    assert has_token()
    assert token_problem() is None


@pytest.fixture
def requires_token(monkeypatch):
    monkeypatch.setattr(ray_start, "_requires_token", lambda address: True)
    turned_on = []
    monkeypatch.setattr(ray_start, "enable_token_auth_by_default", lambda: turned_on.append(True))
    return turned_on


def test_a_token_at_hand_is_sent_to_a_cluster_that_requires_one(requires_token):
    create_token_file(default_token_file())
    use_token_of("head:6379")
    assert requires_token == [True]


def test_without_a_token_the_remedy_for_every_node_is_reported(requires_token):
    with pytest.raises(
        ConfigError, match=r"RAY_ADDRESS=head:6379 requires a token.*On every node.*RAY_AUTH_MODE=token"
    ):
        use_token_of("head:6379")
    assert not requires_token


def test_a_mode_that_is_set_is_respected(requires_token, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    use_token_of("head:6379")
    assert not requires_token
