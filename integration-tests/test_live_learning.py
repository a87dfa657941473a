"""A run learns from users while it serves them: each rewarded conversation trains once, and bad weights never serve."""

import json
import random
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing

from runs import Run, steps_of

from rl_core.testing.exhaustive import exhaustive
from rl_launch.run_session.directory.exactly_once import prove
from rl_launch.run_session.directory.run_folder import RunFolder

USERS = (
    "live-tiny",
    "policy.generation.backend=hf",
    "policy.train_global_batch_size=16",
    "grpo.num_prompts_per_step=16",
    "grpo.val_period=0",
    "checkpointing.save_period=2",
    "checkpointing.metric_name=null",
)


class Crowd:
    """Users who ask for sums, and a service that rewards right answers a little later. They ask again after errors.

    Args:
        folder: Run directory.
        count: Number of users.
    """

    def __init__(self, folder, count=6):
        self.folder, self.answers, self.rewards, self.ended = folder, [], {}, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(count)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        for thread in self._threads:
            thread.join(60)

    def _post(self, path, key, body):
        served = json.loads((self.folder / "live" / "endpoint.json").read_text())
        headers = {"Authorization": f"Bearer {served[key]}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{served['url']}/v1/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def _ask(self, number):
        draw = random.Random(number)
        while not self.ended.is_set():
            a, b = draw.randrange(50), draw.randrange(50)
            messages = [{"role": "user", "content": f"{a}+{b}="}]
            try:
                answer = self._post("chat/completions", "key", {"model": "policy", "messages": messages})
                text = answer["choices"][0]["message"]["content"]
                self.answers.append((time.time(), text))
                self._reward(answer["id"], float(text.strip() == str(a + b)))
            except (OSError, ValueError):
                time.sleep(0.3)  # The run is starting, or was killed.

    def _reward(self, id, reward):
        """Post a reward until it is acknowledged, whatever is killed in between."""
        while not self.ended.is_set():
            try:
                self.rewards[id] = self._post("reward", "reward_key", {"call": id, "reward": reward})["status"]
                return
            except urllib.error.HTTPError as error:
                self.rewards[id] = error.code
                return
            except (OSError, ValueError):
                time.sleep(0.3)


@exhaustive
def test_each_rewarded_conversation_trains_once_wherever_the_run_is_killed(tmp_path):
    folder = tmp_path / "run"
    with Crowd(folder) as crowd:
        run = Run.start(folder, *USERS, "grpo.max_num_steps=8")
        run.await_step(3)
        run.kill_one("ray::AsyncWorkerHost")  # the rollout worker, with the conversations that it has in memory
        run.await_step(5)
        run.kill_all()
        run = Run.start(folder, *USERS, "grpo.max_num_steps=8")
        run.finish()
    assert set(crowd.rewards.values()) <= {"accepted", "repeated"}  # no acknowledged conversation was lost
    proof = prove(RunFolder(folder))
    assert proof.holds, proof.contradictions
    assert proof.num_trained == 8 * 16
    with closing(sqlite3.connect(folder / "live" / "conversations.sqlite")) as database:
        kept = dict(database.execute("SELECT id, outcome FROM conversations").fetchall())
        places = [place for (place,) in database.execute("SELECT place FROM conversations WHERE place IS NOT NULL")]
    assert {kept[id[3:19]] for id in crowd.rewards} == {"rewarded"}
    assert sorted(places) == list(range(len(places)))


@exhaustive
def test_weights_of_a_learning_rate_that_is_far_too_large_are_never_served(tmp_path):
    folder = tmp_path / "run"
    with Crowd(folder) as crowd:
        run = Run.start(folder, *USERS, "grpo.max_num_steps=3", "policy.optimizer.kwargs.lr=1.0")
        run.finish()
    steps = steps_of(folder)
    assert [step["canary/taken_back"] for step in steps] == [1.0, 1.0, 1.0]
    assert "is taken back" in run.output
    # Users have had answers of the first version to the end: its answers are numbers, and those of the others are not.
    last = [text for _, text in crowd.answers[-20:]]
    assert sum(text.strip().isdigit() for text in last) > 15, last
    proof = prove(RunFolder(folder))
    assert proof.holds, proof.contradictions
    assert proof.dropped == {"the weights that it trained were taken back": 3 * 16}
