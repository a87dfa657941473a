"""An endpoint of chat completions that follows a script, and counts what it was asked."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from rl_algos.judges.limits import WINDOW_S, JudgeClock
from rl_core.rollouts.judging import Question

KEY = "sk-key-of-the-judge-0123456789"

SCORE = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["score"],
}


def question(text, form=None, draw=0):
    return Question(({"role": "user", "content": text},), form, draw)


def completion(text, total_tokens=20, finish_reason="stop"):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"object": "chat.completion", "choices": [choice], "usage": {"total_tokens": total_tokens}}


@dataclass
class Asked:
    """A request as the endpoint sees it."""

    body: dict
    begun_s: float
    headers: dict
    count: int  # how often the endpoint has been asked the same
    tokens: int = 0  # that the endpoint counts for it

    @property
    def text(self):
        return self.body["messages"][-1]["content"]


@dataclass
class ScriptedEndpoint:
    """Answers by `script(asked, request)`: a dict is a completion, a response is sent as it is, and None is a
    connection that ends without an answer."""

    script: object
    clock: JudgeClock = field(default_factory=JudgeClock)
    asked: list = field(default_factory=list)
    most_at_once: int = 0
    base_url: str = ""
    port: int = 0

    async def handle(self, request):
        body = await request.json()
        same = json.dumps(body, sort_keys=True)
        self._counts[same] += 1
        asked = Asked(body, self.clock.now(), dict(request.headers), self._counts[same])
        self.asked.append(asked)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            answer = self.script(asked, request)
            answer = await answer if asyncio.iscoroutine(answer) else answer
        finally:
            self._at_once -= 1
        if answer is None:
            request.transport.abort()
            return web.Response()
        if isinstance(answer, dict):
            asked.tokens = answer["usage"]["total_tokens"]
            return web.json_response(answer)
        return answer

    @asynccontextmanager
    async def serving(self, port=0):
        self._counts, self._at_once = Counter(), 0
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    def most_in_a_minute(self, weight=lambda _: 1):
        """Return the largest sum of a weight over any window of a minute."""
        times = [(each.begun_s, weight(each)) for each in self.asked]
        return max(sum(size for at, size in times if end - WINDOW_S < at <= end) for end, _ in times)
