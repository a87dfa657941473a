"""Plugin of pytest (`-p rl_core.testing.quick_imports`): the garbage collector costs less, above all in imports."""

from __future__ import annotations

import gc

import pytest

from rl_core.usage.garbage import collect_seldom

gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect garbage from now on, as seldom as `rl` does, and never look through what was imported."""
    gc.freeze()
    collect_seldom()
    gc.enable()
