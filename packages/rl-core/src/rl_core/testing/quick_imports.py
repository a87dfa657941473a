"""Plugin of pytest (`-p rl_core.testing.quick_imports`): imports of tests and of what they test cost less."""

from __future__ import annotations

import gc

import pytest

gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect garbage from now on, and never look through what was imported."""
    gc.freeze()
    gc.enable()
