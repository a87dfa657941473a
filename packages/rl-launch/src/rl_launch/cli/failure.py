"""Errors of a command: one clear message, and the traceback in the run's logs."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import typer

_WRONG_USE, _FAILED = 2, 1

_REFUSALS = {
    errno.ENOSPC: ("no space left on a disk", "Free some space"),
    errno.EDQUOT: ("a disk quota is exceeded", "Remove files, or have the quota raised"),
    errno.EROFS: ("a file system is read-only", "Have it mounted writable"),
    errno.EIO: ("a disk failed to read or write", "Check the disk or its mount"),
    errno.ESTALE: ("a network file system has lost a file", "Check the mount"),
    errno.ENOTCONN: ("a file system is not connected", "Mount it again"),
    errno.EUCLEAN: ("a file system is damaged", "Have it repaired"),
}
"""Errors of a disk, a quota or a mount, whatever the file: a description of each, and a remedy."""

_REFUSALS_OF_FILES = _REFUSALS | {
    errno.EACCES: ("access to a file was denied", "Allow it for this user"),
    errno.EPERM: ("a change of a file was denied", "Allow it for this user"),
    errno.EFBIG: ("a file reached the size limit", "Raise the limit (ulimit -f)"),
    errno.ENXIO: ("a disk is gone", "Check the disk or its mount"),
    errno.ENODEV: ("a disk is gone", "Check the disk or its mount"),
    errno.ETIMEDOUT: ("a network file system did not answer", "Check the mount"),
    errno.EHOSTDOWN: ("a network file system did not answer", "Check the mount"),
}
"""Errors that mean the same only if they concern a file."""

UNFINISHED = os.EX_TEMPFAIL
"""Exit code, 75, of a run that has ended before its last step and that the same command resumes."""

_OF_LIMITS = ("can't start new thread", "MemoryError", os.strerror(errno.ENOMEM), os.strerror(errno.EAGAIN))
_LIMIT_REACHED = (
    "A limit of memory, processes or threads was reached: the limit of the shell (ulimit -v, ulimit -u), or of the "
    "container or batch job (memory.max, pids.max)."
)

_READER_IS_GONE = 128 + signal.SIGPIPE
"""Exit code of a program that SIGPIPE ends, as in `yes | head`."""


@dataclass
class CommandFailure:
    """Folder for a traceback; None before the run directory is known."""

    run_dir: Path | None = None


@contextmanager
def reported(*, shows_logs: bool = False, verbose: bool = False) -> Iterator[CommandFailure]:
    """Turn an error into a message and an exit code: 2 for an error that the user can fix, 75 for a run that can be
    resumed when the cluster has its devices again, or with a larger budget of a judge, 1 for a failed run.

    Args:
        shows_logs: True to show log messages from the beginning.
        verbose: True to show more of them.
    """
    failure = CommandFailure()
    try:
        if shows_logs:
            from rl_launch.run_session import show_logs

            show_logs(verbose=verbose)
        yield failure
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(_FAILED) from None
    except Exception as error:  # noqa: BLE001  # the end of the process: every failure becomes a report
        if isinstance(error, BrokenPipeError) and _is_reader_gone():
            raise typer.Exit(_READER_IS_GONE) from None
        from rl_core.rollouts.judging import JudgeBudgetSpent
        from rl_launch.placement.bundles import DevicesLost

        _say(explained(error, failure.run_dir))
        is_resumable = isinstance(error, DevicesLost | JudgeBudgetSpent)
        code = UNFINISHED if is_resumable else _WRONG_USE if _is_users(error) else _FAILED
        raise typer.Exit(code) from None


@contextmanager
def resumable() -> Iterator[None]:
    """Exit with `UNFINISHED` if SIGTERM ends the block. A run takes the signal itself, to save. Outside of it, checks
    in threads and other processes would hold up an orderly end."""

    def end(number: int, frame: object) -> None:
        os.write(2, b"ended by SIGTERM\n")
        os._exit(UNFINISHED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit as ending:
        if ending.code == 128 + signal.SIGTERM:
            raise typer.Exit(UNFINISHED) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def explained(error: Exception, run_dir: Path | None) -> str:
    """Return the message for an error. If a traceback can be useful, it is written to the logs of the run.

    Args:
        error: Error that ended the command or one of its runs.
        run_dir: Folder of the run; None if there is none.
    """
    from rl_core.rollouts.judging import JudgeBudgetSpent

    if _is_users(error) or isinstance(error, JudgeBudgetSpent):
        return str(error)
    file = error.filename if isinstance(error, OSError) else None
    # engines report it in errors of their own, with the system's words in them
    refusal = next((said for number, said in _REFUSALS.items() if os.strerror(number) in str(error)), None)
    if isinstance(error, OSError) and file is not None:
        refusal = _REFUSALS_OF_FILES.get(error.errno or 0, refusal)
    if refusal is not None:
        (what, remedy), resume = refusal, " to resume from the newest checkpoint" if run_dir is not None else ""
        place = f"the disk of {run_dir or Path.cwd()}"
        if file is not None:
            path = os.fsdecode(file)
            if run_dir is None or run_dir.absolute() not in Path(path).absolute().parents:
                place = f"the one of {path}"
        advice = f"{what}, most likely {place}. {remedy}, and run the same command again{resume}."
        return f"{advice}\n{describe(error)}"
    from rl_core.errors import WorkerError

    details = "".join(traceback.format_exception(error))
    if isinstance(error, WorkerError):
        details = f"{error.origin or 'worker'}:\n{error.traceback}\n{details}"
    if run_dir is not None and (run_dir / "logs").is_dir():
        log = run_dir / "logs" / "error.log"
        with suppress(OSError):
            log.write_text(details)
            details = f"traceback: {log}"
    return f"{describe(error)}\n{details}"


def _is_users(error: Exception) -> bool:
    """Return whether the user can fix an error without a traceback."""
    from rl_core.errors import ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError

    return isinstance(error, ConfigError | DataError | RunDirectoryError | WorkerEnvironmentError)


@contextmanager
def quiet_without_reader() -> Iterator[None]:
    """Exit without a traceback if the reader of the output is gone, as in `rl env list | head`."""
    try:
        yield
    except SystemExit as ending:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            # the rest of the output is dropped, because the interpreter flushes once more at its end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            if not ending.code:
                raise SystemExit(_READER_IS_GONE) from None
        raise


def _is_reader_gone() -> bool:
    """Return whether standard output is a pipe without a reader. A broken pipe to a worker is a failure instead."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def describe(error: BaseException) -> str:
    """Return the error as a string, preceded by its worker if there is one."""
    from rl_core.errors import RLError

    text = str(error) if isinstance(error, RLError) else f"{type(error).__name__}: {error}"
    limit = [_LIMIT_REACHED] if any(words in text for words in _OF_LIMITS) else []
    return "\n".join([text, *getattr(error, "__notes__", ()), *limit])


def _say(text: str) -> None:
    sys.stderr.write(f"error: {text}\n")
