"""The rows decoded together, one token each per step; rows join and leave between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.torch.generation.row import Row
from rl_core.torch.generation.sampling import draw
from rl_dtensor.generation.cache import Kind, RowCache, has_states
from rl_dtensor.generation.images import TEXT, PromptImages, ShownRows
from rl_dtensor.model.replay import RoutingRecorder


class DecodingBatch:
    """A continuous batch.

    Rows are padded on the left to the longest; positions count from each row's own first token.

    Args:
        kinds: Kinds of the layers of the model's cache.
        recorder: Recorder of the experts that tokens are sent to; None if they are not reported.
        images: Reader of the images of prompts; None for a language model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kinds: Sequence[Kind],
        device: torch.device,
        recorder: RoutingRecorder | None = None,
        images: PromptImages | None = None,
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._images = images
        self._device = device
        self.rows: list[Row] = []
        self._kinds = kinds
        self._cache = RowCache(self._kinds)
        self._lengths: list[int] = []
        self._shifts: list[int] = []

    def join(self, rows: Sequence[Row], version: int) -> None:
        """Read the prompts of these rows, sample the first token of each, and decode on with those that continue."""
        if not has_states(self._kinds):
            self._join(rows, version)
            return
        # a state would take in the padding
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
        shown = TEXT if self._images is None else self._images.of([row.request for row in rows], tokens)
        logits = self._forward(tokens, lengths, cache, _places(shown, lengths, columns), shown)
        shifts = shown.shifts(lengths)
        add_routing(self._recorder, rows, lengths)
        going_on = sample_next(rows, logits, version)
        if not going_on:
            return
        if len(going_on) < len(rows):
            lengths, shifts = ([each[index] for index in going_on] for each in (lengths, shifts))
            cache.keep(torch.tensor(going_on, device=self._device), columns - max(lengths))
        if self.rows:
            self._cache.join(cache)
        else:
            self._cache = cache
        self.rows += [rows[index] for index in going_on]
        self._lengths += lengths
        self._shifts += shifts

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Sample one token for every row; those that end leave."""
        tokens = torch.tensor([[row.tokens[-1]] for row in self.rows])
        self._lengths = [length + 1 for length in self._lengths]
        ends = [[length + shift - 1] for length, shift in zip(self._lengths, self._shifts, strict=True)]
        logits = self._forward(tokens, self._lengths, self._cache, torch.tensor(ends))
        add_routing(self._recorder, self.rows, [1] * len(self.rows))
        self._keep(sample_next(self.rows, logits, version))

    def drop_cancelled(self) -> None:
        """Drop rows that nobody waits for any longer."""
        self._keep([index for index, row in enumerate(self.rows) if not row.future.cancelled()])

    def clear(self) -> list[Row]:
        """Drop all rows and their cache; the rows that were there."""
        rows, self.rows, self._cache = self.rows, [], RowCache(self._kinds)
        self._lengths, self._shifts = [], []
        return rows

    def _forward(
        self, tokens: Tensor, lengths: Sequence[int], cache: RowCache, positions: Tensor, shown: ShownRows = TEXT
    ) -> Tensor:
        """float32 `[rows, vocab]`, logits after the last column.

        Args:
            tokens: Int64 `[rows, new]`.
            lengths: Number of each row's tokens, these included.
            cache: Cache of the tokens before; takes these in.
            positions: Int64 `[rows, new]`, or `[3, rows, new]` in time, height and width.
            shown: Images among these tokens.
        """
        columns = cache.get_seq_length() + tokens.shape[1]
        start = torch.tensor([[columns - length] for length in lengths])
        mask = torch.arange(columns)[None] >= start
        output = self._model(
            input_ids=tokens.to(self._device),
            attention_mask=None if bool(mask.all()) else mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **shown.arguments,
        )
        return output.logits[:, -1].float()

    def _keep(self, indices: Sequence[int]) -> None:
        if len(indices) == len(self.rows):
            return
        if not indices:
            self.clear()
            return
        self.rows = [self.rows[index] for index in indices]
        self._lengths = [self._lengths[index] for index in indices]
        self._shifts = [self._shifts[index] for index in indices]
        first_column = self._cache.get_seq_length() - max(self._lengths)
        self._cache.keep(torch.tensor(indices, device=self._device), first_column)


def _places(shown: ShownRows, lengths: Sequence[int], columns: int) -> Tensor:
    """Places of left-padded rows, 0 for padding: int64 `[rows, columns]`, with axes `[3, rows, columns]`."""
    if shown.axes is None:
        start = torch.tensor([[columns - length] for length in lengths])
        return (torch.arange(columns)[None] - start).clamp(min=0)
    places = torch.zeros(3, len(lengths), columns, dtype=torch.int64)
    for row, (axes, length) in enumerate(zip(shown.axes, lengths, strict=True)):
        places[:, row, columns - length :] = torch.from_numpy(axes.T)
    return places


def add_routing(recorder: RoutingRecorder | None, rows: Sequence[Row], counts: Sequence[int]) -> None:
    """Tell each row where its last tokens, so many, were sent in the forward pass before, if that is reported."""
    if recorder is not None:
        for row, experts, count in zip(rows, recorder.take(len(rows)), counts, strict=True):
            row.add_routing(experts[len(experts) - count :])


def sample_next(rows: Sequence[Row], logits: Tensor, version: int) -> list[int]:
    """Give each row its next token; indices of those that continue."""
    sampling = [row.request.sampling for row in rows]
    tokens, logprobs = draw(logits, sampling, [row.uniform for row in rows])
    pairs = zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)
    return [index for index, (row, token, logprob) in enumerate(pairs) if not row.append(token, logprob, version)]
