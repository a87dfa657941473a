"""Environments of OpenEnv: sessions, actions, observations, and servers that do what they should not."""

import asyncio
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web
from recording import played
from scripted_server import SCHEMA, counting, observation, openenv, served

from rl_core import Conversation, EnvironmentFailure, ToolCall
from rl_core.errors import ConfigError
from rl_core.http_client import MAX_ANSWER
from rl_envs.served.client import MAX_TEXT
from rl_envs.served.openenv import (
    OpenEnvEnvironment,
    RefusedAction,
    check_machine,
    default_text,
    last_object,
    load,
    tools_of,
)
from rl_envs.served.plugin import OpenEnvConfig


def turn(text, number=0, id="0", calls=(), **info):
    asked = ({"role": "user", "content": "?"},)
    return Conversation(id, asked, {"reset": {"seed": 3}, **info}, text, turn=number, tool_calls=tuple(calls), seed=7)


def said(result):
    return [message["content"] for message in result.observation]


def play(environment, *texts, **info):
    """The results of a conversation's turns."""
    results, state = [], None
    for number, text in enumerate(texts):
        [result] = environment.step([turn(text, number, **info)], [state])
        results.append(result)
        state = getattr(result, "state", None)
    environment.close([state])
    return results


def test_conversations_have_sessions_of_their_own_and_the_rewards_of_the_server():
    with served(openenv(counting)) as url:
        environment = OpenEnvEnvironment(OpenEnvConfig(url=url))
        turns = [turn("4", id="a"), turn("7", id="b", reset={"seed": 1})]
        a, b = environment.step(turns, [None, None])
        assert (said(a), said(b)) == (["at 7"], ["at 8"])
        assert (a.reward, a.done, a.info) == (0.0, False, {"steps": 1})
        a, b = environment.step([turn("3", 1, id="a"), turn("9", 1, id="b")], [a.state, b.state])
        assert (a.reward, a.done, b.reward, b.done) == (1.0, True, 0.0, True)


def test_a_refused_action_is_answered_and_costs_nothing_else():
    with served(openenv(counting)) as url:
        first, second = play(OpenEnvEnvironment(OpenEnvConfig(url=url)), "seven", "7")
    assert said(first) == ["Error: text: should be digits"]
    assert not first.done
    assert second.reward == 1.0


def test_a_row_shows_its_start_and_a_start_that_differs_fails_the_rollout():
    with served(openenv(counting)) as url:
        rows = load({"url": url, "size": 3, "instructions": "Add.", "reset": {"deck": 1}}, "train")
        others = load({"url": url, "size": 3}, "validation")
        assert {row["info"]["reset"]["seed"] % 2 for row in rows} == {0}
        assert {row["info"]["reset"]["seed"] % 2 for row in others} == {1}
        seed = rows[0]["info"]["reset"]["seed"]
        assert rows[0]["messages"] == [{"role": "user", "content": f"Add.\n\nat {seed}"}]
        assert rows[0]["info"] == {"reset": {"seed": seed, "deck": 1}, "start": f"at {seed}"}
        [failure] = play(OpenEnvEnvironment(OpenEnvConfig(url=url)), "7", start="at 4")
        assert "begins otherwise than in the row" in failure.reason
        assert failure.fault == "raised"


def test_a_start_that_does_not_follow_from_the_seed_is_the_answer_to_the_first_turn():
    count = iter(range(100))

    async def changing(socket):
        async for _ in socket:
            await socket.send_json(observation(f"{next(count)}", 1.0, done=False))

    with served(openenv(changing)) as url:
        with pytest.raises(ConfigError, match=r"begin differently.*show_start=false"):
            load({"url": url, "size": 2}, "train")
        [row, _] = load({"url": url, "size": 2, "show_start": False}, "train")
        assert row["messages"][0]["content"] == "Begin."
        assert row["info"]["show_start"]
        first, second = play(OpenEnvEnvironment(OpenEnvConfig(url=url)), "anything", "1", **row["info"])
    assert (first.reward, second.reward) == (0.0, 1.0)
    assert int(said(second)[0]) == int(said(first)[0]) + 1


def test_a_restored_conversation_takes_its_actions_again():
    with served(openenv(counting)) as url:
        config = OpenEnvConfig(url=url)
        one, other = OpenEnvEnvironment(config), OpenEnvEnvironment(config)
        [result] = one.step([turn("4")], [None])
        [saved] = one.save([result.state])
        one.close([result.state])
        assert json.loads(saved)[:2] == [{"seed": 3}, [{"text": "4"}]]
        [end] = other.step([turn("3", 1)], other.restore([saved]))
        assert end.reward == 1.0
        changed = saved.replace(b'"seed": 3', b'"seed": 4')
        [failure] = other.step([turn("3", 1)], other.restore([changed]))
        assert failure.fault == "process"
        assert "otherwise than it did before" in failure.reason


def test_pings_between_turns_are_answered():
    with served(openenv(counting, heartbeat=0.1)) as url:
        environment = OpenEnvEnvironment(OpenEnvConfig(url=url))
        [result] = environment.step([turn("4")], [None])
        time.sleep(0.5)
        [result] = environment.step([turn("3", 1)], [result.state])
        assert result.reward == 1.0


def hostile(answer):
    """A session whose reset is right, and whose step is answered by `answer(socket)`."""

    async def session(socket):
        await socket.receive()
        await socket.send_json(observation("hello"))
        message = await socket.receive()
        if "good" in str(message.data):
            await socket.send_json(observation("bye", 1.0, done=True))
        elif message.type is web.WSMsgType.TEXT:
            await answer(socket)

    return session


HOSTILE = {
    "huge": (lambda socket: socket.send_str("x" * (MAX_ANSWER + 1)), "raised", "broke the WebSocket protocol"),
    "binary": (lambda socket: socket.send_bytes(b"{}"), "raised", "binary"),
    "no JSON": (lambda socket: socket.send_str("{"), "raised", "not a JSON object"),
    "deep": (lambda socket: socket.send_str("[" * 200_000), "raised", "not a JSON object"),
    "a list": (lambda socket: socket.send_str("[1]"), "raised", "not a JSON object"),
    "another type": (
        lambda socket: socket.send_json({"type": "state", "data": {}}),
        "raised",
        "without an observation",
    ),
    "no data": (
        lambda socket: socket.send_json({"type": "observation", "data": 3}),
        "raised",
        "without an observation",
    ),
    "NaN": (lambda socket: socket.send_json(observation("", float("nan"))), "raised", "not a finite number"),
    "endless number": (lambda socket: socket.send_json(observation("", 10**400)), "raised", "not a finite number"),
    "reward of text": (lambda socket: socket.send_json(observation("", "1")), "raised", "not a finite number"),
    "done of text": (lambda socket: socket.send_json(observation("", 1.0, "no")), "raised", "without an observation"),
    "an error": (
        lambda socket: socket.send_json(
            {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "m" * 10_000}}
        ),
        "raised",
        "reports EXECUTION_ERROR: mmm",
    ),
    "its end": (lambda socket: socket.close(), "process", "closed the session"),
    "silence": (lambda socket: asyncio.sleep(3), "deadline", "not answered within"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_costs_one_rollout(kind):
    answer, fault, reason = HOSTILE[kind]
    with served(openenv(hostile(answer))) as url:
        environment = OpenEnvEnvironment(OpenEnvConfig(url=url, deadline_s=1.0 if kind == "silence" else 30.0))
        bad, good = environment.step([turn("bad", id="a"), turn("good", id="b")], [None, None])
        assert isinstance(bad, EnvironmentFailure)
        assert bad.fault == fault
        assert reason in bad.reason
        assert len(bad.reason) < 600
        assert good.reward == 1.0
        [again] = environment.step([turn("good")], [None])
        assert again.reward == 1.0


def test_unasked_messages_fail_the_rollout():
    async def chatty(socket):
        async for message in socket:
            for _ in range(1 if "reset" in message.data else 2):
                await socket.send_json(observation("a"))

    with served(openenv(chatty)) as url:
        environment = OpenEnvEnvironment(OpenEnvConfig(url=url))
        [result] = environment.step([turn("1")], [None])
        time.sleep(0.2)
        [failure] = environment.step([turn("2", 1)], [result.state])
    assert isinstance(failure, EnvironmentFailure)
    assert "unasked" in failure.reason


def test_a_server_without_room_is_tried_again_until_there_is_some():
    open_sessions = set()

    async def one_at_a_time(socket):
        if open_sessions:
            error = {"code": "CAPACITY_REACHED", "message": "full", "max_sessions": 1}
            await socket.send_json({"type": "error", "data": error})
            return
        open_sessions.add(socket)
        try:
            await counting(socket)
        finally:
            open_sessions.discard(socket)

    with served(openenv(one_at_a_time)) as url:
        environment = OpenEnvEnvironment(OpenEnvConfig(url=url, deadline_s=10.0))
        results = environment.step([turn("7", id=str(index)) for index in range(4)], [None] * 4)
        assert [result.reward for result in results] == [1.0] * 4
        [kept] = environment.step([turn("1")], [None])
        hasty = OpenEnvEnvironment(OpenEnvConfig(url=url, deadline_s=0.5))
        [failure] = hasty.step([turn("7")], [None])
        environment.close([kept.state])
    assert failure.fault == "process"
    assert "set env.openenv.max_concurrent=1" in failure.reason


def test_a_server_that_starts_late_is_waited_for_and_one_that_never_does_for_a_bounded_time():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    begin = time.monotonic()
    [failure] = play(OpenEnvEnvironment(OpenEnvConfig(url=url, deadline_s=1.0)), "7")
    assert time.monotonic() - begin < 5
    assert failure.fault == "process"
    assert failure.reason.startswith(f"the server {url} cannot be reached")
    for refused in (lambda: tools_of(OpenEnvConfig(url=url)), lambda: load({"url": url, "size": 1}, "train")):
        with pytest.raises(ConfigError, match=r"cannot be reached.*Start the server before the run"):
            refused()
    results = []
    environment = OpenEnvEnvironment(OpenEnvConfig(url=url, deadline_s=40.0))
    waiting = threading.Thread(target=lambda: results.extend(play(environment, "7")))
    waiting.start()
    time.sleep(0.3)
    with served(openenv(counting), port):
        waiting.join(30)
    assert results[0].reward == 1.0


def test_keys_are_sent_and_never_shown():
    seen = []

    async def refuse(request):
        seen.append((request.path, request.query_string, request.headers.get("X-Key")))
        raise web.HTTPForbidden

    with served([web.get("/secret-1/{path}", refuse)]) as url:
        config = OpenEnvConfig(url=f"{url}/secret-1?token=secret-2", headers={"X-Key": "secret-3"})
        problem = check_machine(config)
        [failure] = play(OpenEnvEnvironment(config), "1")
    assert "HTTP 403" in problem
    assert "HTTP 403" in failure.reason
    assert ("/secret-1/schema", "token=secret-2", "secret-3") in seen
    assert ("/secret-1/ws", "token=secret-2", "secret-3") in seen
    assert "secret" not in problem + failure.reason
    with pytest.raises(ValueError, match="no user and password"):
        OpenEnvConfig(url="http://me:secret@host")
    with pytest.raises(ValueError, match="begins with http"):
        OpenEnvConfig(url="localhost:8000")


def test_redirects_do_not_lead_keys_to_another_server():
    seen = []

    async def steal(request):
        seen.append(dict(request.headers))
        raise web.HTTPForbidden

    async def schema(request):
        return web.json_response(SCHEMA)

    with served([web.get("/ws", steal)]) as other:

        async def redirect(request):
            raise web.HTTPFound(f"{other}/ws")

        with served([web.get("/ws", redirect), web.get("/schema", schema)]) as url:
            [failure] = play(OpenEnvEnvironment(OpenEnvConfig(url=url, headers={"X-Key": "secret"})), "1")
    assert not seen
    assert (failure.fault, failure.reason) == (
        "raised",
        f"the server {url} redirects, which is not followed because the headers must not go elsewhere",
    )


def test_another_server_is_refused_before_the_run():
    with served([]) as url:
        assert "is not a server of OpenEnv: it has no schema of actions (HTTP 404)" in check_machine(
            OpenEnvConfig(url=url)
        )


@pytest.mark.parametrize(
    ("properties", "text", "action"),
    [
        ({"text": {"type": "string"}}, " go \n", {"text": "go"}),
        ({"column": {"type": "integer"}}, "I pick 2, no, column 5.", {"column": 5}),
        ({"force": {"type": "number"}}, "-0.5", {"force": -0.5}),
        (
            {"x": {"type": "integer"}, "y": {}},
            'First {"x": 1}, no: {"x": {"a": 2}, "y": "}"}.',
            {"x": {"a": 2}, "y": "}"},
        ),
        ({"column": {"type": "integer"}}, "the left one", "Error: write a number as column"),
        ({"x": {}, "y": {}}, "left {", "Error: write the action as a JSON object"),
    ],
)
def test_the_text_of_a_turn_becomes_the_action_that_the_schema_asks_for(properties, text, action):
    taken = []

    async def session(socket):
        async for message in socket:
            taken.append(json.loads(message.data))
            await socket.send_json(observation("ok"))

    schema = {"action": {"properties": {"metadata": {}, **properties}, "required": list(properties)}}
    with served(openenv(session, schema)) as url:
        [result] = play(OpenEnvEnvironment(OpenEnvConfig(url=url)), text)
    steps = [each["data"] for each in taken if each["type"] == "step"]
    assert steps == ([action] if isinstance(action, dict) else [])
    assert said(result) == (["ok"] if isinstance(action, dict) else [action])


def test_functions_of_the_user_translate_actions_and_observations(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def action(text):\n"
        "    if text == 'no':\n        raise ValueError('say yes')\n    return {'text': str(len(text))}\n"
        "def message(observation):\n    return observation['text'].upper() if 'at' in observation['text'] else 1 / 0\n"
    )
    with served(openenv(counting)) as url:
        config = OpenEnvConfig(url=url, action=f"{file}:action", message=f"{file}:message")
        first, second = play(OpenEnvEnvironment(config), "no", "four")
        wrong = tmp_path / "wrong.py"
        wrong.write_text("def action(text):\n    return {'text': {text}} if text == 'set' else None\n")
        for text in ("set", "none"):
            [failure] = play(OpenEnvEnvironment(OpenEnvConfig(url=url, action=f"{wrong}:action")), text)
            assert "action returns an action as a dict of JSON values, got" in failure.reason
    assert said(first) == ["Error: say yes"]
    assert said(second) == ["AT 7"]

    async def odd(socket):
        async for _ in socket:
            await socket.send_json(observation("?"))

    with served(openenv(odd)) as url:
        [failure] = play(OpenEnvEnvironment(OpenEnvConfig(url=url, message=f"{file}:message")), "four")
    assert "message raised ZeroDivisionError: division by zero (line 6 of" in failure.reason


def test_an_action_of_several_fields_may_be_a_tool():
    schema = {"action": {**SCHEMA["action"], "description": "Add."}}
    with served(openenv(counting, schema)) as url:
        config = OpenEnvConfig(url=url, call_format="model")
        [tool] = tools_of(config)
        assert tool["function"]["name"] == "act"
        assert tool["function"]["description"] == "Add."
        assert tool["function"]["parameters"]["properties"] == {"text": {"type": "string"}}
        environment = OpenEnvEnvironment(config)
        calls = [ToolCall("act", {"text": "4"}, "x"), ToolCall("add", {}, "y"), ToolCall("", {}, "z", error="no JSON")]
        [result] = environment.step([turn("", calls=calls)], [None])
        assert [message["role"] for message in result.observation] == ["tool"] * 3
        assert said(result) == [
            "at 7",
            "Error: there is no tool 'add'; the tool is act",
            "Error: the tool call cannot be read: no JSON",
        ]
        [end] = environment.step([turn("That is all.", 1)], [result.state])
        assert end.done
        assert end.reward == 0.0
        assert OpenEnvEnvironment(OpenEnvConfig(url=url)).step([turn("7")], [None])[0].reward == 1.0


def test_texts_of_observations():
    assert default_text({"metadata": {"a": 1}, "text": "hello"}) == "hello"
    assert default_text({"metadata": {"message": "ready"}}) == "ready"
    assert default_text({"board": [[0, 1]], "legal": "a", "metadata": {}}) == '{"board": [[0, 1]], "legal": "a"}'
    assert default_text({"tool_name": "t", "result": {"a": 1}, "error": None}) == '{"a": 1}'
    assert default_text({"tool_name": "t", "result": None, "error": {"message": "no"}}) == "Error: no"
    assert len(default_text({"text": "x" * 10**6})) == MAX_TEXT
    assert default_text({"text": "\ud800"}) == "?"
    assert last_object('{"a": {"b": 1}} and {"c": 2} {') == {"c": 2}
    begin = time.process_time()
    with pytest.raises(RefusedAction, match="JSON object"):
        last_object("{" * 10**6)
    for depth in (950, 985):  # What can just be read may be too deep to be written.
        with pytest.raises(RefusedAction, match="JSON object"):
            last_object(f'{{"a": {"[" * depth}{"]" * depth}}}')
    assert time.process_time() - begin < 5


def test_a_recorded_session_of_openenv_is_played_as_it_was():
    """The recording is of openenv 0.10.0: an environment that takes texts, and one with tools."""
    played(Path(__file__).with_name("openenv.json"))
