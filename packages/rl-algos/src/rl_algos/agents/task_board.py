"""Rollouts that wait for agents which run elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_algos.agents.address import Address
from rl_algos.agents.calls import CallRefused


@dataclass(frozen=True)
class _Waiting:
    described: Mapping[str, Any]
    address: Address
    is_done: asyncio.Future[None]


class TaskBoard:
    """Hands each rollout to one agent, the oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._taken: dict[str, _Waiting] = {}
        self._any_waiting = asyncio.Event()

    async def play(self, described: Mapping[str, Any], address: Address) -> None:
        """Offer a rollout, and wait until the agent that took it has ended it."""
        offer = _Waiting(described, address, asyncio.get_running_loop().create_future())
        self._waiting.append(offer)
        self._any_waiting.set()
        try:
            await offer.is_done
        finally:
            if offer in self._waiting:
                self._waiting.remove(offer)
            self._taken.pop(address.rollout, None)

    async def take(self, wait_s: float) -> Mapping[str, Any]:
        """Return a rollout: its prompt, URL and keys.

        Args:
            wait_s: Seconds to wait for one.

        Raises:
            CallRefused: If there is none by then.
        """
        try:
            async with asyncio.timeout(wait_s):
                while not self._waiting:
                    self._any_waiting.clear()
                    await self._any_waiting.wait()
        except TimeoutError:
            raise CallRefused("no rollout is waiting; ask again", status=404, code="no_rollout") from None
        offer = self._waiting.popleft()
        address = offer.address
        self._taken[address.rollout] = offer
        return {
            "id": address.rollout,
            "prompt": offer.described,
            "base_url": address.base_url,
            "api_key": address.api_key,
            "reward_key": address.reward_key,
        }

    def end(self, rollout: str) -> None:
        """Note that the agent has ended a rollout; one that has ended already stays so."""
        offer = self._taken.get(rollout)
        if offer is not None and not offer.is_done.done():
            offer.is_done.set_result(None)
