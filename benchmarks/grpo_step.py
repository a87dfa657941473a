"""One GRPO step of `rl train` beside one of TRL's `GRPOTrainer`: tokens per second, phases, and the ratio.

    python benchmarks/grpo_step.py [tiny] [small] [skewed]

Both train the same model on the same prompts on the same cores, in float32: equally many completions, sampled at
temperature 1, one AdamW update a step, no reference policy, and no pass for the logprobs before the update, which with
one update equal those of the update's own pass. All completions are equally long, or, as in `skewed`, have lengths of
a distribution whose 99th percentile is eight medians, as those of real tasks do. Ours is the whole product: Ray, vLLM
(or `--generator vllm-compiled`, which takes minutes to start on a CPU, or `hf`), FSDP2 ranks, packed rows where lengths
differ, verified weight sync. TRL generates with `transformers`, its way on a CPU, and has no weights to sync.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import yaml
from measurement import (
    ModelSize,
    SkewedLengths,
    make_endless_model,
    make_skewed_model,
    num_parameters,
    read_metrics,
    recorded_at,
    rl_command,
    run_logged,
    seconds,
    sums_data,
    surroundings,
    table,
    use_cores,
    write_sums,
)

TRL = "trl==1.16.0"
LOCK = Path(__file__).parents[1] / "packages/rl-launch/src/rl_launch/worker_envs/locks/rl-dtensor.worker.txt"
"""Packages of our trainer, of which TRL gets the same torch and transformers."""

PHASES = ("generation", "logprobs", "training", "weight_sync")
GENERATORS: dict[str, Callable[[int], dict]] = {
    "vllm": lambda rows: {"backend": "vllm", "vllm_cfg": {"max_num_seqs": rows}},
    "vllm-compiled": lambda rows: {"backend": "vllm", "vllm_cfg": {"max_num_seqs": rows, "enforce_eager": False}},
    "hf": lambda rows: {"backend": "hf", "hf_cfg": {"max_batch_size": rows}},
}
"""Generators of our side: their settings for a number of completions at a time."""

LEARNING_RATE = 1e-6
PROMPT_ROOM = 32
"""Tokens that a prompt may have, template included."""


@dataclass(frozen=True)
class Size:
    """A model and the data of one step.

    Args:
        tokens: Tokens of a completion, or their maximum where lengths differ.
        lengths: Law of the lengths; all completions have `tokens` tokens if None.
    """

    model: ModelSize
    prompts: int
    group: int
    tokens: int
    lengths: SkewedLengths | None = None

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group

    def make_model(self, folder: Path) -> None:
        if self.lengths is None:
            make_endless_model(folder, self.model)
        else:
            make_skewed_model(folder, self.model, self.lengths)

    @property
    def completions(self) -> str:
        """The completions of a step, in words."""
        if self.lengths is None:
            return f"{self.rows} completions of {self.tokens} tokens"
        middle, high = (self.lengths.percentile(share) for share in (0.5, 0.99))
        return (
            f"{self.rows} completions with a median of {middle} tokens, a 99th percentile of {high} and at most "
            f"{self.tokens}"
        )


TINY, SMALL = ModelSize(128, 5, 4, 2), ModelSize(512, 11, 8, 2)
SKEWED = SkewedLengths(short_mean=51, long_mean=108, long_share=0.15)
SIZES = {
    "tiny": Size(TINY, prompts=4, group=8, tokens=32),
    "small": Size(SMALL, prompts=8, group=8, tokens=128),
    "skewed-tiny": Size(TINY, prompts=8, group=8, tokens=384, lengths=SKEWED),
    "skewed-small": Size(SMALL, prompts=8, group=8, tokens=384, lengths=SKEWED),
}
SETS = {"skewed": ["skewed-tiny", "skewed-small"]}
"""Names for several sizes."""


@dataclass(frozen=True)
class Step:
    """Seconds of one step, whole and by phase, and the tokens of each completion that it sampled."""

    seconds: float
    phases: dict[str, float]
    lengths: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """All sampled tokens."""
        return sum(self.lengths)

    def spent(self, phase: str) -> float:
        """Return the seconds of a phase; 0 for one that the step does not have."""
        return self.phases.get(phase, 0.0)

    @property
    def other(self) -> float:
        """Seconds outside all phases."""
        return self.seconds - sum(self.phases.values())


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement, and its devices."""

    steps: int
    warm_up: int
    ranks: int
    cores: int
    microbatch: int | None
    generator: str

    def rows_at_a_time(self, size: Size) -> int:
        """Return the number of completions in one forward pass of training, on either side."""
        return min(self.microbatch or size.rows, size.rows)

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.warm_up + self.steps


def main() -> None:
    plan, names, trl_env, folder = read_arguments()
    python = trl_python(trl_env)
    print(surroundings("rl-launch", "rl-dtensor", "rl-vllm"))
    print(
        f"ours on {plan.ranks} training ranks, rollouts by {plan.generator}; "
        f"medians of {plan.steps} steps after {plan.warm_up} of warm-up\n"
    )
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        for name in names:
            place = (folder or Path(scratch)) / name
            place.mkdir(parents=True, exist_ok=True)
            compare(name, SIZES[name], plan, python, place)


def compare(name: str, size: Size, plan: Plan, python: Path, folder: Path) -> None:
    size.make_model(folder / "model")
    write_sums(folder / "prompts.jsonl", size.prompts * plan.last)
    theirs, versions = trl_steps(size, plan, python, folder)
    ours = our_steps(size, plan, folder)
    for step in (*ours, *theirs):
        equal = set(step.lengths) == {size.tokens} or size.lengths
        if len(step.lengths) != size.rows or not equal:
            sys.exit(f"a step sampled {step.num_tokens} tokens in {len(step.lengths)} rows, not {size.completions}")
    parameters = num_parameters(folder / "model") / 1e6
    print(
        f"{name}: {parameters:.1f}M parameters, {size.completions}, "
        f"trained in microbatches of {plan.rows_at_a_time(size)}; baseline {versions}\n"
    )
    print(comparison(ours, theirs))
    print()


def comparison(ours: Sequence[Step], theirs: Sequence[Step]) -> str:
    """Return the table of both."""

    def both(value: Callable[[Step], float], shown: Callable[[float], str] = seconds) -> tuple[str, str]:
        return shown(median(map(value, ours))), shown(median(map(value, theirs)))

    def speed(steps: Sequence[Step]) -> float:
        return sum(step.num_tokens for step in steps) / sum(step.seconds for step in steps)

    def length(steps: Sequence[Step], share: float) -> str:
        lengths = sorted(length for step in steps for length in step.lengths)
        return str(lengths[round(share * (len(lengths) - 1))])

    rows = [
        ("step, s", *both(lambda step: step.seconds)),
        *((f"{phase.replace('_', ' ')}, s", *both(partial(Step.spent, phase=phase))) for phase in PHASES),
        ("other, s", *both(lambda step: step.other)),
        ("other, share of the step", *both(lambda step: step.other / step.seconds, "{:.1%}".format)),
        ("tokens/s", f"{speed(ours):.0f}", f"{speed(theirs):.0f}"),
        *(
            (f"tokens of a completion, {name}", length(ours, share), length(theirs, share))
            for name, share in {"median": 0.5, "99th percentile": 0.99}.items()
        ),
    ]
    return f"{table(['', 'ours', 'TRL'], rows)}\n\ntokens/s, ours/TRL: {speed(ours) / speed(theirs):.2f}x"


def our_steps(size: Size, plan: Plan, folder: Path) -> list[Step]:
    """Return the steps of `rl train` after the warm-up; whole ones last from one record of rollouts to the next."""
    recipe, run_dir = folder / "recipe.yaml", folder / "run"
    recipe.write_text(yaml.safe_dump(our_config(size, plan, folder), sort_keys=False))
    command = rl_command("train", str(recipe), f"run_dir={run_dir}", "--fresh")
    run_logged(command, folder / "rl.log")
    found = []
    for metrics in read_metrics(run_dir)[plan.warm_up :]:
        whole = recorded_at(run_dir, metrics["step"]) - recorded_at(run_dir, metrics["step"] - 1)
        phases = {phase: metrics.get(f"time/{phase}", 0.0) for phase in PHASES}
        records = (run_dir / "rollouts" / f"step_{metrics['step']}.jsonl").read_text().splitlines()
        found.append(Step(whole, phases, [json.loads(record)["num_sampled"] for record in records]))
    return found


def our_config(size: Size, plan: Plan, folder: Path) -> dict:
    return {
        "algorithm": "grpo",
        "policy": {
            "model_name": str(folder / "model"),
            "precision": "float32",
            "train_global_batch_size": size.rows,
            "train_micro_batch_size": plan.rows_at_a_time(size),
            "max_total_sequence_length": PROMPT_ROOM + size.tokens,
            "max_grad_norm": 1.0,
            "sequence_packing": {"enabled": size.lengths is not None},  # equal rows need none
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
            "generation": {"max_new_tokens": size.tokens, "temperature": 1.0, **GENERATORS[plan.generator](size.rows)},
        },
        "grpo": {
            "num_prompts_per_step": size.prompts,
            "num_generations_per_prompt": size.group,
            "max_num_steps": plan.last,
        },
        "loss_fn": {"kl": {"weight": 0.0}},
        "data": sums_data(folder / "prompts.jsonl", "math"),
        "env": {"math": {"answer_format": "numeric"}},
        "checkpointing": {"enabled": False},
        "cluster": {"device": "cpu", "cpu_ranks_per_node": plan.ranks},
    }


def trl_steps(size: Size, plan: Plan, python: Path, folder: Path) -> tuple[list[Step], str]:
    """Return the steps of `GRPOTrainer` after the warm-up, and the versions they ran on."""
    settings = {
        "model": str(folder / "model"),
        "prompts": str(folder / "prompts.jsonl"),
        "scratch": str(folder / "trl"),
        "output": str(folder / "trl.json"),
        "rows": size.rows,
        "microbatch": plan.rows_at_a_time(size),
        "group": size.group,
        "tokens": size.tokens,
        "steps": plan.last,
        "threads": plan.cores,
        "learning_rate": LEARNING_RATE,
    }
    path = folder / "trl-settings.json"
    path.write_text(json.dumps(settings))
    environ = {"OMP_NUM_THREADS": str(plan.cores), "MKL_NUM_THREADS": str(plan.cores), "CUDA_VISIBLE_DEVICES": ""}
    environ |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    run_logged([str(python), str(Path(__file__).with_name("trl_steps.py")), str(path)], folder / "trl.log", environ)
    result = json.loads((folder / "trl.json").read_text())
    steps = [
        Step(step["step"], {phase: step[phase] for phase in PHASES if phase in step}, step["lengths"])
        for step in result["steps"][plan.warm_up :]
    ]
    return steps, ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def trl_python(folder: Path) -> Path:
    """Return the interpreter of TRL's environment, which is made if it does not exist."""
    python = folder / "bin" / "python"
    made = folder / f"{TRL}.made"
    if not made.exists():
        print(f"making an environment for {TRL} in {folder}", file=sys.stderr)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", version, str(folder)], check=True)
        install = [*uv, "pip", "install", "--quiet", "--no-config", "--compile-bytecode", "--python", str(python)]
        subprocess.run([*install, "--constraints", str(LOCK), TRL, "torch"], check=True, cwd=folder)
        made.touch()
    return python


def read_arguments() -> tuple[Plan, list[str], Path, Path | None]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-benchmarks"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*SIZES, *SETS]
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"sizes among {', '.join(names)} (default: all)")
    parser.add_argument("--steps", type=int, default=5, help="steps measured (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those, at least 1 (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="our training ranks, which share the cores (%(default)s)")
    parser.add_argument(
        "--microbatch", type=int, help="completions in one pass of training, on both sides; all by default"
    )
    parser.add_argument("--generator", choices=GENERATORS, default="vllm", help="our generator (%(default)s)")
    parser.add_argument("--cores", type=int, help="cores that either may use (default: all)")
    parser.add_argument("--trl-env", type=Path, default=cache / "trl", help="TRL's environment (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder in which models, runs and logs stay (default: none)")
    parser.add_argument("--quick", action="store_true", help="test run: size tiny, 2 steps after 1")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.sizes if name not in names]
    if unknown or chosen.warm_up < 1 or chosen.steps < 1:
        parser.error(f"unknown size {unknown[0]}" if unknown else "--steps and --warm-up must be at least 1")
    cores = use_cores(chosen.cores)
    if chosen.quick:
        chosen.steps, chosen.warm_up, chosen.sizes = 2, 1, ["tiny"]
    plan = Plan(chosen.steps, chosen.warm_up, chosen.ranks, cores, chosen.microbatch, chosen.generator)
    sizes = [size for name in chosen.sizes or SIZES for size in SETS.get(name, [name])]
    return plan, sizes, chosen.trl_env, chosen.folder


if __name__ == "__main__":
    main()
