"""Checks of a config that need an engine, run in a worker's environment before anything is started.

A check imports its engine, which takes seconds of processor time, so checks that found no problem are remembered
between runs. The answer follows from the section of the config, the files in it, the environment and the
machine. A record is an empty file, named by the digest of all four.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rl_core.config import Config, plain
from rl_core.errors import WorkerEnvironmentError
from rl_core.fork_server import command as forked_command
from rl_launch.worker_envs.node_build import default_root
from rl_launch.worker_envs.variables import OF_THE_MACHINE, forwarded_variables, process_environment, worker_variables

_CHECK = """
import json, os, sys
from rl_core import resolve
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # engines print
for line in sys.stdin:
    check, section = json.loads(line)
    answers.write(json.dumps(list(resolve(check)(section))) + "\\n")
    answers.flush()
"""
_TIMEOUT_S = 300.0

_KEPT_S = 30 * 24 * 3600.0
_TEXTS = (".json", ".jinja", ".txt", ".yaml", ".yml", ".py")
"""Suffixes of files whose contents count. Of other files, such as weights, the size counts."""
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")

_Start = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
"""The interpreter or its fork server, and the variables that differ from the driver's."""

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
    """Return the problems that a backend's `preflight` finds in a model's section of a resolved config.

    A check imports its engine, which takes seconds. One that has found no problem is not repeated for the same section,
    model and environment, in this process or a later one.

    Args:
        python: Interpreter of the worker's environment.
        check: `"package.module:function"`.
        section: The model's section.
        variables: Environment variables of the worker that differ from the driver's; by default the variables of
            every worker with this interpreter.
        imports: Modules to import before the check, in a fork server that the run's workers and later runs share.
        fork_server_s: Seconds for which that server may stay; 0 uses none.

    Raises:
        WorkerEnvironmentError: If the check itself fails.
    """
    if variables is None:
        variables = {**worker_variables(python), **forwarded_variables()}
    record = record_of(python, check, section, variables)
    if has_passed(record):
        return []
    start = (tuple(forked_command(python, imports, fork_server_s)), tuple(sorted(variables.items())))
    idle = (_kept or {}).get(start)
    process = idle.pop() if idle else _CheckProcess(python, start)
    try:
        problems = process.ask(check, section)
    except BaseException:
        process.close()
        raise
    if _kept is None:
        process.close()
    else:
        _kept.setdefault(start, []).append(process)
    if not problems:
        keep_passed(record)
    return problems


@contextmanager
def kept_check_processes() -> Iterator[None]:
    """Share a process between checks with the same interpreter and variables, so that their engine is imported once.

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


class _CheckProcess:
    """A process of a worker's environment that makes checks one after another."""

    def __init__(self, python: str, start: _Start) -> None:
        self._python = python
        self._errors = TemporaryFile()  # noqa: SIM115  # open as long as the process
        command, variables = start
        self._process = subprocess.Popen(
            [*command, "-c", _CHECK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=process_environment(dict(variables)),
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


def records_folder() -> Path:
    """Return the folder of the records, which is made when the first one is written."""
    return default_root().parent / "checks"


def has_passed(record: str) -> bool:
    """Return whether this user wrote a record that is recent enough."""
    try:
        facts = (records_folder() / record).lstat()
    except OSError:
        return False
    return facts.st_uid == os.geteuid() and time.time() - facts.st_mtime < _KEPT_S


def keep_passed(record: str) -> None:
    """Write a record. Where it cannot be written, the check is made again next time."""
    folder = records_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in folder.iterdir():
            if time.time() - old.lstat().st_mtime >= _KEPT_S:
                old.unlink(missing_ok=True)
        (folder / record).touch()


def record_of(python: str, check: str, section: Config, variables: Mapping[str, str]) -> str:
    """Return the name of the record of a check.

    Args:
        python: Interpreter of the worker's environment.
        check: `"package.module:function"`.
        section: Section of a resolved config. Folders and files in it count by their contents, so that a model
            that was moved is the same model.
        variables: Environment variables of the check's process that differ from the driver's. Those that describe the
            machine do not count.
    """
    whole = hashlib.blake2b(digest_size=20)
    for part in (
        check,
        json.dumps(_by_content(plain(section)), sort_keys=True),
        json.dumps(sorted(item for item in variables.items() if item[0] not in OF_THE_MACHINE)),
        platform.node(),
        *(path.read_text() for path in map(Path, _DRIVERS) if path.is_file()),
        *_environment(python),
    ):
        whole.update(part.encode() + b"\0")
    return whole.hexdigest()


def _by_content(value: Any) -> Any:
    """Return plain values, with the digest of the contents of a folder or file in place of its name."""
    if isinstance(value, dict):
        return {key: _by_content(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_by_content(each) for each in value]
    if isinstance(value, str) and os.sep in value:
        path = Path(value).expanduser()
        contents = []
        for file in [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []:
            is_text = file.is_file() and file.suffix in _TEXTS
            digest = hashlib.blake2b(file.read_bytes(), digest_size=20).hexdigest() if is_text else ""
            contents.append((file.name, digest or str(file.stat().st_size)))
        return contents or value
    return value


def _environment(python: str) -> Iterator[str]:
    """Yield the contents of an environment: interpreter, distributions, and the sources that it imports in place."""
    yield python
    yield str(Path(python).resolve())
    for site in sorted(Path(python).parent.parent.glob("lib/python*/site-packages")):
        for entry in sorted(site.iterdir()):
            if entry.suffix in (".dist-info", ".pth"):
                yield f"{entry.name} {entry.stat().st_mtime_ns}"
            if entry.suffix == ".pth":
                yield from _sources(entry.read_text(encoding="utf-8").splitlines())
    yield from _sources(os.environ.get("PYTHONPATH", "").split(os.pathsep))


def _sources(folders: list[str]) -> Iterator[str]:
    for folder in folders:
        if folder.startswith(os.sep) and Path(folder).is_dir():
            for file in sorted(each for each in Path(folder).rglob("*.py*") if each.suffix in (".py", ".pyi")):
                facts = file.stat()
                yield f"{file} {facts.st_size} {facts.st_mtime_ns}"
