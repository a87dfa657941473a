"""One rank of a real worker on random rows, whatever its backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from gpu_check.setup import Setup
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.model import LOGPROBS, ModelSpec, Read, Rendezvous
from rl_core.model_config import ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.plugins import BackendPlugin, resolve
from rl_core.selfcheck.rank_pool import free_port
from rl_core.torch.loss import LossSums, Rows
from rl_core.torch.training.worker import TrainingWorker
from rl_core.torch.transport.digest import digest

PARTS = ("parameters", "optimizer")
ADAMW = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-4, "weight_decay": 0.01})
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05, "momentum": 0.9})


@dataclass(frozen=True)
class NextToken:
    """Mean negative logprob of all tokens but the first of each row."""

    temperature: float = 1.0
    columns: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS,)
    implementation: ClassVar[str] = "gpu_check.workers:next_token"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of tokens that follow another."""
        return {"tokens": float((batch.ragged("tokens").lengths - 1).sum())}


def next_token(_loss: NextToken, reads: Mapping[str, Tensor], _rows: Rows) -> LossSums:
    """Return the sum; the logprob of a row's first token is 0."""
    return LossSums({"tokens": -reads["logprobs"].sum()})


def batch_of(lengths: Sequence[int], vocab: int, seed: int = 0) -> Batch:
    """Return random rows of these lengths."""
    random = np.random.default_rng(seed)
    rows = [random.integers(3, vocab, length) for length in lengths]
    return Batch({"tokens": Ragged.from_rows(rows, dtype=np.int32)})


def packed(max_tokens: int) -> dict[str, Any]:
    """Return the settings of a model whose rows are packed end to end."""
    return {"sequence_packing": SequencePackingConfig(train_mb_tokens=max_tokens, logprob_mb_tokens=max_tokens)}


def padded(max_rows: int) -> dict[str, Any]:
    """Return the settings of a model that pads this many rows together."""
    return {
        "sequence_packing": SequencePackingConfig(enabled=False),
        "train_micro_batch_size": max_rows,
        "logprob_batch_size": max_rows,
    }


def config_of(folder: Path, max_tokens: int, **settings: Any) -> ModelConfig:
    """Return a model that trains in bfloat16 with AdamW, unless settings say otherwise."""
    defaults = {"precision": "bfloat16", "optimizer": ADAMW, "max_total_sequence_length": max_tokens}
    return ModelConfig(model_name=str(folder), **{**defaults, **settings})


@contextmanager
def open_worker(plugin: BackendPlugin, config: ModelConfig, setup: Setup, **backend: Any) -> Iterator[TrainingWorker]:
    """Yield a backend's worker in this process, as its own world."""
    rendezvous = Rendezvous(0, 1, 0, "127.0.0.1", free_port(), setup.device)
    worker = resolve(plugin.worker)(config, plugin.config(**backend), ModelSpec(), rendezvous)
    try:
        yield worker
    finally:
        worker.close()
        setup.accelerator.release()


def numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the metrics of a world of one rank."""
    return {name: metric.result() for name, metric in metrics.items()}


def kept_tensors(worker: TrainingWorker) -> list[Tensor]:
    """Return everything that a checkpoint or an offload must bring back bit for bit."""
    return [tensor for part in PARTS for tensor in worker._residency.kept(part)]  # type: ignore[arg-type]


def kept_digests(worker: TrainingWorker) -> list[str]:
    """Return the digests of `kept_tensors`."""
    return [digest(tensor) for tensor in kept_tensors(worker)]


def num_different(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the number of places where two lists differ."""
    return sum(a != b for a, b in zip(left, right, strict=False)) + abs(len(left) - len(right))


def num_missing(expected: Sequence[str], found: Sequence[str]) -> int:
    """Return the number of entries that one of two lists lacks, in any order; the larger of both."""
    left, right = Counter(expected), Counter(found)
    return max((left - right).total(), (right - left).total())
