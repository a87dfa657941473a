"""Commands, trees and snapshots by the protocol of SandboxFusion, which has programs and files only."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace

from rl_envs.sandbox.interpreter import QUITTERS
from rl_envs.sandbox.program import Limits, Outcome, Program

_TREE, _TASK, _SNAPSHOT, _END = "rl_tree.tar", "rl_task.json", "rl_snapshot.tar", "rl_end.txt"
_MARGIN_SHARE = 0.1
"""Share of the time limit that is left for reading the tree and writing the snapshot."""

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
    """A command as a program that runs it in a child process, and the mark with which Python's end is told.

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


def fetched_files(program: Program) -> list[str]:
    """Names of the files that are fetched when a command has ended."""
    return [_END, *([_SNAPSHOT] if program.snapshot is not None else [])]


def command_outcome(outcome: Outcome, files: Mapping[str, bytes], program: Program, mark: str) -> Outcome:
    """The outcome of a command, from the outcome of the program that ran it and the files that it left."""
    snapshot = files.get(_SNAPSHOT, b"")
    problem = "" if program.snapshot is None or snapshot else "the server returned no snapshot"
    try:
        told = json.loads(files[_END])
        status = told["status"]
        is_complete = told["mark"] == mark
        if status is not None and type(status) is not int:
            raise TypeError
    except (KeyError, ValueError, TypeError, RecursionError):
        # the program that runs the command was ended
        ended = replace(outcome, ending="signal", exit_code=None, signal=9) if outcome.ok else outcome
        return replace(ended, snapshot=snapshot, snapshot_problem=problem)
    if outcome.ending == "exit":
        outcome = _ended(outcome, status)
    return replace(outcome, is_complete=is_complete, snapshot=snapshot, snapshot_problem=problem)


def _ended(outcome: Outcome, status: int | None) -> Outcome:
    """The outcome with the end of the command, by its status of `waitpid`; None if it was at its time limit."""
    if status is None:
        return replace(outcome, ending="deadline", exit_code=None)
    if os.WIFSIGNALED(status):
        return replace(outcome, ending="signal", exit_code=None, signal=os.WTERMSIG(status))
    return replace(outcome, exit_code=os.WEXITSTATUS(status))
