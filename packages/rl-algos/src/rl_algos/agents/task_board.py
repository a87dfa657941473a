"""Rollouts that wait for agents which run elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rl_algos.agents.calls import CallRefused


class LeaseExpired(Exception):
    """An agent that took a rollout has not called for too long; another agent may take the rollout."""


@dataclass(frozen=True)
class Address:
    """URL and keys of one rollout.

    Args:
        rollout: Identifies the rollout at its server.
        root_url: URL that Anthropic's clients take, `http://HOST:PORT/rollouts/ID`.
        api_key: Key of this rollout. No other rollout takes it, and this one only until it has ended.
        reward_key: Key for posting rewards of this rollout; empty if they may not be posted.
    """

    rollout: str
    root_url: str
    api_key: str
    reward_key: str = ""

    @property
    def base_url(self) -> str:
        """URL that OpenAI's clients take."""
        return f"{self.root_url}/v1"


@dataclass(eq=False)
class _Offer:
    """A rollout on the board.

    Args:
        described: The prompt as agents read it.
        address: How the policy is reached.
        is_done: Set when the agent has ended the rollout, or its lease has expired.
        key: Key of the request that took it; empty if it had none.
        num_calls: Number of calls that are being answered.
        expiry: Ends the lease; None before the rollout is taken and while a call is being answered.
    """

    described: Mapping[str, Any]
    address: Address
    is_done: asyncio.Future[None]
    key: str = ""
    num_calls: int = 0
    expiry: asyncio.TimerHandle | None = None

    def disarm(self) -> None:
        """Stop the time of the lease."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class TaskBoard:
    """Leases each rollout to one agent, the oldest first.

    Args:
        lease_s: Seconds without a call until an agent loses the rollout that it took.
    """

    def __init__(self, lease_s: float = 300.0) -> None:
        self._lease_s = lease_s
        self._waiting: deque[_Offer] = deque()
        self._taken: dict[str, _Offer] = {}
        self._changed = asyncio.Condition()

    @property
    def num_waiting(self) -> int:
        """Number of rollouts that no agent has taken."""
        return len(self._waiting)

    async def play(self, described: Mapping[str, Any], address: Address) -> None:
        """Offer a rollout, and wait until the agent that took it has ended it.

        Raises:
            LeaseExpired: If the agent has not called for `lease_s` seconds.
        """
        offer = _Offer(described, address, asyncio.get_running_loop().create_future())
        try:
            async with self._changed:
                self._waiting.append(offer)
                self._changed.notify_all()
            await offer.is_done
        finally:
            if offer in self._waiting:
                self._waiting.remove(offer)
            self._taken.pop(address.rollout, None)
            offer.disarm()

    async def take(self, wait_s: float, key: str = "") -> Mapping[str, Any]:
        """Return a rollout: its prompt, URL and keys.

        Args:
            wait_s: Seconds to wait for one.
            key: Key that is equal for all tries of a request; all of them get the same rollout until it ends. Empty if
                the client gives none.

        Raises:
            CallRefused: If there is none by then.
        """

        def taken() -> _Offer | None:
            held = (offer for offer in self._taken.values() if key and offer.key == key and not offer.is_done.done())
            return next(held, None)

        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self._waiting or taken())
                if (offer := taken()) is None:
                    offer = self._waiting.popleft()
                    offer.key = key
                    self._taken[offer.address.rollout] = offer
        except TimeoutError:
            raise CallRefused("no rollout is waiting; ask again", status=404, code="no_rollout") from None
        address = offer.address
        self.renew(address.rollout)
        keys = {"api_key": address.api_key, "reward_key": address.reward_key, "lease_s": self._lease_s}
        return {"id": address.rollout, "prompt": offer.described, "base_url": address.base_url, **keys}

    def renew(self, rollout: str) -> None:
        """Begin the lease of a rollout anew."""
        with self.calling(rollout):
            pass

    @contextmanager
    def calling(self, rollout: str) -> Iterator[None]:
        """Renew the lease of a rollout, which does not expire until the end of the context."""
        offer = self._taken.get(rollout)
        if offer is None:
            yield
            return
        offer.disarm()
        offer.num_calls += 1
        try:
            yield
        finally:
            offer.num_calls -= 1
            if not offer.num_calls and not offer.is_done.done():
                offer.disarm()
                offer.expiry = asyncio.get_running_loop().call_later(self._lease_s, _expire, offer, self._lease_s)

    def end(self, rollout: str) -> None:
        """Note that the agent has ended a rollout; one that has ended already stays so."""
        offer = self._taken.get(rollout)
        if offer is not None and not offer.is_done.done():
            offer.is_done.set_result(None)


def _expire(offer: _Offer, lease_s: float) -> None:
    if not offer.is_done.done():
        problem = f"the agent that took rollout {offer.address.rollout} has not called for {lease_s:g} s"
        offer.is_done.set_exception(LeaseExpired(problem))
