"""A disk that fails on demand, for processes that a test starts: see `failing_disk.c`."""

import shutil
import subprocess
from pathlib import Path

import pytest

WRITES = ("write", "sync", "create")
"""Writing, flushing, and making, renaming or removing files and folders."""

READS = ("read", "open")


class FailingDisk:
    """Makes calls fail in processes that have its variables, and in those that they start.

    Args:
        folder: Folder of its own.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        self._orders, library = folder / "orders", folder / "failing_disk.so"
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.variables = {"LD_PRELOAD": str(library), "FAILING_DISK": str(self._orders)}

    def fail(self, number: int, folder: Path, operations: tuple[str, ...] = WRITES) -> None:
        """From now on calls on files below a folder, or whose path begins with it, fail with an error."""
        aside = self._orders.with_name("orders.part")
        aside.write_text(f"{number} {','.join(operations)} {folder}\n")
        aside.replace(self._orders)

    def mend(self) -> None:
        """Let all calls pass again."""
        self._orders.unlink()
