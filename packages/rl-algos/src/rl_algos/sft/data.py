"""Training rows of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_algos.data.config import DataConfig
from rl_algos.data.example import Example
from rl_algos.data.examples import Dataset, Datasets
from rl_algos.data.prompts import weights_of
from rl_algos.data.stream import Stream
from rl_algos.sft.config import SFTRoot
from rl_algos.sft.conversation import encode_conversation
from rl_algos.tokenizer import require_chat_template
from rl_core.batch import TOKENS, Batch
from rl_core.errors import DataError
from rl_core.ragged import Ragged


@dataclass(frozen=True)
class TrainingRow:
    """A conversation to learn from.

    Args:
        id: unique within the run and stable across runs.
        tokens: int32 `[tokens]`.
        loss_mask: uint8 `[tokens]`, 1 on what the assistant says.
    """

    id: str
    tokens: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class SFTData:
    """What supervised fine-tuning trains and validates on.

    Args:
        train: training rows in their order.
        validation: batches, empty where there is no validation.
    """

    train: Stream[TrainingRow]
    validation: Sequence[Batch]


def prepare(config: SFTRoot, tokenizer: Any, datasets: Datasets) -> SFTData:
    """Tokenise the data and check what came out; called on the driver before anything is started.

    Args:
        config: root with `sft`, `data` and `policy`.
        tokenizer: as `rl_algos.tokenizer.load_tokenizer` returns it.
        datasets: as `rl_algos.data.examples.load` returns them.

    Raises:
        DataError: naming dataset and row, and the remedy.
        ConfigError: where the tokenizer has no chat template.
    """
    require_chat_template(tokenizer)
    data, sft, policy = config.data, config.sft, config.policy
    limit = policy.max_total_sequence_length
    rows = [_rows(dataset, data, tokenizer, limit) for dataset in datasets.train]
    stream = Stream(
        rows, weights_of(datasets.train), seed=sft.seed, shuffle=data.shuffle, max_num_epochs=sft.num_epochs
    )
    held_out = [row for dataset in datasets.validation for row in _rows(dataset, data, tokenizer, limit)]
    size = sft.val_global_batch_size or policy.train_global_batch_size
    batches = [to_batch(held_out[start : start + size]) for start in range(0, len(held_out), size)]
    return SFTData(stream, batches[: sft.val_batches])


def to_batch(rows: Sequence[TrainingRow]) -> Batch:
    """Rows as the columns that `NLLLoss` needs."""
    return Batch(
        {
            TOKENS: Ragged.from_rows([row.tokens for row in rows], dtype=np.int32),
            "loss_mask": Ragged.from_rows([row.loss_mask for row in rows], dtype=np.uint8),
        }
    )


@dataclass(frozen=True)
class _EncodeExample:
    tokenizer: Any

    def __call__(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        messages = example.messages
        if not example.has_response and example.answer is not None:
            messages = (*messages, {"role": "assistant", "content": str(example.answer)})
        return encode_conversation(self.tokenizer, messages)


def _rows(dataset: Dataset, config: DataConfig, tokenizer: Any, max_tokens: int) -> list[TrainingRow]:
    encoded = dataset.encode(_EncodeExample(tokenizer), config.num_workers)
    limit = min(config.max_input_seq_length or max_tokens, max_tokens)
    kept = dataset.within_limit(
        encoded, [len(tokens) for tokens, _ in encoded.values()], limit, overlong=config.overlong
    )
    rows = [TrainingRow(row_id, tokens, mask) for row_id, (tokens, mask) in kept.items()]
    if not any(row.loss_mask.any() for row in rows):
        raise DataError(
            f"no token of the dataset {dataset.name!r} is under the loss: what the assistant says is empty in every row"
        )
    return rows
