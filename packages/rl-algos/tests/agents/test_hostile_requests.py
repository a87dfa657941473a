"""Requests that would stop, fill or exhaust a rollout worker."""

import asyncio
import json
import threading
from collections import Counter
from contextlib import suppress

import aiohttp
import anthropic
import openai
import pytest
from scripted_client import END, ScriptedClient, check_recorded, says, session_of
from served_rollout import served

from rl_algos import connections
from rl_algos.agents import endpoint as endpoint_module
from rl_algos.agents.calls import CallRefused, ModelCall
from rl_algos.agents.session import MAX_AGENTS, SMALL
from rl_algos.connections import Connections, Pace, SparingLog

USER = {"role": "user", "content": "Hi"}


def draws(**settings):
    return ScriptedClient(lambda before, draw: f"Draw {draw}.{END}", **settings)


class Watched(ScriptedClient):
    """A policy that notes the threads in which it renders, and may hold them."""

    def __post_init__(self):
        super().__post_init__()
        self.threads, self.released = [], threading.Event()
        self.released.set()

    def rendered(self, *args):
        self.threads.append(threading.get_ident())
        self.released.wait(20)
        return super().rendered(*args)


def watched():
    return Watched(lambda before, draw: f"Draw {draw}.{END}")


async def raw(address, sent, *, until=b"", timeout_s=10):
    """Send bytes; return what is answered until the connection is closed, or until some bytes have come."""
    host, _, port = address.base_url.split("/")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    answered = b""
    async with asyncio.timeout(timeout_s):
        while not (until and until in answered) and (some := await reader.read(2**16)):
            answered += some
    writer.close()
    return answered


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_rendered():
    async def main():
        policy = watched()
        longest = policy.characters_per_token
        async with served(policy, max_tokens=400) as to:
            huge = {"messages": [{"role": "user", "content": "x" * int(401 * longest)}]}
            status, body = await to.post("chat/completions", huge)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            assert "at least 401 tokens; the maximum is 400" in body["error"]["message"]
            status, body = await to.post("messages/count_tokens", huge)
            assert (status, "at least 401 tokens" in body["error"]["message"]) == (400, True)
            assert not policy.threads
            # what would still fit by its size alone is rendered
            assert (await to.post("chat/completions", {"messages": [USER]}))[0] == 200
            status, body = await to.post("chat/completions", huge)
            assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
            assert len(policy.threads) == 1
            assert to.session.rollout().status == "truncated"

    asyncio.run(main())


def test_the_same_request_is_tokenised_once_however_often_it_is_sent():
    async def main():
        policy = watched()
        # few characters for the longest token, and too many tokens
        long = {"messages": [{"role": "user", "content": "x" * 3000}]}
        async with served(policy, max_tokens=400) as to:
            for _ in range(5):
                assert (await to.post("chat/completions", long))[0] == 400
            assert len(policy.threads) == 1
            assert (await to.post("chat/completions", {"messages": [USER]}))[0] == 200
            answers = [await to.post("chat/completions", long) for _ in range(5)]
            assert {body["choices"][0]["finish_reason"] for _, body in answers} == {"length"}
            assert len(policy.threads) == 3
            assert len({body["id"] for _, body in answers}) == 1

    asyncio.run(main())


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens"])
def test_only_small_requests_are_rendered_on_the_event_loop(path):
    async def main():
        policy = watched()
        async with served(policy, max_tokens=20_000) as to:
            for size, is_own in ((1, True), (SMALL + 1, False)):
                messages = [{"role": "user", "content": "x" * size}]
                status, _ = await to.post(path, {"messages": messages, "input": messages, "max_tokens": 5})
                assert status == 200
                assert (policy.threads[-1] == threading.get_ident()) is is_own

    asyncio.run(main())


def test_one_request_of_a_rollout_at_a_time_is_tokenised_and_others_go_on():
    async def main():
        policy = watched()
        policy.released.clear()
        session, other = session_of(policy, max_tokens=20_000), session_of(draws())

        async def ask(number):
            content = f"{number}" + "x" * SMALL
            async with session.admitted():
                answering = await session.begin(ModelCall(messages=({**USER, "content": content},), size=len(content)))
            return await answering

        asking = [asyncio.create_task(ask(number)) for number in range(10)]
        while not policy.threads:
            await asyncio.sleep(0.01)
        for each in asking[:5]:
            each.cancel()  # an agent that hangs up, and asks for something else
        assert (await other.answer(ModelCall(messages=(USER,)))).choices[0].text == "Draw 0."
        await asyncio.sleep(0.1)
        assert len(policy.threads) <= 2
        policy.released.set()
        await asyncio.wait(asking)
        assert len(policy.threads) <= 6  # those of requests that were read before their client hung up
        assert all(each.cancelled() for each in asking[:5])
        assert {each.result().choices[0].text for each in asking[5:]} == {"Draw 0."}

    asyncio.run(main())


def test_a_refused_call_leaves_nothing_behind():
    async def main():
        session = session_of(draws(), max_tokens=100)
        for number in range(200):
            with pytest.raises(CallRefused):
                await session.answer(ModelCall(messages=({**USER, "content": f"{number} " + "x" * 200},)))
        assert not session._draws
        assert len(session._refused) <= 64

    asyncio.run(main())


def test_agents_of_a_rollout_are_limited():
    session = session_of(draws())
    for number in range(MAX_AGENTS):
        session.of_agent(f"a{number}")
    with pytest.raises(CallRefused, match="64 agents"):
        session.of_agent("another")


@pytest.mark.parametrize(
    "sent",
    [
        b'{"messages": [' + b"[]," * 100_000 + b"0]}",
        b'{"messages": [' + b"{}," * 100_000 + b"0]}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"metadata": "' + b"x" * (2**20 + 33 * 4000) + b'"}',
    ],
    ids=["lists", "objects", "digits", "bytes"],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_json_that_takes_long_to_read_is_refused(monkeypatch, path, sent):
    served_for = endpoint_module.AgentEndpoint
    monkeypatch.setattr("served_rollout.AgentEndpoint", lambda: served_for(max_tokens=4000))

    async def main():
        async with served(draws()) as to:
            status, body = await to.post(path, sent)
            assert status in (400, 413)
            assert body["error"]["message"]

    asyncio.run(main())


UNKNOWN = [
    ("POST", "v1/embeddings", 404, "embeddings is not served; a rollout has chat/completions"),
    ("GET", "v1/files", 404, "files is not served"),
    ("POST", "v1/chat/completions/more", 404, "is not served"),
    ("POST", "chat/completions", 404, "is not served"),
    ("GET", "v1/chat/completions", 405, "GET is not allowed"),
    ("PUT", "v1/models", 405, "PUT is not allowed"),
    ("DELETE", "v1/responses/rl-0", 404, "is not served"),
    ("OPTIONS", "v1/responses", 405, "OPTIONS is not allowed"),
]


@pytest.mark.parametrize(("method", "path", "status", "message"), UNKNOWN)
@pytest.mark.parametrize("is_anthropic", [False, True])
def test_every_route_has_errors_that_clients_read(method, path, status, message, is_anthropic):
    async def main():
        async with served(draws()) as to, aiohttp.ClientSession() as http:
            headers = {"x-api-key": to.address.api_key, **({"anthropic-version": "2023-06-01"} if is_anthropic else {})}
            async with http.request(method, f"{to.address.root_url}/{path}", headers=headers, data=b"{}") as response:
                body = json.loads(await response.read())
                assert (response.status, message in body["error"]["message"]) == (status, True)
                if status == 404:
                    assert (body.get("type") == "error") is is_anthropic
                    assert body["error"]["type"] == "not_found_error"

    asyncio.run(main())


def test_a_client_shows_why_a_route_is_not_served():
    async def main():
        async with served(draws()) as to:
            with pytest.raises(openai.NotFoundError, match="embeddings is not served"):
                await to.openai.embeddings.create(model="m", input="Hi")
            with pytest.raises(anthropic.NotFoundError, match="is not served"):
                await to.anthropic.messages.batches.list()

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET / HTTP/1.1\r\nBad Header: \xff\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"\xff" * 20_000 + b"\r\n\r\n",
        b"{" * 5000 + b"\r\n\r\n",
    ],
    ids=["tls", "header", "length", "long", "garbage"],
)
def test_strangers_cannot_fill_the_log(caplog, sent):
    async def main():
        async with served(draws()) as to:
            for _ in range(40):
                answered = await raw(to.address, sent)
                body = json.loads(answered.partition(b"\r\n\r\n")[2])
                assert "not valid HTTP" in body["error"]["message"]
            status, _ = await to.post("chat/completions", {"messages": [USER]})
            assert status == 200

    asyncio.run(main())
    assert len(caplog.records) == 1
    assert len(caplog.text) < 500


def test_events_are_counted_and_logged_at_most_once_a_minute(caplog, monkeypatch):
    log = SparingLog(connections._log, "%d events, the last because of %s")
    now = 1000.0
    monkeypatch.setattr(connections.time, "monotonic", lambda: now)
    for _ in range(100):
        log.note("it")
    now += 61
    log.note("that")
    assert [record.getMessage() for record in caplog.records] == [
        "1 events, the last because of it",
        "100 events, the last because of that",
    ]


def test_many_requests_at_once_are_spread_over_the_passes_of_the_loop(monkeypatch):
    now, passes, begun = [0.0], [0], Counter()
    monkeypatch.setattr(connections.time, "perf_counter", lambda: now[0])

    async def work(pace):
        await pace.turn()
        begun[passes[0]] += 1
        now[0] += 0.004

    async def main():
        pace = Pace(budget_s=0.01)
        working = asyncio.gather(*[work(pace) for _ in range(50)])
        while not working.done():
            await asyncio.sleep(0)
            passes[0] += 1

    asyncio.run(main())
    assert begun.total() == 50
    assert max(begun.values()) == 3


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\n", b"GET /rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nX"])
def test_a_connection_without_a_complete_request_is_closed(monkeypatch, sent):
    monkeypatch.setattr(connections, "IDLE_S", 0.3)

    async def main():
        async with served(draws()) as to:
            answered = b""
            with suppress(ConnectionResetError):
                answered = await raw(to.address, sent)
            assert answered == b""

    asyncio.run(main())


def test_a_connection_that_drips_is_closed_and_one_that_waits_for_its_answer_is_not(monkeypatch):
    monkeypatch.setattr(connections, "IDLE_S", 0.5)

    async def drip(address):
        host, _, port = address.base_url.split("/")[2].rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b"X: y\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)

    async def main():
        policy = draws(gate=asyncio.Event())
        async with served(policy) as to:
            asking = asyncio.create_task(to.post("chat/completions", {"messages": [USER]}))
            async with asyncio.timeout(20):
                await drip(to.address)
            policy.gate.set()
            assert (await asking)[0] == 200

    asyncio.run(main())


def test_a_body_that_does_not_arrive_is_answered(monkeypatch):
    monkeypatch.setattr(connections, "TRANSFER_S", 0.2)

    async def main():
        async with served(draws()) as to:
            head = (
                f"POST /rollouts/{to.address.rollout}/v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n"
            )
            answered = await raw(to.address, f"{head}x-api-key: {to.address.api_key}\r\n\r\n{{".encode(), until=b"}}")
            assert answered.startswith(b"HTTP/1.1 408")
            assert b"did not arrive within 0.2 s" in answered

    asyncio.run(main())


def test_open_connections_do_not_shut_others_out(monkeypatch):
    def limited(*args, **settings):
        return Connections(*args, limit=4, **settings)

    monkeypatch.setattr(endpoint_module, "Connections", limited)

    async def main():
        async with served(draws()) as to:
            host, _, port = to.address.base_url.split("/")[2].rpartition(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
            assert (await to.post("chat/completions", {"messages": [USER]}))[0] == 200
            ended = 0
            for reader, writer in held:
                with suppress(TimeoutError, ConnectionResetError):
                    async with asyncio.timeout(0.05):
                        await reader.read()
                ended += reader.at_eof() or reader.exception() is not None
                writer.close()
            assert ended >= 16

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost", 200),
        ("LocalHost:1", 200),
        ("169.254.169.254", 403),
        ("[::1]", 403),
        ("[::1].evil.com", 403),
        ("127.0.0.1.evil.com", 403),
        ("127.0.0.1:80:80", 403),
        ("127.0.0.1@evil.com", 403),
        ("", 403),
        ("127.0.0.1\r\nHost: evil.com", 403),
    ],
)
def test_only_the_own_host_is_served(host, status):
    async def main():
        async with served(draws()) as to:
            port = to.address.root_url.split(":")[2].partition("/")[0]
            head = f"GET /rollouts/{to.address.rollout}/v1/models HTTP/1.1\r\nHost: {host.format(port=port)}\r\n"
            sent = f"{head}x-api-key: {to.address.api_key}\r\nConnection: close\r\n\r\n"
            answered = await raw(to.address, sent.encode())
            # two hosts are no valid HTTP for some parsers
            assert int(answered.split()[1]) in (status, 400 if status == 403 else status)

    asyncio.run(main())


def test_a_compressed_body_is_refused():
    async def main():
        async with served(draws()) as to:
            status, body = await to.post("responses", b"x", **{"Content-Encoding": "gzip"})
            assert (status, "without Content-Encoding" in body["error"]["message"]) == (415, True)

    asyncio.run(main())


REWARDS = [
    b"1" + b"0" * 400,
    b"NaN",
    b"1e999",
    b"-Infinity",
    b"true",
    b"null",
    b'"1"',
    b"[1]",
    b'{"a": {"b": 1}}',
    b'{"a": ' + b"9" * 4000 + b"}",
    json.dumps({f"r{number}": 1 for number in range(101)}).encode(),
    json.dumps({"r" * 101: 1}).encode(),
]


@pytest.mark.parametrize("reward", REWARDS)
def test_a_posted_reward_of_any_value_is_taken_or_refused_with_a_reason(reward, caplog):
    async def main():
        async with served(draws(), takes_rewards=True) as to:
            key = {"Authorization": f"Bearer {to.address.reward_key}"}
            status, body = await to.post("reward", b'{"reward": ' + reward + b"}", **key)
            assert (status, "reward" in body["error"]["message"]) == (400, True)
            assert (await to.post("reward", {"reward": 0.5}, **key))[0] == 200
            assert not to.session.without_reward

    asyncio.run(main())
    assert not caplog.records


STREAMED = {
    "chat/completions": b": \n\n",
    "completions": b": \n\n",
    "responses": b": \n\n",
    "messages": b"event: ping\n",
}


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_begins_at_once_and_beats_while_it_waits(monkeypatch, path):
    monkeypatch.setattr(endpoint_module, "HEARTBEAT_S", 0.05)

    async def main():
        policy = draws(gate=asyncio.Event())
        async with served(policy) as to, aiohttp.ClientSession() as http:
            asked = {"prompt": "Hi"} if path == "completions" else {"messages": [USER], "input": "Hi"}
            body = {**asked, "max_tokens": 50, "stream": True}
            headers = {"x-api-key": to.address.api_key}
            async with http.post(f"{to.address.base_url}/{path}", json=body, headers=headers) as response:
                assert (response.status, response.content_type) == (200, "text/event-stream")
                begun = b""
                while begun.count(STREAMED[path]) < 3:
                    begun += await response.content.readany()
                policy.gate.set()
                assert b"Draw 0." in await response.read()
            check_recorded(to.session, policy)

    asyncio.run(main())


def test_clients_with_a_short_timeout_wait_for_a_slow_policy(monkeypatch):
    monkeypatch.setattr(endpoint_module, "HEARTBEAT_S", 0.1)

    async def main():
        policy = draws(gate=asyncio.Event())
        async with served(policy) as to:
            asyncio.get_running_loop().call_later(2.5, policy.gate.set)
            of_openai = to.openai.with_options(timeout=1, max_retries=0)
            of_anthropic = to.anthropic.with_options(timeout=1, max_retries=0)

            async def chat():
                async with of_openai.chat.completions.stream(model="m", messages=[USER]) as stream:
                    return (await stream.get_final_completion()).choices[0].message.content

            async def responses():
                async with of_openai.responses.stream(model="m", input="Hello") as stream:
                    return (await stream.get_final_response()).output_text

            async def messages():
                async with of_anthropic.messages.stream(model="m", messages=[USER], max_tokens=9) as stream:
                    return await stream.get_final_text()

            assert set(await asyncio.gather(chat(), responses(), messages())) == {"Draw 0."}

    asyncio.run(main())


def test_an_error_after_the_beginning_of_a_stream_is_an_event_that_clients_raise(monkeypatch):
    monkeypatch.setattr(endpoint_module, "HEARTBEAT_S", 0.05)

    async def main():
        for dialect in ("chat", "responses", "messages"):
            policy = ScriptedClient(says(), gate=asyncio.Event())  # it has nothing to say
            async with served(policy) as to:
                asyncio.get_running_loop().call_later(0.3, policy.gate.set)
                match dialect:
                    case "messages":
                        asked = to.anthropic.messages.create(model="m", messages=[USER], max_tokens=9, stream=True)
                    case "chat":
                        asked = to.openai.chat.completions.create(model="m", messages=[USER], stream=True)
                    case _:
                        asked = to.openai.responses.create(model="m", input="Hi", stream=True)
                with pytest.raises((openai.APIError, anthropic.APIError), match="the policy could not answer"):
                    async for _ in await asked:
                        pass

    asyncio.run(main())


def test_a_client_that_hangs_up_between_two_beats_gets_its_completion_at_the_next_try(monkeypatch):
    monkeypatch.setattr(endpoint_module, "HEARTBEAT_S", 0.05)

    async def main():
        policy = draws(gate=asyncio.Event())
        async with served(policy) as to:
            create = to.openai.with_options(max_retries=0).chat.completions.create
            stream = await create(model="m", messages=[USER], stream=True)
            await stream.close()
            await asyncio.sleep(0.2)
            policy.gate.set()
            said = await create(model="m", messages=[USER])
            assert said.choices[0].message.content == "Draw 0."
            check_recorded(to.session, policy)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_last_message_of_the_assistant_is_a_turn_behind_which_the_policy_begins_another(path):
    async def main():
        policy = draws()
        async with served(policy) as to:
            messages = [USER, {"role": "assistant", "content": "The"}]
            status, _ = await to.post(path, {"messages": messages, "input": messages, "max_tokens": 50})
            assert status == 200
            shown = policy.shown(policy.requests[0][0])
            assert shown.endswith("The<|im_end|>\n<|im_start|>assistant\n")

    asyncio.run(main())
