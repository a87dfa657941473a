"""Checks of a config that need an engine, run in a worker's environment before anything is started."""

from __future__ import annotations

import json
import subprocess

from rl_core.config import Config, plain
from rl_core.errors import WorkerEnvironmentError
from rl_launch.worker_envs.passed_checks import PassedChecks, record_of
from rl_launch.worker_envs.variables import worker_process_environment

_CHECK = """
import json, sys
from rl_core.plugins import resolve
problems = list(resolve(sys.argv[1])(json.load(sys.stdin)))
print("\\nproblems " + json.dumps(problems))
"""
_TIMEOUT_S = 300.0


def engine_problems(python: str, check: str, section: Config) -> list[str]:
    """The problems that a backend's `preflight` finds in a model's section of a resolved config.

    A check imports its engine, which takes seconds. One that has found no problem is not repeated for the same section,
    model and environment, in this process or a later one.

    Args:
        python: interpreter of the worker's environment.
        check: `"package.module:function"`.
        section: the model's section.

    Raises:
        WorkerEnvironmentError: if the check itself fails.
    """
    passed, record = PassedChecks(), record_of(python, check, section)
    if passed.has(record):
        return []
    try:
        done = subprocess.run(
            [python, "-c", _CHECK, check],
            input=json.dumps(plain(section)),
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
        passed.add(record)
    return problems
