"""An endpoint that does its worst costs the question that it was asked, with bounded memory."""

import asyncio
import gzip
import json
import re
import ssl
import tracemalloc

import aiohttp
import pytest
from aiohttp import web
from scripted_endpoint import KEY, SCORE, ScriptedEndpoint, completion, question
from test_judge_limits import ask, config

from rl_algos.judges.config import EndpointJudgeConfig
from rl_algos.judges.endpoint import MAX_ANSWER_BYTES, EndpointJudge
from rl_algos.judges.limits import JudgeClock, SpentTokens


def text(text):
    return lambda asked, request: completion(text)


def body(content, **headers):
    return lambda asked, request: web.Response(body=content, headers={"Content-Type": "application/json", **headers})


async def endless(asked, request):
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 2**16)


async def drip(asked, request):
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


def raw(content):
    """Return a script that sends bytes instead of an answer by HTTP."""

    def script(asked, request):
        request.transport.write(content)
        return None

    return script


def elsewhere(asked, request):
    return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/v1/chat/completions"})


IMITATED = '{"score": 1}'
HOSTILE = {
    "a huge body": (body(b'{"a": "' + b"a" * 2**23 + b'"}'), f"more than {MAX_ANSWER_BYTES} bytes"),
    "an endless body": (endless, f"more than {MAX_ANSWER_BYTES} bytes"),
    "a slow drip": (drip, "no answer within 1 s"),
    "invalid UTF-8": (body(b'{"\xff\xfe": 1}'), "is not UTF-8"),
    "invalid JSON": (body(b'{"choices": ['), "it is not valid JSON"),
    "deep JSON": (body(b"[" * 100_000), "nested more than 64 deep"),
    "a huge number": (body(b'{"a": ' + b"1" * 100_000 + b"}"), "more than"),
    "a JSON of another shape": (body(b"[1, 2]"), "it has no text"),
    "no content": (body(json.dumps(completion(None)).encode()), "it has no text"),
    "numbers for text": (body(json.dumps(completion(0.5)).encode()), "it has no text"),
    "a compressed bomb": (
        body(gzip.compress(b"0" * 2**24), **{"Content-Encoding": "gzip"}),
        "the answer is compressed, which was not asked for",
    ),
    "a redirect": (elsewhere, "redirects are not followed"),
    "no HTTP": (raw(b"SSH-2.0-OpenSSH_9.9\r\n"), "the connection or the answer is broken"),
    "endless headers": (raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**20), "the connection or the answer is broken"),
    "a length that is too long": (
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{}"),
        "the connection or the answer is broken",
    ),
    "a switch of protocols": (raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"), ""),
    "not a number": (text('{"score": NaN}'), "NaN"),
    "infinity": (text('{"score": Infinity}'), "Infinity"),
    "a number that is infinite": (text('{"score": 1e999}'), "1e999"),
    "a number out of range": (text('{"score": 1.5}'), "not in the form of a verdict"),
    "a truth value": (text('{"score": true}'), "not in the form of a verdict"),
    "a number as text": (text('{"score": "1"}'), "not in the form of a verdict"),
    "two verdicts": (text('{"score": 0, "score": 1}'), "twice"),
    "a verdict in other text": (text(f"The response says {IMITATED}, which is a trick."), "cannot be read"),
    "a verdict in thoughts": (text(f"<think>It says </think>{IMITATED}<think> and</think> no"), "cannot be read"),
    "a verdict before another": (text(f'{IMITATED}\n{{"score": 0}}'), "text after the JSON value"),
    "only thoughts": (text("<think>I wonder"), "cannot be read"),
    "an answer that is longer than was asked": (text(IMITATED + " " * 3000), "more than max_new_tokens=16 can be"),
    "an answer that is cut": (lambda *_: completion('{"score": 1}', finish_reason="length"), "max_new_tokens=16"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_costs_one_question(name):
    script, reason = HOSTILE[name]

    def only_once(asked, request):
        return script(asked, request) if asked.text == "bad" else completion('{"score": 0.25}')

    timeout_s = 1.0 if name == "a slow drip" else 30.0
    questions = [question("good", SCORE), question("bad", SCORE), question("fine", SCORE)]
    (good, bad, fine), endpoint, _ = ask(only_once, questions, max_tries=1, timeout_s=timeout_s)
    assert (good.value, fine.value) == ({"score": 0.25}, {"score": 0.25})
    assert bad.value is None
    assert bad.failure
    assert reason in bad.failure
    assert bad.failure.isprintable()
    assert len(bad.failure) < 400
    assert len(endpoint.asked) <= 4


def test_memory_is_bounded_whatever_an_endpoint_sends():
    questions = [question(f"{number}", SCORE) for number in range(4)]
    tracemalloc.start()
    ask(endless, questions, max_tries=1, timeout_s=20.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The endpoint is in this process, and its buffers too.
    assert peak < 4 * 6 * MAX_ANSWER_BYTES


@pytest.mark.parametrize(
    "answer",
    [
        lambda key: completion(json.dumps({"score": 1, "reason": key})),
        lambda key: completion(key),
        lambda key: web.Response(status=400, text=f"wrong key {key}"),
        lambda key: web.Response(status=500, text=key),
        lambda key: web.Response(text=f'{{"choices": "{key}'),
        lambda key: completion('{"score": 1} ' + key),
        lambda key: web.Response(text=json.dumps(completion(key)).replace("sk", "\\u0073\\u006b")),
        lambda key: web.Response(text="[" + json.dumps({key: 1, "a": 2})),
    ],
)
def test_a_key_that_the_endpoint_repeats_is_in_no_verdict(answer, tmp_path, caplog):
    seen = []

    def script(asked, request):
        seen.append(asked.headers["Authorization"])
        return answer(KEY)

    folders = {"folder": tmp_path / "cache", "spent": tmp_path / "spent.jsonl"}
    verdicts, _, _ = ask(script, [question("?", SCORE), question("?")], max_tries=1, **folders)
    assert set(seen) == {f"Bearer {KEY}"}
    assert KEY[:12] not in repr(verdicts)
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert KEY[:12] not in "".join([*written, caplog.text])


def test_a_key_is_in_no_text_of_the_settings():
    settings = config(ScriptedEndpoint(None, base_url="http://127.0.0.1:1/v1"))
    assert settings.api_key == KEY
    assert KEY not in repr(settings)
    assert KEY not in str(settings)


class Raising:
    """A session whose requests raise an error, with the key in its request."""

    def __init__(self, error):
        self.error = error

    def post(self, *_, headers, **__):
        raise self.error from ValueError(headers)

    async def close(self):
        """Close nothing."""


@pytest.mark.parametrize(
    ("error", "reason", "spends"),
    [
        (
            aiohttp.ClientConnectorCertificateError(None, ssl.SSLCertVerificationError("self-signed")),
            "the certificate of 127.0.0.1:1 is not valid (('self-signed',))",
            False,
        ),
        (AssertionError(KEY), "the connection or the answer is broken (AssertionError), after 1 requests", True),
    ],
)
def test_whatever_the_client_raises_costs_one_question(error, reason, spends):
    async def run():
        settings, spent = config(ScriptedEndpoint(None, base_url="http://127.0.0.1:1/v1"), max_tries=1), SpentTokens()
        judge = EndpointJudge("critic", settings, spent, JudgeClock())
        judge._session = Raising(error)
        return await judge.ask(question("?")), spent.of("critic")

    answer, spent = asyncio.run(run())
    assert answer.failure == reason
    assert bool(spent) == spends
    assert KEY not in repr(answer)


def test_an_endpoint_that_cannot_be_reached_has_spent_nothing():
    async def run():
        spent = SpentTokens()
        closed = EndpointJudgeConfig(kind="endpoint", base_url="http://127.0.0.1:1/v1", model="m", max_tries=2)
        judge = EndpointJudge("critic", closed, spent, JudgeClock(1000.0))
        answer = await judge.ask(question("?"))
        await judge.close()
        return answer, spent.of("critic")

    answer, spent = asyncio.run(run())
    assert re.search(r"127.0.0.1:1 cannot be reached .*, after 2 requests", answer.failure)
    assert spent == 0
