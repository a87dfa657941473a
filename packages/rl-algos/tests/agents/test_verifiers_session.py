"""Rollouts of verifiers, as its unmodified release sent their requests, are recorded token by token.

`verifiers_sessions.json` has the requests of each rollout with the completions that they got and the agent that sent
them, in their order.
"""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from scripted_client import ScriptedClient, check_recorded, says
from served_rollout import served

SESSIONS = json.loads((Path(__file__).parent / "verifiers_sessions.json").read_text(encoding="utf-8"))


def called_ids(body):
    """The ids of the calls in the conversation of a request."""
    return [call["id"] for message in body["messages"] for call in message.get("tool_calls") or ()]


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", text
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("session", SESSIONS, ids=lambda each: each["mode"])
def test_the_requests_of_a_rollout_are_answered_and_recorded_exactly(session):
    async def main():
        policy = ScriptedClient(says(*session["completions"]))
        ids: dict[str, str] = {}  # of calls, when they were recorded, to their ids in this rollout
        known: list[str] = []
        async with served(policy) as to, aiohttp.ClientSession() as http:
            for request in session["requests"]:
                recorded = called_ids(request["body"])
                ids.update(zip(recorded, known, strict=False))
                text = json.dumps(request["body"])
                for before, now in ids.items():
                    text = text.replace(before, now)
                agent = f"/agents/{request['agent']}" if request["agent"] else ""
                url = f"{to.address.root_url}{agent}/v1/{request['path']}"
                headers = {**request["headers"], "Authorization": f"Bearer {to.address.api_key}"}
                async with http.post(url, data=text, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    events = events_of(await response.text())
                deltas = [choice["delta"] for event in events for choice in event["choices"]]
                known += [call["id"] for delta in deltas for call in delta.get("tool_calls") or () if call.get("id")]
                assert events[-1]["usage"]["completion_tokens"] == len(policy.completions[-1].token_ids)
            assert len(policy.completions) == len(session["completions"])
            if not session["requests"][0]["agent"]:
                check_recorded(to.session, policy)
            return to.session.rollouts()

    rollouts = asyncio.run(main())
    sampled = sum(rollout.num_sampled for rollout in rollouts)
    agents = {request["agent"] for request in session["requests"]}
    assert {rollout.agent for rollout in rollouts} == agents
    assert sampled == sum(rollout.loss_mask.sum() for rollout in rollouts)
    # Each agent's turns continue one row: what verifiers sends back is what was sampled.
    assert all(len(rollout.segments) <= 1 for rollout in rollouts)
