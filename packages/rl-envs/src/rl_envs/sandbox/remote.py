"""Sandboxes of a server, by the protocol of SandboxFusion: `POST /run_code`.

https://bytedance.github.io/SandboxFusion/ has programs and files only. A command, its tree and its snapshot go through
a program that runs the command in a child process.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_core.errors import InfrastructureFailed
from rl_envs.sandbox.interpreter import QUITTERS
from rl_envs.sandbox.program import Cancellation, Ending, Limits, Outcome, Program

GRACE_S = 30.0
"""Seconds beyond a program's own limit within which the server must answer."""
MAX_ANSWER = 2**28
"""Maximum number of bytes of an answer."""
_TREE, _TASK, _SNAPSHOT, _END = "rl_tree.tar", "rl_task.json", "rl_snapshot.tar", "rl_end.txt"
_MARGIN_SHARE = 0.1
"""Share of the time limit that is left for reading the tree and writing the snapshot."""


class RemoteSandboxFailed(InfrastructureFailed):
    """Raised if a server could not run a program, or did not answer."""


class RemoteSandbox:
    """Runs programs on a server, which is responsible for their isolation.

    Args:
        url: Address of the server, such as `http://sandboxes:8080`.
        limits: Limits of programs that come without their own. The server gets time and memory.
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
            limits: Its limits; the limits of the sandbox if None.
            cancellation: Refuses programs that have not begun. The protocol has no request that ends a program.

        Raises:
            RemoteSandboxFailed: If the server could not run it, or it was cancelled before.
        """
        if program.relay is not None:
            raise RemoteSandboxFailed("a server of sandboxes decides itself what a program reaches; it takes no relay")
        if cancellation is not None and cancellation.is_cancelled:
            raise RemoteSandboxFailed("the program was cancelled")
        limits = limits or self.limits
        if not program.command:
            return self._run(program, limits, [])[0]
        sent, mark = command_program(program, limits)
        fetched = [_END, *([_SNAPSHOT] if program.snapshot is not None else [])]
        outcome, files = self._run(sent, limits, fetched)
        return command_outcome(outcome, files, program, mark)

    def close(self) -> None:
        """Do nothing: nothing is kept open."""

    def _run(self, program: Program, limits: Limits, fetched: Sequence[str]) -> tuple[Outcome, Mapping[str, bytes]]:
        """Return the outcome of a program, and the requested files that it left."""
        started = time.monotonic()
        body: dict[str, Any] = {
            "code": program.source,
            "language": "python",
            "stdin": program.stdin.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode(),
            "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mib,
            **({"fetch_files": list(fetched)} if fetched else {}),
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=limits.wall_s + GRACE_S) as response:
                answer = json.loads(response.read(MAX_ANSWER))
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise RemoteSandboxFailed(f"the sandbox server {self._url} did not answer: {error}") from None
        return read_answer(answer, limits, time.monotonic() - started), read_files(answer, fetched)


def read_files(answer: Any, names: Sequence[str]) -> dict[str, bytes]:
    """Return the requested files in a server's answer, if it has them.

    Raises:
        RemoteSandboxFailed: If the answer has another form.
    """
    given = answer.get("files") or {}
    try:
        return {name: base64.b64decode(given[name]) for name in names if given.get(name) is not None}
    except (TypeError, ValueError, AttributeError):
        raise RemoteSandboxFailed(f"the sandbox server sent malformed files: {given!r:.200}") from None


def read_answer(answer: Any, limits: Limits, seconds: float) -> Outcome:
    """Convert a server's answer to an outcome.

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
        limit = limits.output_kib * 1024
        stdout, stderr = ((result.get(name) or "").encode() for name in ("stdout", "stderr"))
        is_timeout = result.get("status") == "TimeLimitExceeded"
        if code is not None and type(code) is not int:
            raise TypeError
    except (TypeError, KeyError, AttributeError, UnicodeError):
        raise RemoteSandboxFailed(f"the sandbox server sent a malformed answer: {answer!r:.200}") from None
    ending: Ending = "exit"
    if is_timeout or code is None:
        ending = "deadline"
    elif len(stdout) > limit or len(stderr) > limit:
        ending = "output"
    elif code < 0:
        ending = "signal"
    exit_code, number = code if ending == "exit" else None, -code if ending == "signal" else None
    return Outcome(ending, exit_code, number, stdout[:limit], stderr[:limit], seconds)


_SOURCE = f"""
import json, os, runpy, signal, sys, tarfile, time
home = os.getcwd()
with open({_TASK!r}) as file:
    task = json.load(file)
os.remove({_TASK!r})
if os.path.exists({_TREE!r}):
    with tarfile.open({_TREE!r}) as archive:
        archive.extractall(home, **({{"filter": "data"}} if hasattr(tarfile, "data_filter") else {{}}))
    os.remove({_TREE!r})
ended, end = os.pipe()
child = os.fork()
if not child:
    os.setsid()
    os.close(ended)
    for name in set(os.environ) - {{"PATH", "LANG"}}:
        del os.environ[name]
    os.environ.update({{"HOME": home, "TMPDIR": home}}, **task["variables"])
    os.chdir(os.path.join(home, task["folder"]))
    command = task["command"]
    leave = os._exit
    code, is_end = 0, True
    try:
        if command[0] != "python" and not command[0].startswith("python3"):
            os.execvp(command[0], command)
        sys.path[:] = [path for path in sys.path if path not in ("", home)]
        sys.argv[:] = command[1:]
        if command[1] == "-m":
            sys.path.append(os.getcwd())
            sys.argv[:] = command[2:]
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        elif command[1] == "-c":
            sys.path.append(os.getcwd())
            sys.argv[:] = ["-c", *command[3:]]
            exec(compile(command[2], "<command>", "exec"), {{"__name__": "__main__"}})
        else:
            sys.path.append(os.path.dirname(os.path.abspath(command[1])))
            runpy.run_path(os.path.abspath(command[1]), run_name="__main__")
    except SystemExit as error:
        code, frame, places = error.code, error.__traceback__, []
        while frame:
            places.append(frame.tb_frame.f_code.co_filename)
            frame = frame.tb_next
        own = (sys._getframe().f_code.co_filename, runpy.__file__, "<frozen runpy>")
        places = [place for place in places if place not in own and not place.endswith({QUITTERS!r})] or [""]
        is_end = places[0] == places[-1] or not places[-1].startswith(home + "/")
        if code is None or isinstance(code, int):
            code = (code or 0) & 255
        else:
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if is_end:
            os.write(end, task["mark"].encode())
        leave(code)
os.close(end)
until = time.monotonic() + task["seconds"]
status = None
while status is None and time.monotonic() < until:
    pid, found = os.waitpid(child, os.WNOHANG)
    if pid:
        status = found
    else:
        time.sleep(0.01)
try:
    os.killpg(child, signal.SIGKILL)
except ProcessLookupError:
    pass
os.set_blocking(ended, False)
try:
    mark = os.read(ended, 64).decode()
except BlockingIOError:
    mark = ""
os.chdir(home)
if task["snapshot"]:
    with tarfile.open({_SNAPSHOT!r}, "w") as archive:
        for name in sorted(os.listdir(task["snapshot"])):
            archive.add(os.path.join(task["snapshot"], name), arcname=name)
with open({_END!r}, "w") as file:
    json.dump({{"mark": mark, "status": status}}, file)
"""


def command_program(program: Program, limits: Limits) -> tuple[Program, str]:
    """Return a command as a program that runs it in a child process, and the mark of its report of Python's end.

    Args:
        program: The command, with its tree.
        limits: Limits; the command has somewhat less time than the program.
    """
    mark = secrets.token_hex(16)
    task = {
        "command": program.command,
        "variables": dict(program.variables),
        "folder": program.folder,
        "snapshot": program.snapshot or "",
        "seconds": limits.wall_s * (1 - _MARGIN_SHARE),
        "mark": mark,
    }
    files = {_TASK: json.dumps(task).encode()} | ({_TREE: program.tree} if program.tree else {})
    return Program(_SOURCE, program.stdin, files), mark


def command_outcome(outcome: Outcome, files: Mapping[str, bytes], program: Program, mark: str) -> Outcome:
    """Return the outcome of a command, from the outcome of the program that ran it and the files that it left."""
    snapshot = files.get(_SNAPSHOT, b"")
    problem = "" if program.snapshot is None or snapshot else "the server returned no snapshot"
    try:
        report = json.loads(files[_END])
        status = report["status"]
        is_complete = report["mark"] == mark
        if status is not None and type(status) is not int:
            raise TypeError
    except (KeyError, ValueError, TypeError, RecursionError):
        # The program that runs the command was ended.
        ended = replace(outcome, ending="signal", exit_code=None, signal=9) if outcome.ok else outcome
        return replace(ended, snapshot=snapshot, snapshot_problem=problem)
    if outcome.ending == "exit":
        # The status of `waitpid` is None if the command was at its time limit.
        if status is None:
            outcome = replace(outcome, ending="deadline", exit_code=None)
        elif os.WIFSIGNALED(status):
            outcome = replace(outcome, ending="signal", exit_code=None, signal=os.WTERMSIG(status))
        else:
            outcome = replace(outcome, exit_code=os.WEXITSTATUS(status))
    return replace(outcome, is_complete=is_complete, snapshot=snapshot, snapshot_problem=problem)
