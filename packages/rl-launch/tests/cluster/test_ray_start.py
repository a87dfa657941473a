"""Connecting to Ray, with a Ray that does not answer in the place of one that would."""

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
