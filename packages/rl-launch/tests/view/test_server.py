"""The server answers only whoever has the token, on this machine, from its own page."""

import http.client
import json
import socket
import threading
import time
from contextlib import suppress

import pytest
from made_runs import made_run, rollout

from rl_launch.view import server as server_module
from rl_launch.view import static_files
from rl_launch.view.catalog import PageCatalog
from rl_launch.view.server import ViewServer


@pytest.fixture
def server(tmp_path):
    made_run(tmp_path / "one")
    made = ViewServer(PageCatalog([tmp_path]))
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    yield made
    made.close()
    thread.join()


def get(server, path, *, method="GET", token=True, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if token:
        given["Cookie"] = f"{server.cookie}={server.token}"
    connection.request(method, path, headers=given)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_the_address_gives_a_cookie_that_other_pages_do_not_send(server):
    status, headers, _ = get(server, server.url.partition(str(server.port))[2], token=False)

    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert server.token in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/events", "/api/raw", "/app/core.js"])
def test_nothing_is_answered_without_the_token(server, path):
    assert get(server, path, token=False)[0] == 401
    assert get(server, path, token=False, Authorization="Bearer wrong")[0] == 401
    assert get(server, path, token=False, Cookie=f"{server.cookie}=é")[0] == 401
    assert get(server, "/?token=wrong", token=False)[0] == 401


def test_a_program_may_send_the_token(server):
    status, _, content = get(server, "/api/runs", token=False, Authorization=f"Bearer {server.token}")
    assert status == 200
    assert [run["id"] for run in json.loads(content)["runs"]] == ["one"]


MALFORMED = ["[::1].evil.com", "[::1", "127.0.0.1:80:80", "evil.com@127.0.0.1", "127.0.0.1/", "localhost:", "[::1]x:80"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "0.0.0.0", "", "[::2]", *MALFORMED])
def test_a_name_that_resolves_to_this_machine_is_refused(server, host):
    assert get(server, "/api/runs", Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1:1", "[::1]:8000"])
def test_a_forwarded_port_is_allowed(server, host):
    assert get(server, "/api/runs", Host=host)[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_a_request_of_another_page_is_refused(server, origin):
    assert get(server, "/api/runs", Origin=origin.format(port=server.port))[0] == 403
    assert get(server, "/api/runs", Origin=f"http://127.0.0.1:{server.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(server, method):
    status, headers, _ = get(server, "/api/runs", method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_a_head_request_has_no_body(server):
    status, headers, content = get(server, "/api/runs", method="HEAD")
    assert status == 200
    assert int(headers["Content-Length"]) > 0
    assert content == b""


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/app/../../server.py", "/%2e%2e/server.py", "//etc/passwd", "/app", "/index.html", "/api/../x"],
)
def test_only_files_of_the_page_are_served(server, path):
    assert get(server, path)[0] == 404


def test_every_answer_has_a_policy_without_inline_code(server):
    for path in ("/", "/api/runs", "/app/core.js", "/nothing"):
        headers = get(server, path)[1]
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


def test_the_page_refers_to_nothing_elsewhere():
    pages = [
        static_files.page(),
        *(static_files.content(name) for name in static_files.names() if "vendor" not in name),
    ]
    for content in pages:
        assert b"//cdn" not in content
        assert b"https://" not in content
        assert b"innerHTML" not in content
        assert b"dangerouslySetInnerHTML" not in content


def test_a_raw_line_is_a_file_to_save_and_no_page(server):
    status, headers, content = get(server, "/api/raw?id=one&kind=step&step=3&row=0")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert headers["Content-Disposition"].startswith("attachment")
    assert json.loads(content)["prompt_id"] == "p0"


def test_a_wrong_request_is_one_message(server):
    status, headers, content = get(server, "/api/rollouts?id=one&first=<script>")
    assert status == 400
    assert headers["Content-Type"].startswith("text/plain")
    assert b"first" in content


def test_numbers_that_json_does_not_have_are_null(server, tmp_path):
    records = b'{"prompt_id": "p", "rewards": {"reward": NaN}, "info": {"x": Infinity, "half": "\\ud800"}}\n'
    (tmp_path / "one" / "rollouts" / "step_3.jsonl").write_bytes(records)
    content = get(server, "/api/rollout?id=one&kind=step&step=3&row=0")[2]
    found = json.loads(content, parse_constant=pytest.fail)["record"]
    assert found["info"]["x"] is None


def test_a_change_is_reported_to_an_open_page(server, tmp_path):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/api/events", headers={"Cookie": f"{server.cookie}={server.token}"})
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    with (tmp_path / "one" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 1.0}) + "\n")

    line = answer.readline()

    assert json.loads(line.removeprefix(b"data: "))["changed"] == {"one": ["metrics.jsonl"]}
    connection.close()


def test_the_server_listens_on_the_loopback_interface_only(server):
    assert server._server.server_address[0] == "127.0.0.1"
    with socket.socket() as other, pytest.raises(OSError, match=r"refused|unreachable"):
        other.connect(("127.0.0.2", server.port))


def test_hostile_rollouts_are_plain_values(server, tmp_path):
    from made_runs import lines

    text = "<script>alert(1)</script>\x1b[31m\u202e" + "x" * 300_000
    (tmp_path / "one" / "rollouts" / "step_3.jsonl").write_bytes(lines([rollout("<img src=x>", 0, text, 1.0)]))
    status, headers, content = get(server, "/api/rollout?id=one&kind=step&step=3&row=0")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert json.loads(content)["record"]["turns"][0]["text"].startswith("<script>alert(1)</script>\x1b[31m\u202e")


def raw(server, sent, *, timeout_s=10):
    """Send bytes; return what is answered until the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s) as connection:
        connection.sendall(sent)
        answered = b""
        with suppress(ConnectionResetError):
            while some := connection.recv(2**16):
                answered += some
        return answered


@pytest.mark.parametrize(
    "sent", [b"BREW / HTTP/1.1\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\xff" * 70_000 + b"\n"]
)
def test_what_is_no_request_is_refused_in_plain_text_with_the_policy(server, sent):
    head, _, body = raw(server, sent).partition(b"\r\n\r\n")
    assert head.split()[1] in (b"400", b"414", b"501", b"505")
    assert b"Content-Type: text/plain" in head
    assert b"Content-Security-Policy: default-src 'self'" in head
    assert b"<" not in body


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_a_connection_without_a_complete_request_is_closed(server, monkeypatch, sent):
    monkeypatch.setattr(server_module, "IDLE_S", 0.2)
    assert raw(server, sent) == b""


def test_open_connections_take_few_threads_and_shut_nobody_out(server, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 8)
    before = threading.active_count()
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    assert get(server, "/api/runs")[0] == 200
    while threading.active_count() - before > 10:  # those that were hung up end soon
        time.sleep(0.01)
    for connection in held:
        connection.close()
