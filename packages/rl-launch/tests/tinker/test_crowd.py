"""A hundred clients at once, some of them slow, hostile or gone: the others train, and the server stays small."""

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from raw_client import RawClient, forward_backward, passed
from test_learning import CYCLE

from rl_core.testing.exhaustive import exhaustive

TRAINING, BROKEN, STALLED, GONE, SLOW = 60, 10, 15, 10, 5
STEPS = 5
BOUND = 200 * 2**20
"""Bytes that the server may grow by. The bodies that stalled clients announce have more together."""


@pytest.fixture
def server(tmp_path):
    program = [sys.executable, Path(__file__).with_name("bigram_host.py"), tmp_path / "queue", "0"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def train(url):
    """Train a model by itself; returns its losses."""
    client = RawClient(url)
    model, losses = client.model(client.session()), []
    for step in range(STEPS):
        promise = client.post("forward_backward", forward_backward(model, 2 * step + 1, [CYCLE]))[1]
        stepped = client.optim_step(model, 2 * step + 2, learning_rate=0.1)[1]
        losses.append(passed(client.result(promise)).metrics["loss:sum"])
        client.result(stepped)
    return losses


def send_rubbish(url, ended):
    client = RawClient(url)
    while not ended.is_set():
        status, answer = client.post("forward_backward", b"\xff" * 100_000, Content_Type="application/x-protobuf")
        assert status == 400, answer


def opened(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def begin(url, announced, sent):
    """Send a part of a body."""
    connection = opened(url)
    head = "POST /api/v1/forward_backward HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: tml-slow"
    connection.sendall(f"{head}\r\nContent-Length: {announced}\r\n\r\n".encode() + bytes(sent))
    return connection


def read_slowly(url, ended):
    connection = opened(url)
    connection.sendall(
        b"GET /api/v1/get_server_capabilities HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: tml-slow\r\n\r\n"
    )
    while not ended.wait(0.2) and connection.recv(1):
        pass
    connection.close()


@exhaustive
def test_a_hundred_clients_are_served_in_bounded_memory(server):
    url, process = server
    alone = train(url)
    before, most, ended = process.memory_info().rss, 0, threading.Event()
    with ThreadPoolExecutor(TRAINING + BROKEN + SLOW) as pool:
        hostile = [pool.submit(send_rubbish, url, ended) for _ in range(BROKEN)]
        hostile += [pool.submit(read_slowly, url, ended) for _ in range(SLOW)]
        held = [begin(url, 60_000_000, 1_000_000) for _ in range(STALLED)]
        for _ in range(GONE):
            begin(url, 1_000_000, 500_000).close()
        training = [pool.submit(train, url) for _ in range(TRAINING)]
        while not all(each.done() for each in training):
            most = max(most, process.memory_info().rss)
            time.sleep(0.1)
        ended.set()
        for each in hostile:
            each.result()
        for connection in held:
            connection.close()
    for each in training:
        np.testing.assert_allclose(each.result(), alone, rtol=1e-6)
    assert most - before < BOUND, f"{(most - before) / 2**20:.0f} MiB"
