"""Whoever sends garbage to a sandbox or to its server gets an error, and the next program runs."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from contextlib import closing, suppress

import pytest

from rl_envs.sandbox.program import Limits, MalformedFrame, Program, read_frame
from rl_envs.sandbox.remote import RemoteSandbox, read_answer
from rl_envs.sandbox.runner import SandboxFailed
from rl_envs.sandbox.sandbox import Sandbox
from rl_envs.sandbox.server import MAX_REQUEST, SandboxServer
from rl_envs.sandbox.session import Session

WORKS = Program("print(6 * 7)")


def framed(text: bytes, size: int | None = None) -> bytes:
    return struct.pack("!I", len(text) if size is None else size) + text


FRAMES = {
    "garbage": b"\xff" * 64,
    "HTTP": b"POST /run_code HTTP/1.1\r\n\r\n",
    "a header of 4 GiB": framed(b"", 2**32 - 1),
    "no JSON": framed(b"{'parts': []}"),
    "no text": framed(b"\xff\xfe\xfd"),
    "no object": framed(b"[1]"),
    "no parts": framed(b"{}"),
    "parts that are no list": framed(b'{"parts": 3}'),
    "a part of a negative length": framed(b'{"parts": [-1]}'),
    "a part of no whole length": framed(b'{"parts": [1.5]}'),
    "a part of 1 TiB": framed(b'{"parts": [1099511627776]}'),
    "parts of 1 GiB together": framed(b'{"parts": [268435455, 268435455, 268435455, 268435455]}'),
    "deep nesting": framed(b"[" * 100_000),
}


@pytest.mark.parametrize("data", FRAMES.values(), ids=FRAMES)
def test_a_malformed_frame_is_refused_before_it_is_read(data: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        far.settimeout(10)
        with pytest.raises(MalformedFrame):
            read_frame(far)


@pytest.mark.parametrize("data", [*FRAMES.values(), framed(b'{"parts": []}'), b""], ids=[*FRAMES, "no program", "none"])
def test_a_keeper_survives_garbage_and_the_sandbox_runs_the_next_program(data: bytes, sandbox: Sandbox) -> None:
    with sandbox.connect() as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(30)
        with suppress(ConnectionResetError):  # what the keeper did not read
            while connection.recv(2**16):
                pass
    assert sandbox.run(WORKS).stdout == b"42\n"


def request(server: SandboxServer, body: bytes, **headers: str) -> tuple[int, bytes]:
    host, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(host), int(port), timeout=30)
    try:
        connection.request("POST", "/run_code", body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


BODIES = {
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "a list": b"[]",
    "deep nesting": b"[" * 200_000,
    "code that is a number": b'{"code": 1}',
    "another language": b'{"code": "", "language": "bash"}',
    "a language that is a list": b'{"code": "", "language": ["python"]}',
    "input that is a list": b'{"code": "", "stdin": [1]}',
    "files that are a list": b'{"code": "", "files": ["a"]}',
    "a file that is a number": b'{"code": "", "files": {"a": 1}}',
    "a file that is not base64": b'{"code": "", "files": {"a": "x"}}',
    "a file outside": b'{"code": "", "files": {"../a": ""}}',
    "a file whose name has a NUL": b'{"code": "", "files": {"a\\u0000b": ""}}',
    "a file with a long name": json.dumps({"code": "", "files": {"a" * 300: ""}}).encode(),
    "a time that is a list": b'{"code": "", "run_timeout": [1]}',
    "a time that is text": b'{"code": "", "run_timeout": "1"}',
    "a negative time": b'{"code": "", "run_timeout": -1}',
    "a time that is no number": b'{"code": "", "run_timeout": NaN}',
    "negative memory": b'{"code": "", "memory_limit_MB": -1}',
    "memory that is text": b'{"code": "", "memory_limit_MB": "much"}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_malformed_request_is_answered_with_an_error(
    body: bytes, server: SandboxServer, capfd: pytest.CaptureFixture[str]
) -> None:
    status, answer = request(server, body)
    assert status == 200
    assert json.loads(answer)["status"] == "SandboxError"
    assert "Traceback" not in capfd.readouterr().err
    assert RemoteSandbox(server.url).run(WORKS).stdout == b"42\n"


HEADERS = {
    "another type": ({"Content-Type": "text/plain"}, 415),
    "no type": ({"Content-Type": ""}, 415),
    "a length that is text": ({"Content-Length": "many"}, 411),
    "a negative length": ({"Content-Length": "-1"}, 411),
    "a length in other digits": ({"Content-Length": "\u00b2"}, 411),
    "no length": ({"Content-Length": "0"}, 413),
    "too long": ({"Content-Length": str(MAX_REQUEST + 1)}, 413),
    "a length of 5000 digits": ({"Content-Length": "9" * 5000}, 413),
}


@pytest.mark.parametrize(("headers", "status"), HEADERS.values(), ids=HEADERS)
def test_a_request_is_refused_by_its_headers(headers: dict[str, str], status: int, server: SandboxServer) -> None:
    assert request(server, b'{"code": ""}', **headers)[0] == status
    assert RemoteSandbox(server.url).run(WORKS).stdout == b"42\n"


def test_limits_beyond_the_servers_are_cut_to_them(server: SandboxServer) -> None:
    body = json.dumps({"code": "print(1)", "run_timeout": 1e308, "memory_limit_MB": float("inf")}).encode()
    assert json.loads(request(server, body)[1])["run_result"]["stdout"] == "1\n"


def test_clients_that_leave_or_say_nothing_hold_nobody_up(
    server: SandboxServer, capfd: pytest.CaptureFixture[str]
) -> None:
    head = b"POST /run_code HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    silent = [socket.create_connection(server.server_address[:2]) for _ in range(50)]
    for index, client in enumerate(silent):
        client.sendall(b"" if index % 2 else head + b'{"code": "')
    for client in silent[:25]:
        client.close()
    assert RemoteSandbox(server.url).run(WORKS).stdout == b"42\n"
    for client in silent[25:]:
        client.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        "Success",
        {},
        {"status": "Success", "run_result": 1},
        {"status": "Success", "run_result": {"return_code": "0"}},
        {"status": "Success", "run_result": {"return_code": True}},
        {"status": "Success", "run_result": {"return_code": 0, "stdout": 1}},
        {"status": "Success", "run_result": {"return_code": 0, "stdout": "\ud800"}},
    ],
    ids=repr,
)
def test_a_servers_malformed_answer_is_an_error(answer: object) -> None:
    with pytest.raises(SandboxFailed):
        read_answer(answer, Limits(), 0.0)


FORGED = {"text": "b'not JSON'", "a number": "b'1'", "deep nesting": "b'[' * 50_000", "bytes": "bytes(range(128, 256))"}
"""Expressions of the bytes that code writes in place of its session's answer."""


@pytest.mark.parametrize("written", FORGED.values(), ids=FORGED)
def test_a_forged_answer_ends_its_session_alone(written: str, sandbox: Sandbox) -> None:
    with closing(Session(sandbox)) as session:
        said = session.execute(
            f"import os\nfor fd in range(3, 9):\n    try: os.write(fd, {written} + b'\\n')\n    except OSError: pass",
            timeout_s=60,
        )
        assert said == "the session was ended: the code wrote to its descriptors"
    assert sandbox.run(WORKS).stdout == b"42\n"
