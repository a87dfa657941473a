"""Courses that agents take, with the unmodified clients: what is sampled is trained on once, as it was sampled."""

import asyncio

import anthropic
import openai
import pytest
from scripted_client import END, ScriptedClient, calls_of, check_recorded
from served_rollout import Served, served

THOUGHT = "<think>\nHm.\n</think>\n\n"


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


async def by_chat(to: Served, turns, **options):
    answer = await to.openai.with_options(**options).chat.completions.create(model="m", messages=turns)
    return answer.choices[0].message.content


async def by_responses(to: Served, turns, **options):
    return (await to.openai.with_options(**options).responses.create(model="m", input=turns)).output_text


async def by_messages(to: Served, turns, **options):
    create = to.anthropic.with_options(**options).messages.create
    answer = await create(model="m", messages=turns, max_tokens=400)
    return "".join(block.text for block in answer.content if block.type == "text")


DIALECTS = {"chat": by_chat, "responses": by_responses, "messages": by_messages}


async def edits_a_question(ask):
    first = await ask([user("a")])
    second = await ask([user("a"), said(first), user("b")])
    await ask([user("A"), said(first), user("b"), said(second), user("c")])


async def edits_an_answer(ask):
    first = await ask([user("a")])
    await ask([user("a"), said(f"{first} Or not."), user("b")])


async def goes_back(ask):
    first = await ask([user("a")])
    before = [user("a"), said(first)]
    second = await ask([*before, user("b")])
    await ask([*before, user("b"), said(second), user("c")])
    await ask([*before, user("d")])


async def compacts(ask):
    first = await ask([user("a")])
    second = await ask([user("a"), said(first), user("b")])
    summary = await ask([user("a"), said(first), user("b"), said(second), user("Sum up.")])
    begun = [user(f"So far: {summary}")]
    third = await ask(begun)
    await ask([*begun, said(third), user("c")])


async def asks_a_sub_agent(ask):
    first = await ask([user("a")])
    inner = await ask([user("Only this.")])
    inner = await ask([user("Only this."), said(inner), user("More.")])
    await ask([user("a"), said(first), user(inner)])


async def asks_in_parallel(ask):
    first = await ask([user("a")])
    found = await asyncio.gather(*[ask([user("a"), said(first), user(f"part {n}")]) for n in range(3)])
    await ask([user("a"), said(first), user("part 1"), said(found[1]), user("more")])


COURSES = {edits_a_question: 2, edits_an_answer: 2, goes_back: 2, compacts: 2, asks_a_sub_agent: 2, asks_in_parallel: 3}
"""Courses, and the number of branches of each."""


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("course", COURSES, ids=lambda course: course.__name__)
def test_every_course_trains_on_what_was_sampled(course, dialect):
    async def main():
        async with served(ScriptedClient(lambda before, draw: f"{THOUGHT}Text {len(before)}.{END}")) as to:
            await course(lambda turns: DIALECTS[dialect](to, turns))
            check_recorded(to.session, to.policy, COURSES[course])

    asyncio.run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_thoughts_that_the_template_cuts_start_a_segment_if_conversations_are_rendered_anew(dialect):
    async def main():
        async with served(ScriptedClient(lambda before, draw: f"{THOUGHT}Text.{END}"), splits=True) as to:
            ask = DIALECTS[dialect]
            first = await ask(to, [user("a")])
            await ask(to, [user("a"), said(first), user("b")])
            assert "Hm." not in to.policy.shown(to.policy.requests[-1][0])
            check_recorded(to.session, to.policy, num_segments=2)

    asyncio.run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_try_that_failed_among_equal_parallel_calls_does_not_get_the_answer_of_another(dialect):
    async def main():
        failures = iter([True])

        def write(before, draw):
            if next(failures, False):
                raise RuntimeError("the engine restarts")
            return f"Draw {draw}.{END}"

        async with served(ScriptedClient(write)) as to:
            found = await asyncio.gather(*[DIALECTS[dialect](to, [user("a")], max_retries=3) for _ in range(3)])
            assert sorted(found) == ["Draw 0.", "Draw 1.", "Draw 2."]
            assert len(to.policy.completions) == 3
            to.policy.requests.pop(0)  # the one that failed
            check_recorded(to.session, to.policy, num_segments=3)

    asyncio.run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_key_of_the_client_identifies_a_call_among_equal_ones(dialect):
    async def main():
        async with served(ScriptedClient(lambda before, draw: f"Draw {draw}.{END}")) as to:
            found = []
            for key in ("x", "y", "x", "y", None):
                headers = {"Idempotency-Key": key} if key else {}
                found.append(await DIALECTS[dialect](to, [user("a")], default_headers=headers))
            assert found == ["Draw 0.", "Draw 1.", "Draw 0.", "Draw 1.", "Draw 2."]
            check_recorded(to.session, to.policy, num_segments=3)

    asyncio.run(main())


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_one_of_two_equal_calls_whose_connection_drops_leaves_its_completion_to_the_next_try(dialect, is_streamed):
    async def main():
        gate = asyncio.Event()
        async with served(ScriptedClient(lambda before, draw: f"Draw {draw}.{END}", gate=gate)) as to:

            async def ask():
                if dialect == "chat":
                    answer = await to.openai.chat.completions.create(
                        model="m", messages=[user("a")], stream=is_streamed
                    )
                    return [event async for event in answer] if is_streamed else answer
                answer = await to.anthropic.messages.create(
                    model="m", messages=[user("a")], max_tokens=400, stream=is_streamed
                )
                return [event async for event in answer] if is_streamed else answer

            one, other = asyncio.create_task(ask()), asyncio.create_task(ask())
            while len(to.policy.requests) < 2:
                await asyncio.sleep(0.01)
            one.cancel()
            await asyncio.wait([one])
            [draws] = to.session._draws.values()
            while not any(draw.is_abandoned for draw in draws):
                await asyncio.sleep(0.01)
            gate.set()
            found = [str(await other), str(await ask())]
            assert {text for each in found for text in ("Draw 0.", "Draw 1.") if text in each} == {"Draw 0.", "Draw 1."}
            assert len(to.policy.requests) == 2
            check_recorded(to.session, to.policy, num_segments=2)

    asyncio.run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_that_never_returns_ends_with_its_rollout_and_leaves_what_was_sampled(dialect):
    async def main():
        async with served(ScriptedClient(lambda before, draw: f"Text.{END}")) as to:
            first = await DIALECTS[dialect](to, [user("a")])
            to.policy.gate = asyncio.Event()
            asking = asyncio.create_task(DIALECTS[dialect](to, [user("a"), said(first), user("b")], max_retries=0))
            while len(to.policy.requests) < 2:
                await asyncio.sleep(0.01)
            to.session.close()
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as refused:
                await asking
            assert refused.value.status_code == 410
            to.policy.requests.pop()
            check_recorded(to.session, to.policy)

    asyncio.run(main())


def test_the_policy_sees_that_a_tool_has_failed():
    async def main():
        texts = iter([calls_of('{"a": 1}', '{"a": 2}', '{"a": 3}') + END, "Sorry." + END])
        async with served(ScriptedClient(lambda before, draw: next(texts))) as to:
            tool = {"name": "add", "input_schema": {"type": "object"}}
            asked = {"model": "m", "max_tokens": 400, "tools": [tool]}
            answer = await to.anthropic.messages.create(messages=[user("a")], **asked)
            blocks = [block for block in answer.content if block.type == "tool_use"]
            contents = ("no such number", "", "Error: none")
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": content, "is_error": True}
                for block, content in zip(blocks, contents, strict=True)
            ]
            turns = [user("a"), {"role": "assistant", "content": answer.content}, user(results)]
            await to.anthropic.messages.create(messages=turns, **asked)
            seen = to.policy.shown(to.policy.requests[-1][0])
            for shown in ("Error: no such number", "Error", "Error: none"):
                assert f"<tool_response>\n{shown}\n</tool_response>" in seen
            check_recorded(to.session, to.policy)

    asyncio.run(main())
