"""Agents as functions and as commands: started for each rollout, recorded, and ended with all that they started."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from conftest import prompt

from rl_algos.agents.task_board import Address, LeaseExpired, TaskBoard
from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.config import AgentConfig
from rl_algos.rollouts.training.batch import build_batch
from rl_algos.rollouts.training.segments import ROLLOUT
from rl_core.rollouts.environment import EnvironmentFailure, StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.record import rollout_record, segments_of, turns_of
from rl_core.rollouts.rollout import Prompt
from rl_core.user_code import FromFile

CLIENT = """
import json, os, urllib.request

def chat(base_url, api_key, messages, **more):
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""
TWO_TURNS = (
    CLIENT
    + """
async def run(base_url, api_key, prompt):
    messages = list(prompt["messages"])
    said = chat(base_url, api_key, messages)
    messages += [said, {"role": "user", "content": "sure?"}]
    said = chat(base_url, api_key, messages)
    print("the last turn was", said["content"])
    return {"reward": float(said["content"] == str(prompt["info"]["answer"])), "turns": 2}
"""
)


def function(folder, text):
    path = Path(folder, "my_agent.py")
    path.write_text(text)
    return FromFile.read(f"{path}:run")


def test_a_function_is_recorded_token_by_token_and_rewarded(make_worker, play, tmp_path):
    worker = make_worker(AgentConfig(run="my_agent.py:run"), function=function(tmp_path, TWO_TURNS))
    ([first, second], _) = asyncio.run(play(worker, seeds=(1, 2)))
    for rollout in (first, second):
        assert rollout.status == "ok", rollout.failure
        assert rollout.rewards == {"reward": 1.0, "turns": 2.0}
        assert [turn.text for turn in rollout.turns] == ["5", "5"]
        assert rollout.segments == ()
        assert rollout.num_sampled == 4  # two digits and the ends of their turns
    sampled = [request.token_ids.tolist() for request in worker._generator.requests]
    *_, last = sorted(sampled, key=len)
    assert first.tokens.tolist()[: len(last)] == last  # what the engine consumed, and what it sampled
    logs = list(Path(tmp_path, "agents").glob("p0-*.log"))
    assert [log.read_text() for log in logs] == ["the last turn was 5\n"] * 2


def test_a_repeated_rollout_finds_the_completions_that_it_had(make_worker, play, tmp_path):
    config, agent = AgentConfig(run="my_agent.py:run"), function(tmp_path, TWO_TURNS)
    (rollouts, turns) = asyncio.run(play(make_worker(config, function=agent), seeds=(1, 2)))
    again = make_worker(config, function=agent)
    (repeated, _) = asyncio.run(play(again, seeds=(1, 2), turns=turns))
    assert again._generator.requests == []
    for one, other in zip(rollouts, repeated, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.rewards == other.rewards


def test_a_command_writes_its_reward_to_a_file(make_worker, play, tmp_path):
    script = Path(tmp_path, "agent.py")
    script.write_text(
        CLIENT
        + """
prompt = json.load(open(os.environ["RL_PROMPT_FILE"]))
said = chat(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], prompt["messages"])
json.dump(float(os.environ["BONUS"]), open(os.environ["RL_REWARD_FILE"], "w"))
"""
    )
    config = AgentConfig(command=[sys.executable, str(script)], env={"BONUS": "0.25"})
    ([rollout], _) = asyncio.run(play(make_worker(config)))
    assert (rollout.status, rollout.reward) == ("ok", 0.25), rollout.failure


HOSTILE_REWARD_FILES = {
    "not JSON": ("open(file, 'w').write('{')", "is not valid JSON"),
    "deep": ("open(file, 'w').write('[' * 100_000)", "is not valid JSON"),
    "huge": ("open(file, 'w').write(' ' * 2**21)", "has more than"),
    "a pipe": ("os.mkfifo(file)", "is not a regular file"),
    "a folder": ("os.mkdir(file)", "is not a regular file"),
    "endless": ("os.symlink('/dev/zero', file)", "cannot be read"),
}


@pytest.mark.parametrize("kind", HOSTILE_REWARD_FILES)
def test_a_hostile_reward_file_costs_its_rollout(make_worker, play, tmp_path, kind):
    code, reason = HOSTILE_REWARD_FILES[kind]
    command = [sys.executable, "-c", f"import os; file = os.environ['RL_REWARD_FILE']; {code}"]
    ([rollout], _) = asyncio.run(play(make_worker(AgentConfig(command=command))))
    assert rollout.status == "failed"
    assert f"the agent's reward file {reason}" in rollout.failure


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('no plan')", "ValueError: no plan"),
        ("import os; os._exit(3)", "status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ("return 1.0", "nothing to train on"),
        ("chat(base_url, api_key, prompt['messages'])", "returned no reward"),
        ("chat(base_url, api_key, prompt['messages']); return 'good'", "must be a finite number"),
        ("chat(base_url, api_key, prompt['messages']); return float('nan')", "must be a finite number"),
    ],
    ids=["raises", "exits", "is killed", "never calls", "no reward", "a word", "not finite"],
)
def test_an_agent_that_fails_costs_its_rollout(make_worker, play, tmp_path, body, reason):
    agent = function(tmp_path, f"{CLIENT}\ndef run(base_url, api_key, prompt):\n    {body}\n")
    ([rollout], _) = asyncio.run(play(make_worker(AgentConfig(run="my_agent.py:run"), function=agent)))
    assert rollout.status == "failed"
    assert reason in rollout.failure
    # what it had said can be read
    record = json.loads(rollout_record(PROMPT, 0, rollout).tobytes())
    assert [turn["text"] for turn in turns_of(record)] == ["5"] * ("chat" in body)
    assert len(segments_of(record)) == ("chat" in body)
    assert rollout.num_sampled == 0


def of_agents(folder):
    """Processes that the agents with this folder in their environment started, whoever their parents are."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if f"FOLDER={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:
                continue
    return found


def all_end(folder):
    """Wait for the processes of the agents with this folder; those that were killed take a moment to disappear."""
    deadline = time.monotonic() + 60
    while of_agents(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not of_agents(folder)


def test_an_agent_that_does_not_end_is_ended_with_everything_that_it_started(make_worker, play, tmp_path):
    stays = "[sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)']"
    agent = function(
        tmp_path,
        f"""
import subprocess, sys, time

def run(base_url, api_key, prompt):
    subprocess.Popen({stays})
    subprocess.Popen({stays}, start_new_session=True)
    time.sleep(99)
""",
    )
    config = AgentConfig(run="my_agent.py:run", grace_s=0.1, env={"FOLDER": str(tmp_path)})
    worker = make_worker(config, function=agent, max_seconds=1.5)
    ([rollout], _) = asyncio.run(play(worker))
    assert rollout.status == "failed"
    assert "max_rollout_s" in rollout.failure
    assert all_end(tmp_path)


def test_rollouts_whose_agents_or_their_host_were_killed_begin_again(make_worker, play, tmp_path):
    """The first rollout kills itself once, the second the host with all agents, the third fails however often."""
    agent = function(
        tmp_path,
        TWO_TURNS.replace(
            "    messages +=",
            f"""
    import signal, subprocess, sys, time
    from pathlib import Path
    number = int(prompt["messages"][0]["content"][0])
    if number == 0 or not (done := Path({str(tmp_path)!r}, f"killed-{{number}}")).exists():
        if number:
            done.touch()
        if number == 2:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
        os.kill(os.getppid() if number == 2 else os.getpid(), signal.SIGKILL)
        time.sleep(99)
    messages +=""",
            1,
        ),
    )
    worker = make_worker(AgentConfig(run="my_agent.py:run", env={"FOLDER": str(tmp_path)}), function=agent)

    async def rollouts():
        await worker.start()
        try:
            tasks = [RolloutTask(prompt(f"{number}+3", number), SamplingParams(32), (1,)) for number in range(3)]
            await worker.begin(list(enumerate(tasks)))
            found = {}
            while len(found) < 3:
                await worker._any_finished.wait()
                number, (_, [found[number]]) = worker._take()
            return found
        finally:
            await worker.close()

    found = asyncio.run(rollouts())
    assert found[0].status == "failed"
    assert "AgentLost" in found[0].failure
    for number in (1, 2):
        assert (found[number].status, found[number].reward) == ("ok", 1.0), found[number].failure
        assert [turn.text for turn in found[number].turns] == ["5", "5"]
    assert all_end(tmp_path)


def test_a_conversation_is_scored_again_if_its_environment_was_killed(make_worker, play, tmp_path):
    class Judge:
        answers = iter([EnvironmentFailure("its process ended: signal SIGKILL"), StepResult(reward=0.5)])

        async def step(self, conversation):
            return next(self.answers)

        async def abandon(self, ids):
            pass

    config = AgentConfig(run="my_agent.py:run", reward="environment")
    worker = make_worker(config, function=function(tmp_path, TWO_TURNS), environments={"agent": Judge()})
    ([rollout], _) = asyncio.run(play(worker))
    assert rollout.reward == 0.5, rollout.failure


def test_what_a_command_leaves_running_ends_with_its_rollout(make_worker, play, tmp_path):
    script = Path(tmp_path, "agent.sh")
    script.write_text(f"setsid {sys.executable} -c 'import time; time.sleep(99)' &\nexit 0\n")
    config = AgentConfig(command=["sh", str(script)], grace_s=0.1, env={"FOLDER": str(tmp_path)})
    ([rollout], _) = asyncio.run(play(make_worker(config)))
    assert rollout.status == "failed"  # it never called the policy
    assert all_end(tmp_path)


def test_the_environment_of_the_prompt_scores_the_conversation(make_worker, play, tmp_path):
    class Judge:
        async def step(self, conversation):
            self.seen = conversation
            return StepResult(reward={"reward": 0.5, "style": 2.0})

        async def abandon(self, ids):
            pass

    judge = Judge()
    config = AgentConfig(run="my_agent.py:run", reward="environment")
    worker = make_worker(config, function=function(tmp_path, TWO_TURNS), environments={"agent": judge})
    ([rollout], _) = asyncio.run(play(worker))
    assert rollout.rewards["style"] == 2.0
    assert rollout.reward == 0.5
    assert [message["role"] for message in judge.seen.messages] == ["user", "assistant", "user", "assistant"]
    assert judge.seen.completion == "5"


def test_a_file_that_cannot_be_loaded_is_told_at_the_start(make_worker, play, tmp_path):
    worker = make_worker(AgentConfig(run="my_agent.py:run"), function=function(tmp_path, "import nowhere\nrun = 1\n"))
    with pytest.raises(Exception, match="nowhere"):
        asyncio.run(play(worker))


def test_agents_end_with_their_worker(tmp_path):
    host = Path(tmp_path, "worker.py")
    host.write_text(
        """
import asyncio, sys
from pathlib import Path
from rl_core.agent_processes.launcher import ProcessLauncher
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.record import rollout_record, segments_of, turns_of
from rl_core.rollouts.rollout import Prompt

async def main():
    waits = "import time; print('up', flush=True); time.sleep(99)"
    launcher = ProcessLauncher(None, [sys.executable, "-c", waits], {"FOLDER": sys.argv[2]}, 1)
    await launcher.start()
    await launcher.play({"id": "p"}, {}, Path(sys.argv[1]))

asyncio.run(main())
"""
    )
    log = Path(tmp_path, "agent.log")

    async def killed():
        worker = await asyncio.create_subprocess_exec(sys.executable, str(host), str(log), str(tmp_path))
        while not (log.exists() and log.read_text()):
            assert worker.returncode is None
            await asyncio.sleep(0.05)
        assert of_agents(tmp_path)
        os.kill(worker.pid, 9)
        await worker.wait()
        while of_agents(tmp_path):
            await asyncio.sleep(0.05)

    asyncio.run(killed())


PROMPT = Prompt("p0", ({"role": "user", "content": "2+3"},), np.zeros(1, np.int32), "agent")
THREADS = (
    CLIENT
    + """
def run(base_url, api_key, prompt):
    first = chat(base_url, api_key, prompt["messages"])
    chat(base_url, api_key, [*prompt["messages"], first, {"role": "user", "content": "a"}])
    chat(base_url, api_key, [*prompt["messages"], first, {"role": "user", "content": "b"}])
    chat(base_url, api_key, [{"role": "user", "content": "sum up"}])
    return 1.0
"""
)


def test_branches_and_threads_are_rows_of_one_rollout(make_worker, play, tmp_path):
    worker = make_worker(AgentConfig(run="my_agent.py:run"), function=function(tmp_path, THREADS))
    (rollouts, _) = asyncio.run(play(worker, seeds=(1, 2)))
    for rollout in rollouts:
        assert len(rollout.segments) == 3
        assert rollout.num_sampled == 8  # the first turn is in two branches, and trained on in one
    config = GRPOConfig(agent=AgentConfig(run="my_agent.py:run"))
    batch = build_batch([RolloutGroup.of(PROMPT, rollouts)], config)
    assert batch.array(ROLLOUT).tolist() == [0, 0, 0, 1, 1, 1]
    assert int(batch.ragged("loss_mask").values.sum()) == 16


COMPACTED = (
    CLIENT
    + """
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

def run(base_url, api_key, prompt):
    system = {"role": "system", "content": "Work alone."}
    begun = [system, *prompt["messages"]]
    first = chat(base_url, api_key, begun, tools=TOOLS)
    chat(base_url, api_key, [*begun, first, {"role": "user", "content": "sure?"}], tools=TOOLS)
    chat(base_url, api_key, [system, {"role": "user", "content": "a summary"}], tools=TOOLS)
    chat(base_url, api_key, [*begun, first, {"role": "user", "content": "another way?"}], tools=TOOLS)
    chat(base_url, api_key, [{"role": "user", "content": "no tools"}])
    return 1.0
"""
)


def test_a_record_has_the_messages_the_tools_and_the_turns_of_each_segment(make_worker, play, tmp_path):
    worker = make_worker(AgentConfig(run="my_agent.py:run"), function=function(tmp_path, COMPACTED))
    ([rollout], _) = asyncio.run(play(worker))
    record = json.loads(rollout_record(PROMPT, 0, rollout).tobytes())
    assert "turns" not in record
    assert [each["num_tokens"] for each in record["segments"]] == list(rollout.segments)
    conversations, tools = {}, {}
    for segment in segments_of(record):
        shared = segment["shared"]
        before = conversations[shared["number"]][: shared["messages"]] if shared else []
        own = [message["content"] for message in segment["messages"]]
        for turn in segment["turns"]:
            own += [turn["text"], *(message["content"] for message in turn.get("observation", ()))]
        conversations[segment["number"]] = before + own
        names = [tool["function"]["name"] for tool in segment["tools"]]
        tools[segment["number"]] = tools[shared["number"]] if shared else names
    begun = ["Work alone.", "2+3", "5"]
    expected = [
        ([*begun, "sure?", "5"], ["look"]),
        (["Work alone.", "a summary", "5"], ["look"]),
        ([*begun, "another way?", "5"], ["look"]),
        (["no tools", "5"], []),
    ]
    assert sorted((conversations[number], tools[number]) for number in conversations) == sorted(expected)
    assert [each["call"] for each in segments_of(record)][::3] == [1, 5]
    # a message that two segments begin with is written once
    assert json.dumps(record).count("Work alone.") == 1
    assert len(turns_of(record)) == 5
    assert "null" not in json.dumps(record["segments"])


@pytest.mark.parametrize("reward", ["posted", "environment"])
def test_an_agent_elsewhere_takes_a_rollout_and_ends_it(make_worker, play, tmp_path, reward):
    class Judge:
        async def step(self, conversation):
            return StepResult(reward=0.5)

        async def abandon(self, ids):
            pass

    async def post(session, url, key, body):
        async with session.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
            return response.status, await response.json()

    async def agent():
        while not (files := list(Path(tmp_path, "agents").glob("*.json"))) or not files[0].read_text():
            await asyncio.sleep(0.01)
        served = json.loads(files[0].read_text())
        async with aiohttp.ClientSession() as session:
            refused, _ = await post(session, f"{served['url']}/rollouts", "wrong", {})
            _, taken = await post(session, f"{served['url']}/rollouts", served["key"], {"wait_s": 30})
            key, base = taken["api_key"], taken["base_url"]
            await post(session, f"{base}/chat/completions", key, {"messages": taken["prompt"]["messages"]})
            own, _ = await post(session, f"{base}/reward", key, {"reward": 9.0})
            if reward == "posted":
                assert (await post(session, f"{base}/reward", taken["reward_key"], {"reward": 0.5}))[0] == 200
            assert (await post(session, f"{base}/end", key, {}))[0] == 200
        return refused, own

    async def both():
        worker = make_worker(AgentConfig(external=True, reward=reward), environments={"agent": Judge()}, max_seconds=60)
        return await asyncio.gather(play(worker), agent())

    ([rollout], _), statuses = asyncio.run(both())
    assert (rollout.status, rollout.reward) == ("ok", 0.5), rollout.failure
    assert statuses == (401, 401 if reward == "posted" else 403)  # an agent does not reward itself


class Elsewhere:
    """An agent that runs elsewhere.

    Args:
        folder: Folder of the run's logs.
    """

    def __init__(self, folder):
        self.folder = folder

    async def __aenter__(self):
        self.http = aiohttp.ClientSession()
        while not (files := list(Path(self.folder, "agents").glob("*.json"))) or not files[0].read_text():
            await asyncio.sleep(0.01)
        self.board = json.loads(files[0].read_text())
        return self

    async def __aexit__(self, *_):
        await self.http.close()

    async def post(self, url, key, body=None, **headers):
        headers = {"Authorization": f"Bearer {key}", **headers}
        async with self.http.post(url, json=body or {}, headers=headers) as response:
            return response.status, await response.json()

    async def take(self, wait_s=30, **headers):
        return await self.post(f"{self.board['url']}/rollouts", self.board["key"], {"wait_s": wait_s}, **headers)

    async def chat(self, taken, *messages):
        asked = {"messages": [*taken["prompt"]["messages"], *messages]}
        return await self.post(f"{taken['base_url']}/chat/completions", taken["api_key"], asked)

    async def finish(self, taken, reward=1.0):
        await self.post(f"{taken['base_url']}/reward", taken["reward_key"], {"reward": reward})
        return await self.post(f"{taken['base_url']}/end", taken["api_key"])


EXTERNAL = {"external": True, "reward": "posted"}
AGAIN = {"role": "user", "content": "sure?"}


def test_a_rollout_whose_agent_died_goes_to_the_next_one_from_its_beginning(make_worker, play, tmp_path):
    async def agents():
        async with Elsewhere(tmp_path) as agent:
            _, first = await agent.take()
            _, said = await agent.chat(first)
            await agent.post(f"{first['base_url']}/reward", first["reward_key"], {"reward": 9.0})
            taken = worker._program._board._taken
            taken[first["id"]].expiry._run()  # as it is after lease_s
            _, second = await agent.take()
            assert second["prompt"] == first["prompt"]
            late, body = await agent.chat(first)
            assert (late, body["error"]["code"]) == (410, "rollout_ended")
            _, again = await agent.chat(second)
            assert (again["id"], again["choices"]) == (said["id"], said["choices"])
            await agent.chat(second, again["choices"][0]["message"], AGAIN)
            await agent.finish(second)

    async def both():
        return await asyncio.gather(play(worker), agents())

    worker = make_worker(AgentConfig(**EXTERNAL), max_seconds=60)
    ([rollout], _), _ = asyncio.run(both())
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.failure
    assert len(worker._generator.requests) == 2  # the first call is not sampled again
    assert [turn.text for turn in rollout.turns] == ["5", "5"]
    assert rollout.segments == ()


def test_a_lease_does_not_expire_while_a_call_is_answered_or_it_is_renewed(make_worker, play, tmp_path):
    async def agent():
        async with Elsewhere(tmp_path) as agent:
            _, taken = await agent.take()
            board = worker._program._board
            assert (await agent.chat(taken))[0] == 200
            [offer] = board._taken.values()
            with board.calling(taken["id"]):
                assert offer.expiry is None
                await agent.post(f"{taken['base_url']}/renew", taken["api_key"])
                assert offer.expiry is None  # another call is still answered
            before = offer.expiry.when()
            await agent.post(f"{taken['base_url']}/renew", "wrong")
            assert offer.expiry.when() == before
            assert (await agent.post(f"{taken['base_url']}/renew", taken["api_key"]))[0] == 200
            assert offer.expiry.when() > before
            await agent.finish(taken)

    async def both():
        return await asyncio.gather(play(worker), agent())

    worker = make_worker(AgentConfig(**EXTERNAL), max_seconds=60)
    ([rollout], _), _ = asyncio.run(both())
    assert rollout.reward == 1.0, rollout.failure


def test_a_lease_expires_after_its_time_without_a_call():
    async def main():
        board = TaskBoard(lease_s=0.01)
        playing = asyncio.create_task(board.play({}, Address("r", "http://x", "k")))
        assert (await board.take(30))["lease_s"] == 0.01
        with pytest.raises(LeaseExpired, match=r"not called for 0\.01 s"):
            await playing

    asyncio.run(main())


def test_a_request_for_a_rollout_that_is_repeated_gets_the_same_one(make_worker, play, tmp_path):
    async def agent():
        async with Elsewhere(tmp_path) as agent:
            key = {"Idempotency-Key": "a"}
            (_, one), (_, same) = await asyncio.gather(agent.take(**key), agent.take(**key))
            assert one == same
            _, other = await agent.take(**{"Idempotency-Key": "b"})
            assert other["id"] != one["id"]
            for taken in (one, other):
                await agent.chat(taken)
                await agent.finish(taken)
            assert (await agent.take(wait_s=0.01, **key))[1]["error"]["code"] == "no_rollout"

    async def both():
        worker = make_worker(AgentConfig(**EXTERNAL), max_seconds=60)
        return await asyncio.gather(play(worker, seeds=(1, 2)), agent())

    (rollouts, _), _ = asyncio.run(both())
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]


def test_a_lease_of_an_agent_that_the_run_starts_is_refused():
    with pytest.raises(ValueError, match=r"lease_s.*external: true"):
        AgentConfig(run="agent.py:run", lease_s=5)


def test_an_address_that_nobody_can_call_is_refused():
    with pytest.raises(ValueError, match="host"):
        AgentConfig(external=True, reward="posted", host="0.0.0.0")


PLANNER = (
    CLIENT
    + """
def run(base_url, api_key, prompt):
    root = base_url.removesuffix("/v1")
    plan = chat(f"{root}/agents/planner/v1", api_key, prompt["messages"])
    for _ in range(2):
        chat(f"{root}/agents/worker/v1", api_key, prompt["messages"])
    return RETURNED
"""
)


def planned(make_worker, play, folder, returned, **settings):
    """The rollouts of a planner that calls once and a worker that calls twice, with what the program returns."""
    config = AgentConfig(run="my_agent.py:run", **settings)
    replies = make_worker(
        config, lambda prompt, seed: str(seed), function=function(folder, PLANNER.replace("RETURNED", returned))
    )
    return asyncio.run(play(replies))[0]


def test_agents_by_name_have_rollouts_and_rewards_of_their_own(make_worker, play, tmp_path):
    rewards = '{"agents": {"planner": 1.0, "worker": {"reward": 0.5, "tests": 2.0}}}'
    planner, worker = planned(make_worker, play, tmp_path, rewards)
    assert (planner.agent, dict(planner.rewards)) == ("planner", {"reward": 1.0})
    assert (worker.agent, dict(worker.rewards)) == ("worker", {"reward": 0.5, "tests": 2.0})
    texts = [turn.text for rollout in (planner, worker) for turn in rollout.turns]
    assert len(set(texts)) == 3  # equal calls, and each a draw of its own
    assert [len(planner.segments), len(worker.segments)] == [0, 2]


def test_an_agent_without_a_reward_earns_that_of_the_rollout(make_worker, play, tmp_path):
    found = planned(make_worker, play, tmp_path, '{"reward": 0.25, "agents": {"worker": 1.0}}')
    assert [(each.agent, each.reward) for each in found] == [("planner", 0.25), ("worker", 1.0)]


def test_an_agent_without_any_reward_is_named(make_worker, play, tmp_path):
    (failed,) = planned(make_worker, play, tmp_path, '{"agents": {"worker": 1.0}}')
    assert "returned no reward" in failed.failure
    assert "(agents: planner)" in failed.failure


class AgentEnvironment:
    """Runs the agents of its conversations in no time, and is asked twice before it says so."""

    def __init__(self, reward=1.0, **info):
        self.reward, self.info, self.asked, self.abandoned = reward, info, [], []

    async def step(self, conversation):
        self.asked.append(conversation)
        if conversation.turn < 2:
            return StepResult(done=False, observation=({"role": "user", "content": "wait"},))
        if not self.info:
            await self.call(conversation.agent_run)
        return StepResult(reward={"reward": self.reward, "passed": self.reward}, info=self.info)

    async def call(self, agent, name=""):
        variables = agent.variables_at("127.0.0.1")
        headers = {"Authorization": f"Bearer {variables['OPENAI_API_KEY']}"}
        body = {"messages": [{"role": "user", "content": "2+3"}]}
        place = f"/agents/{name}/v1" if name else "/v1"
        url = variables["OPENAI_BASE_URL"].removesuffix("/v1") + f"{place}/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
            response.raise_for_status()

    async def abandon(self, ids):
        self.abandoned += ids


IN_ENVIRONMENT = AgentConfig(place="environment", command=["python", "a.py"], files=["a.py"], env={"A": "b"})


def test_an_environment_runs_the_agent_and_gives_the_reward(make_worker, play):
    environment = AgentEnvironment()
    worker = make_worker(IN_ENVIRONMENT, environments={"agent": environment}, files={"a.py": b"text"})
    ([rollout], _) = asyncio.run(play(worker))
    assert (rollout.status, rollout.rewards) == ("ok", {"reward": 1.0, "passed": 1.0}), rollout.failure
    first, *_ = environment.asked
    assert [asked.turn for asked in environment.asked] == [0, 1, 2]
    assert (first.agent_run.command, first.agent_run.files) == (("python", "a.py"), {"a.py": b"text"})
    assert first.agent_run.variables_at("h")["A"] == "b"
    assert environment.abandoned == []


@pytest.mark.parametrize("rewards", [{"solver": 1.0, "critic": {"reward": -1.0}}, {"solver": 1.0}])
def test_an_environment_whose_agent_is_its_own_gives_rewards_by_agent(make_worker, play, rewards):
    class Debate(AgentEnvironment):
        async def step(self, conversation):
            assert conversation.agent_run.command == ()
            for name in ("solver", "critic"):
                await self.call(conversation.agent_run, name)
            return StepResult({}, agent_rewards=rewards)

    worker = make_worker(AgentConfig(place="environment"), environments={"agent": Debate()})
    (found, _) = asyncio.run(play(worker))
    if "critic" not in rewards:
        assert "(agents: critic)" in found[0].failure
        return
    assert {each.agent: each.reward for each in found} == {"solver": 1.0, "critic": -1.0}


def test_an_agent_that_fails_in_its_environment_costs_its_rollout(make_worker, play, tmp_path):
    environment = AgentEnvironment(agent_failure="the agent failed: no plan", agent_output="one\ntwo\n")
    worker = make_worker(IN_ENVIRONMENT, environments={"agent": environment})
    ([rollout], _) = asyncio.run(play(worker))
    assert rollout.status == "failed"
    assert "no plan" in rollout.failure
    assert [log.read_text() for log in Path(tmp_path, "agents").glob("*.log")] == ["one\ntwo\n"]


def test_a_rollout_that_takes_too_long_is_abandoned_with_its_agent(make_worker, play):
    environment = AgentEnvironment()

    async def never(conversation):
        environment.asked.append(conversation)
        return StepResult(done=False, observation=({"role": "user", "content": "wait"},))

    environment.step = never
    worker = make_worker(IN_ENVIRONMENT, environments={"agent": environment}, max_seconds=0.5)
    ([rollout], _) = asyncio.run(play(worker))
    assert rollout.status == "failed"
    assert environment.abandoned == [environment.asked[0].id]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"run": "a.py:run", "place": "environment"}, "place"),
        ({"external": True, "reward": "posted", "place": "environment"}, "place"),
        ({"command": ["a"], "place": "environment", "reward": "returned"}, "reward"),
        ({"command": ["a"], "place": "environment", "reward": "posted"}, "reward"),
        ({"command": ["a"], "place": "environment", "files": ["a/b.py", "c/b.py"]}, "files"),
        ({"command": ["a"], "files": ["b.py"]}, "files"),
        ({"place": "environment", "files": ["b.py"]}, "files"),
    ],
)
def test_keys_that_contradict_the_place_of_an_agent_are_refused(settings, key):
    with pytest.raises(ValueError, match=key):
        AgentConfig(**settings)


def test_rollouts_that_no_agent_has_taken_are_counted(make_worker, tmp_path):
    async def main():
        worker = make_worker(AgentConfig(external=True, reward="posted"), max_seconds=20)
        await worker.start()
        await worker.begin([(0, RolloutTask(prompt(), SamplingParams(8), (1, 2)))])
        while await worker.num_untaken() < 2:
            await asyncio.sleep(0.01)
        [file] = (tmp_path / "agents").glob("*.json")
        served = json.loads(file.read_text())
        headers = {"Authorization": f"Bearer {served['key']}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{served['url']}/rollouts", json={}) as took,
        ):
            assert took.status == 200
        assert await worker.num_untaken() == 1
        await worker.close()

    asyncio.run(main())
