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
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.errors import RLError
from rl_envs.sandbox.cancellation import Cancellation
from rl_envs.sandbox.program import Ending, Limits, Outcome, Program
from rl_envs.sandbox.remote_command import command_outcome, command_program, fetched_files

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

    def run(self, program: Program, limits: Limits | None = None, cancellation: Cancellation | None = None) -> Outcome:
        """Run a program to its end.

        Args:
            program: The program; the server's own network is all that a command has.
            limits: Its limits; those of the sandbox if None.
            cancellation: Refuses programs that have not begun. The protocol has no request that ends one.

        Raises:
            RemoteSandboxFailed: If the server could not run it, or it was cancelled before.
        """
        if program.relay is not None:
            raise RemoteSandboxFailed("a server of sandboxes decides itself what a program reaches; it takes no relay")
        if cancellation is not None and cancellation.is_cancelled:
            raise RemoteSandboxFailed("the program was cancelled")
        limits = limits or self.limits
        if program.command:
            sent, mark = command_program(program, limits)
            outcome, files = self._run(sent, limits, fetched_files(program))
            return command_outcome(outcome, files, program, mark)
        return self._run(program, limits, [])[0]

    def close(self) -> None:
        """Nothing is kept open."""

    def _run(self, program: Program, limits: Limits, fetched: Sequence[str]) -> tuple[Outcome, Mapping[str, bytes]]:
        """The outcome of a program, and the files that it left under these names."""
        started = time.monotonic()
        body = request_body(program, limits)
        answer = self._post({**body, "fetch_files": list(fetched)} if fetched else body, limits.wall_s + GRACE_S)
        return read_answer(answer, limits, time.monotonic() - started), read_files(answer, fetched)

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


def read_files(answer: Any, names: Sequence[str]) -> dict[str, bytes]:
    """The files of a server's answer that were asked for, as far as there are such.

    Raises:
        RemoteSandboxFailed: If the answer has another form.
    """
    given = answer.get("files") or {}
    try:
        return {name: base64.b64decode(given[name]) for name in names if given.get(name) is not None}
    except (TypeError, ValueError, AttributeError):
        raise RemoteSandboxFailed(f"the sandbox server sent malformed files: {given!r:.200}") from None


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
