"""Limits of processes and threads, of control groups and of the user."""

import resource
from types import SimpleNamespace

import pytest

from rl_core.errors import ConfigError
from rl_launch.cluster import process_limit
from rl_launch.cluster.process_limit import ProcessLimit, check_process_limit


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Sets the control groups of this process: the line of `/proc/self/cgroup`, and limits by folder."""

    def set_groups(line, limits):
        for folder, (most, used) in limits.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "pids.max").write_text(f"{most}\n")
            (tmp_path / folder / "pids.current").write_text(f"{used}\n")
        monkeypatch.setattr(process_limit, "_CONTROL_GROUPS", tmp_path)
        (tmp_path / "groups").write_text(f"5:cpu:/other\n{line}\n")
        monkeypatch.setattr(process_limit, "_GROUPS_OF_THIS", tmp_path / "groups")

    monkeypatch.setattr(process_limit.os, "getuid", lambda: 0)
    return set_groups


@pytest.mark.parametrize(
    ("line", "limits", "free"),
    [
        ("0::/job/step", {"job/step": (500, 20), "job": (300, 40)}, 260),
        ("0::/job/step", {"job/step": ("max", 20), "job": (300, 40)}, 260),
        ("8:pids:/job", {"pids/job": (120, 20)}, 100),
        ("0::/", {".": (90, 1)}, 89),
        ("0::/not/mounted/here", {}, None),
        ("0::/job", {"job": ("max", 20)}, None),
    ],
)
def test_the_tightest_control_group_counts(groups, line, limits, free):
    groups(line, limits)
    found = process_limit.process_limit()
    assert (None if found is None else found.free) == free


def test_the_limit_of_a_user_counts_its_threads_and_not_for_the_administrator(groups, monkeypatch):
    groups("0::/", {})
    monkeypatch.setattr(process_limit.resource, "getrlimit", lambda _which: (1000, resource.RLIM_INFINITY))
    assert process_limit.process_limit() is None
    threads = {"num_threads": 7, "uids": SimpleNamespace(real=3)}, {"num_threads": 9, "uids": SimpleNamespace(real=4)}
    running = [SimpleNamespace(info=info) for info in (*threads, {"num_threads": None, "uids": None})]
    monkeypatch.setattr(process_limit.psutil, "process_iter", lambda _names: running)
    monkeypatch.setattr(process_limit.os, "getuid", lambda: 3)
    assert process_limit.process_limit() == ProcessLimit("RLIMIT_NPROC (ulimit -u)", 1000, 7)


def test_a_run_that_would_be_refused_threads_is_refused_with_limit_and_remedy(groups):
    groups("8:pids:/job", {"pids/job": (400, 20)})
    check_process_limit(1, 2)
    with pytest.raises(ConfigError, match=r"pids.max allows 400 .* 20 exist.* at least 600 more.*--pids-limit"):
        check_process_limit(1, 10)
