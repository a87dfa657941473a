"""Checks of a config that need an engine, run in a worker's environment before anything is started."""

from __future__ import annotations

import json
import subprocess

from rl_core.config import Config, plain
from rl_core.errors import WorkerEnvironmentError
from rl_launch.worker_envs.variables import worker_process_environment

_CHECK = """
import json, sys
from rl_core.plugins import resolve
problems = list(resolve(sys.argv[1])(json.load(sys.stdin)))
print("\\nproblems " + json.dumps(problems))
"""
_TIMEOUT_S = 300.0

_passed: set[tuple[str, str, str]] = set()
"""Interpreter, check and section of the checks of this process that found no problem."""


def engine_problems(python: str, check: str, section: Config) -> list[str]:
    """The problems that a backend's `preflight` finds in a model's section of a resolved config.

    A check imports its engine, which takes seconds. One that has found no problem is not repeated for the same section
    in this process, as further seeds of a run and a run that lost a worker would.

    Args:
        python: interpreter of the worker's environment.
        check: `"package.module:function"`.
        section: the model's section.

    Raises:
        WorkerEnvironmentError: if the check itself fails.
    """
    text = json.dumps(plain(section))
    if (python, check, text) in _passed:
        return []
    try:
        done = subprocess.run(
            [python, "-c", _CHECK, check],
            input=text,
            capture_output=True,
            text=True,
            env=worker_process_environment(python),
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WorkerEnvironmentError(f"{check} did not answer within {_TIMEOUT_S:.0f} s in {python}") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith("problems ")]
    if done.returncode or not answers:
        raise WorkerEnvironmentError(f"{check} failed in {python}:\n{done.stderr.strip()}")
    problems = list(json.loads(answers[-1].removeprefix("problems ")))
    if not problems:
        _passed.add((python, check, text))
    return problems
