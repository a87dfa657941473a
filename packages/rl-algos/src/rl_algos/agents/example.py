"""An agent that computes products for the policy, for the recipe `grpo-agent-tiny`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import aiohttp

MAX_CALLS = 1
"""Maximum number of products that the agent computes in one rollout."""

_CALL = re.compile(r"<calculator>(\d+)\*(\d+)</calculator>")


async def run(base_url: str, api_key: str, prompt: Mapping[str, Any]) -> Mapping[str, float]:
    """Ask for the answer, and compute a product if the policy asks for one first.

    Args:
        base_url: Where the policy is, as OpenAI's clients take it.
        api_key: Key of this rollout.
        prompt: Row of the data: `messages` and `info`.

    Returns:
        `reward`: 1 for the right answer, otherwise 0. `calls`: Number of products that were computed.
    """
    messages = list(prompt["messages"])
    num_calls = 0
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        while True:
            async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                response.raise_for_status()
                said = (await response.json())["choices"][0]["message"]
            call = _CALL.fullmatch(said["content"].strip())
            if call is None or num_calls == MAX_CALLS:
                is_right = said["content"].strip() == str(prompt["info"]["answer"])
                return {"reward": float(is_right), "calls": float(num_calls)}
            num_calls += 1
            result = f"<result>\n{int(call[1]) * int(call[2])}\n</result>"
            messages += [said, {"role": "user", "content": result}]
