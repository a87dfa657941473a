"""Resources servers of NeMo Gym: tasks, sessions by cookies, tools, gradings, and hostile servers."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from aiohttp import web
from recording import played
from scripted_server import served

from rl_core import Conversation, EnvironmentFailure, ToolCall
from rl_core.errors import ConfigError, DataError
from rl_core.http_client import MAX_ANSWER
from rl_envs.served.nemo_gym import NeMoGymEnvironment, check_machine, load, tools_of
from rl_envs.served.plugin import NeMoGymConfig
from rl_envs.served.tasks import check_row

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "description": "Add.", "strict": True}
TASK = {"responses_create_params": {"input": "Add up to 3.", "tools": [ADD]}, "begin": 1, "expected": 3}


def turn(text="", number=0, calls=(), id="0", task=TASK, **info):
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": text})
    return Conversation(id, messages, {"task": task, **info}, text, turn=number, tool_calls=tuple(calls))


def graded(reward=1.0, **fields):
    """Routes of a server whose sessions add up; `reward` is that of every grading, or a function of the sum."""
    sums, bodies = {}, []

    async def seed(request):
        body = await request.json()
        response = web.json_response({})
        response.set_cookie("session", key := f"s{len(sums)}")
        sums[key] = body["begin"]
        return response

    async def add(request):
        sums[request.cookies["session"]] += (await request.json()).get("n", 0)
        return web.json_response({"sum": sums[request.cookies["session"]]})

    async def verify(request):
        bodies.append(await request.json())
        answer = {"reward": reward(sums[request.cookies["session"]]) if callable(reward) else reward, **fields}
        return web.json_response({key: value for key, value in answer.items() if value is not ...})

    async def paths(request):
        return web.json_response({"paths": {"/aggregate_metrics": {}}})

    posts = [web.post("/seed_session", seed), web.post("/add", add), web.post("/verify", verify)]
    return [*posts, web.get("/openapi.json", paths)], bodies


def tasks_file(folder, *tasks):
    path = folder / "tasks.jsonl"
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    return str(path)


def test_calls_reach_the_session_of_their_conversation_and_the_server_grades_it():
    routes, bodies = graded(lambda total: float(total == 3))
    with served(routes) as url:
        environment = NeMoGymEnvironment(NeMoGymConfig(url=url))
        calls = [ToolCall("add", {"n": 2}, "x"), ToolCall("verify", {}, "y"), ToolCall("add", {}, "z", error="no JSON")]
        a, b = environment.step([turn("Now", calls=calls, id="a"), turn(calls=calls[:1], id="b")], [None, None])
        assert [message["content"] for message in a.observation] == [
            '{"sum": 3}',
            '{"error": "there is no tool \'verify\'; the tools are add"}',
            '{"error": "Invalid tool call arguments: no JSON"}',
        ]
        assert [message["tool_call_id"] for message in a.observation] == ["x", "y", "z"]
        # The session is at the server, so another process goes on with it.
        other = NeMoGymEnvironment(NeMoGymConfig(url=url))
        a_state, b_state = other.restore(environment.save([a.state, b.state]))
        [b] = other.step([turn(number=1, calls=calls[:1], id="b")], [b_state])
        ends = other.step([turn("It is 3.", 1, id="a"), turn("5", 2, id="b")], [a_state, b.state])
    assert [end.reward["reward"] for end in ends] == [1.0, 0.0]
    body = next(each for each in bodies if each["response"]["id"] == "resp_a")
    assert {key: body[key] for key in TASK} == TASK
    kinds = [item["type"] for item in body["response"]["output"]]
    assert kinds == ["message", *["function_call"] * 3, *["function_call_output"] * 3, "message"]
    call, result = body["response"]["output"][1], body["response"]["output"][4]
    assert (call["name"], call["arguments"], call["call_id"]) == ("add", '{"n": 2}', result["call_id"])
    assert body["response"]["output"][-1]["content"][0]["text"] == "It is 3."
    assert len({item["call_id"] for item in body["response"]["output"] if "call_id" in item}) == 3


def test_components_are_named_rewards_and_thoughts_are_not_graded():
    routes, bodies = graded(0.5, reward_components={"form": 1, "right": 0.0})
    with served(routes) as url:
        [end] = NeMoGymEnvironment(NeMoGymConfig(url=url)).step([turn("<think>3</think>\n4")], [None])
    assert end.reward == {"form": 1.0, "right": 0.0, "reward": 0.5}
    assert end.done
    assert bodies[0]["response"]["output"][0]["content"][0]["text"].strip() == "4"


def test_a_flood_of_components_is_cut():
    routes, _ = graded(0.5, reward_components={f"{'x' * 98}{number:04}": 1 for number in range(2000)})
    with served(routes) as url:
        [end] = NeMoGymEnvironment(NeMoGymConfig(url=url)).step([turn("4")], [None])
    assert end.reward["reward"] == 0.5
    assert len(end.reward) <= 101
    assert max(map(len, end.reward)) == 100


@pytest.mark.parametrize(
    ("fields", "fault", "reason"),
    [
        ({"reward": float("nan")}, "raised", "not a finite number"),
        ({"reward": "1"}, "raised", "not a finite number"),
        ({"reward": ...}, "raised", "without a reward"),
        ({"reward_components": {"a": None, "b": [1]}}, "raised", "not a finite number"),
        ({"more": "x" * (MAX_ANSWER + 1)}, "raised", "more than"),
        ({"mask_sample": True, "failure_reason": "the judge is gone"}, "process", "could not grade.*judge is gone"),
    ],
)
def test_a_grading_that_is_none_costs_one_rollout(fields, fault, reason):
    routes, _ = graded(**fields)
    with served(routes) as url:
        [failure] = NeMoGymEnvironment(NeMoGymConfig(url=url)).step([turn("3")], [None])
    assert isinstance(failure, EnvironmentFailure)
    assert failure.fault == fault
    assert re.search(reason, failure.reason)
    assert len(failure.reason) < 600


@pytest.mark.parametrize(("status", "fault"), [(422, "raised"), (302, "raised"), (500, "raised"), (503, "process")])
def test_a_refused_session_fails_its_rollout(status, fault):
    async def refuse(request):
        return web.Response(status=status, text="because", headers={"Location": "/elsewhere"})

    with served([web.post("/seed_session", refuse)]) as url:
        environment = NeMoGymEnvironment(NeMoGymConfig(url=url, deadline_s=0.5))
        [failure] = environment.step([turn("3")], [None])
    assert failure.fault == fault
    assert f"answered /seed_session with HTTP {status}: because" in failure.reason


def stepping(start="Begin at 1."):
    """Routes of a server that takes steps, and the bodies of these."""
    bodies, closed = [], []

    async def reset(request):
        response = web.json_response({"observation": start, "info": {"supports_explicit_close": True}})
        response.set_cookie("session", "one")
        return response

    async def step(request):
        bodies.append(await request.json())
        calls = [item for item in bodies[-1]["response"]["output"] if item["type"] == "function_call"]
        outputs = [{"call_id": call["call_id"], "output": "done"} for call in calls[:1]]
        is_over = len(bodies) == 2
        answer = {
            "observation": None if is_over else "More?",
            "reward": 0.25,
            "terminated": is_over,
            "truncated": False,
        }
        return web.json_response({**answer, "info": {"tool_outputs": outputs}})

    async def close(request):
        closed.append(request.cookies["session"])
        return web.json_response({})

    return [web.post("/reset", reset), web.post("/step", step), web.post("/close", close)], bodies, closed


def test_a_server_that_takes_steps_gets_every_turn(tmp_path):
    routes, bodies, closed = stepping()
    with served(routes) as url:
        [row] = load({"data_path": tasks_file(tmp_path, TASK), "url": url}, "train")
        assert [message["content"] for message in row["messages"]] == ["Add up to 3.", "Begin at 1."]
        assert closed == ["one"] * 2
        environment = NeMoGymEnvironment(NeMoGymConfig(url=url))
        calls = [ToolCall("add", {}, "x"), ToolCall("add", {}, "y")]
        [first] = environment.step([turn(calls=calls, start="Begin at 1.")], [None])
        said = [(message["role"], message["content"]) for message in first.observation]
        assert said == [("tool", "done"), ("tool", "error: the server has no result"), ("user", "More?")]
        [last] = environment.step([turn("2", 1, start="Begin at 1.")], [first.state])
        assert (first.reward, last.reward, last.done) == (0.25, 0.25, True)
        assert closed == ["one"] * 3
        [failure] = environment.step([turn("2", start="Begin at 2.")], [None])
        assert "begins otherwise than in the row" in failure.reason
    assert [len(body["response"]["output"]) for body in bodies] == [2, 1]


def test_a_start_that_the_prompt_does_not_show_is_the_answer_to_the_first_turn():
    routes, bodies, _ = stepping()
    with served(routes) as url:
        [first] = NeMoGymEnvironment(NeMoGymConfig(url=url)).step([turn("anything")], [None])
    assert first.observation[0]["content"] == "Begin at 1."
    assert not first.done
    assert not bodies


def test_tasks_become_rows(tmp_path):
    history = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Go"}]},
        {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    path = tasks_file(tmp_path, {"responses_create_params": {"input": history, "instructions": "Add."}}, TASK)
    rows = load({"data_path": path}, "validation")
    assert [message["role"] for message in rows[0]["messages"]] == ["system", "system", "user", "assistant", "tool"]
    assert rows[0]["messages"][3]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    assert rows[1] == {
        "messages": [{"role": "user", "content": "Add up to 3."}],
        "info": {"task": TASK},
        "environment": "nemo_gym",
    }
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    with pytest.raises(DataError, match=r"task 1: the prompt has .*input_image.*only text is read"):
        load({"data_path": tasks_file(tmp_path, {"responses_create_params": {"input": [image]}})}, "train")
    with pytest.raises(
        DataError, match=r"tasks.jsonl:1: a task of NeMo Gym is an object with `responses_create_params`"
    ):
        load({"data_path": tasks_file(tmp_path, {"prompt": "x"})}, "train")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"deep.jsonl:1: a task of NeMo Gym"):
        load({"data_path": str(tmp_path / "deep.jsonl")}, "train")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load({"data_path": str(tmp_path / "none")}, "train")


def test_rows_and_servers_are_checked_before_the_run(tmp_path):
    config = NeMoGymConfig(url="http://127.0.0.1:9")
    with pytest.raises(ValueError, match="rows of nemo_gym come from the dataset"):
        check_row({"answer": "3"}, config)
    with pytest.raises(ValueError, match=r"set env.nemo_gym.tools"):
        check_row({"task": TASK}, config)
    with pytest.raises(ConfigError, match=r"127.0.0.1:9 cannot be reached.*Start the server before the run"):
        tools_of(config)
    routes, _ = graded()
    with served(routes) as url:
        config = NeMoGymConfig(url=url, tools=tasks_file(tmp_path, TASK, TASK))
        check_row({"task": TASK}, config)
        [tool] = tools_of(config)
        assert tool["function"] == {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
        assert check_machine(config) == ""
    with served([]) as url:
        assert "is not a resources server of NeMo Gym (HTTP 404)" in check_machine(NeMoGymConfig(url=url))


def test_a_server_that_never_begins_a_task_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_envs.served.nemo_gym.CHECK_S", 0.2)

    async def hang(request):
        await asyncio.sleep(60)

    with served([web.post("/seed_session", hang)]) as url, pytest.raises(ConfigError, match="has not begun a task"):
        load({"data_path": tasks_file(tmp_path, TASK), "url": url}, "train")


def test_recorded_sessions_of_nemo_gym_are_played_as_they_were():
    """The recording is of nemo-gym 0.7.0: a server with tools and sessions, and one that takes steps."""
    played(Path(__file__).with_name("nemo_gym.json"))
