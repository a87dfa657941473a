"""The rows decoded together from first to last, on megatron-core's static inference context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
from torch import Tensor

from rl_core.torch.generation.row import Row, draw_next
from rl_megatron.model.model import ReadingModel
from rl_megatron.model.routing import MegatronRoutingRecorder

COLUMNS = 64
"""The columns of a cache are a multiple of this: Megatron keeps the rotary embedding of each size that it saw."""


class StaticBatch:
    """A batch that rows may leave between steps; none joins while others are being decoded.

    Token i of every row is in column i of the cache, which then needs no padding and no mask. Prompts are read
    together up to the end of the shortest; the rest of longer ones is read column by column, while shorter rows are
    decoded already.

    Args:
        recorder: Recorder of the experts that tokens are sent to; None if they are not reported.

    Attributes:
        rows: Rows that are being decoded.
    """

    def __init__(
        self,
        model: ReadingModel,
        device: torch.device,
        *,
        max_prefill_tokens: int,
        recorder: MegatronRoutingRecorder | None,
    ) -> None:
        self.model, self._recorder, self._device = model, recorder, device
        self._max_prefill_tokens = max_prefill_tokens
        self.rows: list[Row] = []
        config = InferenceWrapperConfig(
            hidden_size=model.config.hidden_size,
            params_dtype=model.config.params_dtype,
            inference_batch_times_seqlen_threshold=-1,
            padded_vocab_size=model.hf.vocab_size,
        )
        self._wrapper = GPTInferenceWrapper(model.chunks[0], config, StaticInferenceContext(0, 0))

    @torch.inference_mode()
    def start(self, rows: Sequence[Row], version: int) -> int:
        """Take rows into the empty batch, read their prompts up to the end of the shortest, and sample the first tokens
        of the shortest; return the number of tokens sampled."""
        assert not self.rows
        self.rows = list(rows)
        columns = max(row.num_prompt_tokens + row.limit for row in rows)
        context = StaticInferenceContext(len(rows), -(-columns // COLUMNS) * COLUMNS)
        self._wrapper.inference_context = context
        self._wrapper.prep_model_for_inference()
        end = min(row.num_prompt_tokens for row in rows)
        tokens = torch.tensor([row.request.token_ids[:end].tolist() for row in rows])
        last = []
        # Rows are read a part at a time, each in its place of the cache.
        size = max(1, self._max_prefill_tokens // end)
        for first in range(0, len(rows), size):
            context.batch_size_offset, context.sequence_len_offset = first, 0
            last.append(self._forward(tokens[first : first + size], 0, self.rows[first : first + size]))
        context.batch_size_offset = 0
        context.enable_decode_mode()
        return self._sample(torch.cat(last), version)

    @torch.inference_mode()
    def step(self, version: int) -> int:
        """Advance by one column: a token of its prompt for rows that still have one there, else the token sampled last;
        return the number of tokens sampled."""
        column = self._num_columns
        tokens = torch.tensor([[row.token(column)] for row in self.rows])
        return self._sample(self._forward(tokens, column, self.rows), version)

    def drop_cancelled(self) -> None:
        """Drop rows that nobody waits for any longer."""
        self._keep([index for index, row in enumerate(self.rows) if not row.future.cancelled()])

    def clear(self) -> list[Row]:
        """Drop all rows and their cache; return the dropped rows."""
        rows, self.rows = self.rows, []
        self._wrapper.inference_context = StaticInferenceContext(0, 0)
        return rows

    @property
    def _num_columns(self) -> int:
        return int(self._wrapper.inference_context.sequence_len_offset)

    def _forward(self, tokens: Tensor, column: int, rows: Sequence[Row]) -> Tensor:
        """Return `[rows, hidden]` of the last of these columns; `tokens` is `[rows, columns]`."""
        places = torch.arange(column, column + tokens.shape[1]).expand_as(tokens)
        batch = {"tokens": tokens.to(self._device), "position_ids": places.to(self._device), "attention_mask": None}
        hidden: Tensor = self._wrapper.run_one_forward_step(batch)
        if self._recorder is not None:
            for row, experts in zip(rows, self._recorder.take(len(rows)), strict=True):
                row.add_routing(experts)
        return hidden[-1]

    def _sample(self, hidden: Tensor, version: int) -> int:
        """Give the rows whose prompt has been read their next token, and drop rows that end."""
        reading = {index for index, row in enumerate(self.rows) if row.num_prompt_tokens > self._num_columns}
        sampling = [index for index in range(len(self.rows)) if index not in reading]
        if not sampling:
            return 0
        rows = [self.rows[index] for index in sampling]
        logits = (hidden[sampling] @ self.model.head_weight().T).float()
        tokens, logprobs = draw_next(rows, logits)
        pairs = zip(sampling, tokens.tolist(), logprobs.tolist(), strict=True)
        ended = {index for index, token, logprob in pairs if self.rows[index].append(token, logprob, version)}
        self._keep([index for index in range(len(self.rows)) if index not in ended])
        return len(sampling)

    @torch.inference_mode()
    def _keep(self, indices: Sequence[int]) -> None:
        """Drop all other rows; the remaining ones move up in the cache."""
        if len(indices) == len(self.rows):
            return
        if not indices:
            self.clear()
            return
        self.rows = [self.rows[index] for index in indices]
        chosen = torch.tensor(indices, device=self._device)
        for memories in self._wrapper.inference_context.key_value_memory_dict.values():
            for memory in memories:
                memory[: self._num_columns, : len(indices)] = memory[: self._num_columns].index_select(1, chosen)
