"""The folder of a Ray that a run starts."""

import os
import stat
from pathlib import Path

import pytest

from rl_core.errors import ConfigError
from rl_launch.cluster import ray_files as module
from rl_launch.cluster.ray_files import folder_problem, prepare_ray_folder, ray_folder, remove_session


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    # the limit of a socket's path has tests of its own, and pytest's folders are long
    monkeypatch.setattr(module, "_LONGEST_SOCKET", 1000)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_only_its_user_may_enter_it(temporary):
    private = prepare_ray_folder()
    assert private == temporary / f"ray-{os.geteuid()}"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    private.chmod(0o755)
    prepare_ray_folder()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert ray_folder() == private / "ray"


def test_the_users_choice_wins_and_is_not_changed(temporary, monkeypatch):
    chosen = temporary / "chosen"
    chosen.mkdir(mode=0o755)
    chosen.chmod(0o755)
    monkeypatch.setenv("RAY_TMPDIR", str(chosen))
    assert prepare_ray_folder() == chosen
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o755


def test_a_link_in_its_place_is_refused(temporary):
    (temporary / "elsewhere").mkdir()
    (temporary / f"ray-{os.geteuid()}").symlink_to(temporary / "elsewhere")
    with pytest.raises(ConfigError, match=r"not a folder that belongs to you.*set RAY_TMPDIR"):
        prepare_ray_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(temporary):
    private = prepare_ray_folder()
    os.chown(private, 12345, 12345)
    with pytest.raises(ConfigError, match="not a folder that belongs to you"):
        prepare_ray_folder()


def test_the_default_is_short_enough_for_sockets(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 2**32 - 2)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    assert folder_problem(ray_folder()) is None


@pytest.mark.parametrize("keep_logs", [False, True])
def test_a_session_is_removed_and_its_logs_kept_on_request(tmp_path, keep_logs):
    session = tmp_path / "session_1"
    for name in ("logs", "sockets"):
        (session / name).mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(session)
    remove_session(session, keep_logs=keep_logs)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in Path(tmp_path).rglob("*"))
    assert left == (["session_1", "session_1/logs", "session_latest"] if keep_logs else [])


def test_a_path_that_is_too_long_for_sockets_is_refused_with_the_remedy():
    assert folder_problem(Path("/var/ray")) is None
    problem, remedy = folder_problem(Path("/var/" + "x" * 60 + "/ray"))
    assert "too long for Ray's sockets" in problem
    assert remedy.startswith("Set RAY_TMPDIR to a folder of at most")
