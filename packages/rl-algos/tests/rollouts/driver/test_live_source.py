"""Conversations of users in their order: each trains once whatever is killed, and bad weights are taken back."""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from rl_algos.agents.conversation_store import ConversationStore, KeptCall
from rl_algos.rollouts.config import CanaryConfig
from rl_algos.rollouts.driver.ledger import Ledger
from rl_algos.rollouts.driver.live_source import (
    NO_REWARD,
    REFUSED,
    SERVED,
    TAKEN_BACK,
    TOO_OLD,
    TRIED,
    LiveSource,
    ServingCanary,
    UserPrompts,
)
from rl_core.errors import DataChanged, WeightSyncError
from rl_core.model import SavedFile
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Completion, Prompt, Rollout, WeightSpan
from rl_core.weights import WeightUpdate

SAMPLING = SamplingParams(max_new_tokens=3)
HELD_OUT = [Prompt(f"h{number}", (), np.array([1], np.int32), "math") for number in range(4)]


def rollout(prompt, *, version=1, reward=1.0):
    tokens = np.array([1, 2], np.int32)
    return Rollout(
        prompt_id=prompt.id,
        tokens=tokens,
        loss_mask=np.array([0, 1], np.uint8),
        generation_logprobs=np.zeros(2, np.float32),
        spans=(WeightSpan(version, 1),),
        turns=(),
        rewards={"reward": reward},
        stop_reason="stop",
    )


class Users:
    """A pool over conversations that have ended: place k is the k-th of them.

    Args:
        ended: Of each conversation, the version that sampled it; None if it expired.
        folder: Folder of live learning.
    """

    num_replicas = 1

    def __init__(self, ended, folder="", *, quality=lambda version: 0.5):
        self.ended, self.folder, self.quality = ended, folder, quality
        self.version, self.adopted, self.verdicts, self.waiting = 0, [], [], []

    def submit(self, tasks):
        first = len(self.waiting)
        self.waiting += tasks
        return list(range(first, len(self.waiting)))

    def next_done(self):
        ticket = next(number for number, task in enumerate(self.waiting) if task is not None)
        prompt, self.waiting[ticket] = self.waiting[ticket].prompt, None
        if prompt.dataset != "users":
            return ticket, RolloutGroup.of(prompt, [rollout(prompt, reward=self.quality(self.version))])
        version = self.ended[int(prompt.id.rpartition("/")[2])]
        played = Rollout.failed(prompt, NO_REWARD) if version is None else rollout(prompt, version=version)
        return ticket, RolloutGroup.of(prompt, [played])

    def adopt(self, update, *, in_flight=False):
        self.version = update.version
        self.adopted.append(update.version)

    def turns(self):
        return {}

    def speculation(self):
        return None

    def idle_share(self):
        return None

    def call_program(self, method, *args):
        if method == "set_verdict":
            self.verdicts.append(args[:2])
        return [{"counts": {"open": 2, "left_out": 1}, "folder": self.folder}.get(method)]


def source_of(pool, *, max_staleness=2):
    return LiveSource(
        pool,
        UserPrompts(),
        sampling=SAMPLING,
        num_generations=1,
        seed=0,
        max_staleness=max_staleness,
        prompts_per_step=2,
        num_ahead=0,
    )


def ledger_of(source):
    ledger = Ledger()
    ledger.restore(source.state()["ledger"])
    return ledger


def test_expired_and_old_conversations_are_counted_and_others_train(tmp_path):
    source = source_of(Users([1, None, 1, 1, 1, 4]))
    source.adopt(WeightUpdate(1, 0))
    assert [group.prompt.id for group in source.collect(2)] == ["users/0", "users/2"]
    assert source.metrics()["live/open"] == 2
    assert source.metrics()["live/left_out"] == 1
    source.adopt(WeightUpdate(4, 0))  # Weights moved on: conversations 3 and 4 are 3 versions old, and 2 are allowed.
    assert [group.prompt.id for group in source.collect(1)] == ["users/5"]
    source.adopt(WeightUpdate(5, 0))
    ledger = ledger_of(source)
    assert ledger.dropped() == {NO_REWARD: [1], TOO_OLD: [3, 4]}
    assert ledger.trained() == {4: [0, 2], 5: [5]}


@pytest.mark.parametrize("seed", range(8))
def test_every_conversation_trains_once_wherever_the_driver_is_killed(seed):
    random = np.random.default_rng(seed)
    ended = [None if random.random() < 0.2 else 1 for _ in range(60)]
    source, version, trained = source_of(Users(ended), max_staleness=100), 1, Counter()
    source.adopt(WeightUpdate(1, 0))
    saved, steps = source.state(), {}
    for _ in range(30):
        groups = source.collect(2)
        if random.random() < 0.3:  # killed after the step has collected
            source = source_of(Users(ended), max_staleness=100)
            source.restore(saved[0] if isinstance(saved, tuple) else saved)
            version = saved[1] if isinstance(saved, tuple) else 1
            steps = {number: ids for number, ids in steps.items() if number <= version}
            source.adopt(WeightUpdate(version, 0))
            continue
        version += 1
        source.adopt(WeightUpdate(version, 0))
        steps[version] = [group.prompt.id for group in groups]
        if random.random() < 0.5:
            saved = source.state(), version
    trained.update(id for ids in steps.values() for id in ids)
    assert set(trained.values()) <= {1}
    ledger = ledger_of(source)
    assert sorted(trained) == sorted(f"users/{k}" for draws in ledger.trained().values() for k in draws)
    assert ledger.dropped().get(NO_REWARD, []) == [k for k in range(ledger.num_drawn) if ended[k] is None]
    places = {int(id.rpartition("/")[2]) for id in trained} | set(ledger.dropped().get(NO_REWARD, []))
    assert places == set(range(ledger.num_drawn))


def test_a_position_in_a_dataset_is_refused():
    with pytest.raises(DataChanged, match="users begin now"):
        UserPrompts().restore({"drawn": [3]})


class Policy:
    """A model whose state is a number, which training changes."""

    trains = True

    def __init__(self):
        self.value, self.loaded = 1, []

    def save(self, path, *, wait=True):
        self.saved = SimpleNamespace(path=path, value=self.value)

    def finish_save(self, *, wait=True):
        return (SavedFile(str(self.saved.value), 1, None, 0),)

    def load(self, path, *, files=()):
        self.value = int(files[0].path)
        self.loaded.append((path, self.value))


class Published:
    """The weights of a policy: the version follows from the number of publications."""

    def __init__(self):
        self.version = 0

    def publish(self):
        self.version += 1
        return WeightUpdate(self.version, 0)


def canary_of(tmp_path, quality):
    pool, weights, policy = Users([1] * 40, str(tmp_path), quality=quality), Published(), Policy()
    source = source_of(pool, max_staleness=100)
    settings = CanaryConfig(enabled=True, max_drop=0.1)
    canary = ServingCanary(settings, source, policy, weights, HELD_OUT, SAMPLING)
    source.adopt(weights.publish())
    canary.begin()
    return canary, pool, policy


def test_a_worse_version_is_taken_back_and_training_continues_from_the_served_one(tmp_path):
    canary, pool, policy = canary_of(tmp_path, {1: 0.5, 2: 0.45, 3: 0.1, 4: 0.45, 5: 0.8}.__getitem__)
    served = []
    for step in range(3):
        canary.source.collect(2)
        policy.value = 10 + step
        update, recorded = canary.serve(canary.weights.publish())
        served.append((update.version, recorded["canary/taken_back"], policy.value))
    # Version 3 is worse; its state is gone, version 4 has that of version 2, and the next step continues from there.
    assert served == [(2, 0.0, 10), (4, 1.0, 10), (5, 0.0, 12)]
    assert pool.adopted == [1, 2, 3, 4, 5]
    tried = [(2, TRIED), (2, SERVED), (3, TRIED), (3, REFUSED), (4, SERVED), (5, TRIED), (5, SERVED)]
    assert pool.verdicts == [(1, SERVED), *tried]
    ledger = ledger_of(canary.source)
    assert ledger.dropped() == {TAKEN_BACK: [2, 3]}
    assert ledger.trained() == {2: [0, 1], 5: [4, 5]}
    assert canary.state() == {"score": 0.8}


def test_weights_that_the_engines_refuse_are_taken_back(tmp_path):
    canary, pool, policy = canary_of(tmp_path, lambda version: 0.5)
    whole = pool.adopt

    def adopt(update, **keys):
        if update.version == 2:
            raise WeightSyncError("the engine computes something else")
        whole(update, **keys)

    pool.adopt = adopt
    canary.source.collect(2)
    policy.value = 99
    update, recorded = canary.serve(canary.weights.publish())
    assert (update.version, recorded["canary/taken_back"], policy.value) == (3, 1.0, 1)


KILLED = """
import asyncio, os, sys
from pathlib import Path
import numpy as np
from rl_algos.agents.conversation_store import ConversationStore, KeptCall
from rl_core.rollouts.rollout import Completion, WeightSpan

async def main():
    store = ConversationStore(Path(sys.argv[1]))
    await store.open()
    completion = Completion(np.array([5, 6], np.int32), np.zeros(2, np.float32), "stop", (WeightSpan(3, 2),))
    while True:
        made = await store.add("", "task")
        await store.keep(made, KeptCall("messages", b"{}", "a", "d", {"q": completion}))
        print("kept", made, flush=True)
        await store.reward(made, "", {"reward": 0.5}, 60)
        print("rewarded", made, flush=True)

asyncio.run(main())
"""


def test_acknowledged_answers_and_rewards_outlive_sigkill(tmp_path):
    path = tmp_path / "live" / "conversations.sqlite"
    lines = []
    for count in (3, 4, 6):
        running = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
        lines += [running.stdout.readline().split() for _ in range(count)]
        running.send_signal(signal.SIGKILL)
        running.wait()

    async def found():
        store = ConversationStore(path)
        await store.open()
        kept = {id: await store.calls(id) for what, id in lines if what == "kept"}
        states = {id: await store.conversation(id) for _, id in lines}
        places = [await store.take(place, 1) for place in range(30)]
        again = [await store.take(place, 1) for place in range(30)]
        await store.close()
        return kept, states, places, again

    kept, states, places, again = asyncio.run(found())
    for calls in kept.values():
        assert [call.completions["q"].token_ids.tolist() for call in calls] == [[5, 6]]
        assert calls[0].completions["q"].spans == (WeightSpan(3, 2),)
    rewarded = {id for what, id in lines if what == "rewarded"}
    assert len(rewarded) == 6
    assert all(states[id].rewards == {"reward": 0.5} for id in rewarded)
    taken = [conversation.id for place in places for conversation in place]
    assert len(taken) == len(set(taken))
    assert rewarded <= set(taken)
    assert again == places


def test_a_place_has_the_same_conversations_for_all_processes(tmp_path):
    """Two workers that ask at once get different conversations for different places, and the same for the same."""

    async def scenario():
        stores = [ConversationStore(tmp_path / "c.sqlite") for _ in range(2)]
        for store in stores:
            await store.open()
        completion = Completion(np.array([5], np.int32), np.zeros(1, np.float32), "stop", (WeightSpan(1, 1),))
        for _ in range(12):
            made = await stores[0].add("", "")
            await stores[0].keep(made, KeptCall("messages", b"{}", "a", "d", {"q": completion}))
            assert await stores[1].reward(made, "", {"reward": 1.0}, 60) == "accepted"
        asked = [(store, place) for place in range(12) for store in stores]
        found = await asyncio.gather(*[store.take(place, 1) for store, place in asked])
        for store in stores:
            await store.close()
        return found

    found = asyncio.run(scenario())
    assert found[::2] == found[1::2]
    assert len({place[0].id for place in found[::2]}) == 12
