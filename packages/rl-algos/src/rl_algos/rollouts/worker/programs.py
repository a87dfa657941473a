"""Rollout programs by name."""

from __future__ import annotations

import importlib.util

from rl_core.config import did_you_mean
from rl_core.plugins.user_code import FromFile, is_in_file

DEFAULT_PROGRAM = "multi_turn"

PROGRAMS = {DEFAULT_PROGRAM: "rl_algos.rollouts.worker.program:MultiTurnProgram"}
"""`"package.module:Class"` of the installed programs."""

AGENT_PROGRAM = "rl_algos.agents.program:AgentProgram"
"""The program that an algorithm's `agent` section asks for."""


def program_named(name: str) -> str | FromFile:
    """A rollout program by name, as `file.py:Class` or as `package.module:Class`; nothing is imported.

    Raises:
        ValueError: If no program has that name, or its file does not define it.
    """
    if ":" not in name:
        if name in PROGRAMS:
            return PROGRAMS[name]
        raise ValueError(
            f"{name!r} is not a rollout program{did_you_mean(name, PROGRAMS)}; allowed: {', '.join(PROGRAMS)}, "
            "file.py:Class or package.module:Class"
        )
    return code_named(name)


def code_named(name: str) -> str | FromFile:
    """Return a user's function or class, named as `file.py:Name` or as `package.module:Name`; nothing is imported.

    Raises:
        ValueError: If the file does not define it, or the module is not installed.
    """
    if is_in_file(name):
        return FromFile.read(name)
    module, colon, _ = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} does not name a function; write file.py:function or package.module:function")
    # a package is imported to look for a module in it, which may itself not be installed
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ValueError(f"the module {module} of {name!r} is not installed. To name code in a file: file.py:NAME")
    return name
