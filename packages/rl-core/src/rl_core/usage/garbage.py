"""The garbage collector, which takes a fifth of the time of importing an engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def collect_seldom() -> None:
    """Collect garbage less often than Python does, in processes whose garbage is small."""
    gc.set_threshold(50_000, 20, 50)


@contextmanager
def without_collections() -> Iterator[None]:
    """Context that pauses garbage collection, for the imports at the start of a process.

    Modules make hundreds of thousands of objects that stay; the collector would look through them again and again.
    Afterwards it leaves all that there is by then alone, whose memory stays shared with forks of the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
