"""Tokens a second of several adapters on one base, beside as many runs with one adapter each.

    python benchmarks/adapters.py [--adapters 4] [--rows 1 4 16] [--tokens 64] [--rank 16] [--rounds 12]

A round is a step of every adapter on rows of its own, once as one pass over all rows in a model with several adapters,
and once as a step of each of several models with one adapter. The models are in processes of their own with one thread
each, so that a step takes the same cores either way; the runs take turns within a round, as on a machine that one of
them fills. Wall time and processor time of the models' processes, median of the rounds' ratios, with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
from measurement import surroundings, table

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import ADAPTER, AdapterLosses, AdapterSettings, ModelSpec, StepSettings
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool
from rl_core.selfcheck.torch.tiny_model import write_tiny_model

SIZE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
}
"""A Qwen3 of 26 million parameters."""

LOSS = TokenLoss(entropy_weight=0.0, topk_weight=0.0, candidates_weight=0.0, sequence_weight=0.0)
SETTINGS = StepSettings(lr=1e-3)


def rows_of(adapter: int, count: int, tokens: int) -> Batch:
    rng = np.random.default_rng(adapter)
    drawn = Ragged.from_rows([rng.integers(0, SIZE["vocab_size"], tokens) for _ in range(count)], dtype=np.int32)
    number = count * tokens
    return Batch(
        {
            "tokens": drawn,
            "loss_mask": drawn.like(np.ones(number, dtype=np.int8)),
            "weights": drawn.like(np.ones(number, dtype=np.float32)),
            "candidates": drawn.like(np.zeros((number, 4), dtype=np.int32)),
            ADAPTER: np.full(count, adapter, dtype=np.int32),
        }
    )


def processor_s() -> float:
    """Return the processor time of all models' processes so far."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def opened(stack: ExitStack, folder: Path, rank: int, adapters: int) -> PooledModel:
    pool = stack.enter_context(RankPool(1))
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        max_total_sequence_length=8192,
        optimizer=OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-3}),
        lora_cfg=LoraConfig(enabled=True, dim=rank, max_adapters=adapters),
        sequence_packing=SequencePackingConfig(enabled=True),
    )
    return stack.enter_context(PooledModel(pool, "rl_dtensor.selfcheck:build", config, ModelSpec(), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="rows of an adapter in a step")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    places, lines = range(given.adapters), []
    with tempfile.TemporaryDirectory() as workspace, ExitStack() as stack:
        folder = write_tiny_model(Path(workspace, "model"), **SIZE)
        together = opened(stack, folder, given.rank, given.adapters)
        alone = [opened(stack, folder, given.rank, 1) for _ in places]
        for place in places:
            together.call("adapters.make", place, AdapterSettings(given.rank, 32.0))
        losses = AdapterLosses(dict.fromkeys(places, LOSS))
        for count in given.rows:
            own = [rows_of(place, count, given.tokens) for place in places]
            joint = Batch.concat(own)

            def all_at_once(joint: Batch = joint) -> None:
                together.accumulate(joint, losses)
                for place in places:
                    together.apply(SETTINGS, adapter=place)

            def one_after_another(own: list[Batch] = own) -> None:
                for model, rows in zip(alone, own, strict=True):
                    model.accumulate(rows, LOSS)
                    model.apply(SETTINGS)

            taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for number in range(given.rounds + 2):
                for is_joint in (True, False) if number % 2 else (False, True):
                    begun, used = time.perf_counter(), processor_s()
                    (all_at_once if is_joint else one_after_another)()
                    taken[is_joint].append((time.perf_counter() - begun, processor_s() - used))
            walls = [statistics.median(wall for wall, _ in taken[each][2:]) for each in (True, False)]
            line = [f"{count} x {given.tokens}"]
            line += [f"{given.adapters * count * given.tokens / wall:,.0f}" for wall in walls]
            for which in range(2):
                ratios = [one[which] / all_[which] for one, all_ in zip(taken[False][2:], taken[True][2:], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                line.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            lines.append(line)
    speeds = ["together, tokens/s", f"{given.adapters} runs, tokens/s"]
    print(table(["rows of each adapter", *speeds, "ratio", "ratio of processor time"], lines))
    print(surroundings())


if __name__ == "__main__":
    main()
