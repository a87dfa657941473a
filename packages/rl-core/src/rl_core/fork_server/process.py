"""A fork of the server becomes the process that was asked for."""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Sequence

from rl_core.fork_server.request import STREAMS, Request


def become(request: Request, streams: Sequence[int]) -> None:
    """Run a request's command in this process, as `python COMMAND` would.

    Raises:
        SystemExit, Exception: As the command does.
    """
    os.setsid()
    for stream, file in zip(STREAMS, streams, strict=True):
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.variables)
    os.chdir(request.directory)
    os.umask(request.umask)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    first, *arguments = request.command
    if first == "-c":
        code, *arguments = arguments
        sys.argv = ["-c", *arguments]
        sys.path.insert(0, "")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), main.__dict__)
        return
    sys.argv = [first, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
    runpy.run_path(first, run_name="__main__")
