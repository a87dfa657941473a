"""The first import of the process that ranks are forks of: its later imports cost a fifth less, as with
`rl_core.usage.garbage.without_collections`, and the ranks, whose models are tiny, collect garbage seldom."""

from __future__ import annotations

import gc
import os

from rl_core.usage.garbage import collect_seldom


def _collect() -> None:
    gc.freeze()
    collect_seldom()
    gc.enable()


gc.disable()
os.register_at_fork(after_in_child=_collect)
