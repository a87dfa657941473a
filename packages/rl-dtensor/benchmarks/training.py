"""Training for the benchmarks of this package: random models, random rows and one rank of a real worker."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from transformers.utils import logging

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import LOGPROBS, ModelSpec, Read, Rendezvous
from rl_core.model_config import DynamicBatchingConfig, ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.selfcheck.rank_pool import free_port
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.torch.loss import LossSums, Rows
from rl_dtensor.config import DTensorConfig
from rl_dtensor.worker import DTensorWorker

LEARNING_RATE = 1e-4
ADAMW = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": LEARNING_RATE, "weight_decay": 0.01})

LENGTHS = ("log-normal", "few-long")
"""Kinds of skewed lengths."""

LOG_SIGMA = 1.2
"""Of log-normal lengths: the mean is about twice the median, one row in a hundred sixteen times as long."""


@dataclass(frozen=True)
class Size:
    """A random Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    vocab: int
    inner: int
    head_dim: int = 64

    def write(self, folder: Path, *, dtype: str = "float32", max_tokens: int = 32768) -> Path:
        """Its Hugging Face files."""
        logging.disable_progress_bar()
        return write_tiny_model(
            folder,
            "qwen3",
            dtype=dtype,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            intermediate_size=self.inner,
            max_position_embeddings=max_tokens,
            initializer_range=0.02,
        )

    @property
    def parameters(self) -> int:
        """Their number."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_value_heads)
        norms = 2 * self.hidden + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.inner + norms
        return self.vocab * self.hidden + self.layers * layer + self.hidden

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:.1f}M parameters (hidden {self.hidden}, {self.layers} layers, "
            f"vocabulary {self.vocab})"
        )


@dataclass(frozen=True)
class NextToken:
    """Mean negative logprob of all tokens but the first of each row."""

    temperature: float = 1.0
    columns: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS,)
    implementation: ClassVar[str] = "training:next_token"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Tokens that follow another."""
        return {"tokens": float((batch.ragged("tokens").lengths - 1).sum())}


def next_token(_loss: NextToken, reads: Mapping[str, Tensor], _rows: Rows) -> LossSums:
    """The sum; the logprob of a row's first token is 0."""
    return LossSums({"tokens": -reads["logprobs"].sum()})


def batch_of(lengths: Sequence[int], vocab: int, seed: int = 0) -> Batch:
    """Random rows of these lengths."""
    random = np.random.default_rng(seed)
    return Batch(
        {"tokens": Ragged.from_rows([random.integers(3, vocab, length) for length in lengths], dtype=np.int32)}
    )


def skewed_lengths(kind: str, rows: int, longest: int, seed: int = 0) -> list[int]:
    """`log-normal` lengths, or `few-long`: one row in sixteen has the greatest, the others about a sixteenth of it."""
    random = np.random.default_rng(seed)
    if kind == "log-normal":
        drawn = random.lognormal(np.log(longest / 16), LOG_SIGMA, rows)
    else:
        drawn = np.where(random.permutation(rows) % 16 == 0, longest, random.uniform(0.5, 1.5, rows) * longest / 16)
    return [int(length) for length in drawn.round().clip(2, longest)]


def packed(max_tokens: int) -> dict[str, Any]:
    """Settings of a model whose rows lie end to end."""
    return {"sequence_packing": SequencePackingConfig(train_mb_tokens=max_tokens, logprob_mb_tokens=max_tokens)}


def padded(max_rows: int) -> dict[str, Any]:
    """Settings of a model that pads so many consecutive rows."""
    return {
        "sequence_packing": SequencePackingConfig(enabled=False),
        "train_micro_batch_size": max_rows,
        "logprob_batch_size": max_rows,
    }


def alike(max_tokens: int) -> dict[str, Any]:
    """Settings of a model that pads rows of like lengths together."""
    budget = DynamicBatchingConfig(enabled=True, train_mb_tokens=max_tokens, logprob_mb_tokens=max_tokens)
    return {"sequence_packing": SequencePackingConfig(enabled=False), "dynamic_batching": budget}


def config_of(folder: Path, max_tokens: int, **settings: Any) -> ModelConfig:
    """A model that trains in float32 with AdamW, unless settings say otherwise."""
    defaults = {"precision": "float32", "optimizer": ADAMW, "max_total_sequence_length": max_tokens}
    return ModelConfig(model_name=str(folder), **{**defaults, **settings})


@contextmanager
def one_rank(config: ModelConfig, device: str = "cpu", **backend: Any) -> Iterator[DTensorWorker]:
    """A worker in this process, as a world of its own."""
    rendezvous = Rendezvous(0, 1, 0, "127.0.0.1", free_port(), "cuda" if device == "cuda" else "cpu")
    worker = DTensorWorker(config, DTensorConfig(**backend), ModelSpec(), rendezvous)
    try:
        yield worker
    finally:
        worker.close()


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process of its own and return its result; exits if it fails there."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        raise SystemExit(f"{function.__name__} ended with {process.exitcode}") from None
    finally:
        process.join()


def _answer(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    connection.send(function(*args))
