"""How far tiny policies learn from environments of other packages, as they are, and from users, by seed.

    python benchmarks/environments.py [--only NAME ...] [--seeds 1 2 3] [--folder FOLDER]

Every run is the tiny recipe as `rl train` makes it, on the CPU; runs are as of `learning.py`. All seeds of a recipe
begin with one model. The tokens of every rollout are compared with the turns that the environment was given, and its
reward with one that is computed again, for games by textarena alone.

`verifiers` and `textarena` need these packages (`pip install verifiers`, `pip install textarena`), and `mcp-calculator`
needs `uvx`, which gets the newest `mcp-server-calculator` of PyPI.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from learning import HEAD, SEEDS, Case, Curve, Measure, along, finished_runs, make_runs, rises_by, rows, run_dir
from measurement import surroundings, table

from rl_envs.calculations import load

START = "mcp-calculator-start"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'
HEADERS = {"Content-Type": "application/json"}
CALCULATOR = ("env.mcp_tools.command=[uvx, mcp-server-calculator]", "policy.max_total_sequence_length=160")


def called(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the form `calculator` of `calculations`, whose demonstration calls the server's tool."""
    asked, *said = row["messages"]
    if len(said) > 1:
        call, _, answer = said
        product = asked["content"].removesuffix("=")
        said = [{**call, "content": CALL % product}, {"role": "tool", "content": answer["content"]}, answer]
    return {**row, "messages": [asked, *said], "environment": "mcp_tools"}


def written(folder: Path, *, demonstrations: bool) -> list[str]:
    """Write rows for both splits and return the keys that name them."""
    keys = []
    for split, size in {
        "train": 8000 if demonstrations else 4000,
        "validation": 256 if demonstrations else 128,
    }.items():
        path = folder / f"{split}.jsonl"
        settings = {"form": "calculator", "demonstrations": demonstrations, "size": size}
        path.write_text("".join(json.dumps(called(row)) + "\n" for row in load(settings, split)))
        keys.append(f"data.{split}={{data_path: {path}, dataset_name: null, settings: null}}")
    return keys


def demonstrations(folder: Path) -> list[str]:
    """Return calls of the calculator and guesses, half and half."""
    return written(folder, demonstrations=True)


def products(folder: Path) -> list[str]:
    """Return products, and the model that has learned from demonstrations."""
    start = run_dir(folder.parents[1], START, SEEDS[0])
    return [*written(folder, demonstrations=False), f"policy.model_name={start}"]


def post(served: Mapping[str, Any], path: str, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {served[key]}", **HEADERS}
    request = urllib.request.Request(f"{served['url']}/v1/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def users(run: Path, count: int = 16) -> Iterator[None]:
    """Yield users of a run who ask for sums, and a service that posts 1 for a right answer and 0 for others."""
    ended = threading.Event()

    def ask(number: int) -> None:
        draw = random.Random(number)
        while not ended.is_set():
            a, b = draw.randrange(50), draw.randrange(50)
            message = {"role": "user", "content": f"{a}+{b}="}
            try:
                served = json.loads((run / "live" / "endpoint.json").read_text())
                answer = post(served, "chat/completions", "key", {"model": "policy", "messages": [message]})
                said = answer["choices"][0]["message"]["content"].strip()
                post(served, "reward", "reward_key", {"call": answer["id"], "reward": float(said == str(a + b))})
            except (OSError, ValueError):  # the run has not started, it trains, or it has ended
                ended.wait(0.5)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)


def learns(recipe: str, *settings: str, metric: str = "val/reward", by: float = 0.1, **options: Any) -> Case:
    """Return the case of a recipe with its own model: held-out reward before the first step and after the last."""
    keys = (
        "grpo.val_at_start=true",
        "grpo.val_at_end=true",
        "checkpointing.metric_name=null",
        "checkpointing.save_period=5",
        "checkpointing.keep_top_k=null",
        "logger.token_level=all",
        "policy.generation.backend=hf",
        *settings,
    )
    return Case(recipe, "grpo", (Measure(metric, rises_by(by)),), keys, warm_key="", **options)


CASES = {
    "verifiers": learns("verifiers-tiny", "grpo.max_val_samples=128"),
    # its game has one start, so that there is nothing to hold out
    "textarena": learns("textarena-tiny", metric="reward/mean"),
    "mcp-calculator": learns("mcp-tools-tiny", *CALCULATOR, data=products),
    "live": learns("live-tiny", "cluster.cpu_ranks_per_node=2", beside=users),
}
STARTS = {
    START: Case(
        "sft-calls-tiny", "sft", (), ("policy.max_total_sequence_length=160",), warm_key="", data=demonstrations
    )
}


def turns_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the policy's turns of a rollout."""
    return record.get("turns") or [turn for segment in record["segments"] for turn in segment["turns"]]


def of_sum(record: Mapping[str, Any]) -> float:
    """Return the reward of a sum, which users ask for in their first message."""
    asked = record["prompt"] or record["segments"][0]["messages"]
    left, right = asked[-1]["content"].removesuffix("=").split("+")
    return float(turns_of(record)[-1]["text"].strip() == str(int(left) + int(right)))


def of_product(record: Mapping[str, Any]) -> float:
    """Return the reward of a product."""
    said, product = turns_of(record)[-1]["text"], record["prompt"][-1]["content"].removesuffix("=")
    left, right = product.split("*")
    return float(said.strip() == str(int(left) * int(right)))


def of_game(record: Mapping[str, Any]) -> float:
    """Return the reward of a game that only textarena plays again."""
    import textarena

    start = record["row"]
    random.seed(start["seed"])
    np.random.seed(start["seed"] % 2**32)
    game = textarena.make(start["id"], **start["config"])
    while isinstance(game, textarena.Wrapper):
        game = game.env
    game.reset(num_players=1, seed=start["seed"])
    is_over = False
    for turn in turns_of(record):
        game.get_observation()
        is_over, _ = game.step(action=turn["text"])
    # A rollout may reach its last turn before its game is over, if a move was refused.
    return float(game.close()[0][0]) if is_over else 0.0


AGAIN: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "verifiers": of_sum,
    "textarena": of_game,
    "mcp-calculator": of_product,
    "live": of_sum,
}
"""Rewards that follow from the record of a rollout."""


def checked(run: Path, again: Callable[[Mapping[str, Any]], float]) -> tuple[int, int, int, int]:
    """Count the rollouts of a run: all, failed, those whose tokens are not their turns, those with another reward."""
    num_rollouts = num_failed = num_other_tokens = num_other_rewards = 0
    for path in sorted((run / "rollouts").glob("step_*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        tokens = pyarrow.parquet.read_table(path.with_name(f"tokens_{path.stem.removeprefix('step_')}.parquet"))
        texts = [b""] * len(records)
        for token in tokens.to_pylist():
            if token["weight_version"] is not None and not token["is_special"]:
                texts[token["rollout"]] += token["text"]
        for record, text in zip(records, texts, strict=True):
            num_rollouts += 1
            num_failed += record["status"] == "failed"
            num_other_tokens += text.decode() != "".join(turn["text"] for turn in turns_of(record))
            if record["status"] != "failed":
                num_other_rewards += again(record) != record["rewards"]["reward"]
    return num_rollouts, num_failed, num_other_tokens, num_other_rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=" ".join(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help="(1 2 3)")
    parser.add_argument("--folder", type=Path, default=Path("runs/environments"), help="of the runs (%(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="of each run, instead of the recipe's")
    parser.add_argument("--table", action="store_true", help="start nothing: show the runs that are finished")
    chosen = parser.parse_args()
    folder = chosen.folder.absolute()
    cases: dict[str, Case] = {name: CASES[name] for name in chosen.only}
    if chosen.steps:
        key = f"grpo.max_num_steps={chosen.steps}"
        cases = {name: replace(case, settings=(*case.settings, key)) for name, case in cases.items()}
    if not chosen.table:
        if "mcp-calculator" in cases:
            make_runs(STARTS, SEEDS[:1], folder, num_jobs=1)
        make_runs(cases, chosen.seeds, folder, num_jobs=1)
    runs = {name: finished_runs(folder, name, chosen.seeds) for name in cases}
    curves = {
        (name, measure.metric): [Curve.of(run, measure.metric) for run in runs[name]]
        for name, case in cases.items()
        for measure in case.measures
    }
    print(f"{surroundings('rl-launch', 'rl-algos', 'rl-envs')}\n")
    print(table(HEAD, rows(cases, curves)))
    print(f"\n{table(('environment', 'metric', 'steps', 'values of each seed'), along(curves))}\n")
    checks: list[Sequence[str]] = [
        (name, *map(str, checked(run.path, AGAIN[name]))) for name in cases for run in runs[name]
    ]
    print(table(("environment", "rollouts", "failed", "with other tokens", "with another reward"), checks))


if __name__ == "__main__":
    main()
