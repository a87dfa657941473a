"""The rows decoded together, one token each per step; rows join and leave between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.torch.generation.row import Row, draw_next
from rl_dtensor.generation.cache import Kind, RowCache, has_states
from rl_dtensor.generation.decoding_pass import DecodingPass
from rl_dtensor.generation.exact_pass import ExactPass
from rl_dtensor.generation.images import PromptImages
from rl_dtensor.model.layers.replay import RoutingRecorder


class DecodingBatch:
    """A continuous batch.

    Rows are padded on the left to the longest; positions count from each row's own first token.

    Args:
        kinds: Kinds of the layers of the model's cache.
        recorder: Recorder of the experts that tokens are sent to; None if they are not reported.
        images: Reader of the images of prompts; None for a language model.
        decoding_pass: Pass over one token of every row; None to run the model's own code.
        exact: Pass that computes the trainer's bits, in place of the model's code; None for none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kinds: Sequence[Kind],
        device: torch.device,
        recorder: RoutingRecorder | None = None,
        images: PromptImages | None = None,
        decoding_pass: DecodingPass | None = None,
        exact: ExactPass | None = None,
    ) -> None:
        self._model, self._recorder, self._images = model, recorder, images
        self._pass, self._exact = decoding_pass, exact
        self._device = device
        self.rows: list[Row] = []
        self._kinds = kinds
        self._cache = RowCache(self._kinds)
        self._lengths: list[int] = []
        self._shifts: list[int] = []

    def join(self, rows: Sequence[Row], version: int) -> None:
        """Read the prompts of these rows and sample the first token of each; rows that continue stay."""
        if not has_states(self._kinds):
            self._join(rows, version)
            return
        # A state would also include the padding.
        for length in sorted({row.num_prompt_tokens for row in rows}):
            self._join([row for row in rows if row.num_prompt_tokens == length], version)

    @torch.inference_mode()
    def _join(self, rows: Sequence[Row], version: int) -> None:
        lengths = [row.num_prompt_tokens for row in rows]
        columns = max(lengths)
        tokens = torch.zeros(len(rows), columns, dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens[index, columns - lengths[index] :] = torch.from_numpy(row.request.token_ids)
        cache = RowCache(self._kinds)
        of_images: Mapping[str, Any] = {}
        axes_of_rows: Sequence[np.ndarray] | None = None
        if self._images is not None:
            of_images, axes_of_rows = self._images.of([row.request for row in rows], tokens)
        if axes_of_rows is None:
            start = torch.tensor([[columns - length] for length in lengths])
            places = (torch.arange(columns)[None] - start).clamp(min=0)
        else:
            places = torch.zeros(3, len(lengths), columns, dtype=torch.int64)
            for index, (axes, length) in enumerate(zip(axes_of_rows, lengths, strict=True)):
                places[:, index, columns - length :] = torch.from_numpy(axes.T)
        logits = self._forward(tokens, lengths, cache, places, of_images)
        shifts = [0] * len(lengths)
        if axes_of_rows is not None:  # An image has more tokens than places.
            shifts = [int(row.max()) + 1 - length for row, length in zip(axes_of_rows, lengths, strict=True)]
        add_routing(self._recorder, rows, lengths)
        continuing = sample_next(rows, logits, version)
        if not continuing:
            return
        if len(continuing) < len(rows):
            lengths, shifts = ([each[index] for index in continuing] for each in (lengths, shifts))
            cache.keep(continuing, max(lengths))
        if self.rows:
            self._cache.join(cache)
        else:
            self._cache = cache
        self.rows += [rows[index] for index in continuing]
        self._lengths += lengths
        self._shifts += shifts

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Sample one token for every row; rows that end leave."""
        tokens = torch.tensor([row.tokens[-1] for row in self.rows])
        self._lengths = [length + 1 for length in self._lengths]
        ends = [length + shift - 1 for length, shift in zip(self._lengths, self._shifts, strict=True)]
        if self._pass is None:
            logits = self._forward(tokens[:, None], self._lengths, self._cache, torch.tensor(ends)[:, None])
        else:
            mask = padding_mask(self._lengths, self._cache.get_seq_length() + 1)
            if mask is not None:
                # Added to the scores, a mask is converted once and not in every layer.
                mask = torch.zeros(mask.shape, dtype=self._model.dtype).masked_fill_(~mask, -torch.inf)
                mask = mask[:, None, None].to(self._device)
            logits = self._pass(tokens.to(self._device), ends, self._cache, mask).float()
        add_routing(self._recorder, self.rows, [1] * len(self.rows))
        self._keep(sample_next(self.rows, logits, version))

    @torch.inference_mode()
    def drop_cancelled(self) -> None:
        """Drop rows whose requests were cancelled."""
        self._keep([index for index, row in enumerate(self.rows) if not row.future.cancelled()])

    def clear(self) -> list[Row]:
        """Drop all rows and their cache; return the rows."""
        rows, self.rows, self._cache = self.rows, [], RowCache(self._kinds)
        self._lengths, self._shifts = [], []
        return rows

    def _forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        cache: RowCache,
        positions: Tensor,
        of_images: Mapping[str, Any] = MappingProxyType({}),
    ) -> Tensor:
        """Compute float32 `[rows, vocab]`, logits after the last column.

        Args:
            tokens: Int64 `[rows, new]`.
            lengths: Number of each row's tokens, these included.
            cache: Cache of the tokens before; these are added to it.
            positions: Int64 `[rows, new]`, or `[3, rows, new]` in time, height and width.
            of_images: Arguments of the model for the images among these tokens.
        """
        if self._exact is not None:
            return self._exact(tokens.to(self._device), lengths, cache, positions.to(self._device))[:, -1]
        mask = padding_mask(lengths, cache.get_seq_length() + tokens.shape[1])
        output = self._model(
            input_ids=tokens.to(self._device),
            attention_mask=None if mask is None else mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **of_images,
        )
        return output.logits[:, -1].float()

    def _keep(self, indices: Sequence[int]) -> None:
        if len(indices) == len(self.rows):
            return
        if not indices:
            self.clear()
            return
        # The last rows take the places of rows that left, so that few keys and values move.
        kept, moving = set(indices), [index for index in indices if index >= len(indices)]
        places = [place if place in kept else moving.pop() for place in range(len(indices))]
        self.rows = [self.rows[index] for index in places]
        self._lengths = [self._lengths[index] for index in places]
        self._shifts = [self._shifts[index] for index in places]
        self._cache.keep(places, max(self._lengths))


def padding_mask(lengths: Sequence[int], columns: int) -> Tensor | None:
    """Return `[rows, columns]`, False for padding left of each row's tokens; None if no row is padded."""
    if min(lengths) == columns:
        return None
    start = torch.tensor([[columns - length] for length in lengths])
    return torch.arange(columns)[None] >= start


def add_routing(recorder: RoutingRecorder | None, rows: Sequence[Row], counts: Sequence[int]) -> None:
    """Add to each row the experts of its last `count` tokens in the forward pass before, if they are reported."""
    if recorder is not None:
        for row, experts, count in zip(rows, recorder.take(len(rows)), counts, strict=True):
            row.add_routing(experts[len(experts) - count :])


def sample_next(rows: Sequence[Row], logits: Tensor, version: int) -> list[int]:
    """Give each row its next token; return the indices of rows that continue."""
    tokens, logprobs = draw_next(rows, logits)
    pairs = zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)
    return [index for index, (row, token, logprob) in enumerate(pairs) if not row.append(token, logprob, version)]


class WholeRowBatch:
    """A continuous batch of a model that no cache of rows serves, with the methods of a `DecodingBatch`.

    A pass takes only rows of one length, so that none is padded. A completion of n tokens takes n passes.

    Args:
        max_tokens: Maximum number of tokens in one pass. A single longer row is an exception.
        recorder: Recorder of the experts that tokens are sent to; None if they are not reported.
    """

    def __init__(
        self, model: PreTrainedModel, device: torch.device, recorder: RoutingRecorder | None = None, *, max_tokens: int
    ) -> None:
        self._model, self._device, self._recorder = model, device, recorder
        self._max_tokens = max_tokens
        self.rows: list[Row] = []

    def join(self, rows: Sequence[Row], version: int) -> None:
        """Read the prompts of these rows and sample the first token of each; rows that continue stay."""
        self.rows += self._extend(rows, version)

    def step(self, version: int) -> None:
        """Sample one token for every row; rows that end leave."""
        self.rows = self._extend(self.rows, version)

    def drop_cancelled(self) -> None:
        """Drop rows whose requests were cancelled."""
        self.rows = [row for row in self.rows if not row.future.cancelled()]

    def clear(self) -> list[Row]:
        """Drop all rows and return them."""
        rows, self.rows = self.rows, []
        return rows

    @torch.inference_mode()
    def _extend(self, rows: Sequence[Row], version: int) -> list[Row]:
        """Sample one token for each of these rows; return rows that continue."""

        def length_of(row: Row) -> int:
            return row.num_prompt_tokens + len(row.tokens)

        continuing: list[Row] = []
        for length, equal in groupby(sorted(rows, key=length_of), key=length_of):
            alike, size = list(equal), max(1, self._max_tokens // length)
            for start in range(0, len(alike), size):
                together = alike[start : start + size]
                tokens = torch.tensor([[*row.request.token_ids.tolist(), *row.tokens] for row in together])
                # The experts of earlier tokens have been reported.
                counts = [1 if row.tokens else tokens.shape[1] for row in together]
                logits = last_logits(self._model, tokens.to(self._device))
                add_routing(self._recorder, together, counts)
                continuing += [together[index] for index in sample_next(together, logits, version)]
        return continuing


def last_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return float32 `[rows, vocab]`, logits after the last of tokens `[rows, columns]`."""
    return model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1].float()
