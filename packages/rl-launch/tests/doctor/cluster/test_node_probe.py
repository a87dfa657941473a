"""Probes without Ray: two addresses of this machine stand for two nodes."""

import http.server
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_launch.doctor.cluster import node_probe
from rl_launch.doctor.cluster.node_probe import NodeProbe

TOKEN = b"t" * 32


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(node_probe, "CONNECT_TIMEOUT_S", 1.0)
    return NodeProbe("127.0.0.2"), NodeProbe("127.0.0.3")


def test_a_transfer_is_measured_by_its_receiver(pair):
    sender, receiver = pair
    port = receiver.listen()
    with ThreadPoolExecutor() as pool:
        received = pool.submit(receiver.receive, TOKEN, 0.1)
        assert sender.send("127.0.0.3", port, TOKEN, 0.1) == ""
        found = received.result()
    assert not found.problem
    assert found.num_bytes
    assert found.seconds >= 0.1


def test_a_connection_without_the_token_is_not_measured(pair):
    sender, receiver = pair
    port = receiver.listen()
    with ThreadPoolExecutor() as pool:
        received = pool.submit(receiver.receive, TOKEN, 0.05)
        with socket.create_connection(("127.0.0.3", port)) as stranger:
            stranger.sendall(b"s" * 32)
            assert stranger.recv(1) == b""
        assert sender.send("127.0.0.3", port, TOKEN, 0.05) == ""
        assert received.result().num_bytes


def test_a_closed_port_and_a_silent_one_are_problems(pair):
    sender, receiver = pair
    assert sender.send("127.0.0.3", receiver.free_port(), TOKEN, 0.1) == "Connection refused"
    receiver.listen()
    assert receiver.receive(TOKEN, 0.1).problem == "nothing arrived within 2 s"


@pytest.fixture
def hub():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(int(self.path[1:]))
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_hub_that_answers_is_reached_whatever_it_says(pair, hub, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    probe, _ = pair
    assert [probe.hub_problem(f"{hub}/{code}", 5) for code in (200, 401, 404, 503)] == ["", "", "", "the answer is 503"]
    assert "refused" in probe.hub_problem(f"http://127.0.0.1:{probe_port()}/x", 5)


def probe_port():
    return NodeProbe("127.0.0.1").free_port()


def test_models_that_are_not_in_the_cache_are_listed(pair, tmp_path):
    (tmp_path / "hub/models--org--here/snapshots").mkdir(parents=True)
    probe, _ = pair
    assert probe.absent_in_cache(["org/here", "org/there"], {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": ""}) == [
        "org/there"
    ]
