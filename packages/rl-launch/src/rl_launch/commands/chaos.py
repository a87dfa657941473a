"""`rl chaos`: faults that are done to a run in progress, on a schedule with a seed."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from rl_core.errors import ConfigError, RunDirectoryError
from rl_core.tracing.stacks import FOLDER, SUFFIX
from rl_launch.cluster.process_stacks import is_here, registered, signal_here
from rl_launch.commands.stacks import on_nodes, require_running
from rl_launch.run_session.directory.lock import holder
from rl_launch.run_session.directory.run_folder import RunFolder

FILE = "chaos.jsonl"
"""Journal of the faults, in a run directory."""

FAULTS = {
    "rank": "a rank of a model",
    "rollout-worker": "a rollout worker with its replica",
    "engine": "a process of an engine, the replica of a rollout worker",
    "environment": "the host of an environment",
    "environment-process": "a process in which an environment scores",
    "node": "all processes of the run on a node that is not the driver's, with the node's raylet in a rehearsal",
    "raylet": "Ray's node process of the driver",
    "gcs": "Ray's control service",
    "keeper": "the parent of Ray's processes",
    "driver": "the process of rl train",
    "disk": "the file system of the run directory, which is filled",
}
"""Faults with the processes that they are done to."""

STOP = "stop-"
"""Prefix of a fault that stops a process for some seconds instead of killing it."""

_BY_ITSELF = ("rank", "rollout-worker", "engine", "environment")
"""Faults that a run survives without a resume."""

_DEFAULT = (*_BY_ITSELF, "raylet", "driver")

_CLOCK = (
    "the clock cannot be moved for one run: it is the clock of the machine, and only root can set it. Runs measure "
    "durations by the monotonic clock"
)
_BALLAST = ".chaos-ballast"
_POLL_S = 0.1
_MAX_FILL_BYTES = 2**44
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunProcess:
    """A process of a run.

    Args:
        name: Name of its log, or of the program of Ray.
        kind: The fault that is done to it.
        pid: Its number on its machine.
        host: Its machine.
        node: Ray's id of its node; empty for the driver.
        record: The file by which it is known; empty for processes of Ray, which descend from the driver.
        process: The process itself, if it is on this machine.
    """

    name: str
    kind: str
    pid: int
    host: str
    node: str
    record: str = ""
    process: psutil.Process | None = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it, unless it has ended."""
        if self.process is not None:
            with suppress(psutil.NoSuchProcess):
                self.process.send_signal(number)
        else:
            on_nodes([self.node], signal_here, self.record, int(number))

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class Schedule:
    """The faults that are done, and when.

    Args:
        faults: Names of faults, of which each occurs equally often; empty for all that suit the run.
        every_s: Mean seconds from a checkpoint to the next fault.
        for_s: Seconds after which no further fault is done.
        seed: Seed of the order, the moments and the processes.
        stopped_s: Seconds that a process is stopped, or the disk is full.
    """

    faults: tuple[str, ...] = ()
    every_s: float = 30.0
    for_s: float = 600.0
    seed: int = 0
    stopped_s: float = 20.0

    def __post_init__(self) -> None:
        for name in self.faults:
            if name == "clock":
                raise ConfigError(f"--faults clock: {_CLOCK}")
            if name.removeprefix(STOP) not in FAULTS or name == f"{STOP}disk":
                raise ConfigError(
                    f"--faults {name}: there is no such fault. There are {', '.join(FAULTS)}, and all except disk with "
                    f"{STOP} before them"
                )


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as `30s`, `10m` or `1h`."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    with suppress(ValueError):
        seconds = float(text.rstrip("".join(units))) * units.get(text[-1:], 1.0)
        if 0 <= seconds < math.inf:
            return seconds
    raise ConfigError(f"{text!r} is not a time; write it as 30s, 10m or 1h")


def processes_of(run: RunFolder) -> list[RunProcess]:
    """Return the processes of a run by its own records: those that write their stacks into its logs, and the processes
    of a Ray that its driver has started.
    """
    found, here = [], socket.gethostname()
    for each in registered(str(run.path / "logs" / FOLDER), SUFFIX):
        process = None
        if is_here(each):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(each.pid)
        elif each.host == here or not os.environ.get("RAY_ADDRESS"):
            continue  # It has ended, or is on a machine that cannot be asked.
        if process is None and each.host == here:
            continue  # It has ended meanwhile.
        found.append(RunProcess(each.name, _kind_of(each.name), each.pid, each.host, each.node, each.path, process))
    driver = next((each.process for each in found if each.kind == "driver"), None)
    for process in _descendants(driver) if driver is not None else ():
        with suppress(psutil.NoSuchProcess):
            name, words = process.name(), process.cmdline()
            kind, node = "", ""
            if name == "raylet":
                node = next((each.partition("=")[2] for each in words if each.startswith("--node_id=")), "")
                kind = "raylet" if any("node:__internal_head__" in each for each in words) else "node"
            elif name == "gcs_server":
                kind = "gcs"
            elif "rl_launch.cluster.node_keeper" in words:
                kind, name = "keeper", "node_keeper"
            if kind:
                found.append(RunProcess(name, kind, process.pid, here, node, process=process))
    return sorted(found, key=lambda each: (each.name, each.pid))


def _kind_of(name: str) -> str:
    worker, _, child = name.partition(".")
    if child:
        return "engine" if child.startswith("engine-") else "environment-process"
    kinds = ("driver", "rollout-worker", "environment", "judges")
    kind = next((each for each in kinds if worker == each or worker.startswith(f"{each}-")), "rank")
    return "environment" if kind == "judges" else kind


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def candidates(fault: str, found: Sequence[RunProcess]) -> list[list[RunProcess]]:
    """Return the groups of processes, one of which a fault is done to at once.

    Args:
        fault: Name of the fault.
        found: The processes of the run.
    """
    kind = fault.removeprefix(STOP)
    if kind != "node":
        return [[each] for each in found if each.kind == kind]
    own = {each.node for each in found if each.kind == "raylet"}
    local = socket.gethostname()
    # On a cluster that others share, its raylet is not the run's.
    away = {
        each.node
        for each in found
        if each.node and each.node not in own and (each.kind == "node" or (not own and each.host != local))
    }
    return [[each for each in found if each.node == node] for node in sorted(away)]


class Journal:
    """Appends events to the journal of a run, and shows them in the log.

    Args:
        run: The run.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._path = run.path / FILE

    def write(self, text: str, **values: Any) -> None:
        """Append an event with its time and the step of the run.

        Args:
            text: The event in words, for the log.
            values: Its values.
        """
        row = {"at": datetime.now().astimezone().isoformat(timespec="milliseconds"), "step": self._run.state().step}
        _log.warning("chaos: %s, at step %d", text, row["step"])
        # A disk that this command has filled refuses the line; the log has it.
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **values}) + "\n")


def chaos(path: Path, schedule: Schedule, *, resumes: bool, is_agreed: bool) -> int:
    """Do faults to a run in progress until the time is over or the run has ended.

    The next fault waits until the run has saved a checkpoint after the last one, so that the run makes progress
    whatever the schedule is.

    Args:
        path: Run directory.
        schedule: The faults.
        resumes: Resume the run if a fault ended it, and start with that if it is not in progress.
        is_agreed: True if the user has agreed to faults of a run that is not a rehearsal.

    Returns:
        Number of faults.

    Raises:
        RunDirectoryError: If the run is not in progress on this machine, or ends without a fault.
        ConfigError: If a fault does not suit the run, the run is another user's, or the user has not agreed.
        KeyboardInterrupt: On SIGINT and SIGTERM, after stopped processes continue and a filled disk has room.
    """
    run = RunFolder(path.absolute())
    config = run.config()
    if config.get("cluster", {}).get("device") != "rehearsal" and not is_agreed:
        raise ConfigError(
            f"{path} is not a rehearsal (cluster.device=rehearsal): its processes would be killed. Repeat the command "
            "with --yes if that is intended"
        )
    if not config.get("checkpointing", {}).get("enabled", True):
        raise ConfigError(f"{path} saves no checkpoints (checkpointing.enabled=false), so it would lose all its steps")
    owner = run.path.stat().st_uid
    if os.geteuid() not in (0, owner):
        raise ConfigError(
            f"{path} belongs to the user {owner}, whose processes you cannot signal. Ask its owner to run rl chaos"
        )
    exercise = _Exercise(run, schedule, resumes=resumes)
    with ExitStack() as undo:
        # A signal must not leave a process stopped, or the disk full.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        undo.callback(signal.signal, signal.SIGTERM, before)
        if os.environ.get("RAY_ADDRESS"):
            import ray

            from rl_launch.cluster.ray_start import connect

            connect(os.environ["RAY_ADDRESS"], is_own=False)
            undo.callback(ray.shutdown)
        exercise.run()
    return exercise.num_faults


class _Exercise:
    def __init__(self, run: RunFolder, schedule: Schedule, *, resumes: bool) -> None:
        self._run, self._schedule, self._resumes = run, schedule, resumes
        self._chance = random.Random(schedule.seed)
        self._journal = Journal(run)
        self._driver: subprocess.Popen[bytes] | None = None
        self._log_at = 0
        self._over_at = 0.0
        self.num_faults = 0

    def run(self) -> None:
        if not (self._resumes and self._has_ended()):
            require_running(self._run.path, "rl chaos")
        self._mark_log()
        self._over_at, faults = time.monotonic() + self._schedule.for_s, self._faults()
        saved, struck_since_start = -1, True
        while time.monotonic() < self._over_at:
            if self._has_ended():
                self._note_message()
                if self._run.state().status == "finished" or not self._resumes:
                    return self._end()
                if not struck_since_start:
                    raise RunDirectoryError(f"{self._run.path} has ended without a fault: {self._run.state().reason}")
                self._resume()
                struck_since_start, saved = False, self._newest()
            elif self._newest() > saved and self._is_at_work():
                time.sleep(self._schedule.every_s * self._chance.uniform(0.5, 1.5))
                if not self._has_ended() and self._is_at_work() and time.monotonic() < self._over_at:
                    self._note_message()
                    saved, struck_since_start = self._newest(), True
                    self._strike(next(faults))
            time.sleep(_POLL_S)
        return self._end()

    def _end(self) -> None:
        self._note_message()
        if self._driver is not None:
            self._driver.wait()
        self._journal.write(f"{self.num_faults} faults were done", event="end", num_faults=self.num_faults)

    def _has_ended(self) -> bool:
        if self._driver is not None and self._driver.poll() is not None:
            self._driver = None
        return self._driver is None and holder(self._run.path) is None

    def _is_at_work(self) -> bool:
        """Return whether the run is between its first step and its last one, after which it only closes."""
        state = self._run.state()
        return state.step > 0 and (not state.max_steps or state.step < state.max_steps)

    def _newest(self) -> int:
        return max(self._run.checkpoint_steps(), default=0)

    def _faults(self) -> Iterator[str]:
        """Yield faults in rounds, in each of which every one occurs once."""
        chosen, found = list(self._schedule.faults), processes_of(self._run)
        if not chosen:
            known = _DEFAULT if self._resumes else _BY_ITSELF
            chosen = [name for name in known if candidates(name, found)]
        for name in chosen:
            self._check(name, found)
        while True:
            self._chance.shuffle(chosen)
            yield from chosen

    def _check(self, fault: str, found: Sequence[RunProcess]) -> None:
        """Refuse a fault that does not suit the run."""
        if fault == "disk":
            if not os.path.ismount(self._run.path):
                raise ConfigError(
                    f"--faults disk: {self._run.path} is not a file system of its own, and filling it would take the "
                    "disk from others. Mount one there, such as a tmpfs with a size"
                )
        elif not candidates(fault, found):
            kinds = sorted({each.kind for each in found})
            raise ConfigError(
                f"--faults {fault}: the run has started no such process ({FAULTS[fault.removeprefix(STOP)]}). It has: "
                f"{', '.join(kinds)}"
            )

    def _strike(self, fault: str) -> None:
        stopped_s = self._schedule.stopped_s
        if fault == "disk":
            self._say_fault(f"the disk is full for {stopped_s:g} s", fault, ())
            with _filled(self._run.path / _BALLAST):
                self._wait_for_end(stopped_s)
            return self._journal.write("the disk has room again", event="undone", fault=fault)
        groups: list[list[RunProcess]] = []
        while not (groups := candidates(fault, processes_of(self._run))):
            if self._has_ended() or time.monotonic() > self._over_at:
                return None
            time.sleep(_POLL_S)
        struck = self._chance.choice(groups)
        names = ", ".join(map(str, struck))
        if not fault.startswith(STOP):
            self._say_fault(f"kills {names}", fault, struck)
            for each in struck:
                each.signal(signal.SIGKILL)
            return None
        self._say_fault(f"stops {names} for {stopped_s:g} s", fault, struck)
        with ExitStack() as going_on:
            for each in struck:
                going_on.callback(each.signal, signal.SIGCONT)
                each.signal(signal.SIGSTOP)
            self._wait_for_end(stopped_s)
        return self._journal.write(f"continues {names}", event="undone", fault=fault)

    def _say_fault(self, text: str, fault: str, struck: Sequence[RunProcess]) -> None:
        self.num_faults += 1
        # The driver's log is read from here on for the message about it.
        self._mark_log()
        self._journal.write(
            f"fault {self.num_faults}, {fault}: {text}",
            event="fault",
            number=self.num_faults,
            fault=fault,
            seed=self._schedule.seed,
            processes=[{"name": each.name, "pid": each.pid, "host": each.host} for each in struck],
        )

    def _wait_for_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._has_ended():
            time.sleep(_POLL_S)

    def _resume(self) -> None:
        self._driver = subprocess.Popen(resume_command(self._run.path))
        self._journal.write(f"resumes the run as process {self._driver.pid}", event="resume", pid=self._driver.pid)

    @property
    def _driver_log(self) -> Path:
        return self._run.logs / "driver.log"

    def _mark_log(self) -> None:
        with suppress(OSError):
            self._log_at = self._driver_log.stat().st_size

    def _note_message(self) -> None:
        """Write the warnings and errors that the run has logged since the last fault."""
        with suppress(OSError), self._driver_log.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._log_at)
            said = [line.strip() for line in file if " WARNING " in line or " ERROR " in line]
            self._log_at = file.tell()
            if said and self.num_faults:
                self._journal.write(f"the run says: {said[0]}", event="message", number=self.num_faults, messages=said)


def resume_command(path: Path) -> list[str]:
    """Return the command that resumes a run."""
    return [sys.executable, "-P", "-m", "rl_launch.cli", "train", str(path)]


@contextmanager
def _filled(path: Path) -> Iterator[None]:
    """Fill the file system of a file, and empty it afterwards."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        size = _MAX_FILL_BYTES
        while size >= 1:
            try:
                os.posix_fallocate(file, os.fstat(file).st_size, size)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                size //= 2
        yield
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
