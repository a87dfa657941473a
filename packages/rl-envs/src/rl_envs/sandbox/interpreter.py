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
from dataclasses import dataclass
from typing import NoReturn

FILE = "program.py"
"""Name of the program in its tracebacks."""

MAX_DIGITS = 100_000
"""Maximum number of decimal digits of an integer that a program converts from or to text; Python's own limit, 4300, is
below what tests ask for."""

# A program may replace the function in the module `os`.
_exit = os._exit
_OWN = (__file__, runpy.__file__, "<frozen runpy>")
"""Files of the frames that a traceback does not show."""
QUITTERS = ("<frozen _sitebuiltins>", "_sitebuiltins.py")
"""Ends of the names of the file of `exit` and `quit`, whose callers end the program."""

PRELOADED = (
    "abc",
    "array",
    "ast",
    "base64",
    "bisect",
    "cmath",
    "collections.abc",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "inspect",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "pprint",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "threading",
    "time",
    "traceback",
    "typing",
    "unicodedata",
    "unittest",
    "urllib.request",
    "zlib",
)
"""Modules that are imported before programs run, so that they start quickly: what solutions, tests and agents import
most."""


def add_builtins() -> None:
    """Add the names that `site` adds to Python's, such as `exit`. `site` does not run, as it adds packages too."""
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
    os._exit(_executed(source).code)


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
    of the command's own: none of those can take the place of a module that is installed.

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
            end = _ran(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
        case ["-c", source, *rest] if is_python:
            _prepare([*path, own], ["-c", *rest], folder, given)
            end = _executed(source)
        case [file, *rest] if is_python and not file.startswith("-"):
            _prepare([*path, os.path.dirname(os.path.abspath(file))], [file, *rest], folder, given)
            end = _ran(lambda: runpy.run_path(os.path.abspath(file), run_name="__main__"))
        case _:
            _prepare([], [], folder, given)
            os._exit(_replaced(command) if commands else _unknown(command))
    if end.is_by_main or not end.place.startswith(f"{folder}/"):
        completed()
    _exit(end.code)


@dataclass(frozen=True)
class _End:
    """The end of a program.

    Args:
        code: Its exit code.
        place: File that raised `SystemExit`; empty if none did.
        is_by_main: True if no other file than the program's main one ended it.
    """

    code: int
    place: str = ""
    is_by_main: bool = True


def _replaced(command: Sequence[str]) -> int:
    """Become a command; returns only if it cannot be executed."""
    try:
        os.execvpe(command[0], list(command), os.environ)
    except OSError as error:
        print(f"{command[0]} cannot be executed: {error.strerror}", file=sys.stderr, flush=True)  # noqa: T201
        return 127


def _unknown(command: Sequence[str]) -> int:
    print(  # noqa: T201  # to the log of the command
        f"{' '.join(command)[:200]!r} cannot be executed in this sandbox, which runs `python FILE`, `python -m MODULE` "
        "and `python -c CODE`; to execute others, set sandbox.commands to folders such as /usr/bin",
        file=sys.stderr,
        flush=True,
    )
    return 126


def _prepare(path: Sequence[str], arguments: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
    """Make this process as a program finds it."""
    _forget_sandbox()
    sys.path[:] = path
    sys.argv[:] = arguments
    os.environ.clear()
    os.environ.update({"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **variables})
    random.seed(0)
    tempfile.tempdir = None  # the sandbox may have looked for its own temporary folder before
    sys.set_int_max_str_digits(MAX_DIGITS)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        stream = open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115  # open to the end
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _executed(source: str) -> _End:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    return _ran(lambda: exec(compile(source, FILE, "exec", dont_inherit=True), main.__dict__))


def _ran(program: Callable[[], object]) -> _End:
    """Run a program to its end, which has the exit code that Python would have."""
    code, places = 0, [""]
    try:
        program()
    except SystemExit as end:
        code = _exit_code(end)
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(_own_part(end))]
        places = [file for file in files if not file.endswith(QUITTERS)] or places
    except BaseException as error:  # noqa: BLE001  # as the interpreter itself does
        code = 1
        _print_traceback(error)
    flushed = _flush(threading._shutdown)  # type: ignore[attr-defined]  # joins threads, as Python does at its end
    return _End(code if flushed else 1, places[-1], places[0] == places[-1])


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)  # noqa: T201  # as the interpreter itself does
    return 1


def _print_traceback(error: BaseException) -> None:
    try:
        traceback.print_exception(type(error), error, _own_part(error), file=sys.stderr)
    except BaseException:  # noqa: BLE001  # a program may break its own stderr, or have no memory left
        os.write(2, type(error).__name__.encode(errors="replace") + b"\n")


def _own_part(error: BaseException) -> types.TracebackType | None:
    """The traceback from the first frame that is the program's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN:
        frames = frames.tb_next
    return frames


def _flush(finish: object) -> bool:
    try:
        finish()  # type: ignore[operator]
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  # output that cannot be written fails the program, as Python does
        return False
    return True


def _forget_sandbox() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rl_envs"]:
        del sys.modules[name]
