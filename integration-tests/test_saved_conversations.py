"""Conversations under way go on where they were after the driver was killed, and everything with it."""

import json
import string
import time
from collections import Counter

import psutil
from runs import Run, rollouts_of

from rl_core.testing.exhaustive import exhaustive

GAMES = '''
import json
import os
import random
import time
from pathlib import Path

from rl_core import Callback
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable
from rl_envs.sandbox.session import Session

NOTES = Path(__file__).parent
TURNS = 4


def noted(name):
    path = NOTES / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(name, *values):
    with open(NOTES / name, "a") as file:
        file.write(json.dumps(values) + "\\n")


class Game:
    """Ends a short row at once. In a long one, the third turn waits until the test opens a gate."""

    def __init__(self):
        self.turn = 0

    def step(self, response, length, conversation_seed):
        if length == "long" and self.turn == 2 and not (NOTES / "gate").exists():
            note("waiting", self.name, conversation_seed)
            while not (NOTES / "gate").exists():
                time.sleep(0.05)
        note("steps", self.name, conversation_seed, self.turn)
        reward = self.play(response, conversation_seed)
        self.turn += 1
        if length == "short" or self.turn == TURNS:
            return reward
        return f"{reward:.6f}"[:8], reward


class Dice(Game):
    """A stochastic game: draws from its own state of a generator."""

    name, state = "dice", None

    def play(self, response, seed):
        chance = random.Random(seed)
        if self.state is not None:
            version, words, gauss = self.state
            chance.setstate((version, tuple(words), gauss))
        rolled = chance.random()
        self.state = chance.getstate()
        return rolled

    def save(self):
        return [self.turn, self.state]

    def restore(self, saved):
        self.turn, self.state = saved


def sandbox():
    for isolation in ("namespaces", "landlock"):
        try:
            opened = Sandbox(isolation)
            with opened.connect():
                return opened
        except SandboxUnavailable:
            continue
    return Sandbox("limits")


class Python(Game):
    """A session in a sandbox, whose variables live from turn to turn."""

    name, session = "python", None

    def play(self, response, seed):
        if self.session is None:
            self.session = Session(sandbox(), seed=seed)
            self.session.execute("import random; seen = []", timeout_s=100)
        self.session.execute(f"seen.append((random.random(), {response!r}))", timeout_s=100)
        return float(self.session.execute("sum(x + len(y) for x, y in seen)", timeout_s=100))

    def save(self):
        return [self.turn, self.session.save()]

    def restore(self, saved):
        self.turn, self.session = saved[0], Session.restore(sandbox(), saved[1])

    def close(self):
        if self.session is not None:
            self.session.close()


class Memory(Game):
    """Remembers what was said."""

    name = "memory"

    def __init__(self):
        super().__init__()
        self.said = []

    def play(self, response, seed):
        self.said.append(response)
        return sum(number * len(text) for number, text in enumerate(self.said, 1)) / 100

    def save(self):
        return [self.turn, self.said]

    def restore(self, saved):
        self.turn, self.said = saved


class Hold(Callback):
    """Ends the first step, before it is saved, once a long conversation of each game waits for the gate."""

    def on_step(self, step, metrics):
        while len({name for name, _ in noted("waiting")}) < 3 and not (NOTES / "gate").exists():
            time.sleep(0.05)

    def on_save(self, step, checkpoint_path):
        note("saved", step)
'''

GAMES_BY_NAME = {"dice": "Dice", "python": "Python", "memory": "Memory"}


def arguments(folder):
    rows = [
        {"messages": [{"role": "user", "content": f"{number}+{number}="}], "environment": name, "length": length}
        for length in ("short", "long")
        for number, name in enumerate(GAMES_BY_NAME, 1)
    ]
    folder.mkdir()
    games = folder / "games.py"
    games.write_text(GAMES)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (
        "grpo-arithmetic",
        "policy.model_name=tiny-arithmetic",
        f"data.train={{data_path: {folder / 'rows.jsonl'}}}",
        "data.shuffle=false",
        "data.validation=null",
        *(
            f"env.{name}={{type: '{folder / 'games.py'}:{kind}', num_workers: 1}}"
            for name, kind in GAMES_BY_NAME.items()
        ),
        f"callbacks=['{folder / 'games.py'}:Hold']",
        "policy.generation.backend=hf",
        # an untrained model rarely ends a completion by itself, and one that is cut off ends its rollout
        f"policy.generation.stop_strings={json.dumps(list(string.ascii_letters + string.digits))}",
        "policy.generation.max_new_tokens=16",
        "policy.max_total_sequence_length=256",
        "policy.train_global_batch_size=6",
        "policy.train_micro_batch_size=6",
        "policy.optimizer.kwargs.lr=0.0",
        "grpo={num_prompts_per_step: 3, num_generations_per_prompt: 2, max_num_steps: 2, max_rollout_turns: 4}",
        "grpo.val_period=0",
        "grpo.async_grpo.enabled=true",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=1",
        "checkpointing.save_period=1",
        "checkpointing.metric_name=null",
        "cluster.device=cpu",
        "cluster.cpu_ranks_per_node=2",
        "loss_fn.importance.high=2.0",
    )


def rewards(folder):
    return {(row["prompt_id"], row["index"]): row["rewards"] for rows in rollouts_of(folder).values() for row in rows}


def notes(folder, name):
    return [tuple(json.loads(line)) for line in (folder / name).read_text().splitlines()]


# rl-algos resumes conversations with a saved state, without one and under another name
@exhaustive
def test_conversations_under_way_go_on_after_the_driver_was_killed(driver, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    told = arguments(killed)
    run = Run.start(tmp_path / "run", *told)
    while not (killed / "saved").exists():
        assert run.process.poll() is None, run.output
        time.sleep(0.1)
    _, alive = psutil.wait_procs(run.kill_all(), 60)
    assert not alive
    (killed / "gate").touch()
    driver.train(run.folder, *told)

    # what waited when the driver was killed had made two turns, which were not made again
    waited = notes(killed, "waiting")
    made = Counter(notes(killed, "steps"))
    assert {name for name, _ in waited} == set(GAMES_BY_NAME)
    assert [made[(*each, turn)] for each in waited for turn in range(4)] == [1] * 4 * len(waited)

    told = arguments(whole)
    (whole / "gate").touch()
    driver.train(tmp_path / "undisturbed", *told)
    found = rewards(run.folder)
    assert len(found) == 12
    assert found == rewards(tmp_path / "undisturbed")
