"""Images that agents and their tools show to the policy, in every dialect."""

import asyncio
import base64
import sys
from pathlib import Path

import pytest
from scripted_client import PROMPT, ScriptedClient, check_recorded, says, session_of
from served_rollout import served

from rl_algos.agents.calls import CallRefused
from rl_algos.agents.dialects.completions import ChatCompletions
from rl_algos.agents.dialects.messages import Messages
from rl_algos.agents.dialects.responses import Responses
from rl_algos.agents.endpoint import BODY_BASE, AgentEndpoint
from rl_algos.agents.program import Task
from rl_algos.agents.task_board import Address
from rl_core.images import ImageStore, digest_of
from rl_core.rollouts.rollout import Prompt
from rl_core.testing.torch.tiny_vision import tiny_png

sys.path.append(str(Path(__file__).parents[1] / "images"))
from vision_tokenizers import family

MODEL = "qwen3_vl"
FIRST, SECOND, SAME_SIZE = tiny_png(0, 64, 96), tiny_png(1, 96, 64), tiny_png(2, 64, 96)
EMPTY_URL = "data:image/png;base64,"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_IMAGES", str(tmp_path / "images"))
    return ImageStore(tmp_path / "images")


def policy(*texts):
    return ScriptedClient(says(*texts), tokenizer=family(MODEL).tokenizer)


def encoded(data):
    return base64.b64encode(data).decode()


def url(data):
    return EMPTY_URL + encoded(data)


def of_chat(data):
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "auto"}}


def of_responses(data):
    return {"type": "input_image", "image_url": url(data), "detail": "auto"}


def of_messages(data):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(data)}}


def asked(kind, image):
    return {"role": "user", "content": [{"type": kind, "text": "How many?"}, image]}


async def chat(to):
    said = {"role": "assistant", "content": "Two."}
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Seen: "}, of_chat(SECOND)]}
    first = asked("text", of_chat(FIRST))
    for messages in ([first], [first, said, result]):
        await to.openai.chat.completions.create(model="m", messages=messages)


async def responses(to):
    said = {"role": "assistant", "content": "Two."}
    output = [{"type": "input_text", "text": "Seen: "}, of_responses(SECOND)]
    result = {"type": "function_call_output", "call_id": "a", "output": output}
    first = asked("input_text", of_responses(FIRST))
    for items in ([first], [first, said, result]):
        await to.openai.responses.create(model="m", input=items)


async def messages(to):
    said = {"role": "assistant", "content": "Two."}
    content = [{"type": "text", "text": "Seen: "}, of_messages(SECOND)]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}
    first = asked("text", of_messages(FIRST))
    for each in ([first], [first, said, result]):
        await to.anthropic.messages.create(model="m", max_tokens=20, messages=each)


@pytest.mark.parametrize("agent", [chat, responses, messages])
def test_the_policy_sees_images_as_the_processor_of_its_model_writes_them(agent, store):
    async def main():
        client = policy("Two.", "One.")
        async with served(client) as to:
            await agent(to)
            check_recorded(to.session, client)
            return client, to.session.rollout()

    client, rollout = asyncio.run(main())
    digests = tuple(map(digest_of, (FIRST, SECOND)))
    assert client.images == [digests[:1], digests]
    assert rollout.images == (digests,)
    parts = [dict(store.put(data).part()) for data in (FIRST, SECOND)]
    expected = family(MODEL).expected(
        [
            {"role": "user", "content": [{"type": "text", "text": "How many?"}, parts[0]]},
            {"role": "assistant", "content": "Two."},
            {"role": "tool", "content": [{"type": "text", "text": "Seen: "}, parts[1]]},
        ],
        add_generation_prompt=True,
    )
    assert client.requests[1][0].tolist() == expected


def test_branches_have_their_own_images_and_pictures_of_one_size_are_separate_draws():
    async def main():
        client = policy("Two.", "Two.", "One.")
        async with served(client) as to:
            for image in (FIRST, SAME_SIZE):
                await to.openai.chat.completions.create(model="m", messages=[asked("text", of_chat(image))])
            further = [asked("text", of_chat(FIRST)), {"role": "assistant", "content": "Two."}]
            further.append({"role": "user", "content": "Sure?"})
            await to.openai.chat.completions.create(model="m", messages=further)
            check_recorded(to.session, client, num_segments=2)
            return client, to.session.rollout()

    client, rollout = asyncio.run(main())
    first, same_size = ((digest_of(data),) for data in (FIRST, SAME_SIZE))
    assert client.images == [first, same_size, first]
    assert client.requests[0][0].tolist() == client.requests[1][0].tolist()
    assert [draw for _, _, draw in client.requests] == [0, 0, 0]
    assert sorted(rollout.images) == sorted([first, same_size])


def test_a_prompt_with_images_is_given_to_the_agent_as_it_sends_it_back(store):
    part = dict(store.put(FIRST).part())
    message = {"role": "user", "content": [{"type": "text", "text": "How many?"}, part]}
    prompt = Prompt("p0", (message,), PROMPT.token_ids, "agent", {})
    task = Task(prompt, Address("r", "http://localhost", "k", ""), Path("log"), "r", None)
    assert ChatCompletions().read({"messages": task.described["messages"]}).messages == (
        {"role": "user", "content": (message["content"][0], part)},
    )


CHAT = "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("dialect", "image", "param", "message"),
    [
        (
            ChatCompletions(),
            {"type": "image_url", "image_url": {"url": "https://example.com/1.png"}},
            CHAT,
            'got "https://example.com/1.png"; the policy downloads nothing; read the image in the agent',
        ),
        (
            ChatCompletions(),
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            CHAT,
            "is not a data URL",
        ),
        (ChatCompletions(), {"type": "image_url", "image_url": {"url": EMPTY_URL + "?"}}, CHAT, "not valid base64"),
        (ChatCompletions(), {"type": "image_url", "image_url": {"url": EMPTY_URL}}, CHAT, "the image is empty"),
        (ChatCompletions(), of_chat(FIRST[:60]), CHAT, "truncated or damaged"),
        (ChatCompletions(), of_chat(b"<svg/>"), CHAT, "it is not an image in one of the formats JPEG, PNG"),
        (Responses(), {"type": "input_image", "file_id": "f"}, "input[0].content[0].image_url", "is missing"),
        (
            Messages(),
            {"type": "image", "source": {"type": "url", "url": "https://example.com/1.png"}},
            "messages[0].content[0].source.type",
            '"url" is not offered; the policy downloads nothing',
        ),
    ],
)
def test_images_that_cannot_be_used_are_refused_by_name(dialect, image, param, message):
    key = "input" if isinstance(dialect, Responses) else "messages"
    with pytest.raises(CallRefused) as refused:
        dialect.read({"max_tokens": 9, key: [{"role": "user", "content": [image]}]})
    assert refused.value.param == param
    assert message in str(refused.value)


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_images_are_of_the_user_and_of_tools(role):
    with pytest.raises(CallRefused, match="pass text, and images in messages of the user and results of tools"):
        ChatCompletions().read({"messages": [{"role": role, "content": [of_chat(FIRST)]}]})


@pytest.mark.parametrize(
    ("tokenizer", "content", "message"),
    [
        ("text_tokenizer", [of_chat(FIRST)], "trained without its vision tower; set policy.vision.enabled: true"),
        ("tokenizer", [of_chat(FIRST)] * 17, "17 images, more than policy.vision.max_images = 16"),
        ("tokenizer", "What is <|image_pad|>?", "a token of images, in its text"),
    ],
)
def test_conversations_that_the_policy_cannot_read_are_refused_with_the_remedy(tokenizer, content, message):
    client = ScriptedClient(says("Two."), tokenizer=getattr(family(MODEL), tokenizer))
    call = ChatCompletions().read({"messages": [{"role": "user", "content": content}]})
    with pytest.raises(CallRefused, match=message.replace(".", "[.]")) as refused:
        asyncio.run(session_of(client).answer(call))
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(("takes_images", "status"), [(True, 200), (False, 413)])
def test_requests_have_room_for_images_if_the_policy_reads_them(takes_images, status, monkeypatch):
    monkeypatch.setattr("served_rollout.AgentEndpoint", lambda: AgentEndpoint(max_tokens=64, takes_images=takes_images))
    padded = of_chat(FIRST + b"\0" * BODY_BASE)  # readers of PNG ignore what comes after its end

    async def main():
        async with served(policy("Two.")) as to:
            return await to.post("chat/completions", {"messages": [asked("text", padded)]})

    found, body = asyncio.run(main())
    assert found == status, body
