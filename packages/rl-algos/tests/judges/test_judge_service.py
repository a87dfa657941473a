"""The service that asks judges: nothing is asked twice, and what cannot be read is asked once more."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from scripted_endpoint import SCORE, ScriptedEndpoint, completion, question
from test_judge_limits import ask, config

from rl_algos.judges.answers import JudgeAnswer
from rl_algos.judges.config import GeneratorJudgeConfig
from rl_algos.judges.rubrics import Rubric
from rl_algos.judges.service import JudgeService
from rl_algos.judges.verdict_cache import CachedAnswer, VerdictCache
from rl_core.rollouts.judging import JudgedRollout

HERE = Path(__file__).parent


def said(text, info=None):
    return JudgedRollout(({"role": "user", "content": "?"},), ({"role": "assistant", "content": text},), info or {})


def test_nothing_is_asked_twice_after_a_kill(tmp_path):
    """The questions in flight at the kill are asked again, because nobody has their answers."""

    async def answered(asked, request):
        await asyncio.sleep(0.01)
        # Every third question is answered in the form only when it is asked once more.
        is_good = int(asked.text.split()[1]) % 3 or asked.body["temperature"]
        return completion('{"score": 1}' if is_good else "no", 50)

    endpoint = ScriptedEndpoint(answered)
    num_questions, env = 60, {**os.environ, "PYTHONPATH": str(HERE)}

    async def run():
        command = [sys.executable, str(HERE / "killed_service.py"), str(tmp_path), "", str(num_questions)]
        async with endpoint.serving():
            command[3] = endpoint.base_url
            for when in (15, 45):
                process = await asyncio.create_subprocess_exec(*command, env=env)
                while len(endpoint.asked) < when:
                    await asyncio.sleep(0.002)
                process.send_signal(signal.SIGKILL)
                await process.wait()
            before = len(endpoint.asked)
            process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
            output, _ = await process.communicate()
            return before, output.split()

    before, (total, cached) = asyncio.run(run())
    assert float(total) == num_questions
    needed = num_questions + num_questions // 3
    # At most four questions are in flight at each of the two kills.
    assert needed <= len(endpoint.asked) <= needed + 2 * 4
    assert before >= 45
    assert 20 < float(cached) < num_questions
    counts = [each.count for each in endpoint.asked]
    assert max(counts) <= 3
    lines = (tmp_path / "run" / "spent.jsonl").read_text().splitlines()
    # Requests in flight at a kill count with all tokens that they may have taken.
    assert '["critic", 0, ' in lines[0]
    assert int(lines[0].rsplit(" ", 1)[1][:-1]) >= 50 * (before - 8)


def test_equal_questions_are_asked_once_at_a_time_and_once_in_all_with_a_cache(tmp_path):
    script = lambda *_: completion('{"score": 1}')  # noqa: E731
    questions = [question("same", SCORE)] * 9 + [question("other", SCORE)]
    verdicts, endpoint, usage = ask(script, questions)
    assert len(endpoint.asked) == 2
    assert [verdict.is_cached for verdict in verdicts] == [False] + [True] * 8 + [False]
    assert usage["judge/critic/cached"] == 8
    assert usage["judge/critic/tokens"] == 40
    assert usage["judge/critic/latency"] > 0


@pytest.mark.parametrize("kind", ["readable", "unreadable"])
def test_another_run_takes_verdicts_from_the_cache_and_asks_again_for_what_is_none(tmp_path, kind):
    script = lambda *_: completion('{"score": 1}' if kind == "readable" else "no" * 500)  # noqa: E731
    settings = {"folder": tmp_path / "cache"}
    first, endpoint, _ = ask(script, [question("?", SCORE)], spent=tmp_path / "one.jsonl", **settings)
    settings["port"] = endpoint.port
    again, same_run, _ = ask(script, [question("?", SCORE)], spent=tmp_path / "one.jsonl", **settings)
    other, other_run, _ = ask(script, [question("?", SCORE)], spent=tmp_path / "two.jsonl", **settings)
    assert len(endpoint.asked) == (1 if kind == "readable" else 2)
    assert same_run.asked == []
    assert len(other_run.asked) == (0 if kind == "readable" else 2)
    assert [each[0].failure for each in (first, again, other)] == [first[0].failure] * 3
    assert bool(first[0].failure) == (kind == "unreadable")
    assert max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 600


@pytest.mark.parametrize(
    "change", [{"model": "n"}, {"temperature": 0.5}, {"max_new_tokens": 17}, {"request": {"top_k": 3}}]
)
def test_a_judge_that_may_answer_otherwise_is_asked(tmp_path, change):
    script = lambda *_: completion("yes")  # noqa: E731
    _, endpoint, _ = ask(script, [question("?")], folder=tmp_path)
    settings = {"folder": tmp_path, "port": endpoint.port}
    _, same, _ = ask(script, [question("?")], timeout_s=3.0, max_tries=2, **settings)
    _, other, _ = ask(script, [question("?")], **change, **settings)
    assert (len(same.asked), len(other.asked)) == (0, 1)


def test_a_judge_without_a_cache_is_asked_each_time(tmp_path):
    script = lambda *_: completion("yes")  # noqa: E731
    _, endpoint, _ = ask(script, [question("?")], folder=tmp_path, cache=False)
    _, again, _ = ask(script, [question("?")], folder=tmp_path, cache=False, port=endpoint.port)
    assert (len(endpoint.asked), len(again.asked)) == (1, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_verdict_that_cannot_be_read_is_asked_for_once_more_with_another_seed():
    def script(asked, request):
        return completion('{"score": 1}' if asked.text == "saved" and asked.body["temperature"] == 1.0 else "no")

    (saved, lost), endpoint, usage = ask(script, [question("saved", SCORE), question("lost", SCORE)])
    assert saved.value == {"score": 1}
    assert lost.failure == "its answer cannot be read: it is not valid JSON: Expecting value: line 1 column 1 (char 0)"
    assert (saved.num_tokens, lost.num_tokens) == (40, 40)
    assert len(endpoint.asked) == len({each.body["seed"] for each in endpoint.asked}) == 4
    assert sorted(each.body["temperature"] for each in endpoint.asked) == [0.0, 0.0, 1.0, 1.0]
    assert (usage["judge/critic/unparsed"], usage["judge/critic/failed"]) == (3, 1)


def test_requests_ask_for_the_form_as_the_settings_have_it():
    script = lambda *_: completion('{"score": 1}')  # noqa: E731
    settings = {"request": {"seed": None, "reasoning_effort": "low"}, "temperature": None}
    _, endpoint, _ = ask(script, [question("?", SCORE)], tokens_field="max_completion_tokens", **settings)
    (asked,) = endpoint.asked
    form = {"name": "verdict", "strict": True, "schema": SCORE}
    assert asked.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        "max_completion_tokens": 16,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": form},
    }
    for structured_output, expected in (("json_object", {"type": "json_object"}), ("none", None)):
        _, endpoint, _ = ask(script, [question("?", SCORE)], structured_output=structured_output)
        assert endpoint.asked[0].body.get("response_format") == expected


def test_a_form_that_cannot_be_checked_fails_and_asks_nobody():
    (verdict,), endpoint, _ = ask(lambda *_: completion("1"), [question("?", {"type": "number", "unheard": 1})])
    assert "the keywords unheard of a JSON schema are not supported" in verdict.failure
    assert endpoint.asked == []


def damaged(content):
    return {
        "cut": content[: len(content) // 2],
        "empty": b"",
        "changed": content.replace(b"good", b"evil"),
        "binary": b"\xff" * 100,
        "huge": content + b" " * 2**23,
    }


@pytest.mark.parametrize("kind", damaged(b""))
def test_a_damaged_entry_is_a_question_that_nobody_has_asked(tmp_path, kind):
    cache = VerdictCache(tmp_path)
    cache.write("a" * 64, "b" * 64, CachedAnswer("good"))
    (path,) = (each for each in tmp_path.rglob("*") if each.is_file())
    assert cache.read("a" * 64, "b" * 64) == CachedAnswer("good")
    assert cache.read("a" * 64, "c" * 64) is None
    path.write_bytes(damaged(path.read_bytes())[kind])
    assert cache.read("a" * 64, "b" * 64) is None
    cache.write("a" * 64, "b" * 64, CachedAnswer("again"))
    assert cache.read("a" * 64, "b" * 64) == CachedAnswer("again")


def test_an_entry_of_another_question_is_not_taken(tmp_path):
    cache = VerdictCache(tmp_path)
    cache.write("a" * 64, "b" * 64, CachedAnswer("good"))
    (path,) = (each for each in tmp_path.rglob("*") if each.is_file())
    path.rename(path.with_name("bb" + "d" * 62))
    assert cache.read("a" * 64, "bb" + "d" * 62) is None


def test_answers_that_nobody_reads_are_removed(tmp_path):
    cache = VerdictCache(tmp_path)
    for asked in ("b" * 64, "c" * 64):
        cache.write("a" * 64, asked, CachedAnswer("good"))
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    assert cache.read("a" * 64, "b" * 64) == CachedAnswer("good")
    cache.prune()
    assert cache.read("a" * 64, "b" * 64) == CachedAnswer("good")
    assert cache.read("a" * 64, "c" * 64) is None


def test_a_folder_that_cannot_be_written_costs_the_cache_and_not_the_run(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    (verdict,), _, _ = ask(lambda *_: completion("yes"), [question("?")], folder=blocked / "cache")
    assert verdict.value == "yes"
    assert "verdicts are not kept" in caplog.text


def run_generator(answers, questions, **settings):
    """Ask a generator whose engine gives these answers, in turn; returns the verdicts and what it was asked."""
    asked = []

    async def ask_engine(judge, given):
        asked.extend((judge, each) for each in given)
        return [answers(each) for each in given]

    own = GeneratorJudgeConfig(kind="generator", model_name="policy")
    service = JudgeService({"own": own}, ask_engine=ask_engine, **settings)

    async def run():
        verdicts = await service.ask("own", questions)
        usage = service.usage()
        await service.close()
        return verdicts, usage

    verdicts, usage = asyncio.run(run())
    return verdicts, asked, usage


def test_a_generator_is_asked_through_its_engine_and_belongs_to_its_weights(tmp_path):
    answers = lambda asked: JudgeAnswer('{"score": 1}' if asked.draw else "no", 7)  # noqa: E731
    versions = iter(["one", "one", "one", "one", "two", "two", None, None])
    settings = {"cache_folder": tmp_path, "version": lambda judge: next(versions)}
    counts = []
    for _ in range(4):
        # The first answer cannot be read, and so is kept for one run only.
        (verdict,), asked, usage = run_generator(answers, [question("?", SCORE)], **settings)
        assert verdict.value == {"score": 1}
        assert {judge for judge, _ in asked} == {"own"}
        counts.append((len(asked), usage["judge/own/requests"]))
    assert counts == [(2, 2), (1, 1), (2, 2), (2, 2)]


def test_failures_of_an_engine_are_reasons():
    final = JudgeAnswer(failure="the question is too long", is_final=True)
    (verdict,), asked, _ = run_generator(lambda _: final, [question("?", SCORE)])
    assert verdict.failure == "the question is too long"
    assert len(asked) == 1


def test_rewards_of_a_group_leave_out_the_members_that_failed():
    def script(asked, request):
        return completion(json.dumps({"reason": "", "score": float("good" in asked.text)}))

    endpoint = ScriptedEndpoint(script)

    async def run():
        async with endpoint.serving():
            service = JudgeService({"critic": config(endpoint)})
            rewards = {"right": Rubric("critic"), "also": Rubric("critic", text="Is it {answer}?")}
            group = [said("good"), None, said("bad")]
            try:
                return await service.judge(rewards, group), await service.judge(rewards, [None])
            finally:
                await service.close()

    given, none = asyncio.run(run())
    assert none == [{}]
    assert [{name: each.value for name, each in row.items()} for row in given] == [
        {"right": 1.0, "also": None},
        {},
        {"right": 0.0, "also": None},
    ]
    assert "the row does not have the field 'answer'" in given[0]["also"].failure


def test_a_question_whose_asker_gives_up_is_still_answered_for_another(tmp_path):
    async def script(asked, request):
        await asyncio.sleep(0.05)
        return completion("yes")

    endpoint = ScriptedEndpoint(script)

    async def run():
        async with endpoint.serving():
            service = JudgeService({"critic": config(endpoint)})
            first = asyncio.create_task(service.ask("critic", [question("?")]))
            await asyncio.sleep(0.01)
            second = asyncio.create_task(service.ask("critic", [question("?")]))
            await asyncio.sleep(0)
            first.cancel()
            (verdict,) = await second
            await service.close()
            return verdict

    verdict = asyncio.run(run())
    assert verdict.value == "yes"
    assert len(endpoint.asked) == 1
