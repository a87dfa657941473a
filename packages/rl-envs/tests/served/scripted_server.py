"""A server in a thread, which answers as a test wants it to."""

import asyncio
import json
import threading
from contextlib import contextmanager

from aiohttp import web

SCHEMA = {"action": {"properties": {"metadata": {"type": "object"}, "text": {"type": "string"}}, "required": ["text"]}}


@contextmanager
def served(routes, port=0):
    """Enter with the address of a server with these routes of aiohttp."""
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        app = web.Application(client_max_size=2**26)
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        address.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        ready.set()
        return runner

    def run():
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def openenv(play, schema=SCHEMA, **socket):
    """Routes of OpenEnv's protocol: `play(socket)` is a session; `socket` are settings of its connection."""

    async def session(request):
        connection = web.WebSocketResponse(**socket)
        await connection.prepare(request)
        await play(connection)
        return connection

    async def schemas(request):
        return web.json_response(schema)

    return [web.get("/ws", session), web.get("/schema", schemas)]


def observation(text, reward=None, done=False, **fields):
    """A message of OpenEnv."""
    data = {"observation": {"metadata": {}, "text": text, **fields}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


async def counting(socket):
    """A session that adds numbers up from the seed of its reset, until the sum is 10 or more."""
    async for message in socket:
        told = json.loads(message.data)
        if told["type"] == "reset":
            total = told["data"]["seed"]
            await socket.send_json(observation(f"at {total}"))
        elif told["data"].get("text", "").isdigit():
            total += int(told["data"]["text"])
            await socket.send_json(observation(f"at {total}", float(total == 10), total >= 10))
        else:
            problem = {"loc": ["text"], "msg": "should be digits"}
            error = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [problem]}
            await socket.send_json({"type": "error", "data": error})
