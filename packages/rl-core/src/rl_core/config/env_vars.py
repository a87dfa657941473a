"""Environment variables that a config gives to workers."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from rl_core.config.problem import Problem, ProblemError

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

SET_BY_THE_LAUNCHER = {
    "CUDA_VISIBLE_DEVICES": "each worker sees the devices that it was placed on; choose them by the keys of `cluster`",
    "LOCAL_RANK": "ranks are numbered by placement",
    "MASTER_ADDR": "ranks meet at an address that is reserved for each start",
    "MASTER_PORT": "ranks meet at a port that is reserved for each start",
    "PYTHONHOME": "each worker has the interpreter of its own environment",
    "RANK": "ranks are numbered by placement",
    "VIRTUAL_ENV": "each worker has the interpreter of its own environment",
    "WORLD_SIZE": "ranks are numbered by placement",
}
"""Variables that no config may set, and why."""


def _check(variables: dict[str, str]) -> dict[str, str]:
    problems = [Problem(name, reason) for name in variables if (reason := _reason(name))]
    if problems:
        raise ProblemError(*problems)
    return variables


def _reason(name: str) -> str:
    if not _NAME.fullmatch(name):
        return "not the name of an environment variable; use letters, digits and underscores"
    if name in SET_BY_THE_LAUNCHER:
        return f"the launcher sets it: {SET_BY_THE_LAUNCHER[name]}; remove it here"
    if name.startswith("RAY_"):
        return "Ray's own variables are read when Ray starts; set it where you start Ray, and remove it here"
    return ""


EnvVars = Annotated[dict[str, str], AfterValidator(_check)]
"""Environment variables by name; an empty text empties a variable."""
