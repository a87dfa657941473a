"""Rows of a batch on the compute device, as losses see them and as a model's forward takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.images import IMAGES
from rl_core.token_filter import ALLOWED, allowed_sets
from rl_core.torch.host_arrays import to_device
from rl_core.torch.loss import Rows

ALLOWED_SET = "allowed_set"
"""Column of rows, int32 `[tokens]`: the row of `ALLOWED_BITS` with the tokens that a grammar allowed at each token."""
ALLOWED_BITS = "allowed_bits"
"""Column of rows, uint8 `[sets, bytes]`, a bit for each token id; set 0 has all tokens."""

ImageColumns = Callable[[Batch], Mapping[str, np.ndarray]]
"""From rows with images to the columns that a model sees, on the host: of any lengths and of the dtypes that
they have on the device."""


def no_images(batch: Batch) -> Mapping[str, np.ndarray]:
    """Return no columns, for a model that sees no images.

    Raises:
        ValueError: Naming the first row that has images.
    """
    lengths = batch.ragged(IMAGES).lengths if IMAGES in batch else np.zeros(0)
    if not lengths.any():
        return {}
    row = int(np.flatnonzero(lengths)[0])
    raise ValueError(
        f"row {row} has {lengths[row]} images, but this model is used as a language model. Train a vision-language "
        "model with vision.enabled=true in its section, or leave out rows with images"
    )


def to_rows(batch: Batch, device: torch.device, *, images: ImageColumns = no_images) -> Rows:
    """Return all columns of a local batch on the device, by one copy that the host does not wait for; floating columns
    become float32, `tokens` int64. `rl_core.token_filter.ALLOWED` becomes `ALLOWED_SET` and `ALLOWED_BITS`, or nothing
    if no token of these rows was constrained.

    Args:
        batch: Local batch.
        device: Device of the columns.
        images: Function that makes columns of the images of rows, which replace `rl_core.images.IMAGES`.

    Raises:
        ValueError: Naming a column that is not numeric or not aligned with `tokens`, or a row without tokens.
    """
    tokens = batch.ragged(TOKENS)
    if np.any(tokens.lengths == 0):
        raise ValueError(f"row {int(np.argmin(tokens.lengths))} has no tokens; a model needs at least one per row")
    columns = {}
    for name in batch:
        column = batch[name]
        if name == IMAGES:
            continue
        if name == ALLOWED:
            entries = batch.ragged(ALLOWED)
            if entries.lengths.any():
                columns[ALLOWED_SET], columns[ALLOWED_BITS] = allowed_sets(entries, tokens.lengths.tolist())
            continue
        if isinstance(column, Ragged) and not np.array_equal(column.offsets, tokens.offsets):
            raise ValueError(f"column {name!r} is not aligned with {TOKENS!r}: its rows have other lengths")
        values = column.values if isinstance(column, Ragged) else column
        if values.dtype.kind not in "biuf":
            raise ValueError(
                f"column {name!r} of dtype {values.dtype} cannot go to a device; leave it out of the loss's columns"
            )
        columns[name] = values.astype(np.float32, copy=False) if values.dtype.kind == "f" else values
    columns[TOKENS] = columns[TOKENS].astype(np.int64)
    columns |= images(batch)
    offsets, *moved = to_device([tokens.offsets, *columns.values()], device)
    return Rows.laid_out(offsets, dict(zip(columns, moved, strict=True)), tokens.offsets, columns)


def idle_rows(device: torch.device, id_columns: Sequence[str] = ()) -> Rows:
    """Return a row of two tokens for a rank that takes part in a forward pass without rows of its own.

    Args:
        device: Device of the columns.
        id_columns: Columns of ids that reads take; they hold none.
    """
    columns: dict[str, np.ndarray] = {
        TOKENS: np.zeros(2, dtype=np.int64),
        **{name: np.full((2, 1), -1, np.int32) for name in id_columns if name != ALLOWED},
    }
    host_offsets = np.array([0, 2])
    offsets, *moved = to_device([host_offsets, *columns.values()], device)
    return Rows.laid_out(offsets, dict(zip(columns, moved, strict=True)), host_offsets, columns)


class ModelInputs(NamedTuple):
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

    def flatten(self, values: Tensor) -> Tensor:
        """Return `[batch, seq, *inner]` of the forward pass as `[tokens, *inner]`, without padding."""
        flat = values.flatten(0, 1)
        if self.attention_mask is None:
            return flat
        length = self.input_ids.shape[1]
        places = [np.arange(count) + row * length for row, count in enumerate(self.row_lengths)]
        return flat[to_device([np.concatenate(places)], flat.device)[0]]


def packed(rows: Rows) -> ModelInputs:
    """Return rows end to end, as one sequence `[1, tokens]`."""
    starts, lengths = rows.host_offsets[:-1], np.diff(rows.host_offsets)
    position = np.arange(rows.num_tokens) - np.repeat(starts, lengths)
    (moved,) = to_device([position], rows.offsets.device)
    return ModelInputs(rows[TOKENS][None], moved[None], tuple(lengths.tolist()))


def padded(rows: Rows, pad_token_id: int = 0) -> ModelInputs:
    """Return one row per sequence, padded on the right to the longest, `[batch, seq]`."""
    lengths = np.diff(rows.host_offsets)
    position = np.tile(np.arange(lengths.max()), (len(rows), 1))
    places = np.minimum(rows.host_offsets[:-1, None] + position, rows.num_tokens - 1)
    mask = (position < lengths[:, None]).astype(np.int64)
    position, places, mask = to_device([position, places, mask], rows.offsets.device)
    input_ids = rows[TOKENS][places].where(mask.bool(), pad_token_id)
    return ModelInputs(input_ids, position, tuple(lengths.tolist()), mask)


def zigzag_slices(length: int, size: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return start and end of the two slices of a row that a context-parallel rank has.

    A row is cut into `2 * size` equal slices; each rank has one from the start and its mirror from the end, so that
    causal attention costs every rank the same. Megatron and Transformer Engine have the same convention.

    Raises:
        ValueError: If the row cannot be cut into equal slices.
    """
    if length % (2 * size):
        raise ValueError(f"{length} tokens cannot be cut into {2 * size} equal slices")
    width = length // (2 * size)
    mirror = 2 * size - 1 - rank
    return (rank * width, (rank + 1) * width), (mirror * width, (mirror + 1) * width)


def zigzag_tokens(length: int, size: int, rank: int) -> Tensor:
    """Return the int64 indices of a rank's tokens; a single rank has any number of them."""
    if size == 1:
        return torch.arange(length)
    return torch.cat([torch.arange(*part) for part in zigzag_slices(length, size, rank)])


def zigzag_order(length: int, size: int) -> Tensor:
    """Return int64 `[length]`, indices of the tokens of all ranks, one rank after another."""
    return torch.cat([zigzag_tokens(length, size, rank) for rank in range(size)])


def mix_each_row(mix: Callable[[Tensor], Tensor], tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mix the tokens of each row by a token mixer that carries a state (linear attention, Mamba).

    Rows of similar lengths are mixed together, so that less than half of the work is padding, however different
    the rows are.

    Args:
        mix: Function from `[rows, longest, inputs]` to `[rows, longest, outputs]`. Rows are padded on the right, which
            no token of them may see.
        tokens: `[tokens, inputs]` of rows end to end.
        lengths: Lengths of the rows, in their order.

    Returns:
        `[tokens, outputs]`.
    """
    rows = tokens.split(list(lengths))
    similar: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        similar.setdefault((len(row) - 1).bit_length(), []).append(place)
    mixed = list(rows)
    for places in similar.values():
        padded = torch.nn.utils.rnn.pad_sequence([rows[place] for place in places], batch_first=True)
        for place, row in zip(places, mix(padded), strict=True):
            mixed[place] = row[: len(rows[place])]
    return torch.cat(mixed)
