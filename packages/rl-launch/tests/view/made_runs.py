"""Folders as runs and evaluations leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, WeightSpan
from rl_launch.run_session.rollouts.run_files import TokenFiles
from rl_launch.run_session.traces.trace_folder import Piece, TraceWriter

CONFIG = """\
algorithm: grpo
policy: {{model_name: Qwen/Qwen3-0.6B, optimizer: {{kwargs: {{lr: {lr}}}}}, generation: {{backend: vllm}}}}
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 2, max_num_steps: 20}}
"""


def rollout(prompt_id: str, index: int, response: str, reward: float | None, **others: Any) -> dict[str, Any]:
    """A rollout as a run records it; one without a reward has failed."""
    return {
        "prompt_id": prompt_id,
        "dataset": "sums",
        "environment": "math",
        "index": index,
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"question {prompt_id}"}],
        "row": {"answer": "12"},
        "turns": [{"text": response, "observation": None, "rewards": {}}],
        "rewards": {} if reward is None else {"reward": reward, "format": 1.0 - reward},
        "status": "failed" if reward is None else "ok",
        "failure": "the tool did not answer" if reward is None else "",
        "stop_reason": "stop",
        "num_sampled": len(response.split()),
        "weight_versions": [3],
        "info": {},
        "advantage": None if reward is None else reward - 0.5,
        **others,
    }


def agent_rollout() -> dict[str, Any]:
    """A rollout of an agent, which begins again with a summary; the later segment has the first tokens."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    made = rollout("p7", 0, "", 1.0)
    del made["turns"]
    segments = [
        {
            "num_tokens": 41,
            "call": 3,
            "shared": {"segment": 1, "messages": 1},
            "messages": [{"role": "user", "content": "In short: 42 files."}],
            "turns": [{"text": "It is repaired.", "rewards": {"reward": 1.0}}],
        },
        {
            "num_tokens": 42,
            "call": 1,
            "tools": [tool],
            "messages": [{"role": "system", "content": "You repair code."}, {"role": "user", "content": "Repair it."}],
            "turns": [
                {"text": "I look.", "rewards": {}, "observation": [{"role": "tool", "content": "42 files"}]},
                {"text": "There are many files.", "rewards": {}},
            ],
        },
    ]
    return {**made, "segments": segments}


def group(step: int, prompt: int, size: int = 2) -> list[dict[str, Any]]:
    """The rollouts of a prompt, of which every second one is rewarded."""
    return [rollout(f"p{prompt}", index, f"answer {index} of step {step}", float(index % 2)) for index in range(size)]


def lines(records: list[Any]) -> bytes:
    return b"".join(
        json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n" for record in records
    )


def add_step(folder: Path, step: int, records: list[Any] | None = None, **metrics: float | None) -> None:
    """Add a step with its rollouts and metrics."""
    found = group(step, 0) + group(step, 1) if records is None else records
    (folder / "rollouts" / f"step_{step}.jsonl").write_bytes(lines(found))
    row = {
        "step": step,
        "reward/mean": 0.1 * step,
        "reward/std": 0.5,
        "train/loss": 1 / step,
        "time/generation": 2.0,
        "time/training": 1.0,
        "time/step": 3.5,
        **metrics,
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def made_run(folder: Path, num_steps: int = 3, *, lr: float = 0.001) -> Path:
    """A run with some steps."""
    for name in ("rollouts", "logs", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"algorithm": "grpo", "model": "Qwen/Qwen3-0.6B", "tags": ["first"]}))
    (folder / "config.yaml").write_text(CONFIG.format(lr=lr))
    (folder / "logs" / "driver.log").write_text(
        "2026-01-02 03:04:05,678 INFO rl_launch.run_session.tracking.progress: step 1/20  reward 0.1\n"
        "2026-01-02 03:04:06,678 WARNING rl_launch.runtime: replica 1 was lost and is restarted\n"
    )
    for step in range(1, num_steps + 1):
        add_step(folder, step)
    return folder


class Words:
    """Texts of the tokens of `add_tokens`: two of a prompt, a character in two parts, and numbered words."""

    def text(self, number: int) -> bytes:
        euro = "\u20ac".encode()
        return {0: b"<|user|>", 1: b"hi ", 2: euro[:2], 3: euro[2:]}.get(number, b"w%d\n" % (number - 4))

    def is_special(self, number: int) -> bool:
        return number == 0


def add_tokens(
    folder: Path, step: int, num_rollouts: int = 2, num_sampled: int = 4, texts: Any = None, prompt_id: str = "p0"
) -> None:
    """Add the tokens of the first rollouts of a step: a prompt of two, and sampled a character of two and words, the
    last of which has another weight version. The advantages of the rollouts are 0.5, 1.5 and so on."""
    tokens = np.arange(4 + num_sampled, dtype=np.int32)
    sampled = np.arange(len(tokens)) >= 2
    length = int(sampled.sum())
    logprobs = np.where(sampled, -0.5 * np.cumsum(sampled), -9.0).astype(np.float32)
    rollouts = [
        Rollout(
            prompt_id,
            tokens,
            sampled.astype(np.uint8),
            np.where(sampled, logprobs + 0.25, 0).astype(np.float32),
            (WeightSpan(3, length - 1), WeightSpan(4, 1)),
            (),
            {"reward": 1.0},
            "stop",
        )
        for _ in range(num_rollouts)
    ]
    group = RolloutGroup.of(Prompt(prompt_id, (), tokens[:2], "math"), rollouts)
    columns = group.columns.only(["tokens", "loss_mask", "generation_logprobs", "weight_versions"])
    every = columns.ragged("tokens").like(np.tile(logprobs, num_rollouts))
    batch = columns.with_columns({"prev_logprobs": every, "advantages": np.arange(num_rollouts) + 0.5})
    files = TokenFiles(folder / "rollouts", "all", 1)
    files.read_texts_from(texts or Words())
    files.append(step, [group], batch)
    files.flush()
    files.close()


def add_traces(folder: Path, num_steps: int) -> None:
    """Traces of steps of two seconds: a rank works in the second half, a replica generates in the first one."""
    writer = TraceWriter(folder / "traces")
    for step in range(1, num_steps + 1):
        begin = 1.8e15 + 2e6 * step
        pieces = [
            Piece("driver", "steps", f"step {step}", begin, 2e6),
            Piece("driver", "phases", "validation", begin, 2e6),
            Piece("driver", "phases", "generation", begin + 1e5, 1e6),
            Piece("driver", "weight sync", f"version {step}", begin + 1.9e6, 1e5),
            Piece("policy-0", "calls", "train_step", begin + 1e6, 1e6),
            *(Piece("rollout-worker-0", "generation", "generation", begin + 1e4 * n, 9e3, 8) for n in range(100)),
            Piece("environment-math", "turns", "turns", begin + 5e5, 2e5),
        ]
        if step == 2:
            pieces.append(Piece("driver", "restarts", "rollout worker 1 is lost", begin + 1e6, None))
        writer.append(step, pieces)
    writer.flush()


def add_profiles(folder: Path) -> None:
    """Files of profiles, and one that is none."""
    profiles = folder / "profiles" / "step_5-7"
    profiles.mkdir(parents=True)
    for name in ("policy-0.torch.json.gz", "rollout-worker-0.py-spy.json", "policy-0.memory.pickle", "notes.txt"):
        (profiles / name).write_bytes(b"x" * 2048)


def made_server(folder: Path) -> Path:
    """Write the files of a server with two tenants."""
    folder.mkdir(parents=True)
    numbers = {
        **dict.fromkeys(("models", "requests", "failed_requests", "queued", "trained_tokens", "sampled_tokens"), 2),
        "waited_s": 3.5,
        "oldest_queued_s": 1.5,
        "queued_bytes": 10,
        "storage_bytes": 4096,
    }
    lines = []
    for step in range(5):
        tenants = {"ada": {**numbers, "steps": step}, "bob": {**numbers, "steps": 2 * step}}
        lines.append({"time": 1.7e9 + 10 * step, "steps": 3 * step, "tenants": tenants})
    (folder / "tenants.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {"time": 1.7e9 + 50, "base_model": "Qwen/Qwen3-8B", "tenants": lines[-1]["tenants"]}
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def made_evaluation(folder: Path, value: float) -> Path:
    """An evaluation of one task with four prompts."""
    folder.mkdir(parents=True)
    rewards = [[value], [1.0], [value], [0.0]]
    estimates = {"mean": {"value": value, "low": value - 0.1, "high": value + 0.1}}
    summary = {
        "estimates": estimates,
        "num_prompts": 4,
        "num_rollouts": 4,
        "num_failed": 0,
        "num_truncated": 0,
        "mean_length": 3.0,
    }
    prompts = [[f"p{number}", f"digest {number}", each] for number, each in enumerate(rewards)]
    data = {"schema": 1, "model": "m", "confidence": 0.95, "tasks": {"sums": summary}, "prompts": {"sums": prompts}}
    (folder / "eval.json").write_text(json.dumps(data))
    (folder / "plan.json").write_text("{}")
    (folder / "config.yaml").write_text("{}")
    records = [{**rollout(f"p{number}", 0, "12", each[0]), "task": "sums"} for number, each in enumerate(rewards)]
    (folder / "rollouts.jsonl").write_bytes(lines(records))
    return folder
