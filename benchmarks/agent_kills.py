"""Random kills of the processes in rollouts of agents, and a comparison with a run that nothing happens to.

    uv run benchmarks/agent_kills.py [--kills 20] [--seed 0] [--steps 24] [--folder runs/agent-kills]

Agents of `grpo-arithmetic` make a call, two equal ones in parallel that continue it, and the first one again, whose
answer the environment scores. While the run trains, the benchmark kills one of its processes again and again: the
driver (then the same command resumes), a rollout worker with its replica, the host of agents, an agent, or an
environment's process. Every kind gets the same number of kills, in random order and at random times. At the end both
runs must have the same rollouts, each once, with the same completions and rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from measurement import surroundings, table
from processes import family

AGENT = """
import asyncio

import aiohttp


async def run(base_url, api_key, prompt):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:

        async def ask(*more):
            body = {"messages": [*prompt["messages"], *more]}
            while True:
                async with session.post(f"{base_url}/chat/completions", json=body) as response:
                    response.raise_for_status()
                    said = (await response.json())["choices"][0]["message"]
                    await asyncio.sleep(0.1)  # as an agent that uses a tool
                    return said

        first = await ask()
        await asyncio.gather(*[ask(first, {"role": "user", "content": "no"}) for _ in range(2)])
        await ask()
"""

SETTINGS = (
    "cluster.device=cpu",
    "cluster.cpu_ranks_per_node=1",
    "logger.tensorboard_enabled=false",
    "policy.generation.backend=hf",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=16",
    "policy.max_total_sequence_length=96",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
    "grpo.agent.reward=environment",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=1",
)

VICTIMS: Mapping[str, str] = {
    "replica": "ray::AsyncWorkerHost",
    "agent host": "rl_core.agent_processes.host",
    "agent": "rl_core.agent_processes.host",
    "environment": "rl_core.environments.process",
}
"""Processes other than the driver, by words of their command lines; agents are children of their host."""

KINDS = ("driver", *VICTIMS)


@dataclass
class Training:
    """A run of `rl train` that may be killed and started again.

    Args:
        folder: Its run directory.
        arguments: Arguments of the command.
    """

    folder: Path
    arguments: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    kills: list[tuple[int, str]] = field(default_factory=list)

    def start(self) -> None:
        rl = Path(sys.executable).with_name("rl")
        with self.log.open("a") as log:
            command = [str(rl), "train", "grpo-arithmetic", *self.arguments, f"run_dir={self.folder}"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def num_steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return sum(line.endswith("\n") and json.loads(line)["step"] > 0 for line in lines)

    @property
    def num_agents(self) -> int:
        """Number of agents that have been started, in all tries."""
        return len(list((self.folder / "logs" / "agents").glob("*.log")))

    def ended(self) -> bool:
        """Return whether it has ended; an error ends the benchmark."""
        assert self.process is not None
        code = self.process.poll()
        if code:
            sys.exit(f"the run ended with status {code}; its output is in {self.log}")
        return code == 0

    def finish(self) -> None:
        while not self.ended():
            time.sleep(0.2)

    def kill(self, kind: str) -> bool:
        """Kill a process of this kind; return whether one was found."""
        assert self.process is not None
        if kind == "driver":
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.kills.append((self.num_steps, kind))
            self.start()
            return True
        found = [each for each in family(psutil.Process(self.process.pid)) if VICTIMS[kind] in described(each)]
        is_agent = [any(VICTIMS[kind] in described(parent) for parent in [each.parent()] if parent) for each in found]
        found = [each for each, agent in zip(found, is_agent, strict=True) if agent == (kind == "agent")]
        if not found:
            return False
        with suppress(psutil.NoSuchProcess):
            found[0].kill()
            self.kills.append((self.num_steps, kind))
            return True
        return False


def described(process: psutil.Process) -> str:
    """Return the name and command line of a process; empty if it has ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return " ".join([process.name(), *process.cmdline()])
    return ""


def disturb(run: Training, num_kills: int, num_steps: int, seed: int) -> None:
    """Kill processes of the run until it ends.

    A kill waits until agents play since the last one, and until the run has come as far as an even spread over its
    steps asks for; then a random time passes.
    """
    drawn = random.Random(seed)
    order = [KINDS[number % len(KINDS)] for number in range(num_kills)]
    drawn.shuffle(order)
    for number, kind in enumerate(order):
        due = number * (num_steps - 2) // num_kills
        before = run.num_agents
        while run.num_steps < due or run.num_agents == before:
            if run.ended():
                return
            time.sleep(0.05)
        time.sleep(drawn.uniform(0, 1))
        while not run.kill(kind):
            if run.ended():
                return
            time.sleep(0.05)
        print(f"{time.strftime('%H:%M:%S')} killed {kind} after step {run.num_steps}", file=sys.stderr)
    run.finish()


def rollouts_of(run: Training) -> dict[int, list[dict[str, object]]]:
    """Return the rows of rollouts by step."""
    paths = (run.folder / "rollouts").glob("step_*.jsonl")
    return {
        int(path.stem.removeprefix("step_")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in paths
    }


COMPARED = ("prompt_id", "index", "status", "rewards", "turns", "segments", "num_sampled", "advantage")


def compared(run: Training) -> dict[int, list[str]]:
    """Return rollouts by step, as far as they must be equal, in the order of their text."""
    return {
        step: sorted(json.dumps({name: row.get(name) for name in COMPARED}, sort_keys=True) for row in rows)
        for step, rows in rollouts_of(run).items()
    }


def prompts(run: Training) -> Counter[object]:
    """Return how often each prompt was trained on, as a group."""
    return Counter(name for rows in rollouts_of(run).values() for name in {row["prompt_id"] for row in rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the kills (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("runs/agent-kills"), help="of both runs (%(default)s)")
    parser.add_argument("--model", default="tiny-arithmetic-sft", help="policy (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="see that it runs: one kill of an agent")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.kills, chosen.steps = 1, 3
    folder = chosen.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    (folder / "agent.py").write_text(AGENT)
    agent = (f"grpo.agent.run={folder / 'agent.py'}:run", f"policy.model_name={chosen.model}")
    arguments = (*SETTINGS, *agent, f"grpo.max_num_steps={chosen.steps}")
    whole, killed = Training(folder / "whole", arguments), Training(folder / "killed", arguments)
    for run in (whole, killed):
        shutil.rmtree(run.folder, ignore_errors=True)
        run.log.unlink(missing_ok=True)
    whole.start()
    whole.finish()
    killed.start()
    disturb(killed, chosen.kills, chosen.steps, chosen.seed)
    print(f"{surroundings('rl-launch', 'rl-algos')}\n")
    print(table(("", "undisturbed", "killed"), facts(whole, killed)))


def facts(whole: Training, killed: Training) -> Iterator[tuple[str, ...]]:
    runs, rows = (whole, killed), [rollouts_of(run) for run in (whole, killed)]
    for kind in KINDS:
        yield (f"kills: {kind}", *(str(sum(each == kind for _, each in run.kills)) for run in runs))
    yield ("steps", *(str(len(each)) for each in rows))
    yield ("rollouts", *(str(sum(map(len, each.values()))) for each in rows))
    yield ("rollouts that failed", *(str(num_failed(each)) for each in rows))
    yield (
        "prompts trained on more than once",
        *(str(sum(count > 1 for count in prompts(run).values())) for run in runs),
    )
    expected, found = compared(whole), compared(killed)
    equal = sum(expected[step] == found.get(step) for step in expected)
    yield ("steps whose rollouts equal the undisturbed ones", str(len(expected)), str(equal))


def num_failed(rows: Mapping[int, Sequence[Mapping[str, object]]]) -> int:
    return sum(row["status"] == "failed" for each in rows.values() for row in each)


if __name__ == "__main__":
    main()
