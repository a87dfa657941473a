"""Log files of bounded size, also those that file descriptors and child processes write to."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

MAX_LOG_BYTES = 2**26
"""Size at which a log starts over; the last one is kept as `NAME.1`."""

CHECK_PERIOD_S = 30.0


def bound_size(path: str, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move the contents of a larger log to `NAME.1` and empty the log in place.

    Renaming would not do: standard output, children and native code hold descriptors of the file. They append
    (O_APPEND), so they continue at the start of the emptied file. A line written between the copy and the truncation is
    lost, as with `copytruncate` of logrotate.
    """
    log = Path(path)
    # another process with the same log may have been first
    if not log.exists() or log.stat().st_size <= max_bytes:
        return
    aside = log.with_name(f".{log.name}.{os.getpid()}.part")
    shutil.copyfile(log, aside)
    os.truncate(log, 0)
    aside.replace(log.with_name(f"{log.name}.1"))


def keep_bounded(path: str) -> None:
    """Bound the size of a log now and for as long as this process lives."""
    bound_size(path)
    threading.Thread(target=_keep_bounded, args=(path,), name="log-size", daemon=True).start()


def _keep_bounded(path: str) -> None:
    wait = threading.Event().wait
    while not wait(CHECK_PERIOD_S):
        try:
            bound_size(path)
        except OSError:
            # a full disk, or a run directory that was removed; the worker does not depend on its log
            continue
