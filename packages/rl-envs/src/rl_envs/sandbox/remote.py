"""Sandboxes of a server, by the protocol of SandboxFusion: `POST /run_code`.

https://bytedance.github.io/SandboxFusion/
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from rl_core.errors import RLError
from rl_envs.sandbox.program import Ending, Limits, Outcome, Program

GRACE_S = 30.0
"""Seconds beyond a program's own limit within which the server must answer."""
MAX_ANSWER = 2**28
"""Maximum number of bytes of an answer."""


class RemoteSandboxFailed(RLError):
    """Raised if a server could not run a program, or did not answer."""


class RemoteSandbox:
    """Runs programs on a server, which is responsible for their isolation.

    Args:
        url: Address of the server, such as `http://sandboxes:8080`.
        limits: Limits of programs that come without their own. The server is told of time and memory.
    """

    def __init__(self, url: str, *, limits: Limits | None = None) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"sandbox.url must begin with http:// or https://, got {url!r}")
        self._url = url.rstrip("/") + "/run_code"
        self.limits = limits or Limits()

    def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Run a program to its end.

        Raises:
            RemoteSandboxFailed: If the server could not run it.
        """
        limits = limits or self.limits
        started = time.monotonic()
        answer = self._post(request_body(program, limits), limits.wall_s + GRACE_S)
        return read_answer(answer, limits, time.monotonic() - started)

    def close(self) -> None:
        """Nothing is kept open."""

    def _post(self, body: dict[str, Any], timeout: float) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return json.loads(response.read(MAX_ANSWER))
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise RemoteSandboxFailed(f"the sandbox server {self._url} did not answer: {error}") from None


def request_body(program: Program, limits: Limits) -> dict[str, Any]:
    """A program as the server takes it."""
    return {
        "code": program.source,
        "language": "python",
        "stdin": program.stdin.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode(),
        "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
        "run_timeout": limits.wall_s,
        "memory_limit_MB": limits.memory_mib,
    }


def read_answer(answer: Any, limits: Limits, seconds: float) -> Outcome:
    """A server's answer as an outcome.

    Raises:
        RemoteSandboxFailed: If the server could not run the program, or the answer has another form.
    """
    try:
        status, result = answer["status"], answer.get("run_result")
        if status == "SandboxError" or result is None:
            raise RemoteSandboxFailed(
                f"the sandbox server could not run a program: {answer.get('message') or answer!r:.200}"
            )
        code = result.get("return_code")
        most = limits.output_kib * 1024
        stdout, stderr = ((result.get(name) or "").encode() for name in ("stdout", "stderr"))
        is_timeout = result.get("status") == "TimeLimitExceeded"
        if code is not None and type(code) is not int:
            raise TypeError
    except (TypeError, KeyError, AttributeError, UnicodeError):
        raise RemoteSandboxFailed(f"the sandbox server sent a malformed answer: {answer!r:.200}") from None
    ending: Ending = "exit"
    if is_timeout or code is None:
        ending = "deadline"
    elif len(stdout) > most or len(stderr) > most:
        ending = "output"
    elif code < 0:
        ending = "signal"
    return Outcome(
        ending,
        exit_code=code if ending == "exit" else None,
        signal=-code if ending == "signal" else None,
        stdout=stdout[:most],
        stderr=stderr[:most],
        seconds=seconds,
    )
