"""A process that imports the file of a user's agent once, and forks a process for each rollout.

It is started as `python -m rl_core.agent_processes.host`. Its standard input has the agent's function, pickled as a
name or an `AgentFunction`, or None for commands, and then a JSON line for each rollout to play or to end. It answers a
line when a rollout has ended with all of its processes: it adopts processes whose parents have ended, so none is lost.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import json
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rl_core.user_code import resolve

READY = "ready"

MARK = "RL_ROLLOUT"
"""Environment variable that all processes of a rollout have; its value differs for each rollout."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.02


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Output of the user's file is not an answer.
    size = int.from_bytes(_exactly(8), "big")
    try:
        agent = pickle.loads(_exactly(size))
        function = resolve(agent) if isinstance(agent, str) else None if agent is None else agent.load()
    except BaseException as error:  # noqa: BLE001 - the worker reports any failure
        traceback.print_exc()
        print(json.dumps({"failure": f"{type(error).__name__}: {error}"}), file=answers)
        return
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()  # Collections in the forked processes do not touch the pages that they share with this one.
    print(json.dumps({"state": READY}), file=answers)
    Host(function, answers).serve()


@dataclass
class _Played:
    """A rollout that is being played.

    Args:
        leader: The process that it began with, which leads its session.
        status: How that ended; None while it runs.
        grace_s: Seconds that its processes have to end by themselves.
        killed_at: When those that are left are killed; None while they may run.
    """

    leader: int
    grace_s: float
    status: int | None = None
    killed_at: float | None = None


class Host:
    """Forks a process for each rollout, and ends its remaining processes.

    Args:
        function: The user's function; None if rollouts have commands.
        answers: Where it answers.
    """

    def __init__(self, function: Callable[..., Any] | None, answers: TextIO) -> None:
        self._function = function
        self._answers = answers
        self._played: dict[str, _Played] = {}

    def serve(self) -> None:
        """Serve until standard input ends."""
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        unread = b""
        while True:
            is_ending = any(each.killed_at is not None for each in self._played.values())
            ready, _, _ = select.select([0, woken], [], [], _POLL_S if is_ending else None)
            if woken in ready:
                os.read(woken, 4096)
            self._reap()
            if 0 in ready:
                read = os.read(0, 65536)
                if not read:
                    break
                *lines, unread = (unread + read).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            for mark, played in [each for each in self._played.items() if each[1].killed_at is not None]:
                left = self._processes(mark, played)
                if left and time.monotonic() >= (played.killed_at or 0):
                    _signal(left, signal.SIGKILL)
                elif not left and played.status is not None:
                    del self._played[mark]
                    print(json.dumps({"ended": mark, "status": played.status}), file=self._answers)
        for mark, played in self._played.items():
            _signal(self._processes(mark, played), signal.SIGKILL)

    def _obey(self, task: dict[str, Any]) -> None:
        played = self._played.get(task["id"])
        if "end" not in task:
            parent, leader = os.getpid(), os.fork()
            if not leader:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                self._answers.close()
                _become_agent(self._function, task, parent)
            self._played[task["id"]] = _Played(leader, task["grace_s"])
        elif played is not None:
            self._end(task["id"], played)

    def _reap(self) -> None:
        by_leader = {played.leader: mark for mark, played in self._played.items() if played.status is None}
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in by_leader:
                    played = self._played[by_leader[pid]]
                    played.status = os.waitstatus_to_exitcode(status)
                    self._end(by_leader[pid], played)

    def _end(self, mark: str, played: _Played) -> None:
        """Ask the processes of a rollout to end."""
        if played.killed_at is None:
            played.killed_at = time.monotonic() + played.grace_s
            _signal(self._processes(mark, played), signal.SIGTERM)

    def _processes(self, mark: str, played: _Played) -> list[int]:
        """Return the running processes of a rollout: its leader's descendants, and processes that were adopted."""
        leaders = {each.leader for each in self._played.values()}
        found = [] if played.status is not None else [played.leader]
        for pid in _children(os.getpid()):
            if pid not in leaders:
                # An adopted process is recognised by its session or its mark, whatever parents it had.
                with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                    is_own = _state_and_session(pid)[1] == played.leader
                    if is_own or f"{MARK}={mark}".encode() in file.read().split(b"\0"):
                        found.append(pid)
        for pid in found:
            found += _children(pid)  # The list grows while it is read, so it has their children too.
        return [pid for pid in found if _state_and_session(pid)[0] not in ("Z", "")]


def kill_all(marks: Collection[str]) -> None:
    """Kill the processes of rollouts whose host was killed.

    Args:
        marks: Values of `MARK` of the rollouts.
    """
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            found = [each for each in file.read().split(b"\0") if each.startswith(f"{MARK}=".encode())]
            if any(each.decode(errors="replace").partition("=")[2] in marks for each in found):
                _signal([int(name)], signal.SIGKILL)


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())


def _state_and_session(pid: int) -> tuple[str, int]:
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The fields after the name, which is in parentheses, are state, parent, group and session.
        state, _, _, session = file.read().rpartition(")")[2].split()[:4]
        return state, int(session)
    return "", 0


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _become_agent(function: Callable[..., Any] | None, task: dict[str, Any], parent: int) -> None:
    """Become the agent of one rollout."""
    status = 1
    try:
        os.setsid()
        # The agent ends with the host, as the host ends with the worker.
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(task["env"])
        if function is None:
            os.execvp(task["command"][0], task["command"])
        with open(os.environ["RL_PROMPT_FILE"], encoding="utf-8") as file:
            prompt = json.load(file)
        result = function(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], prompt)
        if inspect.isawaitable(result):
            result = asyncio.run(asyncio.wait_for(result, None))
        if result is not None:
            with open(os.environ["RL_REWARD_FILE"], "w", encoding="utf-8") as file:
                json.dump(result, file, default=float)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the log has the traceback, and the status shows it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exactly(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            raise EOFError("standard input ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
