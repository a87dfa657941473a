"""Three steps of `rl train grpo-math-1b` on a random model, profiled: Ray, vLLM, a policy and all between them."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from measurement import read_metrics, write_sums

from gpu_check.report import Report
from gpu_check.setup import Setup
from rl_algos.tiny_model import make_tiny_model

RECIPE = "grpo-math-1b"
NUM_STEPS = 3
MISMATCH_BOUND = 5e-2
"""How much the ratio of probabilities of policy and generator may exceed 1 on average, in bfloat16."""
NUM_SHOWN = 12
"""Operations of a process in the report."""
TRAIN_S = 420.0


def check(setup: Setup, report: Report) -> None:
    """Check that a run ends well, that its sampled tokens come from the weights of their step, and that it is
    profiled."""
    run_dir = setup.workspace / "train"
    with report.attempt(f"rl train {RECIPE}, {NUM_STEPS} steps"):
        _train(setup, run_dir)
        steps = read_metrics(run_dir)
        _steps(report, steps, run_dir)
        _profiles(report, run_dir)


def _train(setup: Setup, run_dir: Path) -> None:
    recipe = run_dir.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(_config(setup, run_dir), sort_keys=False))
    command = [sys.executable, "-m", "rl_launch.cli", "train", str(recipe), f"run_dir={run_dir}", "--fresh"]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TRAIN_S)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")


def _config(setup: Setup, run_dir: Path) -> dict[str, Any]:
    """Return the recipe with a random model, sums in place of its data, and fewer, shorter rollouts."""
    model, data = run_dir.with_name("train-model"), run_dir.with_name("train.jsonl")
    if setup.is_small:
        make_tiny_model(model)
    else:
        make_tiny_model(model, hidden_size=1536, num_layers=28, num_heads=12, num_key_value_heads=2)
    prompts, group, tokens = setup.pick(4, 32), 4, setup.pick(8, 256)
    write_sums(data, prompts * NUM_STEPS)
    engine = {"kv_cache_gib": 0.25} if setup.is_small else {}
    return {
        "defaults": RECIPE,
        "policy": {
            "model_name": str(model),
            "train_global_batch_size": prompts * group // 2,
            "max_total_sequence_length": 64 + tokens,
            "sequence_packing": {"train_mb_tokens": setup.pick(256, 8192), "logprob_mb_tokens": setup.pick(256, 16384)},
            "generation": {"max_new_tokens": tokens, "vllm_cfg": engine},
        },
        "grpo": {
            "num_prompts_per_step": prompts,
            "num_generations_per_prompt": group,
            "max_num_steps": NUM_STEPS,
            "val_period": 0,
        },
        "data": {
            "default": {"processor": None},
            "train": {
                "dataset_name": None,
                "subset": None,
                "split": None,
                "data_path": str(data),
                "input_key": "question",
                "output_key": "answer",
            },
            "validation": None,
        },
        "env": {"math": {"answer_format": "numeric"}},
        "checkpointing": {"enabled": False},
        "profiling": {"steps": [NUM_STEPS, NUM_STEPS], "tools": ["torch"]},
        "cluster": {"device": setup.device, "gpus_per_node": 1, **_engines_here()},
    }


def _engines_here() -> dict[str, str]:
    """Return the setting that workers use the environment of this process if it has the engines: packages of a checkout
    cannot be installed elsewhere."""
    return {"worker_envs": "shared"} if find_spec("vllm") else {}


def _steps(report: Report, steps: Sequence[dict[str, Any]], run_dir: Path) -> None:
    report.holds("steps in the metrics", f"{NUM_STEPS} asked for", len(steps) == NUM_STEPS, str(len(steps)))
    finite = [all(math.isfinite(step[name]) for name in ("train/loss", "train/grad_norm")) for step in steps]
    norms = ", ".join(f"{step['train/grad_norm']:.3g}" for step in steps)
    report.holds("loss and gradient are finite", "every step", all(finite), f"gradient norms {norms}")
    for step in steps:
        number = step["step"]
        excess = step["mismatch/mean"] - 1  # the mean of exp |difference|
        report.within(f"step {number}: mismatch/mean above 1", "the policy's logprobs", excess, MISMATCH_BOUND)
        records = (run_dir / "rollouts" / f"step_{number}.jsonl").read_text().splitlines()
        versions = {version for record in records for version in json.loads(record)["weight_versions"]}
        report.holds(
            f"step {number}: weight version of its rollouts", "the step's", versions == {number}, str(sorted(versions))
        )
    phases = [name for name in steps[-1] if name.startswith("time/")]
    report.figures(
        "Seconds of a step by phase",
        ("step", *(name.removeprefix("time/") for name in phases), "tokens/s sampled", "tokens/s trained"),
        [
            (
                str(step["step"]),
                *(f"{step.get(name, 0.0):.2f}" for name in phases),
                f"{step['generation/tokens_per_second']:.0f}",
                f"{step['train/tokens_per_second']:.0f}",
            )
            for step in steps
        ],
    )


def _profiles(report: Report, run_dir: Path) -> None:
    """Check for a trace of the policy and one of the rollout worker, and list where their time goes."""
    for process in ("policy-0", "rollout-worker-0"):
        found = sorted(run_dir.glob(f"profiles/*/{process}.torch.json.gz"))
        report.holds(
            f"torch profile of {process}", "asked for", len(found) == 1, ", ".join(path.name for path in found)
        )
        if not found:
            continue
        times = _times(json.loads(gzip.decompress(found[0].read_bytes()))["traceEvents"])
        total = sum(times.values()) or 1.0
        report.figures(
            f"Operations of {process} in step {NUM_STEPS}: kernels, or those of the CPU if there is no GPU",
            ("operation", "ms", "share"),
            [
                (name[:80], f"{microseconds / 1e3:.2f}", f"{microseconds / total:.1%}")
                for name, microseconds in times.most_common(NUM_SHOWN)
            ],
        )


def _times(events: Sequence[dict[str, Any]]) -> Counter[str]:
    """Return the microseconds by operation, of the innermost operations of a Chrome trace."""
    kinds = {event.get("cat") for event in events}
    kind = "kernel" if "kernel" in kinds else "cpu_op"
    chosen = [event for event in events if event.get("cat") == kind and event.get("ph") == "X"]
    return _innermost(chosen)


def _innermost(events: Sequence[dict[str, Any]]) -> Counter[str]:
    """Time of each event less that of the events within it on its thread."""
    times: Counter[str] = Counter()
    open_events: list[tuple[Any, float, str]] = []
    for event in sorted(events, key=lambda event: (str(event["tid"]), event["ts"], -event["dur"])):
        thread, start, took = event["tid"], event["ts"], event["dur"]
        while open_events and (open_events[-1][0] != thread or open_events[-1][1] <= start):
            open_events.pop()
        if open_events:
            times[open_events[-1][2]] -= took
        times[event["name"]] += took
        open_events.append((thread, start + took, event["name"]))
    return times
