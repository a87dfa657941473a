"""Rollout programs by name."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from rl_algos.rollouts.config import COMPACTION_PROGRAM
from rl_core import resolve
from rl_core.config import did_you_mean
from rl_core.user_code import FromFile, is_in_file

DEFAULT_PROGRAM = "multi_turn"

POLICY, RECENT = "policy", "recent"
"""Summarisers of the program `compaction` that are not agents: the policy, and a rule that keeps the newest turns."""

TURNS = (DEFAULT_PROGRAM, COMPACTION_PROGRAM)
"""Installed programs of turns with an environment."""

PROGRAMS = {
    DEFAULT_PROGRAM: "rl_algos.rollouts.worker.program:MultiTurnProgram",
    COMPACTION_PROGRAM: "rl_algos.rollouts.worker.program:CompactionProgram",
    "proposer_solver": "rl_algos.rollouts.worker.program:ProposerSolverProgram",
}
"""`"package.module:Class"` of the installed programs."""

GIVEN = ("max_turns", "max_tokens", "split", "structured_output")
"""Arguments of programs that other keys of the config set."""

AGENT_PROGRAM = "rl_algos.agents.program:AgentProgram"
"""The program that an algorithm's `agent` section asks for."""

LIVE_PROGRAM = "rl_algos.agents.live:LiveProgram"
"""The program that serves users (`agent.live`)."""


def program_named(name: str) -> str | FromFile:
    """Return a rollout program by name, as `file.py:Class` or as `package.module:Class`; nothing is imported.

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


def argument_problem(name: str, args: Mapping[str, Any]) -> str:
    """Return why an installed program cannot be created with these arguments; empty if it can, or if it is the user's
    own, which its process creates.
    """
    if name not in PROGRAMS or not args:
        return ""
    program = resolve(PROGRAMS[name])
    own = [each for each in inspect.signature(program).parameters if each not in GIVEN]
    if unknown := sorted(set(args) - set(own)):
        return f"{', '.join(unknown)}: the program {name} takes {', '.join(own) or 'no arguments'}"
    try:
        program(max_turns=1, max_tokens=1, **args)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


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
    if _spec(module) is None:
        raise ValueError(f"the module {module} of {name!r} is not installed. To name code in a file: file.py:NAME")
    return name


def files_named(names: Sequence[str]) -> dict[str, bytes]:
    """Read files, by their names without folders.

    Args:
        names: Paths, or modules of installed packages as `package.module`; nothing is run.

    Raises:
        ValueError: If there is no such file or module.
    """
    found = {}
    for name in names:
        path = Path(name).expanduser()
        if not path.exists() and all(part.isidentifier() for part in name.split(".")):
            module = _spec(name)
            path = Path(module.origin) if module is not None and module.origin else path
        try:
            found[path.name] = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return found


def _spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module; None if it is not installed."""
    # The search for a module imports its package, which may itself not be installed.
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
