"""Modules that an import leaves in its process: none of an engine in a driver, and none that prevents a fork."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from rl_core.fork_server.server import import_all

_REPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(list(sys.modules)))
"""


_CALL = """
import atexit, json, sys
from importlib.metadata import EntryPoint
atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))
EntryPoint("command", sys.argv.pop(1), "console_scripts").load()()
"""


def loaded_by(*modules: str) -> frozenset[str]:
    """Return the top-level packages and modules that a fresh interpreter has loaded once it imported `modules`.

    Raises `ImportError` with the interpreter's traceback if one of them cannot be imported.
    """
    done = subprocess.run([sys.executable, "-c", _REPORT, *modules], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImportError(f"importing {', '.join(modules)} failed:\n{done.stderr}")
    return frozenset(name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1]))


def loaded_by_command(command: str, *arguments: str) -> frozenset[str]:
    """Return the top-level packages and modules that a command has loaded when it ends, however it ends.

    Args:
        command: Its entry point, `module:function`.
        arguments: Arguments of its command line.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CALL, command, *arguments], capture_output=True, text=True, check=False
    )
    return frozenset(name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1]))


def fork_problem(*modules: str) -> str:
    """Return why a process that has imported `modules` must not be forked; empty if it may be.

    Looks at multiprocessing's fork server of this process, so modules that it has imported
    (`rl_core.selfcheck.rank_pool.preload`) are not imported again.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_fork_problem, args=(theirs, modules))
    process.start()
    theirs.close()
    problem: str = ours.recv()
    process.join()
    return problem


def _send_fork_problem(pipe: Connection, modules: tuple[str, ...]) -> None:
    problem = import_all(modules)
    # A fork has none of the threads that its parent started.
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    pipe.send(problem or (f"the fork server has {threads} threads" if threads > 1 else ""))


def modules_of(package: str, *, outside: tuple[str, ...] = ()) -> list[str]:
    """Return every module of a package, itself first, without importing any; `outside` are subpackages to leave out."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"no package {package}")
    root = Path(spec.origin).parent
    found = {".".join((package, *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")}
    names = sorted({name.removesuffix(".__init__") for name in found})
    return [name for name in names if not any(name == part or name.startswith(f"{part}.") for part in outside)]


def light_modules_of(package: str) -> list[str]:
    """Return the package itself and its modules named `config` or `plugin`, which a driver imports."""
    return [name for name in modules_of(package) if name == package or {"config", "plugin"} & set(name.split("."))]
