"""The first import of the process that ranks are forks of: what it imports then costs a fifth less, as with
`rl_core.imports.without_collections`, and the ranks, whose models are tiny, collect garbage seldom."""

from __future__ import annotations

import gc
import os


def _collect() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


gc.disable()
os.register_at_fork(after_in_child=_collect)
