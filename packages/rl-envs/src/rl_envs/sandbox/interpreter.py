"""Running of a program's source in the process that was made for it."""

from __future__ import annotations

import linecache
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import NoReturn

FILE = "program.py"
"""Name of the program in its tracebacks."""

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
    "zlib",
)
"""Modules that are imported before programs run, so that they start quickly."""


def run(source: str, *, path: Sequence[str], folder: str) -> NoReturn:
    """Run a program as `__main__` and end this process as Python would.

    Args:
        source: Text of the program.
        path: Folders that it may import from.
        folder: Its scratch folder.
    """
    _forget_sandbox()
    sys.path[:] = [*path, folder]
    sys.argv[:] = [FILE]
    os.environ.clear()
    os.environ.update({"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"})
    random.seed(0)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        stream = open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115  # open to the end
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os._exit(_execute(source))


def _execute(source: str) -> int:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    code = 0
    try:
        exec(compile(source, FILE, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:  # noqa: BLE001  # as the interpreter itself does
        code = 1
        _print_traceback(error)
    return code if _flush(threading._shutdown) else 1  # type: ignore[attr-defined]  # joins threads, as Python does at its end


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)  # noqa: T201  # as the interpreter itself does
    return 1


def _print_traceback(error: BaseException) -> None:
    try:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of `_execute`
        traceback.print_exception(type(error), error, frames, file=sys.stderr)
    except BaseException:  # noqa: BLE001  # a program may break its own stderr, or have no memory left
        os.write(2, type(error).__name__.encode(errors="replace") + b"\n")


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
