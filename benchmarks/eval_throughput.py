"""Prompts per second of `rl eval`, next to direct calls of its engine in a separate process.

    uv run benchmarks/eval_throughput.py [--generator vllm|hf|scripted] [--prompts 2000] [--tokens 256]

Both serve the same requests with the same seeds after a warm-up, and neither counts the start of the engine. `rl eval`
also decodes, scores every completion by its environment and writes it. The scripted engine answers a number of
requests at a time after a fixed time and takes no processor, so the difference from its rate is the overhead of
everything else. With a real engine on a CPU this overhead takes the same cores, per sample and not per token: fewer
tokens show more of it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measurement import seconds, surroundings, table
from rich.console import Console

from rl_algos.rollouts.algorithm import RolloutEvaluation
from rl_algos.rollouts.driver.task_evaluation import EvaluationPlan
from rl_algos.tokenizer import load_tokenizer
from rl_core.plugins import resolve
from rl_core.rollouts.generation import GenerationRequest, Placement
from rl_core.rollouts.rollout import Completion, WeightSpan
from rl_launch.backends import Backends
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.commands.evaluate import roll_out
from rl_launch.commands.train import with_local_models
from rl_launch.evaluation.folder import EvaluationFolder
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.processes import provision_workers
from rl_launch.runtime.runtime import Runtime

SCRIPTED = "scripted"
WARM_UP = 32
"""Prompts that are rolled out before the measurement."""


class ScriptedGenerator:
    """A generator that answers each request with one token after `ANSWER_S`, `SLOTS` at a time."""

    ANSWER_S = 0.25
    SLOTS = 128
    num_ranks = 1

    def __init__(self, config: Any, backend: Any, model: Any, placement: Placement) -> None:
        self._free = asyncio.Semaphore(self.SLOTS)
        self._num_sampled = 0

    async def start(self) -> None:
        """Do nothing: nothing is loaded."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the last token of the request again."""
        async with self._free:
            await asyncio.sleep(self.ANSWER_S)
        self._num_sampled += 1
        token = np.array(request.token_ids[-1:], dtype=np.int32)
        return Completion(token, np.zeros(1, dtype=np.float32), "stop", (WeightSpan(0, 1),))

    async def health(self) -> dict[str, int]:
        """Return the numbers of a generator that is never hung."""
        return {"num_requests": 0, "num_sampled": self._num_sampled}

    async def close(self) -> None:
        """Do nothing: nothing was started."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generator", default="vllm", choices=["vllm", "hf", SCRIPTED], help="engine (%(default)s)")
    parser.add_argument("--prompts", type=int, default=2000, help="prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a completion (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="100 prompts: only shows that it runs")
    given = parser.parse_args()
    num_prompts = 100 if given.quick else given.prompts
    run = with_engine(with_local_models(make_plan(num_prompts, given.generator, given.tokens)), given.generator)
    config = run.config
    plan = RolloutEvaluation(config).plan(load_tokenizer(config.policy.tokenizer, config.policy.model_name))
    print(surroundings("ray"))
    ours = evaluated(run, plan)
    direct = called_directly(run.backends, plan)
    rows = [
        ["rl eval", seconds(ours), f"{num_prompts / ours:.0f}", f"{direct / ours:.3f}"],
        ["engine alone", seconds(direct), f"{num_prompts / direct:.0f}", "1"],
    ]
    print(
        table(
            [f"{given.generator}, {num_prompts} prompts, {given.tokens} tokens", "seconds", "prompts/s", "ratio"], rows
        )
    )


def make_plan(num_prompts: int, generator: str, num_tokens: int) -> RunPlan:
    """Return sums for the tiny model, which has not learnt to end its answers."""
    dataset = {"dataset_name": "arithmetic", "settings": {"num_rows": num_prompts, "validation_fraction": 0.5}}
    values = {
        "algorithm": "evaluation",
        "policy": {
            "model_name": "tiny-arithmetic",
            "precision": "float32",
            "max_total_sequence_length": 32 + num_tokens,
            "generation": {"backend": "hf" if generator == SCRIPTED else generator, "max_new_tokens": num_tokens},
        },
        "eval": {"tasks": [{"name": "sums", "dataset": dataset}]},
        "env": {"math": {"answer_format": "numeric"}},
    }
    return read_plan(values)


def with_engine(run: RunPlan, generator: str) -> RunPlan:
    """Return the plan with the scripted engine in the place of its own if it is chosen."""
    backends = run.backends
    assert backends.generation is not None, "an evaluation generates"
    if generator != SCRIPTED:
        return run
    plugin = replace(backends.generation.plugin, worker=f"{Path(__file__).absolute()}:{ScriptedGenerator.__name__}")
    changed = replace(backends, generation=replace(backends.generation, plugin=plugin))
    return replace(run, backends=changed)


def evaluated(run: RunPlan, plan: EvaluationPlan) -> float:
    """Return the seconds of rolling out the plan as `rl eval` does."""
    device = run.device
    envs = provision_workers(run, plan.needs, device)
    with (
        tempfile.TemporaryDirectory() as folder,
        VirtualCluster.of(run.config.cluster, device) as cluster,
        Runtime(run, envs, cluster, Path(folder)) as runtime,
    ):
        pool = runtime.evaluation_pool(plan.needs)
        (task,) = plan.tasks
        warm = replace(plan, tasks=[replace(task, groups=task.groups[:WARM_UP])])
        timings = []
        for name, each in (("warm", warm), ("whole", plan)):
            place = EvaluationFolder(Path(folder) / name)
            done = place.open({}, run.root, {task.name: task.num_samples})
            started = time.monotonic()
            roll_out(each, pool, place, done, Console(quiet=True))
            timings.append(time.monotonic() - started)
            place.close()
        return timings[-1]


def called_directly(backends: Backends, plan: EvaluationPlan) -> float:
    """Return the seconds that the engine takes to answer all requests at once, in its own process."""
    requests = [
        GenerationRequest(group.prompt.token_ids, group.sampling, seed)
        for task in plan.tasks
        for group in task.groups
        for seed in group.seeds
    ]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(backends.generation, requests, theirs))
    process.start()
    took: float = ours.recv()
    process.join()
    return took


def _answer(generation: Any, requests: Sequence[GenerationRequest], pipe: Any) -> None:
    pipe.send(asyncio.run(_timed(generation, requests)))


async def _timed(generation: Any, requests: Sequence[GenerationRequest]) -> float:
    placement = Placement("cpu", (), max(1, multiprocessing.cpu_count() // 2))
    generator = resolve(generation.plugin.worker)(generation.config, generation.backend, generation.model, placement)
    await generator.start()
    await asyncio.gather(*map(generator.generate, requests[:WARM_UP]))
    started = time.monotonic()
    await asyncio.gather(*map(generator.generate, requests))
    took = time.monotonic() - started
    await generator.close()
    return took


if __name__ == "__main__":
    main()
