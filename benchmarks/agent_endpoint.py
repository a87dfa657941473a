"""Processor time of a call to the endpoint that agents call, with an engine that answers at once.

    uv run benchmarks/agent_endpoint.py
    uv run benchmarks/agent_endpoint.py --hostile

The server has a process of its own. Clients send plain HTTP requests in conversations of eight turns, so that the
figures are the server's: routing, keys, JSON, the chat template, the tree of tokens and its copies. The baseline is an
aiohttp server that reads the same requests and answers with a fixed JSON object.

With `--hostile` it shows what floods of clients, huge messages and malformed requests do to the server's event loop:
the processor time of its thread in the longest pass over the callbacks that were ready, and in the longest callback,
the memory of the process and the size of its log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import resource
import selectors
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from measurement import surroundings, table
from processes import resident_mib

from rl_algos.agents.endpoint import AgentEndpoint
from rl_algos.agents.session import AgentSession
from rl_algos.connections import collect_rarely
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.tiny_model import END, make_tokenizer
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan

TURNS = 8
ASKED = "what is the sum of these numbers: " + " ".join(map(str, range(40)))
ANSWER = "the sum is 780, as each pair of the first and the last of them is 39, and there are 20 of these"
FIXED = {"choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}]}


SLOW = "slow"
"""Beginning of a conversation that is answered after 3 s."""


class NullClient:
    """A policy that answers at once, always the same."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        tokens = chat.encoded(ANSWER + END)
        logprobs = np.zeros(len(tokens), np.float32)
        self._completion = Completion(tokens, logprobs, "stop", (WeightSpan(1, len(tokens)),))
        self.sampling = SamplingParams(max_new_tokens=256)
        self.characters_per_token = chat.characters_per_token
        self.read, self.rendered, self.continuation = chat.read, chat.rendered, chat.continuation
        self.encoded, self.shown, self.pieces = chat.encoded, chat.shown, chat.pieces

    async def generate(self, token_ids: np.ndarray, sampling: Any = None, *, draw: int | None = None) -> Completion:
        if self._chat.encoded(SLOW).tobytes() in token_ids[:64].tobytes():
            await asyncio.sleep(3.0)
        return self._completion

    async def step(self, conversation: Any) -> Any:
        raise NotImplementedError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000, help="calls of each row (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="test run: 200 calls")
    parser.add_argument(
        "--hostile",
        nargs="?",
        const="",
        metavar="NAME",
        help="floods of clients, huge messages and malformed requests; those whose names contain NAME",
    )
    chosen = parser.parse_args()
    if chosen.hostile is not None:
        show_floods(chosen.hostile, scale=0.02 if chosen.quick else 1.0)
        return
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
            pipe.send((used.ru_utime + used.ru_stime, resident_mib()))
        elif asked == "close":
            await close_sessions()
        else:
            pipe.send(await open_sessions(asked))


async def _serve(pipe: Connection) -> None:
    endpoint = AgentEndpoint()
    await endpoint.start()
    client = NullClient(Chat(make_tokenizer()))
    stack = AsyncExitStack()

    async def open_sessions(count: int) -> list[tuple[str, str]]:
        found = []
        for number in range(count):
            prompt = Prompt(f"p{number}", (), np.zeros(0, np.int32), "agent")
            session = AgentSession(prompt, client, 1_000_000)
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


MAX_TOKENS = 262_144
"""`policy.max_total_sequence_length` of the rollouts that are flooded. Requests may then have 8 MiB, the maximum."""

_WORDS = "the quick brown fox jumps over the lazy dog; "


class PassWatch(selectors.EpollSelector):
    """A selector that measures the passes of its event loop: the processor time of the thread between two waits."""

    def __init__(self) -> None:
        super().__init__()
        self.worst_s = 0.0
        self._begun_s: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        """Wait for events."""
        if self._begun_s is not None:
            self.worst_s = max(self.worst_s, time.thread_time() - self._begun_s)
        found = super().select(timeout)
        self._begun_s = time.thread_time()
        return found


class CallbackWatch:
    """Measures the callbacks of event loops: the processor time of the longest one."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        run = asyncio.Handle._run

        def measured(handle: Any) -> None:
            begun = time.thread_time()
            run(handle)
            self.worst_s = max(self.worst_s, time.thread_time() - begun)

        asyncio.Handle._run = measured  # type: ignore[method-assign]


Flood = Callable[[Sequence[tuple[str, str]], int], Awaitable[Counter[str]]]
"""Floods rollouts, each with its URL and key, with so many clients; returns the numbers of answers by status."""

NUM_FLOODED = 256
"""Number of rollouts that the clients of a flood share."""


def _post(path: str, body: bytes, *, num_each: int = 1) -> Flood:
    async def flood(rollouts: Sequence[tuple[str, str]], count: int) -> Counter[str]:
        answers: Counter[str] = Counter()

        async def client(http: aiohttp.ClientSession, url: str, key: str) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            for _ in range(num_each):
                try:
                    async with http.post(f"{url}/{path}", data=body, headers=headers) as response:
                        await response.read()
                        answers[str(response.status)] += 1
                except aiohttp.ClientError:
                    answers["closed"] += 1

        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await asyncio.gather(*[client(http, *rollouts[number % len(rollouts)]) for number in range(count)])
        return answers

    return flood


def _raw(sent: bytes, wait_s: float = 0.0) -> Flood:
    async def flood(rollouts: Sequence[tuple[str, str]], count: int) -> Counter[str]:
        host, port = rollouts[0][0].split("/")[2].split(":")
        answers: Counter[str] = Counter()
        few = asyncio.Semaphore(count if wait_s else 64)

        async def client() -> None:
            async with few:
                try:
                    reader, writer = await asyncio.open_connection(host, int(port))
                    writer.write(sent)
                    async with asyncio.timeout(wait_s or 60):
                        answered = await reader.read(2**16)
                    answers[answered[9:12].decode() or "closed"] += 1
                    writer.close()
                except ConnectionError:
                    answers["closed"] += 1
                except TimeoutError:
                    answers["open"] += 1

        await asyncio.gather(*[client() for _ in range(count)])
        return answers

    return flood


def _asks(content: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def _floods() -> list[tuple[str, int, Flood]]:
    """Return the name of each flood, its number of clients, and the flood."""
    chat, many = "chat/completions", json.dumps({"role": "user", "content": ""})
    deep = b'{"messages": ' + b"[" * 400_000
    numbers = b'{"metadata": [' + b"1," * (3 * 2**20) + b"1]}"
    lists = b'{"metadata": [' + b"[]," * 280_000 + b"1]}"
    return [
        ("calls", 2000, _post(chat, _asks("2+3"), num_each=2)),
        ("calls of 4 kB", 2000, _post(chat, _asks(_WORDS * 90))),
        ("streams of a slow policy", 2000, _post(chat, _asks(SLOW, stream=True))),
        ("messages of 4 MB, refused by size", 200, _post(chat, _asks(_WORDS * (4 * 2**20 // len(_WORDS))))),
        ("messages of 3 MB, tokenised", 4, _post(chat, _asks(_WORDS * (3 * 2**20 // len(_WORDS))))),
        ("bodies of 16 MB", 50, _post(chat, _asks("x" * 2**24))),
        ("100,000 messages", 10, _post(chat, f'{{"messages": [{",".join([many] * 100_000)}]}}'.encode())),
        ("tools of 2 MB", 4, _post(chat, _asks("x", tools=[{"name": "a", "description": _WORDS * 40_000}]))),
        ("JSON: nested 400,000 deep", 100, _post(chat, deep)),
        ("JSON: 3 million numbers", 20, _post(chat, numbers)),
        ("JSON: 280,000 lists", 20, _post(chat, lists)),
        ("malformed, 7 kB", 5000, _raw(b"GET / HTTP/1.1\r\nX: " + b"\xff" * 7000 + b"\r\n\r\n")),
        ("without a key", 5000, _raw(b"POST /rollouts/0/v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")),
        ("half-open", 1000, _raw(b"POST / HTTP/1.1\r\nX", wait_s=40.0)),
    ]


def show_floods(chosen: str, scale: float) -> None:
    """Print a table of floods.

    Args:
        chosen: Part of the names of floods to show; empty for all.
        scale: Part of the clients that each flood has.
    """
    print(f"{surroundings('rl-algos', 'aiohttp')}\n")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    context = multiprocessing.get_context("spawn")
    rows = []
    for name, count, flood in (each for each in _floods() if chosen in each[0]):
        num_clients = max(1, round(count * scale))
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve_watched, args=(theirs,))
        server.start()
        rollouts, before = ours.recv()
        answers = asyncio.run(flood(rollouts, num_clients))
        ours.send("end")
        passes, callbacks, after, log_bytes = ours.recv()
        server.join()
        answered = ", ".join(f"{status}: {number}" for status, number in sorted(answers.items()))
        times = [f"{1000 * seconds:.0f}" for seconds in (passes, callbacks)]
        rows.append([name, str(num_clients), answered, *times, f"{before:.0f}", f"{after:.0f}", str(log_bytes)])
        print(f"{name}: {answered}", flush=True)
    columns = ["flood", "clients", "answers", "worst pass, CPU ms", "worst callback", "MiB before", "MiB after", "log"]
    print(f"\n{table(columns, rows)}")


def _serve_watched(pipe: Connection) -> None:
    callbacks, selector = CallbackWatch(), PassWatch()
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        log = Path(folder, "log")
        logging.basicConfig(filename=log, level=logging.INFO)
        runner.run(_flooded(pipe, selector, callbacks, log))


async def _flooded(pipe: Connection, passes: PassWatch, callbacks: CallbackWatch, log: Path) -> None:
    endpoint = AgentEndpoint(max_tokens=MAX_TOKENS)
    await endpoint.start()
    chat = Chat(make_tokenizer())
    chat.prepare()
    async with AsyncExitStack() as stack:
        addresses = []
        for number in range(NUM_FLOODED):
            prompt = Prompt(f"p{number}", (), np.zeros(0, np.int32), "agent")
            session = AgentSession(prompt, NullClient(chat), MAX_TOKENS)
            addresses.append(await stack.enter_async_context(endpoint.opened(session)))
        collect_rarely()  # as `AgentProgram` does
        await asyncio.sleep(0.1)  # the pass that has prepared the rollouts is not one of the flood
        passes.worst_s = callbacks.worst_s = 0.0
        pipe.send(([(address.base_url, address.api_key) for address in addresses], resident_mib()))
        await asyncio.to_thread(pipe.recv)
        pipe.send((passes.worst_s, callbacks.worst_s, resident_mib(), log.stat().st_size))
    await endpoint.close()


if __name__ == "__main__":
    main()
