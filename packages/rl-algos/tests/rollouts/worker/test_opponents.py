"""Agents whose turns other weights than the policy's take, beside a replica that only says who was asked."""

import asyncio
import json

import numpy as np
import pytest

from rl_algos.rollouts.worker import worker as worker_module
from rl_algos.rollouts.worker.opponents import OpponentSpec, opponents_of_play
from rl_algos.rollouts.worker.worker import RolloutWorker, RolloutWorkerSpec
from rl_algos.tiny_model import make_tokenizer
from rl_core.model_config import TokenizerConfig
from rl_core.plugins import OpponentNeed
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RECORD, RolloutGroup
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan

TOKENIZER = make_tokenizer()
PROMPT = Prompt("p0", ({"role": "user", "content": "go"},), np.array([1, 2], np.int32), "game")
POLICY_VERSION, OPPONENT_VERSION = 30, 21


class Engine:
    """Samples one token that follows from the seed, with the logprob `-version`."""

    num_ranks = 1

    def __init__(self, version):
        self.version, self.requests, self.calls = version, [], []

    async def generate(self, request):
        self.requests.append(request)
        token = np.array([TOKENIZER.encode("1234", add_special_tokens=False)[request.seed % 4]], np.int32)
        logprobs = np.full(1, -self.version, np.float32)
        return Completion(token, logprobs, "stop", (WeightSpan(self.version, 1),))

    async def start(self):
        self.calls.append("start")

    async def pause(self, mode):
        self.calls.append(f"pause {mode}")

    async def resume(self):
        self.calls.append("resume")

    async def sleep(self):
        self.calls.append("sleep")
        return True

    async def wake(self):
        self.calls.append("wake")

    async def close(self):
        self.calls.append("close")

    async def health(self):
        return {"num_requests": 2, "num_sampled": 10, "weight_version": self.version}


class Game:
    """Two players take two turns each, and the first one wins."""

    def __init__(self):
        self.seen = []

    async def step(self, conversation):
        self.seen.append((conversation.agent, conversation.trainer_state.global_step))
        agent, other = ("first", "second")[:: 1 if conversation.turn % 2 == 0 else -1]
        if conversation.turn == 3:
            return StepResult(reward=-1.0, agent=agent, agent_rewards={other: 1.0})
        go = ({"role": "user", "content": "your turn"},)
        return StepResult(done=False, observation=go, agent=agent, next_agent=other)

    async def abandon(self, ids):
        pass


@pytest.fixture
def make_worker(monkeypatch):
    real = worker_module.resolve
    monkeypatch.setattr(worker_module, "load_tokenizer", lambda *_: TOKENIZER)
    monkeypatch.setattr(worker_module, "resolve", lambda path: Engine if path == "engine" else real(path))

    def make(*needs, first_agent=""):
        spec = RolloutWorkerSpec(
            generator="engine",
            generator_args=(POLICY_VERSION,),
            program="rl_algos.rollouts.worker.program:MultiTurnProgram",
            program_args={"max_turns": 2, "max_tokens": 200, "first_agent": first_agent},
            tokenizer=TokenizerConfig(),
            model_name="none",
            opponents=tuple(OpponentSpec(need, (OPPONENT_VERSION,)) for need in needs),
        )
        return RolloutWorker(spec, {"game": Game()})

    return make


def played(worker, *seeds, turns=()):
    """A group, and the turns of its rollouts before it was taken."""

    async def run():
        await worker.begin([(7, RolloutTask(PROMPT, SamplingParams(max_new_tokens=4), seeds, turns=turns))])
        await worker._any_finished.wait()
        so_far = (await worker.turns())[7] if not worker._finished[0][1].exception() else ()
        ((_, report),), columns, records = await worker.finished()
        return RolloutGroup.split(PROMPT, report.rollouts, columns.with_columns(records.columns)), so_far

    return asyncio.run(run())


SECOND = OpponentNeed("older", {"second": 1.0}, update_every=20)


def test_an_opponent_answers_for_its_agent_and_its_rollouts_lie_apart(make_worker):
    worker = make_worker(SECOND)
    group, _ = played(worker, 5, 6)
    assert group.rollouts.agents == ("first", "first")
    assert {version for spans in group.rollouts.spans for version, _ in spans} == {POLICY_VERSION}
    assert group.rewards().tolist() == [1.0, 1.0]
    assert group.opponents is not None
    assert group.opponents.rollouts.agents == ("second", "second")
    assert group.opponents.rollouts.is_opponent == (True, True)
    assert {version for spans in group.opponents.rollouts.spans for version, _ in spans} == {OPPONENT_VERSION}
    logprobs = group.opponents.columns.ragged("generation_logprobs").values
    assert set(logprobs[group.opponents.columns.ragged("loss_mask").values > 0]) == {-OPPONENT_VERSION}
    records = [json.loads(bytes(each)) for each in group.all_records.ragged(RECORD)]
    assert [(each["agent"], each.get("opponent"), each["weight_versions"], each["play"]) for each in records] == [
        ("first", None, [POLICY_VERSION], 0),
        ("first", None, [POLICY_VERSION], 1),
        ("second", True, [OPPONENT_VERSION], 0),
        ("second", True, [OPPONENT_VERSION], 1),
    ]


def test_an_agent_that_has_the_first_turn_is_an_opponent_if_its_name_is_given(make_worker):
    need = OpponentNeed("older", {"first": 1.0}, update_every=20)
    worker = make_worker(need, first_agent="first")
    group, _ = played(worker, 5)
    assert group.rollouts.agents == ("second",)
    assert len(worker._opponents["older"].requests) == 2
    group, _ = played(make_worker(need), 5)
    assert group.rollouts.status == ("failed",)
    assert "set first_agent in rollout_program_args" in group.rollouts.failure[0]


def test_a_play_of_opponents_alone_has_no_rollout_of_the_policy(make_worker):
    need = OpponentNeed("older", {"first": 1.0, "second": 1.0}, update_every=20)
    group, _ = played(make_worker(need, first_agent="first"), 5)
    assert len(group.rollouts) == len(group.columns) == len(group.rewards()) == 0
    assert group.opponents.rollouts.agents == ("first", "second")
    assert len(group.all_records) == 2


def test_a_play_that_runs_again_asks_no_engine_twice_and_is_the_same(make_worker):
    whole, turns = played(make_worker(SECOND), 5, 6)
    worker = make_worker(SECOND)
    again, _ = played(worker, 5, 6, turns=turns)
    assert worker._generator.requests == worker._opponents["older"].requests == []
    for ours, theirs in ((again, whole), (again.opponents, whole.opponents)):
        assert ours.rollouts == theirs.rollouts
        for name in ("tokens", "generation_logprobs", "weight_versions"):
            np.testing.assert_array_equal(ours.columns.ragged(name).values, theirs.columns.ragged(name).values)


def test_equal_requests_of_policy_and_opponent_have_other_seeds_and_digests(make_worker):
    worker = make_worker(SECOND)

    async def ask(prompt, client):
        own, theirs = await asyncio.gather(
            client.generate(prompt.token_ids, draw=0), client.generate(prompt.token_ids, draw=0, agent="second")
        )
        assert (own.spans[0].version, theirs.spans[0].version) == (POLICY_VERSION, OPPONENT_VERSION)
        raise RuntimeError("asked")

    worker._program.run = ask
    group, _ = played(worker, 5)
    assert "RuntimeError: asked" in group.rollouts.failure[0]
    (own,), (theirs,) = worker._generator.requests, worker._opponents["older"].requests
    assert own.seed != theirs.seed
    assert own.digest != theirs.digest


def test_rewards_see_the_progress_of_the_policy_whoever_moved_last(make_worker):
    worker = make_worker(SECOND)
    played(worker, 5)
    assert [step for _, step in worker._services.environments["game"].seen] == [POLICY_VERSION - 1] * 4


def test_two_players_who_alternate_are_never_opponents_at_once():
    need = OpponentNeed("older", {"first": 0.5, "second": 0.5}, update_every=20)
    drawn = [opponents_of_play([need], seed) for seed in range(2000)]
    assert {tuple(each) for each in drawn} == {("first",), ("second",)}
    assert sum("first" in each for each in drawn) == pytest.approx(1000, abs=100)
    assert drawn == [opponents_of_play([need], seed) for seed in range(2000)]


def test_an_opponent_of_every_play_plays_beside_one_of_some():
    needs = [OpponentNeed("older", {"a": 1.0, "b": 0.25}), OpponentNeed("other", {"c": 0.25})]
    drawn = [opponents_of_play(needs, seed) for seed in range(2000)]
    assert {tuple(sorted(each.items())) for each in drawn} == {
        (("a", "older"),),
        (("a", "older"), ("b", "older")),
        (("a", "older"), ("c", "other")),
    }


def test_engines_start_sleep_wake_and_end_with_the_replica_and_count_in_its_health(make_worker):
    worker = make_worker(SECOND)

    async def run():
        await worker.start()
        await worker.generator("sleep")
        await worker.generator("wake")
        health = await worker.health()
        await worker.close()
        return health

    assert asyncio.run(run()) == {"num_requests": 4, "num_sampled": 20, "weight_version": POLICY_VERSION}
    calls = ["start", "pause interrupt", "sleep", "wake", "resume", "close"]
    assert worker._opponents["older"].calls == worker._generator.calls == calls
