from __future__ import annotations

import asyncio

from rl_core.environments.pool import Leases


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is set."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def at(self, now: float) -> None:
        """Run what is due by then."""
        self.now = now
        self.run_until_complete(asyncio.sleep(0))
        self.run_until_complete(asyncio.sleep(0))


def test_a_lease_ends_when_it_is_not_renewed_and_only_then() -> None:
    ended: list[str] = []
    loop = Clock()
    leases = Leases(10.0, ended.append)

    async def renew(*clients: str) -> None:
        for client in clients:
            leases.renew(client)

    loop.run_until_complete(renew("a", "b", ""))
    loop.at(9.0)
    loop.run_until_complete(renew("a"))
    loop.at(11.0)
    assert ended == ["b"]
    loop.run_until_complete(renew("b"))
    loop.at(18.5)
    assert ended == ["b"]
    loop.at(20.0)
    assert ended == ["b", "a"]
    loop.at(22.0)
    assert ended == ["b", "a", "b"]
    loop.run_until_complete(renew("c"))
    leases.close()
    loop.at(99.0)
    assert ended == ["b", "a", "b"]
    loop.close()
