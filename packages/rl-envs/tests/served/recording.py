"""Sessions with the real servers of others, recorded through a proxy and played again without them.

`python recording.py openenv TEXTS_URL TOOLS_URL` and `python recording.py nemo_gym COUNTER_URL STEPS_URL` record again,
with servers of the newest packages at these addresses: for OpenEnv an environment of one string that is over after two
steps and one with the tools `add` and `fail`, for NeMo Gym `example_session_state_mgmt` and
`example_multi_turn_gymnasium`.
"""

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
from aiohttp import web
from scripted_server import served

from rl_core import Conversation, ToolCall
from rl_envs.served.nemo_gym import NeMoGymEnvironment
from rl_envs.served.openenv import OpenEnvEnvironment, tools_of
from rl_envs.served.plugin import NeMoGymConfig, OpenEnvConfig

KINDS = {"openenv": (OpenEnvConfig, OpenEnvEnvironment), "nemo_gym": (NeMoGymConfig, NeMoGymEnvironment)}


def results_of(kind, url, play):
    """The tools of a server if they are asked for, and the reward, the end and the messages of each turn."""
    settings, environment = KINDS[kind]
    config = settings(url=url)
    found = [tools_of(config)] if play.get("lists") else []
    environment = environment(config)
    state, asked = None, tuple(play.get("messages", [{"role": "user", "content": "?"}]))
    for number, turn in enumerate(play["turns"]):
        calls = tuple(ToolCall(*call) for call in turn.get("calls", ()))
        messages = (*asked, {"role": "assistant", "content": turn.get("text", "")})
        conversation = Conversation("0", messages, play["info"], turn.get("text", ""), turn=number, tool_calls=calls)
        [result] = environment.step([conversation], [state])
        if not hasattr(result, "done"):
            raise AssertionError(result.reason)
        found.append([result.reward, result.done, [message["content"] for message in result.observation]])
        state = result.state
    environment.close([state])
    return found


def played(path):
    """Play a recording, and compare the results and all that was sent with what they were."""
    recording = json.loads(path.read_text())
    for play in recording["plays"]:
        requests, sessions = list(play["requests"]), list(play["sessions"])

        async def answer(request, requests=requests):
            sent = await _sent(request)
            exchange = next(each for each in requests if each[0] == sent)
            requests.remove(exchange)
            return _response(*exchange[1])

        async def session(request, sessions=sessions):
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            exchanges = sessions.pop(0)
            async for message in socket:
                sent, answer = exchanges.pop(0)
                assert json.loads(message.data) == sent
                await socket.send_json(answer)
            assert not exchanges
            return socket

        with served([web.get("/ws", session), web.route("*", "/{path:.*}", answer)]) as url:
            assert results_of(recording["kind"], url, play) == play["results"]
        assert not requests
        assert not sessions


async def _sent(request):
    body = await request.text()
    return [request.method, request.path, json.loads(body) if body else None, request.headers.get("Cookie", "")]


def _response(status, body, cookies):
    response = web.Response(status=status, text=body, content_type="application/json")
    for name, value in cookies.items():
        response.set_cookie(name, value)
    return response


def recorded(kind, upstream, play):
    """Return a play with the results and the exchanges of a real server."""
    requests, sessions = [], []

    async def relay(request):
        sent = await _sent(request)
        headers = {"Cookie": sent[3]} if sent[3] else {}
        jar = aiohttp.DummyCookieJar()
        async with (
            aiohttp.ClientSession(cookie_jar=jar) as client,
            client.request(sent[0], upstream + sent[1], json=sent[2], headers=headers) as response,
        ):
            answer = [
                response.status,
                await response.text(),
                {name: each.value for name, each in response.cookies.items()},
            ]
        requests.append([sent, answer])
        return _response(*answer)

    async def relay_session(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        exchanges = []
        sessions.append(exchanges)
        async with aiohttp.ClientSession() as client, client.ws_connect(upstream + "/ws") as real:
            async for message in socket:
                await real.send_str(message.data)
                exchanges.append([json.loads(message.data), json.loads((await real.receive()).data)])
                await socket.send_json(exchanges[-1][1])
        return socket

    with served([web.get("/ws", relay_session), web.route("*", "/{path:.*}", relay)]) as url:
        results = results_of(kind, url, play)
        asyncio.run(asyncio.sleep(0.1))
    return {**play, "results": results, "requests": requests, "sessions": sessions}


def main(kind, *urls):
    if kind == "openenv":
        add, fail = ["add", {"number": 1}, "a"], ["fail", {}, "b"]
        plays = [
            {"info": {"reset": {"seed": 5}}, "turns": [{"text": "0"}, {"text": "9"}]},
            {
                "info": {"reset": {"seed": 5}},
                "lists": True,
                "turns": [
                    {"calls": [add, fail, ["add", {"number": "x"}, "c"], ["nothing", {}, "d"]]},
                    {"calls": [["add", {"number": 2}, "a"]]},
                ],
            },
        ]
    else:
        tool = {"type": "function", "parameters": {"type": "object"}, "description": "", "strict": True}
        tools = [{**tool, "name": "increment_counter"}, {**tool, "name": "get_counter_value"}]
        counter = {"input": [{"role": "user", "content": "Add 1."}], "tools": tools}
        task = {"responses_create_params": counter, "initial_count": 3, "expected_count": 4}
        asked = {"input": [{"role": "user", "content": "What is the capital of France?"}]}
        game = {"responses_create_params": asked, "follow_ups": ["A landmark?"], "expected_answer": "Eiffel"}
        plays = [
            {
                "info": {"task": task},
                "turns": [
                    {"calls": [["increment_counter", {"count": 1}, "a"], ["increment_counter", {"n": 1}, "b"]]},
                    {"calls": [["get_counter_value", {}, "a"], ["verify", {}, "b"]]},
                    {"text": "It is 4."},
                ],
            },
            {"info": {"task": game}, "turns": [{"text": "Paris."}, {"text": "The Eiffel tower."}]},
        ]
    recordings = [recorded(kind, url, play) for url, play in zip(urls, plays, strict=True)]
    path = Path(__file__).with_name(f"{kind}.json")
    path.write_text(json.dumps({"kind": kind, "plays": recordings}, indent=1) + "\n")
    sys.stdout.write("".join(f"{each['results']}\n" for each in recordings))


if __name__ == "__main__":
    main(*sys.argv[1:])
