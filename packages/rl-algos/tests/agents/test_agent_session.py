import asyncio
import copy
from dataclasses import replace

import pytest
from chat_tokenizers import tokenizer_of
from scripted_client import ADD, END, ScriptedClient, calls_of, check_recorded, says, session_of

from rl_algos.agents.calls import CallRefused, ModelCall
from rl_core.rollouts.rollout import Thinking, WeightSpan

USER = {"role": "user", "content": "Hi"}
CALL = ModelCall(messages=(USER,))


def draws():
    return ScriptedClient(lambda before, draw: f"Draw {draw}.{END}")


async def dropped(session, client, call):
    """Ask, and hang up while the policy samples."""
    client.gate = asyncio.Event()
    asking = asyncio.create_task(session.answer(call))
    while not client.requests:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    client.gate.set()


def test_an_answer_that_did_not_arrive_is_given_to_the_next_equal_call():
    async def main():
        client = draws()
        session = session_of(client)
        first = await session.answer(CALL)
        session.delivered(first, is_delivered=False)
        assert await session.answer(CALL) is first
        session.delivered(first)
        assert (await session.answer(CALL)).choices[0].text == "Draw 1."
        check_recorded(session, client, num_segments=2)

    asyncio.run(main())


def test_a_response_that_did_not_arrive_is_given_to_the_next_equal_call():
    async def main():
        session = session_of(draws())
        begun = await session.answer(ModelCall(messages=(USER,), is_stored=True))
        call = ModelCall(messages=(USER,), continues=begun.id)
        first = await session.answer(call)
        session.delivered(first, is_delivered=False)
        assert await session.answer(call) is first

    asyncio.run(main())


def test_a_dropped_call_without_logprobs_is_not_the_answer_to_one_with_them():
    async def main():
        client = draws()
        session = session_of(client)
        await dropped(session, client, CALL)
        answer = await session.answer(ModelCall(messages=(USER,), wants_logprobs=True))
        assert "".join(answer.choices[0].pieces) == f"Draw 1.{END}"

    asyncio.run(main())


def test_calls_that_differ_in_what_the_policy_does_not_see_are_different_draws():
    async def main():
        session = session_of(draws())
        calls = [CALL, ModelCall(messages=(USER,), reads_calls=False), ModelCall(messages=(USER,), num_choices=2), CALL]
        answers = [await session.answer(call) for call in calls]
        assert [choice.text for answer in answers for choice in answer.choices] == [f"Draw {n}." for n in range(5)]

    asyncio.run(main())


def test_two_requests_that_wait_for_a_call_that_is_refused_are_both_told_so():
    async def main():
        session = session_of(draws(), max_tokens=3)
        asked = await asyncio.gather(session.answer(CALL), session.answer(CALL, is_retry=True), return_exceptions=True)
        assert [(type(each), each.code) for each in asked] == [(CallRefused, "context_length_exceeded")] * 2

    asyncio.run(main())


def test_thoughts_that_the_prompt_opened_are_apart_from_the_text_even_if_they_do_not_end():
    async def main():
        tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
        tokenizer.chat_template += "{{- '<think>\\n' if add_generation_prompt -}}"
        session = session_of(ScriptedClient(says("Hm.</think>\n\nHi.", "Hm, 42.", "42"), tokenizer))
        choices = [(await session.answer(CALL)).choices[0] for _ in range(2)]
        assert [(choice.thoughts, choice.text) for choice in choices] == [("Hm.", "Hi."), ("Hm, 42.", "")]
        assert session.messages[-1]["content"] == ""
        await session.answer(ModelCall(text="1+1=<think>"))
        assert session.opened_thoughts == "<think>"

    asyncio.run(main())


class ThoughtsCut(ScriptedClient):
    """A client whose thinking budget ended the thoughts of every turn."""

    async def generate(self, *args, **settings):
        found = await super().generate(*args, **settings)
        text, forced = self.shown(found.token_ids), self.encoded("\n</think>\n\n")
        count = len(self.encoded(text[: text.index("\n</think>")]))
        spans = (WeightSpan(1, len(found.token_ids) - len(forced)),)
        return replace(found, thinking=Thinking(count, len(forced), is_cut=True), spans=spans)


def test_tokens_that_ended_thoughts_are_read_by_the_agent_and_not_learned():
    async def main():
        client = ThoughtsCut(says(*["<think>Hm\n</think>\n\nHi."] * 2))
        session = session_of(client)
        first = (await session.answer(CALL)).choices[0]
        assert (first.thoughts, first.text) == ("Hm", "Hi.")
        later = (USER, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "So?"})
        await session.answer(ModelCall(messages=later))
        rollout = session.rollout()
        assert client.shown(rollout.tokens[rollout.loss_mask == 1]) == f"<think>HmHi.{END}" * 2
        assert [turn.num_sampled for turn in rollout.turns] == [7, 7]
        assert rollout.info == {"thinking/tokens": 6, "thinking/cut": 1}

    asyncio.run(main())


def test_a_call_that_cannot_be_read_is_recorded_with_its_turn():
    async def main():
        session = session_of(ScriptedClient(says("<tool_call>1</tool_call>", calls_of('{"a": 1}'))))
        for _ in range(2):
            await session.answer(ModelCall(messages=(USER,), tools=({"type": "function", "function": ADD},)))
        assert sorted(turn.has_invalid_call for turn in session.rollout().turns) == [False, True]

    asyncio.run(main())


def test_a_draw_that_failed_frees_its_number_and_no_other():
    async def main():
        failures = iter([True, False, False])

        def write(before, draw):
            if next(failures):
                raise RuntimeError("the engine restarts")
            return "Hi." + END

        session = session_of(ScriptedClient(write))
        asked = await asyncio.gather(session.answer(CALL), session.answer(CALL), return_exceptions=True)
        assert [type(each).__name__ for each in asked] == ["RuntimeError", "ModelAnswer"]
        assert (await session.answer(CALL)).id != asked[1].id

    asyncio.run(main())


def test_an_answer_without_room_can_be_continued_as_an_empty_turn():
    async def main():
        client = ScriptedClient(says("x" * 50))
        session = session_of(client, max_tokens=100)
        await session.answer(CALL)
        long = ModelCall(messages=({"role": "user", "content": "y" * 200},), is_stored=True)
        empty = await session.answer(long)
        after = await session.answer(ModelCall(messages=(USER,), continues=empty.id))
        assert after.choices[0].finish_reason == "length"
        assert after.num_prompt_tokens > empty.num_prompt_tokens
        check_recorded(session, client)

    asyncio.run(main())


def test_an_id_of_another_rollout_cannot_be_continued():
    async def main():
        one, other = session_of(draws()), session_of(draws())
        answer = await one.answer(ModelCall(messages=(USER,), is_stored=True))
        with pytest.raises(CallRefused, match=f"previous_response_id '{answer.id}' is not the id"):
            await other.answer(ModelCall(messages=(USER,), continues=answer.id))
        one.close()
        with pytest.raises(CallRefused, match="has ended"):
            await one.answer(ModelCall(messages=(USER,), continues="unknown"))

    asyncio.run(main())
