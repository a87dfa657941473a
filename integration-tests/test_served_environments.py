"""Runs whose environment is a server: rollouts have the sampled tokens, and the rewards of the server."""

import asyncio
import json
import random
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
from aiohttp import web
from runs import assert_tokens_are_those_of_rollouts, rollouts_of, steps_of
from test_algorithms import COMMON

from rl_core.testing.exhaustive import exhaustive

FEW = ("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=2", "grpo.val_period=0")


@contextmanager
def sums():
    """Enter with the address of a server that asks for sums by the protocols of OpenEnv and NeMo Gym, and with the
    answers that it got and their rewards. It ends the session of the fortieth answer."""
    loop, ready, found, graded = asyncio.new_event_loop(), threading.Event(), [], []

    def reward(text, total):
        graded.append((text, total, float(text == str(total))))
        return graded[-1][2]

    async def session(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            data = json.loads(message.data)["data"]
            if "seed" in data:
                a, b = random.Random(data["seed"]).choices(range(50), k=2)
                told = {"observation": {"text": f"{a}+{b}="}, "reward": None, "done": False}
            else:
                told = {"observation": {"text": ""}, "reward": reward(data["text"], a + b), "done": True}
                if len(graded) == 40:
                    graded.pop()
                    graded.append(("", 0, None))
                    return socket
            await socket.send_json({"type": "observation", "data": told})
        return socket

    async def schema(request):
        return web.json_response({"action": {"properties": {"text": {"type": "string"}}, "required": ["text"]}})

    async def paths(request):
        return web.json_response({"paths": {"/aggregate_metrics": {}}})

    async def seed(request):
        return web.json_response({})

    async def verify(request):
        body = await request.json()
        said = body["response"]["output"][-1]["content"][0]["text"]
        return web.json_response({"reward": reward(said, int(body["expected_answer"]))})

    async def start():
        app = web.Application()
        gets = [web.get("/ws", session), web.get("/schema", schema), web.get("/openapi.json", paths)]
        app.add_routes([*gets, web.post("/seed_session", seed), web.post("/verify", verify)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        return runner

    def run():
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20)
    try:
        yield found[0], graded
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def tasks(folder):
    """Settings with a file of tasks of NeMo Gym."""
    lines = []
    for a in range(10):
        asked = {"input": [{"role": "user", "content": f"{a}+7="}]}
        lines.append(json.dumps({"responses_create_params": asked, "expected_answer": str(a + 7)}) + "\n")
    (folder / "tasks.jsonl").write_text("".join(lines))
    return tuple(f"data.{split}.settings.data_path={folder / 'tasks.jsonl'}" for split in ("train", "validation"))


@exhaustive
@pytest.mark.parametrize("kind", ["openenv", "nemo_gym"])
def test_a_run_has_the_tokens_of_the_policy_and_the_rewards_of_the_server(kind, driver, warm_model, tmp_path):
    settings = tasks(tmp_path) if kind == "nemo_gym" else ("data.train.settings.size=8",)
    with sums() as (url, graded):
        recipe, model = f"{kind.replace('_', '-')}-tiny", f"policy.model_name={warm_model}"
        driver.train(tmp_path / "run", recipe, *COMMON, *FEW, model, f"env.{kind}.url={url}", *settings)
    assert_tokens_are_those_of_rollouts(tmp_path / "run")
    rollouts = [record for records in rollouts_of(tmp_path / "run").values() for record in records]
    assert [line["rollout/failed"] for line in steps_of(tmp_path / "run")] == [0, 0]
    texts = Counter((each["turns"][0]["text"].strip(), each["rewards"]["reward"]) for each in rollouts)
    # The server also knows the responses that a run tries before it starts.
    assert not texts - Counter((text.strip(), reward) for text, _, reward in graded)
    assert {reward for _, reward in texts} == {0.0, 1.0}
