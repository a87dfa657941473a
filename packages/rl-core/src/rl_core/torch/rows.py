"""Rows of a batch on the compute device, as losses see them and as a model's forward takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.torch.loss import Rows


def to_rows(batch: Batch, device: torch.device) -> Rows:
    """All columns of a local batch on the device; floating columns become float32, `tokens` int64.

    Raises:
        ValueError: Naming a column that is not numeric or not aligned with `tokens`, or a row without tokens.
    """
    tokens = batch.ragged(TOKENS)
    if np.any(tokens.lengths == 0):
        raise ValueError(f"row {int(np.argmin(tokens.lengths))} has no tokens; a model needs at least one per row")
    columns = {}
    for name in batch:
        column = batch[name]
        if isinstance(column, Ragged) and not np.array_equal(column.offsets, tokens.offsets):
            raise ValueError(f"column {name!r} is not aligned with {TOKENS!r}: its rows have other lengths")
        values = column.values if isinstance(column, Ragged) else column
        columns[name] = _tensor(name, values, device)
    columns[TOKENS] = columns[TOKENS].long()
    return Rows(torch.as_tensor(tokens.offsets, device=device), columns)


def idle_rows(device: torch.device, id_columns: Sequence[str] = ()) -> Rows:
    """A row of two tokens for a rank that takes part in a forward pass without rows of its own.

    Args:
        device: Device of the columns.
        id_columns: Columns of ids that reads take; they hold none.
    """
    columns = {name: torch.full((2, 1), -1, dtype=torch.int32, device=device) for name in id_columns}
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    return Rows(torch.tensor([0, 2], device=device), {TOKENS: tokens, **columns})


def _tensor(name: str, values: np.ndarray, device: torch.device) -> Tensor:
    if values.dtype.kind not in "biuf":
        raise ValueError(
            f"column {name!r} of dtype {values.dtype} cannot go to a device; leave it out of the loss's columns"
        )
    if values.dtype.kind == "f":
        values = values.astype(np.float32, copy=False)
    return torch.tensor(values, device=device)


@dataclass(frozen=True)
class ModelInputs:
    """The tokens of some rows in the layout of one forward pass, and the way back from it.

    Args:
        input_ids: Int64 `[batch, seq]`; packed rows lie end to end in `[1, tokens]`.
        position_ids: Int64, of the same shape; they start at 0 in every row.
        row_lengths: Tokens of each row.
        attention_mask: Int64 `[batch, seq]`, 1 on tokens; None if packed.
    """

    input_ids: Tensor
    position_ids: Tensor
    row_lengths: tuple[int, ...]
    attention_mask: Tensor | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 `[rows + 1]`, where each packed row starts and ends."""
        lengths = torch.tensor([0, *self.row_lengths], dtype=torch.int32, device=self.input_ids.device)
        return lengths.cumsum(0, dtype=torch.int32)

    def flatten(self, values: Tensor) -> Tensor:
        """`[batch, seq, *inner]` of the forward pass as `[tokens, *inner]`, without padding."""
        flat = values.flatten(0, 1)
        if self.attention_mask is None:
            return flat
        return flat[self.attention_mask.flatten().nonzero()[:, 0]]


def packed(rows: Rows) -> ModelInputs:
    """Rows end to end, as one sequence `[1, tokens]`."""
    starts = rows.spread(rows.offsets[:-1])
    position = torch.arange(len(starts), device=starts.device) - starts
    return ModelInputs(rows[TOKENS][None], position[None], tuple(rows.offsets.diff().tolist()))


def padded(rows: Rows, pad_token_id: int = 0) -> ModelInputs:
    """One row per sequence, padded on the right to the longest, `[batch, seq]`."""
    lengths = rows.offsets.diff()
    row_lengths = tuple(lengths.tolist())
    position = torch.arange(max(row_lengths), device=lengths.device).expand(len(rows), -1)
    is_token = position < lengths[:, None]
    input_ids = torch.full_like(position, pad_token_id).masked_scatter(is_token, rows[TOKENS])
    return ModelInputs(input_ids, position, row_lengths, is_token.long())
