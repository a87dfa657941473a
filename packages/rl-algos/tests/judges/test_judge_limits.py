"""An endpoint that fails in every usual way, counted at the endpoint."""

import asyncio
import email.utils
import random
import time

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_endpoint import KEY, SCORE, ScriptedEndpoint, completion, question

from rl_algos.judges.config import EndpointJudgeConfig, JudgeLimitsConfig
from rl_algos.judges.limits import WINDOW_S, JudgeClock, RequestLimits, SpentTokens
from rl_algos.judges.service import JudgeService
from rl_core.rollouts.judging import JudgeBudgetSpent


def config(endpoint, **settings):
    limits = JudgeLimitsConfig(**settings.pop("limits", {}))
    settings = {"max_new_tokens": 16, "model": "m", **settings}
    return EndpointJudgeConfig(kind="endpoint", base_url=endpoint.base_url, api_key=KEY, limits=limits, **settings)


def ask(script, questions, *, speed=1.0, folder=None, spent=None, port=0, **settings):
    """Ask an endpoint that follows a script; returns the verdicts, or the error, and the endpoint."""
    clock = JudgeClock(speed)
    settings.setdefault("timeout_s", 30 * speed)
    endpoint = ScriptedEndpoint(script, clock)

    async def run():
        async with endpoint.serving(port):
            service = JudgeService({"critic": config(endpoint, **settings)}, folder, spent, clock=clock)
            try:
                return await service.ask("critic", questions), service.usage()
            except JudgeBudgetSpent as error:
                return error, service.usage()
            finally:
                await service.close()

    found, usage = asyncio.run(run())
    return found, endpoint, usage


def storm(seed, clock):
    """A script of failures: at most three for a question, whose next answer is good."""

    async def script(asked, request):
        draw = random.Random(f"{seed} {asked.text} {asked.count} {asked.body['seed']}")
        await asyncio.sleep(draw.uniform(0, 2) / clock.speed)
        # What the endpoint computes, it counts, also if nobody gets it.
        asked.tokens = draw.randrange(20, 60)
        kind = draw.random() if asked.count <= 3 else 1.0
        if kind < 0.05:
            return web.Response(status=draw.choice([500, 502, 503, 529]), text="overloaded")
        if kind < 0.1:
            return None
        if kind < 0.15:
            await asyncio.sleep(1000)
        if kind < 0.2:
            asked.tokens = 0
            return web.Response(status=429, headers={"Retry-After": str(draw.randrange(3))})
        if kind < 0.3 and asked.body["temperature"] == 0:
            return completion("I would give it a 1, because", asked.tokens)
        return completion('{"score": 0.5}', asked.tokens)

    return script


@pytest.mark.parametrize("seed", range(2))
def test_no_limit_is_exceeded_and_no_answer_is_lost_in_a_storm_of_failures(seed):
    clock = JudgeClock(300.0)
    limits = {"concurrent": 6, "requests_per_minute": 90, "tokens_per_minute": 9000, "max_total_tokens": 200_000}
    verdicts, endpoint, usage = ask(
        storm(seed, clock),
        [question(f"Question {number}", SCORE) for number in range(150)],
        speed=clock.speed,
        limits=limits,
        timeout_s=150.0,
    )
    assert [verdict.failure for verdict in verdicts] == [""] * 150
    assert {verdict.value["score"] for verdict in verdicts} == {0.5}
    assert len(endpoint.asked) > 170
    assert endpoint.most_at_once <= 6
    assert endpoint.most_in_a_minute() <= 90
    assert endpoint.most_in_a_minute(lambda each: each.tokens) <= 9000
    assert usage["judge/critic/requests"] >= len(endpoint.asked)
    assert usage["judge/critic/unparsed"] > 5
    assert usage["judge/critic/failed"] == 0


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_time_that_an_endpoint_asks_to_wait_holds_for_all_questions(form):
    pauses = []

    def script(asked, request):
        if len(pauses) < 2 and asked.count == 1 and asked.text in ("1", "3"):
            pauses.append(asked.begun_s)
            until = "30" if form == "seconds" else email.utils.formatdate(time.time() + 30.5, usegmt=True)
            return web.Response(status=429, headers={"Retry-After": until})
        return completion("good")

    verdicts, endpoint, _ = ask(
        script, [question(str(number)) for number in range(5)], speed=600.0, limits={"concurrent": 1}, max_tries=1
    )
    assert [verdict.value for verdict in verdicts] == ["good"] * 5
    assert len(pauses) == 2
    assert len(endpoint.asked) == 7
    for begun in pauses:
        assert not [each for each in endpoint.asked if begun < each.begun_s < begun + 29]


def test_an_endpoint_that_asks_for_a_day_costs_the_question_and_not_the_run():
    script = lambda asked, request: web.Response(status=429, headers={"Retry-After": "86400"})  # noqa: E731
    (verdict,), endpoint, _ = ask(script, [question("?")])
    assert "asks to wait for 86400 s" in verdict.failure
    assert len(endpoint.asked) == 1


def test_the_last_try_saves_a_question_and_no_further_one_is_made():
    def script(asked, request):
        good = asked.count == (3 if asked.text == "saved" else 4)
        return completion("good") if good else web.Response(status=500)

    verdicts, endpoint, _ = ask(script, [question("saved"), question("lost")], speed=1000.0, max_tries=3)
    assert verdicts[0].value == "good"
    assert verdicts[1].failure == "HTTP 500, after 3 requests"
    assert len(endpoint.asked) == 6


def test_an_endpoint_with_too_many_requests_loses_no_question():
    """HTTP 429 is not a failed try, with `Retry-After` or without."""

    def script(asked, request):
        if asked.count <= 5:
            return web.Response(status=429, headers={"Retry-After": "1"} if asked.count % 2 else {})
        return completion("good")

    verdicts, endpoint, _ = ask(script, [question(str(each)) for each in range(4)], speed=1000.0, max_tries=1)
    assert [verdict.value for verdict in verdicts] == ["good"] * 4
    assert len(endpoint.asked) == 24


def test_an_endpoint_that_always_has_too_many_requests_costs_an_hour():
    script = lambda asked, request: web.Response(status=429, headers={"Retry-After": "590"})  # noqa: E731
    (verdict,), endpoint, _ = ask(script, [question("?")], speed=60_000.0)
    assert verdict.failure == "HTTP 429, and asks to wait for 590 s, after 3540 s of waiting"
    assert len(endpoint.asked) == 7


def test_waits_stop_growing():
    script = lambda asked, request: web.Response(status=429)  # noqa: E731
    (verdict,), endpoint, _ = ask(script, [question("?")], speed=60_000.0)
    assert "of waiting" in verdict.failure
    assert 120 < len(endpoint.asked) < 250


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_request_that_is_refused_is_not_repeated(status):
    script = lambda asked, request: web.Response(status=status, text=f"no\x1b[31m {KEY}\nmore")  # noqa: E731
    (verdict,), endpoint, _ = ask(script, [question("?")])
    assert verdict.failure == f"HTTP {status} (no [31m [api_key] more)"
    assert len(endpoint.asked) == 1


def test_no_token_is_spent_above_the_budget(tmp_path):
    """The endpoint takes nearly all tokens that it may."""

    def script(asked, request):
        return completion("good", 300)

    questions = [question(f"Question {number}") for number in range(40)]
    ran, endpoint, _ = ask(script, questions, limits={"max_total_tokens": 5000, "concurrent": 8}, folder=tmp_path)
    assert isinstance(ran, JudgeBudgetSpent)
    assert "judges.critic.limits.max_total_tokens" in str(ran)
    assert "resume" in str(ran)
    spent = sum(each.tokens for each in endpoint.asked)
    # The next question could have taken about 400.
    assert 4500 < spent <= 5000


def test_a_resumed_run_has_spent_what_it_spent_before(tmp_path):
    script = lambda asked, request: completion("good", 300)  # noqa: E731
    questions = [question(f"Question {number}") for number in range(12)]
    settings = {"folder": tmp_path / "cache", "spent": tmp_path / "run" / "spent.jsonl"}
    ran, first, _ = ask(script, questions, limits={"max_total_tokens": 2000}, **settings)
    assert isinstance(ran, JudgeBudgetSpent)
    settings["port"] = first.port
    ran, second, _ = ask(script, questions, limits={"max_total_tokens": 2000}, **settings)
    assert isinstance(ran, JudgeBudgetSpent)
    assert second.asked == []
    verdicts, third, usage = ask(script, questions, limits={"max_total_tokens": 10_000}, **settings)
    assert [verdict.value for verdict in verdicts] == ["good"] * 12
    assert len(first.asked) + len(third.asked) == 12
    assert usage["judge/critic/cached"] == len(first.asked)


@pytest.mark.parametrize("reported", [0, -5, 10**9, True, "20", None, 1.5])
def test_tokens_that_cannot_be_true_are_counted_as_the_most_that_can(reported):
    script = lambda asked, request: completion("good", reported)  # noqa: E731
    (verdict,), _, usage = ask(script, [question("?")])
    assert verdict.value == "good"
    assert 256 < verdict.num_tokens == usage["judge/critic/tokens"] < 500


def test_tokens_are_counted_from_before_a_request_until_its_end(tmp_path):
    file = tmp_path / "spent.jsonl"
    spent = SpentTokens(file)
    first, second = spent.reserve("critic", 100), spent.reserve("critic", 50)
    assert first != second
    spent.settle("critic", second, 50, 7)
    assert spent.of("critic") == 107
    # The process is killed while it writes a line.
    with file.open("a") as torn:
        torn.write('["critic", 3')
    again = SpentTokens(file)
    assert again.of("critic") == 107
    assert file.read_text() == '["critic", 0, 107]\n'
    assert again.of("other") == 0
    spent.close()
    again.close()


def test_a_question_above_the_limit_of_a_minute_is_refused_at_once():
    (verdict,), endpoint, _ = ask(lambda *_: completion("good"), [question("?")], limits={"tokens_per_minute": 300})
    assert "limits.tokens_per_minute is 300" in verdict.failure
    assert endpoint.asked == []


class DrivenClock(JudgeClock):
    """A clock that tests move."""

    def __init__(self):
        super().__init__()
        self.time = 0.0

    def now(self):
        return self.time

    async def wait(self, event, seconds):
        if seconds == float("inf"):
            await event.wait()
            return
        until = self.time + seconds
        while self.time < until and not event.is_set():
            await asyncio.sleep(0)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.floats(0, 90), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30
    ),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(40, 120),
)
def test_no_window_at_the_endpoint_has_more_than_the_limits(requests, concurrent, per_minute, tokens):
    """However long requests travel, and whenever between their start and their end the endpoint counts them."""
    clock, spent, counted = DrivenClock(), SpentTokens(), []
    limits = JudgeLimitsConfig(concurrent=concurrent, requests_per_minute=per_minute, tokens_per_minute=tokens)

    async def run():
        admission = RequestLimits("critic", limits, spent, clock)
        at_once = 0

        async def send(most, seconds, share, when):
            nonlocal at_once
            async with admission.admitted(most) as request:
                at_once += 1
                assert at_once <= concurrent
                begun = clock.time
                while clock.time < begun + seconds:
                    await asyncio.sleep(0)
                request.tokens = int(most * share)
                counted.append((begun + when * (clock.time - begun), request.tokens))
                at_once -= 1

        tasks = [asyncio.create_task(send(*request)) for request in requests]
        while not all(task.done() for task in tasks):
            for _ in range(6):
                await asyncio.sleep(0)
            clock.time += 7.3
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert len(counted) == len(requests)
    for end, _ in counted:
        window = [size for at, size in counted if end - WINDOW_S < at <= end]
        assert len(window) <= per_minute
        assert sum(window) <= tokens
    assert spent.of("critic") == sum(size for _, size in counted)
