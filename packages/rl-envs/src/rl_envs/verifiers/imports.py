"""Modules of tasksets and harnesses that verifiers does not find by their ids."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

CHAT = "rl_chat"
"""Id of the harness of agents that have none, which is in `rl_envs.verifiers.chat`."""

_NAME = re.compile(r"[a-z_][a-z0-9_]*")


def importable_id(id: str) -> str:
    """Return the id by which verifiers finds a taskset, a harness or an environment.

    Verifiers takes names of top-level modules, and starts servers of tools by the names of their modules. The folder of
    a file is added to the paths of this process and of those that it starts; a dotted name is imported here.

    Raises:
        ImportError: If it cannot be imported.
    """
    if id.endswith(".py"):
        path = Path(id).expanduser().absolute()
        if not path.is_file():
            raise ImportError(f"{path} is not a file")
        if not _NAME.fullmatch(path.stem):
            raise ImportError(f"{path.name} must have a name of small letters, digits and underscores; rename it")
        folder = str(path.parent)
        if folder not in sys.path:
            sys.path.append(folder)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
        found = importlib.import_module(path.stem).__file__
        if found is None or not os.path.samefile(found, path):
            raise ImportError(f"{path.name} has the name of another module ({found}); rename it")
        return path.stem
    module = "rl_envs.verifiers.chat" if id == CHAT else id
    if "." not in module:
        return id
    name = re.sub(r"\W", "_", id).lower()
    sys.modules[name] = importlib.import_module(module)
    return name
