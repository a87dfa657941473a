"""A rollout behind a real endpoint, and the unmodified clients that call it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai
from scripted_client import ScriptedClient, session_of

from rl_algos.agents.endpoint import AgentEndpoint
from rl_algos.agents.session import AgentSession
from rl_algos.agents.task_board import Address


@dataclass(frozen=True)
class Served:
    """A rollout that is served."""

    session: AgentSession
    policy: ScriptedClient
    address: Address
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON body of the answer to a request that no client would send."""
        sent = {"Authorization": f"Bearer {self.address.api_key}", **headers}
        url = f"{self.address.base_url}/{path}"
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with aiohttp.ClientSession() as http, http.post(url, headers=sent, **data) as response:
            return response.status, await response.json()


@asynccontextmanager
async def served(policy: ScriptedClient, *, takes_rewards: bool = False, **settings: Any) -> AsyncIterator[Served]:
    """Serve a rollout of the policy."""
    endpoint = AgentEndpoint()
    await endpoint.start()
    session = session_of(policy, **settings)
    try:
        async with endpoint.opened(session, takes_rewards=takes_rewards) as address, clients_of(address) as clients:
            yield Served(session, policy, address, *clients)
    finally:
        await endpoint.close()


@asynccontextmanager
async def clients_of(address: Address) -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    """The clients of OpenAI and Anthropic for a rollout."""
    async with (
        openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as of_openai,
        anthropic.AsyncAnthropic(base_url=address.root_url, api_key=address.api_key) as of_anthropic,
    ):
        yield of_openai, of_anthropic
