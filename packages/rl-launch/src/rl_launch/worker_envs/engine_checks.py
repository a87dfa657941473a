"""Checks of a config that need an engine, run in a worker's environment before anything is started."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import NamedTuple

from rl_core.config import Config, plain
from rl_core.errors import WorkerEnvironmentError
from rl_core.fork_server import command as forked_command
from rl_launch.worker_envs.passed_checks import PassedChecks, record_of
from rl_launch.worker_envs.variables import forwarded_variables, worker_variables

_CHECK = """
import json, os, sys
from rl_core.plugins import resolve
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # engines print
for line in sys.stdin:
    check, section = json.loads(line)
    answers.write(json.dumps(list(resolve(check)(section))) + "\\n")
    answers.flush()
"""
_TIMEOUT_S = 300.0

_kept: dict[_Start, list[_CheckProcess]] | None = None
"""Idle processes by how they were started, while checks are to share them."""


def engine_problems(
    python: str,
    check: str,
    section: Config,
    *,
    variables: Mapping[str, str] | None = None,
    imports: Sequence[str] = (),
    fork_server_s: float = 0.0,
) -> list[str]:
    """The problems that a backend's `preflight` finds in a model's section of a resolved config.

    A check imports its engine, which takes seconds. One that has found no problem is not repeated for the same section,
    model and environment, in this process or a later one.

    Args:
        python: Interpreter of the worker's environment.
        check: `"package.module:function"`.
        section: The model's section.
        variables: Environment variables of the worker that differ from the driver's; by default those of every worker
            with this interpreter.
        imports: Modules to import before the check, in a fork server that the run's workers and later runs share.
        fork_server_s: Seconds for which that server may stay; 0 uses none.

    Raises:
        WorkerEnvironmentError: If the check itself fails.
    """
    if variables is None:
        variables = {**worker_variables(python), **forwarded_variables()}
    passed, record = PassedChecks(), record_of(python, check, section, variables)
    if passed.has(record):
        return []
    start = _Start(tuple(forked_command(python, imports, fork_server_s)), tuple(sorted(variables.items())))
    process = _taken(start) or _CheckProcess(python, start)
    try:
        problems = process.ask(check, section)
    except BaseException:
        process.close()
        raise
    _put_back(start, process)
    if not problems:
        passed.add(record)
    return problems


@contextmanager
def kept_check_processes() -> Iterator[None]:
    """Context in which checks with the same interpreter and variables share a process, so that their engine is imported
    once.

    The process stays until the context ends, with the memory that the engine takes; on GPUs that may be memory of the
    GPU.
    """
    global _kept
    _kept = {}
    try:
        yield
    finally:
        processes, _kept = [process for several in _kept.values() for process in several], None
        for process in processes:
            process.close()


class _Start(NamedTuple):
    """The interpreter or what stands in for it, and the variables that differ from the driver's."""

    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


class _CheckProcess:
    """A process of a worker's environment that makes checks one after another."""

    def __init__(self, python: str, start: _Start) -> None:
        self._python = python
        self._errors = TemporaryFile()  # noqa: SIM115  # open as long as the process
        self._process = subprocess.Popen(
            [*start.command, "-c", _CHECK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **dict(start.variables)},
        )

    def ask(self, check: str, section: Config) -> list[str]:
        """Make a check.

        Raises:
            WorkerEnvironmentError: If the check fails or does not answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([check, plain(section)]).encode() + b"\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _TIMEOUT_S)[0]:
            raise WorkerEnvironmentError(f"{check} did not answer within {_TIMEOUT_S:.0f} s in {self._python}")
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
            raise WorkerEnvironmentError(f"{check} failed in {self._python}:\n{said}")
        return list(json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _taken(start: _Start) -> _CheckProcess | None:
    """A kept process that no other thread has, for one check; None if there is none."""
    idle = (_kept or {}).get(start)
    return idle.pop() if idle else None


def _put_back(start: _Start, process: _CheckProcess) -> None:
    if _kept is None:
        process.close()
    else:
        _kept.setdefault(start, []).append(process)
