"""Sets up a Python worker's process as Ray's `setup_worker.py` does, without importing Ray.

A raylet starts it as a script in the environment of its node. Ray's own imports Ray, which takes half a second of
processor time, only to execute the worker's interpreter, which imports Ray again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_KNOWN = frozenset({"env_vars", "py_executable"})
_ABSENT = re.compile(r"\$\{[A-Z0-9_]+\}")


def main(arguments: Sequence[str]) -> None:
    """Execute the command of a worker. A runtime environment with more than variables and an interpreter is Ray's to
    set up.

    Args:
        arguments: From the raylet: runtime environment, language, and the worker's script with its arguments.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", dest="context", default="{}")
    parser.add_argument("--language", default="")
    found, command = parser.parse_known_args(arguments)
    context = json.loads(found.context or "{}")
    if found.language != "PYTHON" or any(value and name not in _KNOWN for name, value in context.items()):
        os.execv(sys.executable, [sys.executable, str(_script_of_ray()), *arguments])
    _start(context, command)


def _start(context: Mapping[str, Any], command: Sequence[str]) -> None:
    for name, value in (context.get("env_vars") or {}).items():
        # a variable that is not set stands for nothing
        os.environ[name] = _ABSENT.sub("", os.path.expandvars(value))
    words = ["exec", context.get("py_executable") or sys.executable, *map(shlex.quote, command)]
    os.execvp("bash", ["bash", "-c", " ".join(words)])


def _script_of_ray() -> Path:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "_private" / "workers" / "setup_worker.py"


if __name__ == "__main__":
    main(sys.argv[1:])
