"""Runs as they lie on a disk."""

import json
from pathlib import Path

import pytest

from rl_launch.run_session.directory.run_folder import RunFolder

CONFIG = """\
algorithm: grpo
policy: {model_name: Qwen/Qwen3-0.6B, generation: {backend: vllm, max_new_tokens: 64}}
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2, max_num_steps: 20}
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "run"
    (path / "rollouts").mkdir(parents=True)
    (path / "run.json").write_text("{}")
    (path / "config.yaml").write_text(CONFIG)
    return path


@pytest.fixture
def record(folder):
    """Write steps and return the run."""

    def written(rows, rollouts=()):
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step, records in dict(rollouts).items():
            lines = (json.dumps(each) + "\n" for each in records)
            (folder / "rollouts" / f"step_{step}.jsonl").write_text("".join(lines))
        return RunFolder(folder)

    return written
