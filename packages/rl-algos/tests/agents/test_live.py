"""Users with unmodified clients: their conversations are kept, rewarded once, and trained once."""

import asyncio
import json
import sqlite3
from contextlib import asynccontextmanager

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
from conftest import Scripted

from rl_algos.rollouts.config import AgentConfig
from rl_algos.rollouts.driver.live_source import NO_REWARD, NO_TEXT, REFUSED, SERVED, TRIED, UserPrompts
from rl_algos.rollouts.worker import worker as worker_module
from rl_algos.rollouts.worker.worker import RolloutWorker, RolloutWorkerSpec
from rl_algos.tiny_model import make_tokenizer
from rl_core.model_config import TokenizerConfig
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.record import rollout_record

SAMPLING = SamplingParams(32)


def live(**keys):
    return AgentConfig(external=True, reward="posted", live=keys)


@pytest.fixture
def make_live(monkeypatch, tmp_path):
    """A rollout worker that serves users of the run in `tmp_path`."""
    real = worker_module.resolve
    monkeypatch.setattr(worker_module, "resolve", lambda path: Scripted if path == "scripted" else real(path))

    def make(reply=lambda prompt, seed: "5", *, group_size=1, folder=tmp_path / "run", **keys):
        tokenizer = make_tokenizer()
        monkeypatch.setattr(worker_module, "load_tokenizer", lambda *_: tokenizer)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        spec = RolloutWorkerSpec(
            generator="scripted",
            generator_args=(reply, tokenizer),
            program="rl_algos.agents.live:LiveProgram",
            program_args={"config": live(**keys), "max_tokens": 256, "sampling": SAMPLING, "group_size": group_size},
            tokenizer=TokenizerConfig(),
            model_name="none",
            logs=str(folder / "logs"),
        )
        worker = RolloutWorker(spec, {})
        worker._services.version = 3
        return worker

    return make


class Users:
    """The unmodified clients of a run's users, and the holder of the key for rewards."""

    def __init__(self, worker):
        self.worker = worker
        self.folder = worker._logs.parent / "live"
        self.served = json.loads((self.folder / "endpoint.json").read_text())
        url, key = self.served["url"], self.served["key"]
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)

    async def say(self, text, before=(), **headers):
        messages = [*before, {"role": "user", "content": text}]
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.openai.chat.completions.create(model="m", messages=messages, extra_headers=given)

    async def reward(self, reward, *, key=None, **whose):
        headers = {"Authorization": f"Bearer {key or self.served['reward_key']}"}
        body = {"reward": reward, **whose}
        url = f"{self.served['url']}/v1/reward"
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
            found = await answer.json()
            return answer.status, found.get("status") or found["error"]["code"]

    async def trained(self, *places, size=1):
        """The rollouts of places, which wait until there are conversations."""
        stream = UserPrompts()
        prompts = {place: stream.take(1)[0] for place in range(max(places) + 1)}
        tasks = [(place, RolloutTask(prompts[place], SAMPLING, tuple(range(size)))) for place in places]
        await self.worker.begin(tasks)
        found = {}
        while len(found) < len(places):
            await self.worker._any_finished.wait()
            number, (_, rollouts) = self.worker._take()
            found[number] = rollouts
        return found


@asynccontextmanager
async def running(worker):
    await worker.start()
    try:
        yield Users(worker)
    finally:
        await worker.close()


def test_conversations_of_both_clients_are_rollouts_with_late_rewards(make_live):
    async def scenario():
        async with running(make_live()) as users:
            first = await users.say("2+3")
            said = [{"role": "user", "content": "2+3"}, first.choices[0].message.model_dump(exclude_none=True)]
            second = await users.say("sure?", said)
            other = await users.anthropic.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "1+4"}]
            )
            streamed = await users.openai.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "4+1"}], stream=True
            )
            ids = {chunk.id async for chunk in streamed}
            waiting = asyncio.create_task(users.trained(0, 1, 2))
            assert await users.reward({"reward": 0.25, "style": 1}, call=other.id) == (200, "accepted")
            assert await users.reward(1.0, call=second.id) == (200, "accepted")
            assert await users.reward(0.5, call=ids.pop()) == (200, "accepted")
            return await asyncio.wait_for(waiting, 20), users

    found, users = asyncio.run(scenario())
    assert [rollout.rewards for (rollout,) in found.values()] == [
        {"reward": 0.25, "style": 1.0},
        {"reward": 1.0},
        {"reward": 0.5},
    ]
    (rollout,) = found[1]
    assert (rollout.status, rollout.prompt_id, rollout.segments) == ("ok", "users/1", ())
    assert [turn.text for turn in rollout.turns] == ["5", "5"]
    sampled = [request.token_ids.tolist() for request in users.worker._generator.requests]
    longest = max(sampled, key=len)
    assert rollout.tokens.tolist()[: len(longest)] == longest  # the engine consumed these, and nothing was tokenised
    assert len(sampled) == 4  # replaying samples nothing
    assert rollout_record(UserPrompts().take(2)[1], 0, rollout).size  # it can be written


@pytest.mark.parametrize("whose", ["call", "conversation"])
def test_a_reward_counts_once_and_each_other_post_has_its_answer(make_live, whose):
    async def scenario():
        async with running(make_live(deadline_s=1.0)) as users:
            answer = await users.say("2+3", X_RL_Conversation="mine")
            own = {"call": answer.id} if whose == "call" else {"conversation": "mine"}
            found = [await users.reward(1.0, **own) for _ in range(2)]
            found.append(await users.reward(0.0, **own))
            found.append(await users.reward(1.0, call="rl-" + "0" * 32))
            found.append(await users.reward(1.0, conversation="nobody's"))
            found.append(await users.reward(1.0, key=users.served["key"], **own))
            found.append(await users.reward("good", **own))
            late = await users.say("1+1")
            await asyncio.sleep(1.6)
            found.append(await users.reward(1.0, call=late.id))
            left = await users.say("1+2", X_RL_Conversation="out")
            await users.say("1+2", X_RL_Conversation="out", X_RL_Train="no")
            found.append(await users.reward(1.0, call=left.id))
            return found

    assert asyncio.run(scenario()) == [
        (200, "accepted"),
        (200, "repeated"),
        (409, "already_rewarded"),
        (404, "unknown_conversation"),
        (404, "unknown_conversation"),
        (401, "invalid_api_key"),
        (400, "invalid_request"),
        (410, "deadline_passed"),
        (409, "left_out"),
    ]


def test_everything_outlives_the_process(make_live):
    """A second process finds the open conversation, its tokens, and the reward that the first one acknowledged."""

    async def first():
        async with running(make_live()) as users:
            open_one = await users.say("2+3")
            done = await users.say("1+4")
            assert await users.reward(0.5, call=done.id) == (200, "accepted")
            return open_one, users.served["key"], (await users.trained(0))[0][0]

    async def second(before, key):
        async with running(make_live()) as users:
            assert users.served["key"] == key
            said = [{"role": "user", "content": "2+3"}, before.choices[0].message.model_dump(exclude_none=True)]
            after = await users.say("sure?", said)
            assert after.id[:19] == before.id[:19]  # the same conversation
            assert len(users.worker._generator.requests) == 1
            assert await users.reward(1.0, call=after.id) == (200, "accepted")
            return await users.trained(0, 1)

    before, key, trained = asyncio.run(first())
    found = asyncio.run(second(before, key))
    assert np.array_equal(found[0][0].tokens, trained.tokens)
    assert np.array_equal(found[0][0].generation_logprobs, trained.generation_logprobs)
    assert found[0][0].spans == trained.spans
    assert found[1][0].segments == ()
    assert [turn.text for turn in found[1][0].turns] == ["5", "5"]


def test_groups_are_conversations_of_one_task(make_live):
    async def scenario():
        async with running(make_live(group_size=2, deadline_s=60)) as users:
            with pytest.raises(openai.BadRequestError, match="X-RL-Task"):
                await users.say("2+3")
            answers = {name: await users.say("2+3", X_RL_Task=name[0]) for name in ("a1", "b1", "b2", "a2")}
            for number, answer in enumerate(answers.values()):
                assert await users.reward(number / 4, call=answer.id) == (200, "accepted")
            return await users.trained(0, 1, size=2)

    found = asyncio.run(scenario())
    assert [[rollout.reward for rollout in found[place]] for place in (0, 1)] == [[0.0, 0.75], [0.25, 0.5]]


def test_conversations_without_a_reward_are_counted_and_train_nothing(make_live):
    async def scenario():
        async with running(make_live(deadline_s=0.4)) as users:
            await users.say("2+3")
            ((rollout,),) = (await asyncio.wait_for(users.trained(0), 10)).values()
            return rollout, await users.worker.program("counts")

    rollout, counts = asyncio.run(scenario())
    assert (rollout.status, rollout.failure) == ("failed", NO_REWARD)
    assert counts == {"open": 0, "rewarded": 0, "expired": 1, "left_out": 0, "waiting": 0}


@pytest.mark.parametrize("how", ["header", "key", "header later", "retention"])
def test_text_that_is_not_to_be_kept_is_not_in_any_file(make_live, how):
    secret = "31415926"

    async def scenario():
        keys = {"retention_s": 0.3, "deadline_s": 2.0} if how == "retention" else {}
        async with running(make_live(**keys)) as users:
            if how == "key":
                users.openai.api_key = users.served["private_key"]
            headers = {"X_RL_Train": "no"} if how == "header" else {"X_RL_Conversation": "c"}
            answer = await users.say(f"{secret}+3", **headers)
            if how == "header later":
                await users.say("go away", X_RL_Conversation="c", X_RL_Train="no")
            if how == "retention":
                assert await users.reward(1.0, call=answer.id) == (200, "accepted")
                await asyncio.sleep(1.2)
                ((rollout,),) = (await users.trained(0)).values()
                assert rollout.failure == NO_TEXT
            else:
                assert (await users.reward(1.0, call=answer.id))[0] in (404, 409)
            found = await users.worker._program._store._run(
                lambda: users.worker._program._store._read("SELECT COUNT(*) FROM calls")[0][0]
            )
            return found, users.folder

    num_calls, folder = asyncio.run(scenario())
    assert num_calls == 0
    for path in folder.parent.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes()
            assert path.parent.name != "live" or path.stat().st_mode & 0o077 == 0, path


def test_limits_of_strangers_are_answered_with_429_and_a_time(make_live):
    async def scenario():
        async with running(make_live(max_open=1, requests_per_minute=3)) as users:
            await users.say("2+3")
            with pytest.raises(openai.RateLimitError, match="max_open") as full:
                await users.say("1+1")
            await users.say("2+3", X_RL_Train="no")
            with pytest.raises(openai.RateLimitError, match="requests_per_minute") as fast:
                await users.say("2+3")
            users.openai.api_key = "rl-somebody"
            with pytest.raises(openai.AuthenticationError):
                await users.say("2+3")
            return [error.value.response.headers["Retry-After"] for error in (full, fast)]

    assert asyncio.run(scenario()) == ["60", "20"]


def test_users_get_no_answer_of_a_version_that_is_tried_or_taken_back(make_live):
    async def scenario():
        async with running(make_live(canary={"enabled": True})) as users:
            program = users.worker._program
            await program.set_verdict(3, TRIED)
            asked = asyncio.create_task(users.say("2+3"))
            await asyncio.sleep(0.6)
            assert not asked.done()
            assert not users.worker._generator.requests
            await program.set_verdict(3, SERVED)
            await asyncio.wait_for(asked, 5)
            # A call that was in progress as the version changed has an answer of the tried one, which is discarded.
            users.worker._services.version = 2
            await program.set_verdict(2, SERVED)
            await program.set_verdict(3, TRIED)
            asked = asyncio.create_task(users.say("1+4"))
            await asyncio.sleep(0.6)
            assert len(users.worker._generator.requests) == 2
            await program.set_verdict(3, REFUSED)
            await asyncio.sleep(0.6)
            assert not asked.done()
            await program.set_verdict(3, SERVED)
            await asyncio.wait_for(asked, 5)

    asyncio.run(scenario())


def test_equal_first_turns_of_two_users_are_not_mixed_up(make_live):
    async def scenario():
        async with running(make_live()) as users:
            one, other = await users.say("2+3"), await users.say("2+3")
            assert one.id != other.id
            said = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
            third = await users.say("sure?", said)
            return {answer.id[:19] for answer in (one, other, third)}

    assert len(asyncio.run(scenario())) == 3


def test_users_are_answered_although_nothing_can_be_stored(make_live, monkeypatch):
    async def fails(*_):
        raise sqlite3.OperationalError("database or disk is full")

    async def scenario():
        async with running(make_live()) as users:
            store = users.worker._program._store
            for name in ("keep", "add"):
                monkeypatch.setattr(store, name, fails)
                answer = await users.say("2+3")
                assert answer.choices[0].message.content == "5"
                assert (await users.reward(1.0, call=answer.id))[1] in ("unknown_conversation", "accepted")

    asyncio.run(scenario())


def test_counting_tokens_keeps_nothing_and_ends_nothing(make_live):
    async def scenario():
        async with running(make_live()) as users:
            first = await users.say("2+3")
            said = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
            question = [*said, {"role": "user", "content": "sure?"}]
            counted = await users.anthropic.messages.count_tokens(model="m", messages=question)
            assert await users.reward(1.0, call=first.id) == (200, "accepted")
            return counted.input_tokens, len(users.worker._generator.requests[0].token_ids)

    counted, first = asyncio.run(scenario())
    assert counted > first
