"""Machines of a server with the protocol of SandboxFusion: `POST /run_code`.

https://bytedance.github.io/SandboxFusion/ describes it.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from typing import IO, Any

from rl_envs.sandbox.machines import MARGIN_S, MachineRequest, ServiceSandbox, max_report_bytes
from rl_envs.sandbox.program import Ending, Limits, Outcome
from rl_envs.sandbox.runner import SandboxFailed, SandboxUnavailable

WAITS_S = (1.0, 3.0, 9.0)
"""Seconds before a program is sent again to a server that has not taken it."""
OVERHEAD_MIB = 256
"""Memory in MiB that the server allows in addition to the program's, for its supervisor."""
_BUSY = (429, 502, 503, 504)
_JOB, _REPORT = "rl_job", "rl_report"


class SandboxFusion:
    """Runs programs on a server, which is responsible for their isolation and decides which addresses they reach.

    Args:
        url: Address of the server, such as `http://sandboxes:8080`.
        key_env: Environment variable with the key that the server wants as a bearer token; empty for none.
    """

    def __init__(self, url: str, key_env: str = "") -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"sandbox.url must begin with http:// or https://, got {url!r}")
        self._url = url.rstrip("/") + "/run_code"
        self._headers = {"Content-Type": "application/json"}
        if key_env:
            if not os.environ.get(key_env):
                raise SandboxUnavailable(f"the environment variable {key_env}, with the key of {url}, is not set")
            self._headers["Authorization"] = f"Bearer {os.environ[key_env]}"
        self._opener = urllib.request.build_opener(_NoRedirects)

    def open(self, request: MachineRequest) -> MachineRequest:
        """Return the request: the server makes a machine when it gets the program."""
        return request

    def run(self, machine: MachineRequest, supervisor: str, job: bytes, timeout_s: float) -> bytes | Outcome:
        """Send a program, and wait for its report."""
        limits = machine.limits
        body = {
            "code": supervisor,
            "language": "python",
            "files": {_JOB: base64.b64encode(job).decode()},
            "fetch_files": [_REPORT],
            "run_timeout": limits.wall_s + MARGIN_S / 2,
            "memory_limit_MB": limits.memory_mib + OVERHEAD_MIB,
        }
        started = time.monotonic()
        answer = self._answer(json.dumps(body).encode(), 2 * max_report_bytes(limits), started + timeout_s)
        return read_answer(answer, limits, time.monotonic() - started)

    def close(self, machine: MachineRequest) -> None:
        """Do nothing: the protocol has no request that ends a program."""

    def _answer(self, body: bytes, max_bytes: int, until: float) -> Any:
        """Return the server's answer. A program is sent again only if the server has not taken it."""
        for wait_s in (*WAITS_S, 0.0):
            request = urllib.request.Request(self._url, body, self._headers)
            try:
                with self._opener.open(request, timeout=max(0.1, until - time.monotonic())) as response:
                    return json.loads(read_within(response, max_bytes, until))
            except urllib.error.HTTPError as error:
                is_busy, reason = error.code in _BUSY, f"HTTP {error.code} {error.reason}"
            except urllib.error.URLError as error:
                is_busy, reason = isinstance(error.reason, ConnectionRefusedError), str(error.reason)
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                is_busy, reason = False, f"{type(error).__name__}: {error}"
            if not is_busy or not wait_s or time.monotonic() + wait_s > until:
                break
            time.sleep(wait_s)
        raise SandboxFailed(f"the sandbox server {self._url} did not answer: {reason:.300}")


class RemoteSandbox(ServiceSandbox):
    """Runs programs on a server, which is responsible for their isolation.

    Args:
        url: Address of the server, such as `http://sandboxes:8080`.
        limits: Limits of programs that come without their own. The server gets time and memory.
        key_env: Environment variable with the server's key; empty for none.
    """

    def __init__(self, url: str, *, limits: Limits | None = None, key_env: str = "") -> None:
        super().__init__(SandboxFusion(url, key_env), limits=limits, place=f"the sandbox server {url}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirections, which would send the key to another server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def read_within(response: Any, max_bytes: int, until: float) -> bytes:
    """Return the body of a response.

    Args:
        response: Response of `urllib`.
        max_bytes: Maximum number of bytes.
        until: Time of `time.monotonic` at which it must have ended.

    Raises:
        ValueError, TimeoutError: If it is longer, or takes longer.
    """
    received = bytearray()
    while chunk := response.read1(2**20):
        received += chunk
        if len(received) > max_bytes:
            raise ValueError(f"it sent more than {max_bytes} bytes")
        if time.monotonic() > until:
            raise TimeoutError("it was still sending at the time limit")
    return bytes(received)


def read_answer(answer: Any, limits: Limits, seconds: float) -> bytes | Outcome:
    """Return the report in a server's answer, or the server's own description of the end if there is none.

    Raises:
        SandboxFailed: If the server could not run the program, or the answer has another form.
    """
    try:
        status, result = answer["status"], answer.get("run_result")
        if status == "SandboxError" or result is None:
            reason = answer.get("message") or answer
            raise SandboxFailed(f"the sandbox server could not run a program: {reason!r:.200}")
        report = (answer.get("files") or {}).get(_REPORT)
        if report is not None:
            return base64.b64decode(report, validate=True)
        # The program has ended its supervisor, or the server does not allow more than one process.
        code, limit = result.get("return_code"), limits.output_kib * 1024
        stdout, stderr = ((result.get(name) or "").encode() for name in ("stdout", "stderr"))
        is_timeout = result.get("status") == "TimeLimitExceeded"
        if code is not None and type(code) is not int:
            raise TypeError("a code is a number")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise SandboxFailed(f"the sandbox server sent a malformed answer: {error}: {answer!r:.200}") from None
    ending: Ending = "exit"
    if is_timeout or code is None:
        ending = "deadline"
    elif len(stdout) > limit or len(stderr) > limit:
        ending = "output"
    elif code < 0:
        ending = "signal"
    exit_code, number = code if ending == "exit" else None, -code if ending == "signal" else None
    return Outcome(ending, exit_code, number, stdout[:limit], stderr[:limit], seconds)
