"""Time and memory of `rl view` on a large run, which is made first.

    python benchmarks/view_scale.py [--steps 10000] [--rollouts 1024]

The run has the files that a real one leaves: metrics of every step, rollouts of recent steps one by one and of earlier
steps in archives. The page's requests are then sent to a server in its own process, with an index that begins empty.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
from measurement import surroundings, table

from rl_launch.run_session.rollouts import rollout_store

METRICS = 60
WORDS = [
    "the",
    "answer",
    "is",
    "a",
    "number",
    "of",
    "apples",
    "that",
    "were",
    "left",
    "over",
    "after",
    "each",
    "child",
    "took",
    "some",
    "and",
    "gave",
    "two",
    "back",
]
CONFIG = """\
algorithm: grpo
policy: {model_name: m}
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 16}
"""


def make_run(folder: Path, num_steps: int, num_rollouts: int, characters: int) -> None:
    """Write a run directory."""
    rollouts = folder / "rollouts"
    rollouts.mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "run.json").write_text('{"algorithm": "grpo", "model": "m"}')
    (folder / "config.yaml").write_text(CONFIG)
    numbers = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            values = {f"group{number % 6}/metric{number}": numbers.random() for number in range(METRICS - 6)}
            times = {"time/generation": 20.0, "time/training": 10.0, "time/step": 31.0, "train/num_tokens": 1e6}
            row = {"step": step, "reward/mean": numbers.random(), "reward/std": 0.4, **times, **values}
            file.write(json.dumps(row) + "\n")
    # a few different steps are enough: their rollouts are read as if all differed
    steps = [_step(numbers, num_rollouts, characters) for _ in range(8)]
    for step in range(1, num_steps + 1):
        rollout_store.file_of(rollouts, step).write_bytes(steps[step % len(steps)])
        if step % rollout_store.STEPS_PER_ARCHIVE == 0:
            rollout_store.archive_before(rollouts, step)


def _step(numbers: random.Random, num_rollouts: int, characters: int) -> bytes:
    lines = []
    for number in range(num_rollouts):
        text = ""
        while len(text) < characters:
            text += f"{numbers.choice(WORDS)} "
        prompt, reward = f"math:{number // 16}", float(numbers.random() < 0.4)
        record = {
            "prompt_id": prompt, "dataset": "math", "environment": "math", "index": number % 16,
            "prompt": [{"role": "user", "content": f"How many apples has child {number // 16}?"}],
            "row": {"answer": "12"}, "turns": [{"text": text, "observation": None, "rewards": {"reward": reward}}],
            "rewards": {"reward": reward}, "status": "ok", "failure": "", "stop_reason": "stop",
            "num_sampled": numbers.randrange(20, 900), "weight_versions": [7], "info": {}, "advantage": reward - 0.4,
        }  # fmt: skip
        lines.append(json.dumps(record) + "\n")
    return "".join(lines).encode()


class Server:
    """`rl view` in a process of its own."""

    def __init__(self, folder: Path, cache: Path) -> None:
        command = [sys.executable, "-m", "rl_launch.cli", "view", str(folder)]
        self.started = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(cache))
        assert self._process.stdout is not None
        url = urllib.parse.urlsplit(self._process.stdout.readline().strip())
        self.seconds_to_start = time.perf_counter() - self.started
        self._base, self._token = f"http://{url.netloc}", urllib.parse.parse_qs(url.query)["token"][0]

    def ask(self, name: str, /, **given: object) -> tuple[float, dict]:
        query = urllib.parse.urlencode(given, doseq=True)
        headers = {"Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(f"{self._base}/api/{name}?{query}", headers=headers)
        started = time.perf_counter()
        with urllib.request.urlopen(request) as answer:
            content = answer.read()
        return time.perf_counter() - started, json.loads(content)

    def mebibytes(self) -> float:
        return psutil.Process(self._process.pid).memory_info().rss / 2**20

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def _environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cache)}


def measure(folder: Path, cache: Path, num_steps: int) -> list[tuple[str, float, float]]:
    """Return the seconds of each request, and memory of the server after it."""
    server, found = Server(folder, cache), []

    def note(what: str, seconds: float) -> None:
        found.append((what, seconds, server.mebibytes()))

    run = folder.name
    note("start of `rl view`", server.seconds_to_start)
    started = time.perf_counter()
    server.ask("runs")
    server.ask("run", id=run)
    for name in ("reward/mean", "reward/std", *(f"group{number}/metric{number}" for number in range(4))):
        server.ask("series", id=run, name=name)
    note("open the run: list, summary, six plots", time.perf_counter() - started)
    note("rollouts of the newest step", server.ask("rollouts", id=run, limit=64)[0])
    note("rollouts of a step in an archive", server.ask("rollouts", id=run, first=50, last=50, limit=64)[0])
    note("one rollout with its group", server.ask("rollout", id=run, kind="step", step=num_steps, row=9)[0])
    limits = {"min_reward": 1, "min_num_tokens": 500}
    note("filter a step by reward and length", server.ask("rollouts", id=run, limit=64, **limits)[0])
    note("sort a step by length", server.ask("rollouts", id=run, limit=64, sort="-num_tokens")[0])
    note("search the text of a step", server.ask("rollouts", id=run, limit=64, text="no such words")[0])
    note("times of all steps", server.ask("timeline", id=run)[0])
    note("advice", server.ask("report", id=run)[0])
    first, total, most, requests = max(1, num_steps - 999), 0.0, 0.0, 0
    pending = 1
    while pending:
        seconds, answer = server.ask("rollouts", id=run, first=first, last=num_steps, limit=64)
        total, most, requests, pending = total + seconds, max(most, seconds), requests + 1, answer["pending"]
    note(f"index 1,000 steps ({requests} requests, the longest {most:.2f} s)", total)
    wide = {"id": run, "first": first, "last": num_steps, "limit": 64}
    note("filter 1,000 indexed steps", server.ask("rollouts", **wide, **limits)[0])
    note("sort 1,000 indexed steps by length", server.ask("rollouts", **wide, sort="-num_tokens")[0])
    server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--characters", type=int, default=200, help="length of a response")
    parser.add_argument("--folder", type=Path, help="keep the run here, and use it again")
    parser.add_argument("--quick", action="store_true", help="300 steps of 64 rollouts")
    given = parser.parse_args()
    steps, rollouts = (300, 64) if given.quick else (given.steps, given.rollouts)
    print(surroundings("rl-launch"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "run"
        if not folder.exists():
            make_run(folder, steps, rollouts, given.characters)
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        cache = Path(temporary) / "cache"
        found = measure(folder, cache, steps)
        index = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        print(f"\n{steps:,} steps of {rollouts:,} rollouts, {len(sizes)} files, {sum(sizes) / 2**30:.2f} GiB;", end=" ")
        print(f"the index afterwards: {index / 2**20:.0f} MiB\n")
    rows = [(what, f"{seconds:.2f}", f"{memory:.0f}") for what, seconds, memory in found]
    print(table(("request", "seconds", "memory of the server, MiB"), rows))


if __name__ == "__main__":
    main()
