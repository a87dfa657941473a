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
from collections.abc import Sequence
from pathlib import Path

_KNOWN = frozenset({"env_vars", "py_executable"})
_ABSENT = re.compile(r"\$\{[A-Z0-9_]+\}")


def main(arguments: Sequence[str]) -> None:
    """Execute the command of a worker. Ray's own script sets up a runtime environment with more than variables and an
    interpreter.

    Args:
        arguments: From the raylet: runtime environment, language, and the worker's script with its arguments.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", dest="context", default="{}")
    parser.add_argument("--language", default="")
    found, command = parser.parse_known_args(arguments)
    context = json.loads(found.context or "{}")
    if found.language != "PYTHON" or any(value and name not in _KNOWN for name, value in context.items()):
        spec = importlib.util.find_spec("ray")
        assert spec is not None
        assert spec.origin is not None
        script = Path(spec.origin).parent / "_private" / "workers" / "setup_worker.py"
        os.execv(sys.executable, [sys.executable, str(script), *arguments])
    for name, value in (context.get("env_vars") or {}).items():
        # A variable that is not set becomes empty.
        os.environ[name] = _ABSENT.sub("", os.path.expandvars(value))
    words = ["exec", context.get("py_executable") or sys.executable, *map(shlex.quote, command)]
    os.execvp("bash", ["bash", "-c", " ".join(words)])


if __name__ == "__main__":
    main(sys.argv[1:])
