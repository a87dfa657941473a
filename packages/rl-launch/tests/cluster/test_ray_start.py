"""Connecting to Ray, with a Ray that does not answer in the place of one that would."""

import signal
from typing import NoReturn

import pytest

from rl_core.errors import ConfigError, RLError
from rl_launch.cluster import (
    ray_start,
    virtual_cluster,  # noqa: F401  # sets what Ray reads when it is imported
)
from rl_launch.cluster.ray_start import connect

ADDRESS = "127.0.0.1:6379"


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> NoReturn:
        raise ConnectionError("no GCS")

    monkeypatch.setattr(ray_start.ray, "init", init)


def test_a_ray_of_our_own_that_does_not_answer_is_not_blamed_on_the_environment(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RLError, match=f"the Ray that this run started at {ADDRESS} does not answer: no GCS") as caught:
        connect(ADDRESS, is_own=True)
    assert not isinstance(caught.value, ConfigError)
    assert "RAY_ADDRESS" not in str(caught.value)


def test_a_cluster_that_does_not_answer_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match="RAY_ADDRESS is auto, but no Ray cluster answers there: no GCS"):
        connect("auto", is_own=False)


def test_this_programs_handler_of_sigterm_stays_when_ray_sets_its_own(monkeypatch):
    monkeypatch.setattr(ray_start.ray, "init", lambda **_: signal.signal(signal.SIGTERM, lambda *_: None))
    before = signal.getsignal(signal.SIGTERM)

    def own(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, own)
    try:
        connect(ADDRESS, is_own=True)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_handler_of_this_program_rays_stays(monkeypatch):
    def theirs(number: int, frame: object) -> None: ...

    monkeypatch.setattr(ray_start.ray, "init", lambda **_: signal.signal(signal.SIGTERM, theirs))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        connect(ADDRESS, is_own=True)
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("load", "said"), [(100_000.0, "load 100000 on .* cores.*less busy"), (0.0, "rl doctor")])
def test_a_ray_that_never_starts_is_explained(monkeypatch, load, said):
    monkeypatch.setattr(ray_start.time, "sleep", lambda _: None)
    monkeypatch.setattr(ray_start.os, "getloadavg", lambda: (load, load, load))

    def start() -> NoReturn:
        raise RuntimeError("it timed out")

    with pytest.raises(RLError, match=rf"Ray did not start in 3 attempts; the last said: it timed out\n.*{said}"):
        ray_start.retried(start, lambda: None)
