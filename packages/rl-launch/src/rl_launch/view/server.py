"""The HTTP server of `rl view`: read only, on the loopback interface, for whoever has the token.

Requests must name a loopback address as their host, because a foreign page that has its name resolve to 127.0.0.1 sends
its own. A request from a page must come from this one. The token is in the address that the user opens. The server
answers with a cookie and redirects; programs may send the token as `Authorization: Bearer TOKEN`.

A connection without a complete request is closed after `IDLE_S`, and earlier if there are too many.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import isfinite
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rl_algos.host_header import host_name
from rl_core.config.tree import mapped
from rl_core.errors import ConfigError, RLError
from rl_launch.view import static_files
from rl_launch.view.answers import ANSWERS
from rl_launch.view.catalog import PageCatalog
from rl_launch.view.parameters import Parameters
from rl_launch.view.rollouts import raw_rollout

HOST = "127.0.0.1"

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
IDLE_S = 20.0
"""Maximum number of seconds for which a connection waits without a complete request, or does not read its answer."""

MAX_CONNECTIONS = 128
"""Maximum number of connections. Each has a thread."""

_EVENT_PERIOD_S = 0.5
_HEARTBEAT_S = 15.0
_MAX_PARAMETERS = 200
_FILES = (
    *("metrics.jsonl", "state.json", "run.json", "rollouts", "checkpoints", "logs/driver.log", "traces", "profiles"),
    *("rollouts.jsonl", "eval.json", "status.json"),
)
"""Files and folders of an entry whose changes a page shows. A page that shows another log asks for it by itself."""

_log = logging.getLogger(__name__)


def serve(catalog: PageCatalog, port: int, say: Callable[[str], None], *, opens_browser: bool = False) -> None:
    """Serve a catalog until an interrupt or SIGTERM.

    Args:
        catalog: PageCatalog to serve.
        port: Port on the loopback interface; 0 for a free one.
        say: Function that is called with the address.
        opens_browser: True to open the address in a browser.

    Raises:
        ConfigError: If the port is in use.
    """
    server = ViewServer(catalog, port)
    threading.Thread(target=server.serve, name="rl-view", daemon=True).start()
    ended = threading.Event()
    earlier = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        say(server.url)
        if opens_browser:
            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):
            while not ended.wait(1.0):
                pass
    finally:
        signal.signal(signal.SIGTERM, earlier)
        server.close()


class ViewServer:
    """Serves a catalog until it is closed.

    Args:
        catalog: PageCatalog to serve.
        port: Port on the loopback interface; 0 for a free one.

    Raises:
        ConfigError: If the port is in use.

    Attributes:
        url: Address to open in a browser, with the token.
        cookie: Name of the cookie with the token.
    """

    def __init__(self, catalog: PageCatalog, port: int = 0) -> None:
        self.catalog = catalog
        self.token = secrets.token_urlsafe(24)
        self.is_closing = threading.Event()
        server = self

        class Bound(_Handler):
            view = server

        try:
            self._server = _Server((HOST, port), Bound)
        except OSError as error:
            raise ConfigError(f"--port: port {port} cannot be used: {error.strerror}. Choose another one.") from None
        self.port = int(self._server.server_address[1])
        self.url = f"http://{HOST}:{self.port}/?token={self.token}"
        # its name contains the port because browsers share cookies between ports
        self.cookie = f"rl_view_{self.port}"

    def serve(self) -> None:
        """Answer requests until `close` is called from another thread, or an interrupt is raised."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """End the server and the connections of its pages."""
        self.is_closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        self._waiting: dict[socket.socket, float] = {}  # since when, in this order
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread; the one that has waited longest makes room for it."""
        if len(self._open) >= MAX_CONNECTIONS:
            _hang_up(next(iter(list(self._waiting)), request))
        self._open.add(request)
        self.wait(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection, and close it."""
        self._open.discard(request)
        self.begin(request)
        super().shutdown_request(request)

    def wait(self, connection: socket.socket) -> None:
        """Note that a connection waits for a request."""
        self._waiting[connection] = time.monotonic()

    def begin(self, connection: socket.socket) -> None:
        """Note that the headers of a request are complete."""
        self._waiting.pop(connection, None)

    def service_actions(self) -> None:
        """Close the connections that have waited too long; called several times a second."""
        late = time.monotonic() - IDLE_S
        for connection in [each for each, since in list(self._waiting.items()) if since < late]:
            self.begin(connection)
            _hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # a browser that closes a connection is not an error
        _log.debug("connection of %s ended", client_address, exc_info=True)


class _Refusal(Exception):
    """A request that is not answered."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def _hang_up(connection: socket.socket) -> None:
    """End a connection; its thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    view: ViewServer
    server: _Server
    timeout = IDLE_S
    protocol_version = "HTTP/1.1"
    server_version = "rl-view"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request; without a body if its method is HEAD."""
        self.server.begin(self.connection)
        try:
            self._route()
        except _Refusal as refusal:
            self._send(refusal.status, f"{refusal}\n".encode(), "text/plain; charset=utf-8")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"read only\n", "text/plain", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method  # noqa: N815

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        self.server.wait(self.connection)
        super().handle_one_request()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer input that is not a request in the same way as refusals."""
        self.close_connection = True
        self.request_version = self.protocol_version  # input that cannot be read has a version without headers
        status = HTTPStatus(code)
        self._send(status, f"{status.phrase}\n".encode(), "text/plain; charset=utf-8")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parameter of http.server's
        """Log requests for debugging only; without the query, which may contain the token."""
        _log.debug("%s", self.command)

    def _route(self) -> None:
        sent = self.headers.get_all("Host", [])
        if host_name(sent) not in _LOOPBACK:
            raise _Refusal(HTTPStatus.FORBIDDEN, "the host of the address must be 127.0.0.1 or localhost")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{sent[0]}":
            raise _Refusal(HTTPStatus.FORBIDDEN, "requests of other pages are not answered")
        url = urlsplit(self.path)
        try:
            given = parse_qs(url.query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
        except ValueError:
            raise _Refusal(HTTPStatus.BAD_REQUEST, "too many parameters") from None
        if url.path == "/" and "token" in given:
            token = given["token"][-1]
            if not self._is_token(token):
                said = "the token in the address is not the one that rl view has printed"
                raise _Refusal(HTTPStatus.UNAUTHORIZED, said)
            cookie = f"{self.view.cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Location": "/", "Set-Cookie": cookie})
            return
        self._check_token()
        if url.path == "/":
            self._send(HTTPStatus.OK, static_files.page(), "text/html; charset=utf-8")
        elif url.path == "/api/events":
            self._send_events()
        elif url.path == "/api/raw":
            headers = {"Content-Disposition": 'attachment; filename="rollout.json"'}
            self._send(HTTPStatus.OK, self._asked(raw_rollout, given), "text/plain; charset=utf-8", headers)
        elif url.path.startswith("/api/"):
            answer = ANSWERS.get(url.path.removeprefix("/api/"))
            if answer is None:
                raise _Refusal(HTTPStatus.NOT_FOUND, "there is no such request")
            self._send(HTTPStatus.OK, as_json(self._asked(answer, given)), "application/json")
        else:
            name = url.path.removeprefix("/")
            try:
                content = static_files.content(name)
            except FileNotFoundError:
                raise _Refusal(HTTPStatus.NOT_FOUND, "there is no such file") from None
            kind = static_files.TYPES.get(name[name.rfind(".") :], "text/plain; charset=utf-8")
            self._send(HTTPStatus.OK, content, kind)

    def _check_token(self) -> None:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        found = [token] if kind == "Bearer" else []
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        if self.view.cookie in cookies:
            found.append(cookies[self.view.cookie].value)
        if not any(self._is_token(each) for each in found):
            raise _Refusal(
                HTTPStatus.UNAUTHORIZED, "open the address that rl view has printed, which contains the token"
            )

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(errors="replace"), self.view.token.encode())

    def _asked(self, answer: Callable[[PageCatalog, Parameters], Any], given: Mapping[str, Sequence[str]]) -> Any:
        try:
            return answer(self.view.catalog, Parameters(given))
        except (RLError, FileNotFoundError) as error:
            raise _Refusal(HTTPStatus.BAD_REQUEST, str(error)) from None
        except Exception as error:  # noqa: BLE001  # a page shows the failure, and the server continues
            _log.exception("a request failed")
            raise _Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}") from None

    def _send_events(self) -> None:
        # before the answer begins, because the page relies on events from then on
        seen, waited = stamps_of(self.view.catalog), 0.0
        self._send_head(HTTPStatus.OK, "text/event-stream", {})
        self.close_connection = True
        while not self.view.is_closing.wait(_EVENT_PERIOD_S):
            now = stamps_of(self.view.catalog)
            found, seen = changes(seen, now), now
            waited = 0.0 if found else waited + _EVENT_PERIOD_S
            if found:
                self.wfile.write(b"data: " + as_json(found) + b"\n\n")
            elif waited >= _HEARTBEAT_S:
                # finds out whether the page is still there
                self.wfile.write(b": \n\n")
                waited = 0.0

    def _send(self, status: HTTPStatus, content: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self._send_head(status, kind, {"Content-Length": str(len(content)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_head(self, status: HTTPStatus, kind: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        everywhere = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Content-Security-Policy": static_files.POLICY,
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        for name, value in {**everywhere, **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def as_json(answer: Any) -> bytes:
    """Return an answer as JSON. Numbers that are not finite are null."""
    try:
        text = json.dumps(answer, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        finite = mapped(answer, lambda _, value: None if isinstance(value, float) and not isfinite(value) else value)
        text = json.dumps(finite, ensure_ascii=False, separators=(",", ":"))
    # half of a surrogate pair has no UTF-8
    return text.encode(errors="replace")


def stamps_of(catalog: PageCatalog) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the size and time of the files that a page shows, by the id of each entry and the name of the file."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for entry in catalog.entries():
        files = found[entry.id] = {}
        for name in _FILES if entry.sort != "file" else ("",):
            with suppress(OSError):
                facts = os.stat(entry.path / name if name else entry.path)
                files[name] = (facts.st_size, facts.st_mtime_ns)
    return found


def changes(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the ids of entries that have changed, with their files that did, and whether entries came or
    went; empty if nothing has changed."""
    changed = {
        id: [name for name, stamp in files.items() if before[id].get(name) != stamp]
        for id, files in now.items()
        if id in before and before[id] != files
    }
    has_others = now.keys() != before.keys()
    return {"changed": changed, "list": has_others} if changed or has_others else {}
