"""Time that the rollout layer adds to every turn, its throughput by number of replicas, and its memory.

    python benchmarks/rollouts.py [--rollouts 10000] [--quick]

A rollout worker plays conversations of several turns on an engine that answers at once with scripted tokens, and an
environment that answers at once with a message or the results of tool calls. So all time is the rollout layer's: the
transcript, reading turns, tool calls, the chat template, and the columns of the groups. The baseline is the same number
of calls of the engine and the environment without that layer. Throughput is measured on engines that take a fixed time
for a turn, each with a rollout worker in a process of its own, as replicas have. Nearly all of that time is waiting, so
four replicas need not have four cores; the CPU time of a rollout beside it says how many a core carries.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
from measurement import surroundings, table
from processes import resident_mib

from rl_algos.rollouts.worker.worker import RolloutWorker, RolloutWorkerSpec
from rl_algos.tiny_model import make_tiny_model
from rl_algos.tokenizer import encode_prompt, load_tokenizer
from rl_core.model_config import TokenizerConfig
from rl_core.rollouts.environment import Conversation, StepResult
from rl_core.rollouts.generation import GenerationRequest, SamplingParams
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan

NUM_TURNS = 4
NUM_TOKENS = 64
"""Tokens of a plain turn."""
TURN_S = 1.0
"""Seconds of a turn on an engine that is not instant."""
REPLICAS = (1, 2, 4)
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "two"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


class ScriptedEngine:
    """Answers every request with the same tokens, at once or after a fixed time."""

    num_ranks = 1

    def __init__(self, tokens: np.ndarray, turn_s: float = 0.0) -> None:
        self._turn_s = turn_s
        self._completion = Completion(
            tokens, np.full(len(tokens), -1.0, np.float32), "stop", (WeightSpan(1, len(tokens)),)
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        await asyncio.sleep(self._turn_s)
        return self._completion


class InstantEnvironment:
    """Answers every turn but the last at once."""

    async def step(self, conversation: Conversation) -> StepResult:
        await asyncio.sleep(0)
        if conversation.turn + 1 == NUM_TURNS:
            return StepResult(reward=1.0)
        message: dict[str, Any] = {"role": "user", "content": "Go on, please."}
        if conversation.tool_calls:
            message = {"role": "tool", "content": "2", "tool_call_id": conversation.tool_calls[0].id}
        return StepResult(done=False, observation=(message,))

    async def abandon(self, conversation_ids: Sequence[str]) -> None:
        pass


class Bench:
    """A worker with its engine and environment, and the prompt of all rollouts."""

    def __init__(self, folder: str, *, with_calls: bool, turn_s: float = 0.0) -> None:
        settings = TokenizerConfig(tool_format="hermes")
        tokenizer = load_tokenizer(settings, folder)
        messages = ({"role": "user", "content": "How much is it? " * 20},)
        said = CALL if with_calls else "x" * (NUM_TOKENS - 1)
        sampled = np.asarray(tokenizer.encode(said + tokenizer.eos_token, add_special_tokens=False), np.int32)
        tools = (TOOL,) if with_calls else ()
        self.prompt = Prompt("p", messages, encode_prompt(tokenizer, messages, tools), "instant", tools=tools)
        self.engine, self.environment = ScriptedEngine(sampled), InstantEnvironment()
        spec = RolloutWorkerSpec(
            generator=f"{__file__}:ScriptedEngine",
            generator_args=(sampled, turn_s),
            program="rl_algos.rollouts.worker.program:MultiTurnProgram",
            program_args={"max_turns": NUM_TURNS, "max_tokens": 100_000},
            tokenizer=settings,
            model_name=folder,
        )
        self.worker = RolloutWorker(spec, {"instant": self.environment})

    async def play(self, num_rollouts: int) -> None:
        """Play so many rollouts at once, in groups of 16."""
        sizes = [16] * (num_rollouts // 16) + [num_rollouts % 16] * (num_rollouts % 16 > 0)
        sampling = SamplingParams(max_new_tokens=1000)
        await self.worker.begin(
            [(number, RolloutTask(self.prompt, sampling, tuple(range(size)))) for number, size in enumerate(sizes)]
        )
        left = len(sizes)
        while left:
            reports, _, _ = await self.worker.finished()
            for _, report in reports:
                left -= 1
                assert all(rollout.num_turns == NUM_TURNS for rollout in report.rollouts), "a rollout broke off"

    async def baseline(self, num_rollouts: int) -> None:
        """Call engine and environment as often, and nothing else."""
        request = GenerationRequest(self.prompt.token_ids, SamplingParams(max_new_tokens=1), 0)

        async def one() -> None:
            for turn in range(NUM_TURNS):
                await self.engine.generate(request)
                await self.environment.step(Conversation("c", (), {}, "", False, turn))

        await asyncio.gather(*(one() for _ in range(num_rollouts)))


async def overhead_ms(bench: Bench, concurrent: int, repeats: int) -> float:
    """Return the median milliseconds of CPU time that the rollout layer adds to a turn: other work of the machine adds
    none."""
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        await bench.play(concurrent)
        middle = time.process_time()
        await bench.baseline(concurrent)
        seconds.append((middle - begin) - (time.process_time() - middle))
    return float(np.median(seconds)) / (concurrent * NUM_TURNS) * 1000


def throughput(folder: str, num_replicas: int, num_batches: int, concurrent: int) -> tuple[float, float]:
    """Return the rollouts per second and the CPU seconds of one, of replicas that all play a number of batches at the
    same time."""
    context = multiprocessing.get_context("spawn")
    start, times = context.Barrier(num_replicas), context.SimpleQueue()
    arguments = (folder, num_batches, concurrent, start, times)
    processes = [context.Process(target=play_as_replica, args=arguments) for _ in range(num_replicas)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit("a replica failed")
    begins, ends, cpu_s = zip(*(times.get() for _ in processes), strict=True)
    num_rollouts = num_replicas * num_batches * concurrent
    return num_rollouts / (max(ends) - min(begins)), sum(cpu_s) / num_rollouts


def play_as_replica(folder: str, num_batches: int, concurrent: int, start: Barrier, times: Any) -> None:
    """Play in this process once all replicas are ready; puts begin, end and CPU seconds into a queue."""

    async def play() -> tuple[float, float, float]:
        bench = Bench(folder, with_calls=True, turn_s=TURN_S)
        await bench.play(concurrent)
        start.wait()
        begin, cpu_before = time.monotonic(), time.process_time()
        for _ in range(num_batches):
            await bench.play(concurrent)
        return begin, time.monotonic(), time.process_time() - cpu_before

    times.put(asyncio.run(play()))


async def memory(bench: Bench, num_rollouts: int, concurrent: int) -> list[tuple[int, float]]:
    """Return the resident memory after each quarter of the rollouts."""
    readings, played = [], 0
    for quarter in range(1, 5):
        while played < num_rollouts * quarter / 4:
            await bench.play(concurrent)
            played += concurrent
        readings.append((played, resident_mib()))
    return readings


def measure_scaling(folder: str, num_batches: int, concurrent: int) -> None:
    """Measure throughput by number of replicas, and print the table."""
    rows, alone = [], 0.0
    for count in REPLICAS:
        found, cpu_s = throughput(folder, count, num_batches, concurrent)
        alone = alone or found
        rows.append([str(count), f"{found:.1f}", f"{found / alone:.2f}", f"{1000 * cpu_s:.2f}"])
    ideal = concurrent / (NUM_TURNS * TURN_S)
    print(f"\nOf {concurrent} at a time; {ideal:.0f} a second and replica are possible.\n")
    print(table(["replicas", "rollouts per second", "of one replica", "CPU ms per rollout"], rows))


async def measure(folder: str, repeats: int, num_rollouts: int) -> None:
    """Measure overhead and memory on the model in a folder, and print the tables."""
    rows = []
    for with_calls in (False, True):
        bench = Bench(folder, with_calls=with_calls)
        await bench.play(16)
        for concurrent in (16, 64, 256):
            milliseconds = await overhead_ms(bench, concurrent, repeats)
            rows.append(["tool calls" if with_calls else "plain turns", str(concurrent), f"{milliseconds:.3f}"])
    print(table(["turns", "concurrent rollouts", "CPU ms per turn"], rows))
    print()
    readings = await memory(bench, num_rollouts, min(num_rollouts // 4, 256))
    print(table(["rollouts", "resident MiB"], [[str(played), f"{mib:.1f}"] for played, mib in readings]))


def main() -> None:
    """Measure, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000, help="of the measurement of memory")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    arguments = parser.parse_args()
    print(f"{surroundings('rl-algos')}\n")
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        asyncio.run(measure(folder, 2 if arguments.quick else 9, 256 if arguments.quick else arguments.rollouts))
        measure_scaling(folder, 1 if arguments.quick else 10, 32)


if __name__ == "__main__":
    main()
