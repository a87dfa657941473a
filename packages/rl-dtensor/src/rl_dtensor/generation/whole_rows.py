"""Rows decoded without a cache: each step runs every row from its start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.torch.generation.row import Row
from rl_dtensor.generation.batch import add_routing, sample_next
from rl_dtensor.model.replay import RoutingRecorder


class WholeRowBatch:
    """A continuous batch of a model that no cache of rows serves, with the methods of a `DecodingBatch`.

    A pass takes only rows of one length, so that none is padded. A completion of n tokens takes n passes.

    Args:
        most_tokens: Maximum number of tokens in one pass; a single longer row excepted.
        recorder: Recorder of the experts that tokens are sent to; None if they are not reported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        recorder: RoutingRecorder | None = None,
        *,
        most_tokens: int,
    ) -> None:
        self._model = model
        self._device = device
        self._recorder = recorder
        self._most_tokens = most_tokens
        self.rows: list[Row] = []

    def join(self, rows: Sequence[Row], version: int) -> None:
        """Read the prompts of these rows, sample the first token of each, and decode on with those that continue."""
        self.rows += self._extend(rows, version)

    def step(self, version: int) -> None:
        """Sample one token for every row; those that end leave."""
        self.rows = self._extend(self.rows, version)

    def drop_cancelled(self) -> None:
        """Drop rows that nobody waits for any longer."""
        self.rows = [row for row in self.rows if not row.future.cancelled()]

    def clear(self) -> list[Row]:
        """Drop all rows; the rows that were there."""
        rows, self.rows = self.rows, []
        return rows

    @torch.inference_mode()
    def _extend(self, rows: Sequence[Row], version: int) -> list[Row]:
        """Sample one token for each of these rows; those that continue."""
        going_on: list[Row] = []
        for together in self._passes(rows):
            tokens = torch.tensor([_tokens(row) for row in together])
            # the experts of earlier tokens have been reported
            counts = [1 if row.tokens else tokens.shape[1] for row in together]
            logits = last_logits(self._model, tokens.to(self._device))
            add_routing(self._recorder, together, counts)
            going_on += [together[index] for index in sample_next(together, logits, version)]
        return going_on

    def _passes(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """The rows of each pass."""
        for length, equal in groupby(sorted(rows, key=_length), key=_length):
            together = list(equal)
            size = max(1, self._most_tokens // length)
            yield from (together[start : start + size] for start in range(0, len(together), size))


def last_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """float32 `[rows, vocab]`, logits after the last of tokens `[rows, columns]`."""
    return model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1].float()


def _length(row: Row) -> int:
    return row.num_prompt_tokens + len(row.tokens)


def _tokens(row: Row) -> list[int]:
    return [*row.request.token_ids.tolist(), *row.tokens]
