"""Leases of an environment pool's clients, so that conversations of one that died do not stay for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LEASE_S = 600.0
"""How long a client need not be heard of; its process may be busy with loading an engine."""
RENEW_S = LEASE_S / 10
"""How often a client renews its lease."""


class Leases:
    """Tells when a client was last heard of too long ago; to be used from one event loop.

    Args:
        lease_s: how long a lease lasts.
        expire: called with a client whose lease ran out.
    """

    def __init__(self, lease_s: float, expire: Callable[[str], None]) -> None:
        self._lease_s = lease_s
        self._expire = expire
        self._ends: dict[str, asyncio.TimerHandle] = {}

    def renew(self, client: str) -> None:
        """Begin a client's lease anew; no client (an empty name) has none."""
        if not client:
            return
        if (end := self._ends.pop(client, None)) is not None:
            end.cancel()
        self._ends[client] = asyncio.get_running_loop().call_later(self._lease_s, self._end, client)

    def close(self) -> None:
        """End every lease without a word."""
        for end in self._ends.values():
            end.cancel()
        self._ends.clear()

    def _end(self, client: str) -> None:
        del self._ends[client]
        self._expire(client)
