"""Weight updates of requests in flight: every token must have the logprob of its weight version, and memory stay flat.

    python benchmarks/in_flight_updates.py [--updates 100] [--generator vllm|hf]

The policy, a replica on a device of its own, the pool and weight sync are the product's own, on the CPU and with a tiny
model in float32. The policy steps on finished rollouts, and each step's weights reach the replica while completions are
in progress, which continue with them. Every version is saved. Afterwards the policy loads each version again and
computes the logprobs of all tokens that were sampled with it, and of the tokens that the version before sampled, as a
control.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from measurement import ModelSize, make_endless_model, surroundings, table

from rl_algos.losses.policy import PolicyLoss
from rl_algos.tokenizer import load_tokenizer
from rl_core.data.batch import Batch
from rl_core.devices import device_named
from rl_core.model import LOGPROBS, Model
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import GENERATION_LOGPROBS, LOSS_MASK, WEIGHT_VERSIONS
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import NOT_SAMPLED
from rl_core.run import Components
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.processes import provision_workers
from rl_launch.runtime.runtime import Runtime

MODEL = ModelSize(hidden_size=128, num_layers=4, num_heads=4, num_key_value_heads=2)
TOLERANCE = 1e-3
GROUP = 2
LEARNING_RATE = 0.5
COLUMNS = ("tokens", LOSS_MASK, GENERATION_LOGPROBS, WEIGHT_VERSIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100, help="with requests in flight (%(default)s)")
    parser.add_argument("--generator", choices=("vllm", "hf"), default="vllm", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=768, help="most tokens of a completion (%(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help=f"under way, {GROUP} completions each (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="test run: 5 updates of 4 prompts")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.updates, chosen.prompts = 5, 4
    print(f"{surroundings('rl-core', 'rl-launch', 'torch')}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        folder = Path(scratch)
        make_endless_model(folder / "model", MODEL)
        with started(folder, chosen.generator, chosen.tokens) as components:
            run = updated(components, folder, chosen)
            print(run.summary(), "\n\n", run.memory(), "\n", sep="", flush=True)
            found = compared(components.models["policy"], run)
    print(found.summary())
    if not found.worst <= TOLERANCE:
        sys.exit(f"the largest difference is above {TOLERANCE:g}")


@contextmanager
def started(folder: Path, generator: str, num_tokens: int) -> Iterator[Components]:
    """Yield the processes of a GRPO run whose replica has its own device."""
    overrides = [
        f"policy.model_name={folder / 'model'}",
        f"policy.optimizer={{name: torch.optim.SGD, kwargs: {{lr: {LEARNING_RATE}}}}}",
        f"policy.max_total_sequence_length={num_tokens + 32}",
        f"policy.generation.max_new_tokens={num_tokens}",
        f"policy.generation.backend={generator}",
        "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
        "checkpointing.metric_name=null",
        "cluster.device=cpu",
    ]
    plan = read_plan("grpo-arithmetic", overrides)
    config, algorithm = plan.config, plan.algorithm
    tokenizer = load_tokenizer(config.policy.tokenizer, config.policy.model_name)
    data = algorithm.prepare(config, tokenizer, algorithm.load(config))
    needs = algorithm.rollouts(config, data)
    device = device_named("cpu")
    envs = provision_workers(plan, needs, device)
    logs = folder / "logs"
    logs.mkdir()
    with (
        VirtualCluster.of(config.cluster, device, after_a_loss=False) as cluster,
        Runtime(plan, envs, cluster, logs) as runtime,
    ):
        yield runtime.components(data, needs, vocabulary=len(tokenizer))


@dataclass
class UpdatedRun:
    """Rollouts of a run, and the weights that sampled them.

    Args:
        rollouts: all that finished; the columns are here.
        saved: folder of each version.
        seconds: Seconds of all updates.
        resident: MiB by process as `resident_by_process` gives them, after a tenth, a half and all of the updates.
    """

    rollouts: Batch
    saved: dict[int, Path]
    seconds: float
    resident: Sequence[dict[str, float]]

    def summary(self) -> str:
        """Return updates, completions and their versions."""
        versions = [np.unique(row[row != NOT_SAMPLED]) for row in self.rollouts.ragged(WEIGHT_VERSIONS)]
        counts = [len(each) for each in versions]
        interrupting = {int(version) for each in versions for version in each[1:]}
        return (
            f"{len(self.saved) - 1} updates in {self.seconds:.0f} s, {len(interrupting)} of them within a completion; "
            f"{len(counts)} completions, {sum(count > 1 for count in counts)} of several versions, "
            f"{median(counts):g} in the median and {max(counts)} at most"
        )

    def memory(self) -> str:
        """Return the table of memory."""
        head = ("MiB of its own after", "a tenth", "half", "all of the updates")
        names = [name for name in self.resident[-1] if all(name in each for each in self.resident)]
        return table(head, [(name, *(f"{each[name]:.1f}" for each in self.resident)) for name in names])


def updated(components: Components, folder: Path, chosen: argparse.Namespace) -> UpdatedRun:
    """Update the replica while it generates; each update follows a step on a group that has finished."""
    policy, weights, pool = components.models["policy"], components.weights, components.pool
    assert weights is not None, "the run generates"
    assert pool is not None, "the run generates"
    rng = np.random.default_rng(0)

    def submit(count: int) -> None:
        tasks = []
        for prompt in components.data.train.take(count):
            longest = int(rng.integers(chosen.tokens // 4, chosen.tokens + 1))
            seeds = tuple(int(seed) for seed in rng.integers(2**31, size=GROUP))
            tasks.append(RolloutTask(prompt, SamplingParams(longest), seeds))
        pool.submit(tasks)

    saved: dict[int, Path] = {}
    finished: list[Batch] = []
    resident: list[dict[str, float]] = []
    looks = {max(1, chosen.updates // 10), max(2, chosen.updates // 2), chosen.updates}
    began = 0.0
    for number in range(chosen.updates + 1):
        update = weights.publish()
        saved[update.version] = folder / "versions" / str(update.version)
        policy.save(str(saved[update.version]))
        pool.adopt(update, in_flight=True)
        if number == 0:
            submit(chosen.prompts)
            began = time.monotonic()
        if number in looks:
            resident.append(resident_by_process())
        _, group = pool.next_done()
        finished.append(group.columns.only(COLUMNS).local())
        submit(1)
        policy.train_step(trained_on(finished[-1], rng), PolicyLoss(on_policy=True))
    took = time.monotonic() - began
    for _ in range(chosen.prompts):
        finished.append(pool.next_done()[1].columns.only(COLUMNS).local())
    return UpdatedRun(Batch.concat(finished), saved, took, resident)


def trained_on(rollouts: Batch, rng: np.random.Generator) -> Batch:
    """Return rollouts with advantages of either sign."""
    return rollouts.with_columns({"advantages": rng.choice([-1.0, 1.0], len(rollouts)).astype(np.float32)})


def resident_by_process() -> dict[str, float]:
    """Return the MiB that this process and all that it has started keep resident, by name, without files and shared
    memory."""
    driver = psutil.Process()
    found = {"driver": driver.memory_info()}
    for process in driver.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            name = (process.cmdline() or [process.name()])[0]
            if name.startswith(("ray::", "VLLM")) and "IDLE" not in name:
                found[f"{name} {process.pid}"] = process.memory_info()
    return {name: (memory.rss - memory.shared) / 2**20 for name, memory in found.items()}


@dataclass(frozen=True)
class Comparison:
    """Absolute differences of logprobs.

    Args:
        own: float64 `[tokens]`, from the logprobs of the version that sampled the token.
        before: float64 `[tokens]`, from the logprobs of the version before it, if there is one.
    """

    own: np.ndarray
    before: np.ndarray

    @property
    def worst(self) -> float:
        """The largest difference from the token's own version."""
        return float(self.own.max())

    def summary(self) -> str:
        """Return the differences from both versions."""
        return (
            f"{len(self.own)} sampled tokens. From the logprobs of the version that is recorded they differ by "
            f"{self.own.mean():.1e} on average and {self.worst:.1e} at most; from those of the version before it by "
            f"{self.before.mean():.1e} on average and {self.before.max():.1e} at most."
        )


def compared(policy: Model, run: UpdatedRun) -> Comparison:
    """Have the policy load every version, and compute the logprobs of the tokens that it sampled."""
    own, before = [], []
    for version, folder in run.saved.items():
        policy.load(str(folder))
        rows = [index for index, row in enumerate(run.rollouts.ragged(WEIGHT_VERSIONS)) if is_of(row, version).any()]
        if not rows:
            continue
        batch = run.rollouts.select(np.array(rows))
        logprobs = policy.infer(batch.only(["tokens"]), [LOGPROBS]).ragged("logprobs").values.astype(np.float64)
        differences = np.abs(logprobs - batch.ragged(GENERATION_LOGPROBS).values)
        versions = batch.ragged(WEIGHT_VERSIONS).values
        own.append(differences[versions == version])
        before.append(differences[versions == version + 1])
    return Comparison(np.concatenate(own), np.concatenate(before))


def is_of(versions: np.ndarray, version: int) -> np.ndarray:
    """Return the tokens that this version sampled, and those that the next one did."""
    return (versions == version) | (versions == version + 1)


if __name__ == "__main__":
    main()
