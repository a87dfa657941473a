import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

import anthropic
import numpy as np
import openai
import pytest
from chat_tokenizers import tokenizer_of
from scripted_client import ADD, END, ScriptedClient, calls_of, check_recorded, says, session_of
from served_rollout import Served, clients_of, served

from rl_algos.agents.endpoint import MAX_BODY, AgentEndpoint

CHAT_TOOL = {"type": "function", "function": {**ADD, "strict": True}}
FLAT_TOOL = {"type": "function", **ADD, "strict": True}
ANTHROPIC_TOOL = {"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}
USER = {"role": "user", "content": "What is 1+2+3+4?"}
TURNS = (
    "<think>\nTwo sums first.\n</think>\n\nI add.\n" + calls_of('{"a": 1, "b": 2}', '{"a": 3, "b": 4}'),
    calls_of('{"a": 3, "b": 7}'),
    "It is 10.",
)


def added(arguments) -> str:
    return str(arguments["a"] + arguments["b"])


async def chat(to: Served, is_streamed: bool) -> str:
    messages, completions = [USER], to.openai.chat.completions
    while True:
        asked = {"model": "policy", "messages": messages, "tools": [CHAT_TOOL]}
        if is_streamed:
            async with completions.stream(**asked) as stream:
                turn = (await stream.get_final_completion()).choices[0].message
        else:
            turn = (await completions.create(**asked)).choices[0].message
        if not turn.tool_calls:
            return turn.content
        messages.append(turn.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        for call in turn.tool_calls:
            result = added(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def responses(to: Served, is_streamed: bool, *, by_id: bool = False) -> str:
    items, before = [USER], {}
    while True:
        asked = {"model": "policy", "input": items, "tools": [FLAT_TOOL], "instructions": "Add.", **before}
        if is_streamed:
            async with to.openai.responses.stream(**asked) as stream:
                answer = await stream.get_final_response()
        else:
            answer = await to.openai.responses.create(**asked)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": added(json.loads(call.arguments))}
            for call in calls
        ]
        if by_id:
            items, before = results, {"previous_response_id": answer.id}
        else:
            items += [*(item.model_dump(exclude_none=True) for item in answer.output), *results]


async def responses_by_id(to: Served, is_streamed: bool) -> str:
    return await responses(to, is_streamed, by_id=True)


async def messages(to: Served, is_streamed: bool) -> str:
    turns = [USER]
    while True:
        asked = {"model": "policy", "messages": turns, "tools": [ANTHROPIC_TOOL], "max_tokens": 400, "system": "Add."}
        if is_streamed:
            async with to.anthropic.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await to.anthropic.messages.create(**asked)
        if answer.stop_reason != "tool_use":
            return answer.content[0].text
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": added(block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


LOOPS = (chat, responses, responses_by_id, messages)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_with_parallel_tool_calls_is_one_branch_of_exact_tokens(
    loop: Callable[[Served, bool], Awaitable[str]], is_streamed: bool
):
    async def main():
        async with served(ScriptedClient(says(*TURNS))) as to:
            assert await loop(to, is_streamed) == "It is 10."
            check_recorded(to.session, to.policy)
            shown = to.policy.shown(to.session.rollout().tokens)
            assert all(turn + END in shown for turn in TURNS)
            assert shown.count("<tool_response>") == 3
            assert to.session.rollout().status == "ok"

    asyncio.run(main())


def test_thoughts_are_apart_from_the_text_in_every_dialect():
    async def main():
        async with served(ScriptedClient(lambda before, draw: f"<think>\nHm {draw}.\n</think>\n\nHi.{END}")) as to:
            chat = await to.openai.chat.completions.create(model="m", messages=[USER])
            assert chat.choices[0].message.reasoning_content == "Hm 0."
            response = await to.openai.responses.create(model="m", input=[USER])
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert response.output[0].content[0].text == "Hm 1."
            message = await to.anthropic.messages.create(model="m", messages=[USER], max_tokens=400)
            assert [block.type for block in message.content] == ["thinking", "text"]
            assert (message.content[0].thinking, message.content[1].text) == ("Hm 2.", "Hi.")
            assert chat.choices[0].message.content == response.output_text == "Hi."
            check_recorded(to.session, to.policy, num_segments=3)

    asyncio.run(main())


def test_equal_calls_are_different_draws_and_choices_too():
    async def main():
        async with served(ScriptedClient(lambda before, draw: f"Draw {draw}.{END}")) as to:
            create = to.openai.chat.completions.create
            parallel = await asyncio.gather(*[create(model="m", messages=[USER]) for _ in range(3)])
            assert {each.choices[0].message.content for each in parallel} == {"Draw 0.", "Draw 1.", "Draw 2."}
            assert len({each.id for each in parallel}) == 3
            several = await create(model="m", messages=[USER], n=2)
            assert [each.message.content for each in several.choices] == ["Draw 3.", "Draw 4."]
            assert several.usage.completion_tokens == sum(len(each.token_ids) for each in to.policy.completions[-2:])
            # the best of them is continued
            echoed = {"role": "assistant", "content": "Draw 1."}
            await create(model="m", messages=[USER, echoed, USER])
            check_recorded(to.session, to.policy, num_segments=5)
            seen = to.policy.shown(to.policy.requests[-1][0])
            assert f"Draw 1.{END}" in seen

    asyncio.run(main())


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_client_that_loses_patience_and_asks_again_gets_the_completion_that_was_drawn(dialect):
    async def main():
        gate = asyncio.Event()
        async with served(ScriptedClient(lambda before, draw: f"Draw {draw}.{END}", gate=gate)) as to:
            hasty = to.openai.with_options(timeout=0.3, max_retries=5)
            asked = {
                "chat": lambda: hasty.chat.completions.create(model="m", messages=[USER]),
                "responses": lambda: hasty.responses.create(model="m", input=[USER]),
                "messages": lambda: to.anthropic.with_options(timeout=0.3, max_retries=5).messages.create(
                    model="m", messages=[USER], max_tokens=400
                ),
            }[dialect]
            asking = asyncio.create_task(asked())
            await asyncio.sleep(0.5)
            gate.set()
            assert "Draw 0." in (await asking).model_dump_json()
            assert len(to.policy.requests) == 1
            check_recorded(to.session, to.policy)

    asyncio.run(main())


def test_a_connection_that_drops_leaves_its_completion_to_the_next_equal_call():
    async def main():
        gate = asyncio.Event()
        async with served(ScriptedClient(lambda before, draw: f"Draw {draw}.{END}", gate=gate)) as to:
            create = to.openai.chat.completions.create
            dropped = asyncio.create_task(create(model="m", messages=[USER]))
            while not to.policy.requests:
                await asyncio.sleep(0.01)
            dropped.cancel()
            await asyncio.wait([dropped])
            await asyncio.sleep(0.1)
            gate.set()
            first, second = [await create(model="m", messages=[USER]) for _ in range(2)]
            assert [each.choices[0].message.content for each in (first, second)] == ["Draw 0.", "Draw 1."]
            check_recorded(to.session, to.policy, num_segments=2)

    asyncio.run(main())


def test_only_the_key_of_the_rollout_opens_it():
    async def main():
        endpoint = AgentEndpoint()
        await endpoint.start()
        policies = [ScriptedClient(says("a")) for _ in range(2)]
        async with endpoint.opened(session_of(policies[0])) as one, endpoint.opened(session_of(policies[1])) as other:
            assert one.api_key != other.api_key
            for key in ("wrong", "", other.api_key):
                async with clients_of(one) as (of_openai, of_anthropic):
                    with pytest.raises(openai.AuthenticationError, match="not the one that this URL takes"):
                        await of_openai.with_options(api_key=key or "none").responses.create(model="m", input="Hi")
                    with pytest.raises(
                        anthropic.AuthenticationError, match="not the one that this URL takes"
                    ) as refused:
                        await of_anthropic.with_options(api_key=key or "none").messages.create(
                            model="m", messages=[USER], max_tokens=5
                        )
                    assert refused.value.body["error"]["type"] == "authentication_error"
        async with clients_of(one) as (of_openai, of_anthropic):
            with pytest.raises(openai.APIStatusError) as refused:
                await of_openai.chat.completions.create(model="m", messages=[USER])
            assert (refused.value.status_code, refused.value.code) == (410, "rollout_ended")
            with pytest.raises(anthropic.APIStatusError) as refused:
                await of_anthropic.messages.create(model="m", messages=[USER], max_tokens=5)
            assert refused.value.status_code == 410
        assert not policies[0].requests
        await endpoint.close()

    asyncio.run(main())


def test_a_call_in_flight_when_the_rollout_ends_is_told_so():
    async def main():
        endpoint = AgentEndpoint()
        await endpoint.start()
        policy = ScriptedClient(says("a"), gate=asyncio.Event())
        async with endpoint.opened(session_of(policy)) as address, clients_of(address) as (client, _):
            create = client.with_options(max_retries=0).chat.completions.create
            asking = asyncio.create_task(create(model="m", messages=[USER]))
            while not policy.requests:
                await asyncio.sleep(0.01)
            endpoint._open[address.base_url.split("/")[-2]][0].close()
            with pytest.raises(openai.APIStatusError) as refused:
                await asking
            assert refused.value.status_code == 410
        await endpoint.close()

    asyncio.run(main())


PATHS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")


@pytest.mark.parametrize("path", PATHS)
def test_requests_that_no_client_sends_are_refused(path):
    async def main():
        async with served(ScriptedClient(says())) as to:
            status, body = await to.post(path, b"{not json")
            assert (status, "not valid JSON" in body["error"]["message"]) == (400, True)
            assert (await to.post(path, b"[1]"))[0] == 400
            assert (await to.post(path, b"[" * 100_000))[0] == 400
            halves = (
                b'{"model": "\\uD83D", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": true'
            )
            status, body = await to.post(path, halves + b', "input": "Hi", "prompt": "Hi"}')
            assert (status, "surrogates not allowed" in body["error"]["message"]) == (400, True)
            assert (await to.post(path, b" " * (MAX_BODY + 1)))[0] == 413
            status, body = await to.post(path, {}, Host="evil.example:80")
            assert (status, "'evil.example' is not served" in body["error"]["message"]) == (403, True)
            assert (await to.post(path, {}, Authorization="Bearer clé"))[0] == 401
            status, body = await to.post(path, {})
            assert status == 400

    asyncio.run(main())


def test_a_key_that_is_not_text_is_a_wrong_one():
    async def main():
        async with served(ScriptedClient(says())) as to:
            _, _, host, path = to.address.base_url.split("/", 3)
            reader, writer = await asyncio.open_connection(*host.split(":"))
            head = f"POST /{path}/responses HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\nAuthorization: Bearer "
            writer.write(head.encode() + b"\xff\xfe\r\n\r\n{}")
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            writer.close()

    asyncio.run(main())


def test_schemas_that_are_nested_as_deep_as_json_can_be_do_not_break_the_server():
    async def main():
        async with served(ScriptedClient(lambda before, draw: "Hi." + END), max_tokens=20_000) as to:
            for depth in range(sys.getrecursionlimit() - 120, sys.getrecursionlimit()):
                schema = b'{"a":' * depth + b"1" + b"}" * depth
                tools = b'[{"type": "function", "function": {"name": "add", "parameters": ' + schema + b"}}]"
                body = b'{"messages": [{"role": "user", "content": "Hi"}], "tools": ' + tools + b"}"
                assert (await to.post("chat/completions", body))[0] in (200, 400)

    asyncio.run(main())


def test_logprobs_are_those_of_the_sampled_tokens():
    async def main():
        async with served(ScriptedClient(lambda before, draw: f"Hi {draw}.{END}")) as to:
            chat = await to.openai.chat.completions.create(model="m", messages=[USER], logprobs=True, n=2)
            response = await to.openai.responses.create(
                model="m", input=[USER], include=["message.output_text.logprobs"]
            )
            text = await to.openai.completions.create(model="m", prompt="Hi", logprobs=1)
            listed = [
                *([each.logprob for each in choice.logprobs.content] for choice in chat.choices),
                [each.logprob for each in response.output[0].content[0].logprobs],
                text.choices[0].logprobs.token_logprobs,
            ]
            assert listed == [each.logprobs.tolist() for each in to.policy.completions]
            pieces = "".join(each.token for each in chat.choices[1].logprobs.content)
            assert pieces == f"Hi 1.{END}"
            plain = await to.openai.chat.completions.create(model="m", messages=[USER], n=2)
            assert plain.choices[0].logprobs is None

    asyncio.run(main())


def test_a_response_continues_an_earlier_one_by_its_id_without_its_instructions():
    async def main():
        async with served(ScriptedClient(says("One.", "Two.", "Three."))) as to:
            create = to.openai.responses.create
            first = await create(model="m", input="a", instructions="First.")
            second = await create(model="m", input="b", instructions="First.", previous_response_id=first.id)
            assert second.previous_response_id == first.id
            assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
            check_recorded(to.session, to.policy)
            await create(model="m", input="c", instructions="Second.", previous_response_id=second.id)
            seen = to.policy.shown(to.policy.requests[-1][0])
            assert "First." not in seen
            assert [part in seen for part in ("Second.", "a", "One.", "b", "Two.", "c")] == [True] * 6
            check_recorded(to.session, to.policy, num_segments=2)

    asyncio.run(main())


def test_only_a_stored_answer_of_the_rollout_can_be_continued():
    async def main():
        async with served(ScriptedClient(says("One.", "Two."))) as to:
            create = to.openai.responses.create
            unstored = await create(model="m", input="a", store=False)
            chat = await to.openai.chat.completions.create(model="m", messages=[USER])
            for id in (unstored.id, chat.id, "resp_1"):
                with pytest.raises(openai.BadRequestError, match="not the id of a stored answer") as refused:
                    await create(model="m", input="b", previous_response_id=id)
                assert (refused.value.code, refused.value.param) == (
                    "previous_response_not_found",
                    "previous_response_id",
                )

    asyncio.run(main())


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_conversation_that_is_too_long_is_refused_at_first_and_ends_the_rollout_later(dialect):
    async def main():
        async with served(ScriptedClient(says("x" * 200)), max_tokens=300) as to:

            async def ask(text):
                user = [{"role": "user", "content": text}]
                if dialect == "messages":
                    return await to.anthropic.messages.create(model="m", messages=user, max_tokens=400)
                if dialect == "responses":
                    return await to.openai.responses.create(model="m", input=user)
                return await to.openai.chat.completions.create(model="m", messages=user)

            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="maximum is 300"):
                await ask("x" * 400)
            await ask("x")
            late = (await ask("x" * 400)).model_dump()
            reason = {
                "chat": lambda: late["choices"][0]["finish_reason"] == "length",
                "responses": lambda: late["incomplete_details"] == {"reason": "max_output_tokens"},
                "messages": lambda: late["stop_reason"] == "max_tokens",
            }[dialect]
            assert reason()
            assert to.session.rollout().status == "truncated"
            check_recorded(to.session, to.policy)

    asyncio.run(main())


def test_a_completion_is_cut_at_the_room_that_is_left():
    async def main():
        async with served(ScriptedClient(says("x" * 200)), max_tokens=100) as to:
            answer = await to.openai.chat.completions.create(model="m", messages=[USER], max_tokens=1000)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage.total_tokens == 100

    asyncio.run(main())


def test_calls_beyond_the_limit_are_refused():
    async def main():
        async with served(ScriptedClient(says("One.")), max_calls=1) as to:
            await to.openai.chat.completions.create(model="m", messages=[USER])
            with pytest.raises(openai.PermissionDeniedError, match="had its 1 completions") as refused:
                await to.openai.responses.create(model="m", input="b")
            assert refused.value.code == "rollout_call_limit"
            with pytest.raises(anthropic.PermissionDeniedError):
                await to.anthropic.messages.create(model="m", messages=[USER], max_tokens=5)
            assert to.session.rollout().status == "truncated"

    asyncio.run(main())


def test_a_stop_string_ends_the_text_before_it_and_the_branch_continues_behind_it():
    async def main():
        turn = "Think.\nAct: look\nObservation: made up"
        async with served(ScriptedClient(says(turn, turn, turn, "Done."))) as to:
            user = [USER]
            message = await to.anthropic.messages.create(
                model="m", messages=user, max_tokens=400, stop_sequences=["\nObservation:"]
            )
            assert (message.content[0].text, message.stop_reason) == ("Think.\nAct: look", "stop_sequence")
            assert message.stop_sequence == "\nObservation:"
            create = to.openai.chat.completions.create
            chat = await create(model="m", messages=user, stop=["\nObservation:"])
            assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("Think.\nAct: look", "stop")
            echoed = {"role": "assistant", "content": "Think.\nAct: look"}
            await create(model="m", messages=[*user, echoed, {"role": "user", "content": "Observation: 3"}])
            assert "Act: look\nObservation:<|im_end|>" in to.policy.shown(to.policy.requests[-1][0])
            check_recorded(to.session, to.policy, num_segments=2)

    asyncio.run(main())


def test_a_text_is_continued_token_by_token_with_the_tokenizer_of_a_tiny_model(tokenizer):
    async def main():
        turns = iter(["3;Observation:", "7;Observation:", "8"])
        policy = ScriptedClient(lambda before, draw: next(turns), tokenizer, "hermes")
        async with served(policy) as to:
            prompt = "1+2="
            for said in ("3;", "7;"):
                answer = await to.openai.completions.create(model="m", prompt=prompt, stop="Observation:")
                assert (answer.choices[0].text, answer.choices[0].finish_reason) == (said, "stop")
                prompt += f"{said}Observation: more\n"
            last = await to.openai.completions.create(model="m", prompt=prompt, max_tokens=1, stream=True)
            assert [chunk.choices[0].text async for chunk in last] == ["8"]
            check_recorded(to.session, to.policy)
            assert to.policy.shown(to.session.rollout().tokens) == prompt + "8"

    asyncio.run(main())


def test_a_conversation_that_the_template_refuses_is_the_fault_of_the_request():
    async def main():
        policy = ScriptedClient(lambda before, draw: "Hi.<eos>", tokenizer_of("gemma3"))
        async with served(policy) as to:
            with pytest.raises(openai.BadRequestError, match="chat template of the policy does not render"):
                await to.openai.chat.completions.create(model="m", messages=[USER, USER])
            await to.openai.chat.completions.create(model="m", messages=[USER])
            said = {"role": "assistant", "content": "Hi."}
            with pytest.raises(openai.BadRequestError, match="chat template of the policy does not render"):
                await to.openai.chat.completions.create(model="m", messages=[USER, said, said, USER])
            with pytest.raises(anthropic.BadRequestError, match="chat template of the policy does not render"):
                await to.anthropic.messages.count_tokens(model="m", messages=[USER, USER])

    asyncio.run(main())


def test_an_error_of_the_policy_is_not_kept_for_the_next_try():
    async def main():
        tries = iter([RuntimeError("the engine restarts"), "Hi." + END])

        def write(before, draw):
            text = next(tries)
            if isinstance(text, Exception):
                raise text
            return text

        async with served(ScriptedClient(write)) as to:
            answer = await to.openai.chat.completions.create(model="m", messages=[USER])
            assert answer.choices[0].message.content == "Hi."

    asyncio.run(main())


def test_tokens_are_counted_as_they_are_sampled_from():
    async def main():
        async with served(ScriptedClient(says("One.", "Two."))) as to:
            asked = {"model": "m", "messages": [USER], "tools": [ANTHROPIC_TOOL], "system": "Add."}
            counted = (await to.anthropic.messages.count_tokens(**asked)).input_tokens
            await to.anthropic.messages.create(**asked, max_tokens=9)
            turns = [USER, {"role": "assistant", "content": "One."}, USER]
            later = (await to.anthropic.messages.count_tokens(**{**asked, "messages": turns})).input_tokens
            answer = await to.anthropic.messages.create(**{**asked, "messages": turns}, max_tokens=9)
            assert [counted, later] == [len(seen) for seen, _, _ in to.policy.requests]
            assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == later

    asyncio.run(main())


def test_rewards_are_posted_for_answers_of_every_dialect():
    async def main():
        async with served(ScriptedClient(lambda before, draw: f"{draw}{END}"), takes_rewards=True) as to:
            chat = await to.openai.chat.completions.create(model="m", messages=[USER], n=2)
            response = await to.openai.responses.create(model="m", input=[USER])
            message = await to.anthropic.messages.create(model="m", messages=[USER], max_tokens=5)
            key = {"Authorization": f"Bearer {to.address.reward_key}"}
            for call, choice in ((chat.id, 1), (response.id, 0), (message.id, 0)):
                assert await to.post("reward", {"reward": 1, "call": call, "choice": choice}, **key) == (200, {})
            assert (await to.post("reward", {"reward": 1, "call": "rl-0"}, **key))[0] == 404
            assert (await to.post("reward", {"reward": 1}))[0] == 401
            assert to.session.rollout().rewards == {"reward": 3.0}

    asyncio.run(main())


def test_the_list_of_models_and_any_name_of_one_are_served():
    async def main():
        async with served(ScriptedClient(says("Hi."))) as to:
            assert [model.id async for model in to.openai.models.list()] == ["policy"]
            assert (await to.openai.responses.create(model="gpt-x", input="Hi")).model == "gpt-x"

    asyncio.run(main())


def test_completions_of_a_repeated_rollout_do_not_depend_on_the_order_of_parallel_calls():
    async def rollout(order):
        async with served(ScriptedClient(lambda before, draw: f"{len(before) % 7} {draw}{END}")) as to:
            create = to.openai.chat.completions.create
            texts = [f"Question {number}" for number in range(3)] * 2
            calls = [create(model="m", messages=[{"role": "user", "content": texts[place]}]) for place in order]
            await asyncio.gather(*calls)
            return to.session.rollout()

    one, other = [asyncio.run(rollout(order)) for order in ((0, 1, 2, 3, 4, 5), (5, 1, 3, 0, 4, 2))]
    assert np.array_equal(one.tokens, other.tokens)
    assert one.segments == other.segments
