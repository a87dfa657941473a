"""Imports run without the garbage collector, and only they."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORTS = """
import gc
from rl_core.usage.garbage import without_collections
before = gc.get_freeze_count()
with without_collections():
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > before
gc.disable()
with without_collections():
    pass
assert not gc.isenabled()
"""

FORKS = """
import gc, os
import rl_core.selfcheck.quick_imports
assert not gc.isenabled()
child = os.fork()
if not child:
    os._exit(0 if gc.isenabled() and gc.get_freeze_count() and gc.get_threshold()[0] > 700 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("code", [IMPORTS, FORKS], ids=["imports", "forks"])
def test_nothing_is_collected_until_modules_are_imported(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
