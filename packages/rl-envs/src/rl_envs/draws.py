"""Numbers for generated datasets, equal on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator


def draws(text: str) -> Iterator[int]:
    """Endless uniform integers below 2**64 that depend only on a string."""
    count = 0
    while True:
        yield int.from_bytes(hashlib.blake2b(f"{text}/{count}".encode(), digest_size=8).digest())
        count += 1
