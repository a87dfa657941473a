"""A reference server of sandboxes: `python -m rl_envs.sandbox.server` answers `POST /run_code` on a loopback port.

It has no authentication: whoever reaches the port runs programs in its sandbox. Put it behind a proxy that has.
"""

from __future__ import annotations

import argparse
import base64
import json
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_core.errors import RLError
from rl_envs.sandbox.program import Limits, Outcome, Program
from rl_envs.sandbox.sandbox import Sandbox

MAX_REQUEST = 2**26
"""Most bytes of a request."""


class SandboxServer(ThreadingHTTPServer):
    """Serves one sandbox on a port of this machine.

    Args:
        sandbox: runs the programs; its limits are the most that a request may ask for.
        port: 0 for any that is free.
    """

    daemon_threads = True

    def __init__(self, sandbox: Sandbox, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.sandbox = sandbox

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer

    def do_POST(self) -> None:
        if self.path != "/run_code":
            self.send_error(404)
            return
        size = int(self.headers.get("Content-Length") or 0)
        if not 0 < size <= MAX_REQUEST:
            self.send_error(413)
            return
        try:
            program, limits = program_in(json.loads(self.rfile.read(size)), self.server.sandbox.limits)
        except ValueError as error:
            self._answer({"status": "SandboxError", "message": str(error)})
            return
        try:
            outcome = self.server.sandbox.run(program, limits)
        except RLError as error:
            self._answer({"status": "SandboxError", "message": str(error)})
            return
        self._answer(answer_to(outcome))

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""

    def _answer(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def program_in(body: Any, most: Limits) -> tuple[Program, Limits]:
    """The program of a request, and its limits.

    Raises:
        ValueError: if the request has another form, or another language.
    """
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        raise ValueError("a request needs the program as text under `code`")
    if body.get("language", "python") != "python":
        raise ValueError(f"this server runs python, got the language {body['language']!r}")
    files = {name: base64.b64decode(content) for name, content in (body.get("files") or {}).items()}
    program = Program(body["code"], stdin=(body.get("stdin") or "").encode(errors="replace"), files=files)
    return program, replace(
        most,
        wall_s=min(most.wall_s, float(body.get("run_timeout") or most.wall_s)),
        memory_mib=min(most.memory_mib, int(body.get("memory_limit_MB") or most.memory_mib)),
    )


def answer_to(outcome: Outcome) -> dict[str, Any]:
    """An outcome as SandboxFusion tells it."""
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
        print(f"sandboxes at {server.url}", flush=True)  # noqa: T201  # tells the user where it listens
        server.serve_forever()


if __name__ == "__main__":
    main()
