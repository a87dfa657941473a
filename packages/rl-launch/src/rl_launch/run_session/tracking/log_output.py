"""Log records on the console and in the run directory."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from logging.handlers import RotatingFileHandler
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from rl_core.plugins import plugin_packages


@cache
def shared_console() -> Console:
    """Return the console of progress and log records: they share one, so that neither writes over the other."""
    return Console(stderr=True)


def show_logs(*, verbose: bool = False) -> None:
    """Send the messages of this project and of plugins, and the warnings of all libraries, to the console: above a live
    line, or as plain lines, which in a notebook are ordinary output of the cell.
    """
    console = shared_console()
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_time=False, show_path=False, show_level=False)
        handler.setFormatter(_Plain("%(message)s"))
    else:
        # a notebook shows standard error like an error
        handler = logging.StreamHandler(sys.stdout if console.is_jupyter else console.file)
        handler.setFormatter(_Plain("%(asctime)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    for earlier in [each for each in root.handlers if each.name == "rl-console"]:
        root.removeHandler(earlier)
    handler.name = "rl-console"
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in {"rl_core", "rl_launch", *plugin_packages()}:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)
    # Two libraries warn in notebooks without ipywidgets, and nothing here shows their bars.
    warnings.filterwarnings("ignore", message="IProgress not found")
    logging.getLogger("ray.widgets").setLevel(logging.ERROR)
    logging.captureWarnings(True)


MAX_LOG_BYTES = 2**26
"""Size at which the driver's log starts over, as the logs of workers do. Their module (`rl_core.ray.host`) imports Ray,
which a session without Ray must not load."""


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Append log records to a file while inside; one of more than `MAX_LOG_BYTES` becomes `NAME.1`."""
    handler = _LogFile(path, maxBytes=MAX_LOG_BYTES, backupCount=1, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        with suppress(OSError):  # a failing disk refuses what is buffered once more
            handler.close()


class _LogFile(RotatingFileHandler):
    """Drops records while the disk refuses them, and reports it once: logging would print a traceback for each."""

    _is_told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - a method of logging's
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_told:
            self._is_told = True
            sys.stderr.write(f"warning: {self.baseFilename} is not written: {error.strerror}\n")


class _Plain(logging.Formatter):
    """Names the level of warnings and errors only."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text
