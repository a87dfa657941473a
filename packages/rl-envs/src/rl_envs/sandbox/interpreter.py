"""Running of a program's source in the process that was made for it."""

from __future__ import annotations

import linecache
import os
import random
import re
import runpy
import site
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

FILE = "program.py"
"""Name of the program in its tracebacks."""

MAX_DIGITS = 100_000
"""Maximum number of decimal digits of an integer that a program converts from or to text. Python's own limit, 4300, is
too low for some tests."""

# A program may replace the function in the module `os`.
_exit = os._exit
_OWN = (__file__, runpy.__file__, "<frozen runpy>")
"""Files of the frames that a traceback does not show."""
QUITTERS = ("<frozen _sitebuiltins>", "_sitebuiltins.py")
"""Endings of the file of `exit` and `quit`, whose callers end the program."""

PRELOADED = (
    "abc", "array", "ast", "base64", "bisect", "cmath", "collections.abc", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "itertools", "json", "math",
    "numbers", "operator", "pprint", "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading",
    "time", "traceback", "typing", "unicodedata", "unittest", "urllib.request", "zlib",
)  # fmt: skip
"""Modules that are imported before programs run, so that they start quickly. Solutions, tests and agents import these
most."""


def add_builtins() -> None:
    """Add the builtins of `site`, such as `exit`. `site` does not run, as it adds packages too."""
    for add in (site.setquit, site.setcopyright, site.sethelper):
        add()


def run(source: str, *, path: Sequence[str], folder: str) -> NoReturn:
    """Run a program as `__main__` and end this process as Python would.

    Args:
        source: Text of the program.
        path: Folders that it may import from.
        folder: Its scratch folder.
    """
    _prepare([*path, folder], [FILE], folder, {})
    code, _ = _execute(source, folder)
    os._exit(code)


def run_command(
    command: Sequence[str],
    *,
    path: Sequence[str],
    folder: str,
    variables: Mapping[str, str],
    commands: Sequence[str],
    completed: Callable[[], object],
) -> NoReturn:
    """Run a command in the current folder. Python runs in this process, so its library and `path` come before all files
    of the command: none of these can replace a module that is installed.

    Args:
        command: The command and its arguments.
        path: Folders that Python may import from.
        folder: Its scratch folder.
        variables: Further environment variables.
        commands: Folders of commands that may be executed; empty if none may.
        completed: Called when Python has come to its end, unless a file of the command's own that is not its main file
            ended it by `SystemExit`.
    """
    given = dict(variables)
    if commands:
        given = {"PATH": ":".join(commands), "PYTHONPATH": ":".join(path), **given}
        sys.executable = f"{commands[0]}/python3"
    program, *arguments = command
    is_python = re.fullmatch(r"python(3(\.\d+)?)?", os.path.basename(program)) is not None
    own = os.getcwd()
    match arguments:
        case ["-m", module, *rest] if is_python:
            _prepare([*path, own], ["-m", *rest], folder, given)
            end = _run(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), folder)
        case ["-c", source, *rest] if is_python:
            _prepare([*path, own], ["-c", *rest], folder, given)
            end = _execute(source, folder)
        case [file, *rest] if is_python and not file.startswith("-"):
            _prepare([*path, os.path.dirname(os.path.abspath(file))], [file, *rest], folder, given)
            end = _run(lambda: runpy.run_path(os.path.abspath(file), run_name="__main__"), folder)
        case _:
            _prepare([], [], folder, given)
            code, problem = 126, f"{' '.join(command)[:200]!r} cannot be executed in this sandbox, which runs "
            problem += (
                "`python FILE`, `python -m MODULE` and `python -c CODE`; to execute others, set sandbox.commands "
            )
            problem += "to folders such as /usr/bin"
            if commands:
                try:
                    os.execvpe(program, list(command), os.environ)
                except OSError as error:
                    code, problem = 127, f"{program} cannot be executed: {error.strerror}"
            print(problem, file=sys.stderr, flush=True)  # noqa: T201  # It goes to the log of the command.
            os._exit(code)
    code, is_complete = end
    if is_complete:
        completed()
    _exit(code)


def _prepare(path: Sequence[str], arguments: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
    """Give this process the state that a program expects."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rl_envs"]:
        del sys.modules[name]
    sys.path[:] = path
    sys.argv[:] = arguments
    os.environ.clear()
    os.environ.update({"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **variables})
    random.seed(0)
    tempfile.tempdir = None  # The sandbox may have looked for its own temporary folder before.
    sys.set_int_max_str_digits(MAX_DIGITS)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        stream = open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115  # It stays open.
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _execute(source: str, folder: str) -> tuple[int, bool]:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    return _run(lambda: exec(compile(source, FILE, "exec", dont_inherit=True), main.__dict__), folder)


def _run(program: Callable[[], object], folder: str) -> tuple[int, bool]:
    """Run a program to its end; return the exit code that Python would have, and whether it is complete.

    A program is not complete if one of its own files that is not its main file ended it by `SystemExit`.
    """
    code, places = 0, [""]
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = (end.code or 0) & 0xFF
        else:
            print(end.code, file=sys.stderr)  # noqa: T201  # The interpreter does the same.
            code = 1
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(_own_part(end))]
        places = [file for file in files if not file.endswith(QUITTERS)] or places
    except BaseException as error:  # noqa: BLE001  # The interpreter does the same.
        code = 1
        try:
            traceback.print_exception(type(error), error, _own_part(error), file=sys.stderr)
        except BaseException:  # noqa: BLE001  # A program may break its own stderr, or have no memory left.
            os.write(2, type(error).__name__.encode(errors="replace") + b"\n")
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # It joins threads, as Python does at its end.
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  # Output that cannot be written fails the program, as in Python.
        code = 1
    return code, places[0] == places[-1] or not places[-1].startswith(f"{folder}/")


def _own_part(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the program's first frame."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN:
        frames = frames.tb_next
    return frames
