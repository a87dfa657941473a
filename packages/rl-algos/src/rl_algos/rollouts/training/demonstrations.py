"""Conversations of a dataset that steps learn next to their rollouts."""

from __future__ import annotations

import numpy as np

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.stream import Stream
from rl_algos.losses.mask import DEMONSTRATION
from rl_algos.sft.data import TrainingRow, to_batch, training_rows
from rl_core.data.batch import Batch
from rl_core.tokenizer import Tokenizer


class DemonstrationRows:
    """The conversations of a dataset in an order that follows from the seed: all of them once before any comes again. A
    checkpoint holds the position, so every step of a run has its own rows, however often the run is resumed.

    Args:
        stream: Conversations, and the position among them.
        rows_per_step: Number of conversations of a step.
    """

    def __init__(self, stream: Stream[TrainingRow], rows_per_step: int) -> None:
        self.stream = stream
        self._rows_per_step = rows_per_step

    @classmethod
    def of(
        cls, dataset: DatasetConfig, data: DataConfig, tokenizer: Tokenizer, *, rows: int, max_tokens: int, seed: int
    ) -> DemonstrationRows:
        """Read and tokenise a dataset, as supervised fine-tuning does.

        Args:
            dataset: Its settings.
            data: Section `data` of the run, for malformed rows and workers; its `default` is for prompts.
            tokenizer: Tokenizer with a chat template.
            rows: Number of conversations of a step.
            max_tokens: Maximum number of tokens of a conversation.
            seed: Seed of the order.

        Raises:
            DataError: With dataset and row, and the remedy.
        """
        kept = ("overlong", "malformed", "allow_image_urls", "max_video_frames", "shuffle", "num_workers")
        own = DataConfig(train=dataset, **{key: getattr(data, key) for key in kept})
        (loaded,) = load_datasets(own, "train")
        conversations = training_rows(loaded, own, tokenizer, max_tokens, learn="all")
        return cls(Stream([conversations], seed=seed, shuffle=own.shuffle, digests=[loaded.digest]), rows)

    def take(self) -> Batch:
        """Return the conversations of the next step: `tokens`, `loss_mask`, `demonstration` and `images`."""
        batch = to_batch(self.stream.take(self._rows_per_step))
        return batch.with_columns({DEMONSTRATION: np.ones(len(batch), dtype=np.uint8)})
