"""A process that imports the file of a user's agent once, and forks a process for each rollout.

It is started as `python -m rl_algos.agents.host`. Its standard input has the agent's function as a pickled `FromFile`,
or None for commands, and then a JSON line for each rollout: its command, variables and log. It answers a line when the
process is forked, and one when that has ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

READY = "ready"
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the user's file prints is not an answer
    size = int.from_bytes(_exactly(8), "big")
    try:
        agent = pickle.loads(_exactly(size))
        function = None if agent is None else agent.load()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the worker reports it
        traceback.print_exc()
        print(json.dumps({"failure": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps({"state": READY}), file=answers)
    _serve(function, answers)


def _serve(function: Callable[..., Any] | None, answers: Any) -> None:
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, str] = {}
    unread = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended = {"ended": children.pop(pid), "status": os.waitstatus_to_exitcode(status)}
            print(json.dumps(ended), file=answers)
        if 0 not in ready:
            continue
        read = os.read(0, 65536)
        if not read:
            return
        *lines, unread = (unread + read).split(b"\n")
        for line in lines:
            task = json.loads(line)
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                answers.close()
                _play(function, task, parent)
            children[pid] = task["id"]
            print(json.dumps({"started": task["id"], "pid": pid}), file=answers)


def _play(function: Callable[..., Any] | None, task: dict[str, Any], parent: int) -> None:
    """Become the agent of one rollout."""
    status = 1
    try:
        os.setsid()
        _end_with(parent)
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
            result = asyncio.run(_awaited(result))
        if result is not None:
            with open(os.environ["RL_REWARD_FILE"], "w", encoding="utf-8") as file:
                json.dump(result, file, default=float)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the log has it, and the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends, as it does with the worker."""
    pr_set_pdeathsig = 1
    _LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


async def _awaited(result: Any) -> Any:
    return await result


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
