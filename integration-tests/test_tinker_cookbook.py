"""Recipes of tinker-cookbook, unmodified, against `rl serve tinker` with a tiny model, offline on local files.

The cookbook is not a dependency: `pip install tinker-cookbook` next to the other packages to run these tests. Its data
and tokenizer are folders in the working folder, which `load_dataset` and transformers prefer to the hub.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl_algos.tiny_model import make_tiny_model
from rl_core.testing.exhaustive import exhaustive

pytestmark = [
    exhaustive,
    pytest.mark.skipif(find_spec("tinker_cookbook") is None, reason="tinker-cookbook is not installed"),
]

MODEL = "Qwen/Qwen3-8B-Base"
"""Name that the cookbook knows, with a renderer that works with every tokenizer."""


def write_rows(folder: Path, *, config: str = "default", **splits: list[dict]) -> None:
    """Write a dataset that `load_dataset` finds by the name of its folder."""
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"\n  - split: {split}\n    path: {split}.jsonl" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:{files}\n---\n")


def chat(number: int) -> dict:
    question = {"role": "user", "content": f"Say {number % 7}."}
    return {"prompt": question["content"], "messages": [question, {"role": "assistant", "content": str(number % 7)}]}


def write_data(folder: Path) -> None:
    """Write the data of all recipes in a few rows."""
    chats = [chat(number) for number in range(256)]
    write_rows(folder / "HuggingFaceH4/no_robots", train=chats, test=chats[:8])
    sums = [{"question": f"What is {a} and 1?", "answer": f"It is\n#### {a + 1}"} for a in range(12)]
    write_rows(folder / "openai/gsm8k", config="main", train=sums, test=sums[:4])
    pairs = [
        {
            "chosen": f"\n\nHuman: Say {n % 7}.\n\nAssistant: {n % 7}",
            "rejected": f"\n\nHuman: Say {n % 7}.\n\nAssistant: no",
        }
        for n in range(64)
    ]
    write_rows(folder / "Anthropic/hh-rlhf", train=pairs, test=pairs[:8])
    problems = [{"question": f"What is {number} plus 2?"} for number in range(32)]
    write_rows(folder / "zwhe99/DeepMath-103K", train=problems)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with data and a model, and the environment of programs whose server is running."""
    folder = tmp_path_factory.mktemp("tinker")
    write_data(folder)
    make_tiny_model(folder / MODEL, num_layers=2, max_position_embeddings=2048)
    command = [
        *(str(Path(sys.executable).with_name("rl")), "serve", "tinker", "grpo-arithmetic", "tinker.port=0"),
        *(f"policy.model_name={folder / MODEL}", f"tinker.base_model={MODEL}", f"run_dir={folder / 'run'}"),
        *("policy.max_total_sequence_length=2048", "policy.lora_cfg.max_adapters=2", "policy.lora_cfg.dim=32"),
        *("cluster.cpu_ranks_per_node=2", "cluster.process_timeout_s=1200", "policy.train_micro_batch_size=8"),
    ]
    log = (folder / "server.log").open("w")
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        url = next((line for line in server.stdout if line.startswith("export ")), "").partition("=")[2].strip()
        assert url, (folder / "server.log").read_text()[-3000:]
        yield (
            folder,
            {
                **os.environ,
                "TINKER_BASE_URL": url,
                "TINKER_API_KEY": "tml-test",
                "TINKER_TELEMETRY": "0",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    finally:
        server.kill()
        log.close()


def run_recipe(served, name: str, module: str, *arguments: str) -> list[dict]:
    """Run a recipe; returns its metrics by step."""
    folder, environment = served
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{module}", *arguments, f"log_path={folder / name}"]
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, check=False, timeout=900
    )
    server = (folder / "server.log").read_text()[-3000:]
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}\nserver: {server}"
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def values(metrics: list[dict], key: str) -> list[float]:
    return [row[key] for row in metrics if key in row]


def test_supervised_learning(served):
    metrics = run_recipe(
        served,
        "sl",
        "sl_loop",
        *(f"model_name={MODEL}", "learning_rate=0.003", "batch_size=16", "max_length=256", "lora_rank=8"),
        "save_every=8",
    )
    losses = values(metrics, "train_mean_nll")
    assert losses[-1] < 0.7 * losses[0]


def test_reinforcement_learning(served):
    # from 0.6 on, its default is a loss that is refused by name
    loss = [] if version("tinker-cookbook").startswith("0.5.") else ["loss_fn=importance_sampling"]
    metrics = run_recipe(
        served,
        "rl",
        "rl_loop",
        *(f"model_name={MODEL}", "max_tokens=16", "batch_size=4", "group_size=4", "lora_rank=8", "save_every=0"),
        *loss,
    )
    assert len(metrics) >= 2


def test_preferences(served):
    metrics = run_recipe(
        served,
        "dpo",
        "preference.dpo.train",
        *(f"model_name={MODEL}", "renderer_name=role_colon", "batch_size=8", "max_steps=6", "learning_rate=0.001"),
        "max_length=256",
    )
    margins = values(metrics, "dpo_loss") or values(metrics, "loss")
    assert margins[-1] < margins[0]


def test_distillation(served):
    metrics = run_recipe(
        served,
        "distillation",
        "distillation.on_policy_distillation",
        *(f"model_name={MODEL}", f"teacher_model={MODEL}", "lora_rank=8", "group_size=2", "groups_per_batch=4"),
        *("max_tokens=16", "max_steps=2", "eval_every=0", "save_every=0", "renderer_name=role_colon"),
    )
    assert len(metrics) >= 2


def test_several_players(served):
    metrics = run_recipe(
        served,
        "players",
        "multiplayer_rl.guess_number.train",
        *(f"model_name={MODEL}", "renderer_name=role_colon", "group_size=2", "batch_size=2", "max_tokens=8"),
        *("max_steps=2", "eval_every=0", "save_every=0"),
    )
    assert len(metrics) >= 2
