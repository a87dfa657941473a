"""A hub that answers, refuses, or is silent."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rl_algos import hub


class _Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(200 if self.path == "/api/models/some/model" else 404)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - its name in the base
        pass


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No variable of the machine, an empty cache, and a first question."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.forget()
    yield
    hub.forget()


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> str:
    """A port that nobody listens on."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{reserved.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    return address


@pytest.fixture
def downloaded(tmp_path: Path) -> str:
    snapshot = tmp_path / "cache" / "models--some--model" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return "some/model"


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that has `some/model` alone."""
    with HTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.usefixtures("answering")
def test_what_the_hub_has_is_left_to_the_libraries() -> None:
    assert hub.problem("model", "some/model") == ""


@pytest.mark.usefixtures("answering")
def test_what_the_hub_does_not_show_is_told_at_once() -> None:
    said = hub.problem("model", "some/modle")
    assert said.startswith("not a local folder, and not a model on http://127.0.0.1")
    assert "HF_TOKEN" in said
    assert hub.problem("dataset", "some/model").startswith("not a dataset on ")


@pytest.mark.usefixtures("answering")
def test_a_download_of_what_the_hub_shows_no_longer_is_used(downloaded: str) -> None:
    assert hub.problem("model", "some/modle")
    assert hub.problem("model", downloaded) == ""


def test_a_hub_out_of_reach_is_told_with_the_remedy(closed: str) -> None:
    said = hub.problem("model", "some/model")
    assert said.startswith("not a local folder, not among the downloads in ")
    assert f"{closed} cannot be reached (" in said
    assert "hf download some/model" in said
    assert "hf download some/data --repo-type dataset" in hub.problem("dataset", "some/data")


def test_a_silent_hub_is_waited_for_once_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def never(kind: hub.Kind, name: str) -> hub.HubAnswer:
        asked.append(name)
        threading.Event().wait()
        raise AssertionError

    monkeypatch.setattr(hub, "MAX_SILENCE_S", 0.2)
    monkeypatch.setattr(hub, "_answer", never)
    assert "(no answer within 0.2 s)" in hub.problem("model", "some/model")
    assert "(no answer within 0.2 s)" in hub.problem("dataset", "some/data")
    assert asked == ["some/model"]


@pytest.mark.usefixtures("closed")
def test_what_was_downloaded_is_used_and_nobody_asks_the_hub_again(
    downloaded: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        assert hub.problem("model", downloaded) == ""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert len(caplog.records) == 1
    with caplog.at_level(logging.WARNING):
        assert hub.problem("model", downloaded) == ""
    assert len(caplog.records) == 1


def test_offline_mode_asks_nobody(downloaded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "_answer", lambda kind, name: pytest.fail("the hub was asked"))
    assert hub.problem("model", downloaded) == ""
    assert "HF_HUB_OFFLINE is set" in hub.problem("model", "another/model")


def test_the_cache_is_where_the_hub_library_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert hub.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub.cache_folder() == tmp_path / "home" / "hub"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_folder() == tmp_path / "xdg" / "huggingface" / "hub"
