"""Processor time of a call to the endpoint that agents call, with an engine that answers at once.

    uv run benchmarks/agent_endpoint.py

The server has a process of its own. Clients send plain HTTP requests in conversations of eight turns, so that the
figures are the server's: routing, keys, JSON, the chat template, the tree of tokens and its copies. The baseline is an
aiohttp server that reads the same requests and answers with a fixed JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from measurement import surroundings, table

from rl_algos.agents.calls import Limits
from rl_algos.agents.endpoint import AgentEndpoint
from rl_algos.agents.session import AgentSession
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.tiny_model import END, make_tokenizer
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.program import Reply
from rl_core.rollouts.rollout import Completion, Message, Prompt, WeightSpan

TURNS = 8
ASKED = "what is the sum of these numbers: " + " ".join(map(str, range(40)))
ANSWER = "the sum is 780, as each pair of the first and the last of them is 39, and there are 20 of these"
FIXED = {"choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}]}


class NullClient:
    """A policy that answers at once, always the same."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        tokens = chat.encoded(ANSWER + END)
        logprobs = np.zeros(len(tokens), np.float32)
        self._completion = Completion(tokens, logprobs, "stop", (WeightSpan(1, len(tokens)),))
        self.sampling = SamplingParams(max_new_tokens=256)
        self.characters_per_token = chat.characters_per_token

    async def generate(self, token_ids: np.ndarray, sampling: Any = None, *, draw: int | None = None) -> Completion:
        return self._completion

    async def step(self, conversation: Any) -> Any:
        raise NotImplementedError

    def read(self, token_ids: np.ndarray, tools: Sequence[Mapping[str, Any]] | None = None) -> Reply:
        return self._chat.read(token_ids, tools or ())

    def continuation(self, turn: Message, observation: Sequence[Message], sampled: np.ndarray) -> np.ndarray:
        return self._chat.continuation(turn, observation, sampled)

    def rendered(self, messages: Sequence[Message], so_far: np.ndarray, tools: Any = None) -> np.ndarray:
        return self._chat.rendered(messages, so_far, tools or ())

    def encoded(self, text: str) -> np.ndarray:
        return self._chat.encoded(text)

    def shown(self, token_ids: np.ndarray) -> str:
        return self._chat.shown(token_ids)

    def pieces(self, token_ids: np.ndarray) -> list[str]:
        return [self.shown(token_ids[place : place + 1]) for place in range(len(token_ids))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000, help="calls of each row (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="test run: 200 calls")
    chosen = parser.parse_args()
    num_calls = 200 if chosen.quick else chosen.calls
    print(f"{surroundings('rl-algos', 'aiohttp')}\n")
    rows = []
    for name, serve in (("aiohttp, a fixed answer", _serve_fixed), ("endpoint", _serve)):
        for num_conversations in (64, 256):
            rows.append([name, str(num_conversations), *_measured(serve, num_conversations, num_calls)])
    columns = ["server", "conversations", "CPU ms a call", "calls/s", "MiB at half", "MiB at the end"]
    print(table(columns, rows))
    endpoint, fixed = (next(row[2] for row in rows if row[0].startswith(name)) for name in ("endpoint", "aiohttp"))
    print(f"\nratio of processor time, endpoint to baseline, 64 conversations: {float(endpoint) / float(fixed):.2f}")


def _measured(serve: Any, num_conversations: int, num_calls: int) -> list[str]:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_run, args=(serve, theirs))
    server.start()
    try:
        before = _usage(ours)
        begun = time.perf_counter()
        rounds = max(1, num_calls // (num_conversations * TURNS))
        halves = [rounds // 2, rounds - rounds // 2]
        used = [before]
        for count in halves:
            for _ in range(count):
                asyncio.run(_talk(ours, num_conversations))
            used.append(_usage(ours))
        seconds = time.perf_counter() - begun
    finally:
        ours.send("end")
        server.join()
    calls = rounds * num_conversations * TURNS
    cpu = (used[-1][0] - before[0]) / calls
    return [f"{1000 * cpu:.2f}", f"{calls / seconds:.0f}", f"{used[1][1]:.0f}", f"{used[2][1]:.0f}"]


def _usage(server: Connection) -> tuple[float, float]:
    server.send("usage")
    found: tuple[float, float] = server.recv()
    return found


async def _talk(server: Connection, num_conversations: int) -> None:
    server.send(num_conversations)
    addresses = server.recv()
    connector = aiohttp.TCPConnector(limit=num_conversations)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*[_converse(session, url, key) for url, key in addresses])
    server.send("close")


async def _converse(session: aiohttp.ClientSession, url: str, key: str) -> None:
    messages = [{"role": "user", "content": ASKED}]
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(TURNS):
        async with session.post(f"{url}/chat/completions", json={"messages": messages}, headers=headers) as response:
            body = await response.json()
            assert response.status == 200, body
        messages += [body["choices"][0]["message"], {"role": "user", "content": ASKED}]


def _run(serve: Any, pipe: Connection) -> None:
    asyncio.run(serve(pipe))


async def _obey(pipe: Connection, open_sessions: Any, close_sessions: Any) -> None:
    """Answer the parent until it ends."""
    while (asked := await asyncio.to_thread(pipe.recv)) != "end":
        if asked == "usage":
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((used.ru_utime + used.ru_stime, _resident_mib()))
        elif asked == "close":
            await close_sessions()
        else:
            pipe.send(await open_sessions(asked))


def _resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


async def _serve(pipe: Connection) -> None:
    endpoint = AgentEndpoint()
    await endpoint.start()
    client = NullClient(Chat(make_tokenizer()))
    stack = AsyncExitStack()

    async def open_sessions(count: int) -> list[tuple[str, str]]:
        found = []
        for number in range(count):
            prompt = Prompt(f"p{number}", (), np.zeros(0, np.int32), "agent")
            session = AgentSession(prompt, client, Limits(1_000_000))
            address = await stack.enter_async_context(endpoint.opened(session))
            found.append((address.base_url, address.api_key))
        return found

    await _obey(pipe, open_sessions, stack.aclose)
    await endpoint.close()


async def _serve_fixed(pipe: Connection) -> None:
    async def answer(request: web.Request) -> web.Response:
        json.loads(await request.read())
        return web.json_response(FIXED)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def open_sessions(count: int) -> list[tuple[str, str]]:
        return [(url, "key")] * count

    async def close_sessions() -> None:
        pass

    await _obey(pipe, open_sessions, close_sessions)
    await runner.cleanup()


if __name__ == "__main__":
    main()
