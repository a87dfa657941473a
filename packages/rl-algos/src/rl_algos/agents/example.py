"""An agent that is sent back once if its answer is wrong, for the recipe `grpo-agent-tiny`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp


async def run(base_url: str, api_key: str, prompt: Mapping[str, Any]) -> Mapping[str, float]:
    """Ask for the answer, and once more if it is wrong.

    Args:
        base_url: Where the policy is, as OpenAI's clients take it.
        api_key: Key of this rollout.
        prompt: Row of the data: `messages` and `info`.

    Returns:
        `reward`: 1 for a right answer, half of that for one at the second try. `accuracy`: 1 if the first was right.
    """
    headers = {"Authorization": f"Bearer {api_key}"}
    messages = list(prompt["messages"])
    answer = str(prompt["info"]["answer"])
    async with aiohttp.ClientSession(headers=headers) as session:
        for attempt in (0, 1):
            async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                response.raise_for_status()
                said = (await response.json())["choices"][0]["message"]
            if said["content"].strip() == answer:
                return {"reward": 1.0 - attempt / 2, "accuracy": 1.0 - attempt}
            messages += [said, {"role": "user", "content": "no"}]
    return {"reward": 0.0, "accuracy": 0.0}
