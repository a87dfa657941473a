"""A reference server of sandboxes: `python -m rl_envs.sandbox.server` answers `POST /run_code` on a loopback port.

It has no authentication: whoever reaches the port runs programs in its sandbox. Put it behind a proxy that has.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_core.errors import RLError
from rl_envs.sandbox import tree
from rl_envs.sandbox.program import Limits, Outcome, Program
from rl_envs.sandbox.sandbox import Sandbox

MAX_REQUEST = 2**26
"""Maximum number of bytes of a request."""
CLIENT_TIMEOUT_S = 60.0
"""Seconds within which a client must send or take its next bytes."""


class SandboxServer(ThreadingHTTPServer):
    """Serves one sandbox on a port of this machine.

    Args:
        sandbox: Runs the programs; its limits are the maximum of a request.
        port: 0 for any that is free.
    """

    daemon_threads = True

    def __init__(self, sandbox: Sandbox, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.sandbox = sandbox

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer
    timeout = CLIENT_TIMEOUT_S

    def do_POST(self) -> None:
        if self.path != "/run_code":
            self.send_error(404)
            return
        if self.headers.get_content_type() != "application/json":
            # The pages of a browser may send other types to any address without asking.
            self.send_error(415, "send application/json")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            self.send_error(411)
            return
        if len(length) > 12 or not 0 < int(length) <= MAX_REQUEST:
            self.send_error(413)
            return
        data = self.rfile.read(int(length))
        if len(data) < int(length):  # The client left.
            self.close_connection = True
            return
        try:
            try:
                body = json.loads(data)
            except RecursionError:
                raise ValueError("the request is nested too deeply") from None
            program, limits = program_in(body, self.server.sandbox.limits)
            outcome = self.server.sandbox.run(program, limits)
            files = files_in(outcome, body.get("fetch_files") or [], limits)
            answer = {**answer_to(outcome), "files": files}
        except (ValueError, RLError) as error:
            answer = {"status": "SandboxError", "message": str(error)}
        encoded = json.dumps(answer).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)
        except ConnectionError:  # The client left.
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Do nothing: requests are not logged."""


def program_in(body: Any, highest: Limits) -> tuple[Program, Limits]:
    """Return the program of a request, and its limits.

    Raises:
        ValueError: If the request has another form, or another language.
    """
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        raise ValueError("a request needs the program as a string under `code`")
    if body.get("language", "python") != "python":
        raise ValueError(f"this server runs python, got the language {body['language']!r:.100}")
    stdin, files = body.get("stdin") or "", body.get("files") or {}
    if not isinstance(stdin, str):
        raise ValueError("`stdin` is a string")
    if not isinstance(files, dict) or not all(isinstance(content, str) for content in files.values()):
        raise ValueError("`files` is an object of names and contents in base64")
    fetched = body.get("fetch_files") or []
    if not isinstance(fetched, list) or not all(isinstance(name, str) for name in fetched):
        raise ValueError("`fetch_files` is a list of paths")
    program = Program(
        body["code"],
        stdin=stdin.encode(errors="replace"),
        files={name: base64.b64decode(content) for name, content in files.items()},
        snapshot="." if fetched else None,
    )
    memory = _bounded(body, "memory_limit_MB", highest.memory_mib)
    return program, replace(highest, wall_s=_bounded(body, "run_timeout", highest.wall_s), memory_mib=math.ceil(memory))


def files_in(outcome: Outcome, names: Sequence[str], limits: Limits) -> dict[str, str]:
    """Return the requested files that a program left, in base64.

    Raises:
        ValueError: If its files are too large.
    """
    if outcome.snapshot_problem:
        raise ValueError(f"the files cannot be fetched: {outcome.snapshot_problem}")
    if not names:
        return {}
    left = {entry.path: entry.content for entry in tree.unpack(outcome.snapshot, limits.scratch_mib * 2**20)}
    found = {name: left.get(posixpath.normpath(name)) for name in names}
    return {name: base64.b64encode(content).decode() for name, content in found.items() if content is not None}


def _bounded(body: Mapping[str, Any], key: str, highest: float) -> float:
    """Return the limit of a request, no larger than the server's."""
    value = body.get(key) or highest
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"`{key}` is a positive number, got {value!r:.100}")
    return min(highest, value)


def answer_to(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome in the form of SandboxFusion."""
    is_over = outcome.ending in ("deadline", "cpu")
    code = outcome.exit_code if outcome.signal is None else -outcome.signal
    return {
        "status": "Success" if outcome.ok else "Failed",
        "message": "",
        "run_result": {
            "status": "TimeLimitExceeded" if is_over else "Finished",
            "execution_time": outcome.seconds,
            "return_code": None if is_over else -9 if code is None else code,
            "stdout": outcome.stdout.decode(errors="replace"),
            "stderr": outcome.stderr.decode(errors="replace"),
        },
    }


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--isolation", choices=("namespaces", "landlock"), default="namespaces")
    arguments = parser.parse_args()
    with (
        Sandbox(arguments.isolation) as sandbox,
        SandboxServer(sandbox, host=arguments.host, port=arguments.port) as server,
    ):
        print(f"sandboxes at {server.url}", flush=True)  # noqa: T201  # The user needs the address.
        server.serve_forever()


if __name__ == "__main__":
    main()
