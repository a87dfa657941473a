"""The tokens of some rows in one rank's forward pass: packed or padded, and split over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.data.batch import TOKENS
from rl_core.torch.heads.reads import HeldTokens
from rl_core.torch.host_arrays import to_device
from rl_core.torch.loss import Rows
from rl_core.torch.rows import zigzag_order, zigzag_slices, zigzag_tokens

IMAGE_BLOCKS = "image_blocks"
"""Column of the number of each token's image, int64 `[tokens]`; -1 for text. The tokens of an image see one another.
Rows without such images lack the column."""

MIN_SAVED = 0.1
"""Minimum share of the tokens of some rows for which a common beginning is computed once: their keys and values are
copied for each row, and kernels for equal numbers of queries and keys are faster."""


class Context(NamedTuple):
    """The ranks that share the tokens of each row.

    Each holds two of `2 size` equal chunks of the sequence, the i-th and the i-th from the end, so that under a causal
    mask all have the same work.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    method: str


class Alignment(NamedTuple):
    """Constraints that the layout of a forward pass must meet.

    Args:
        multiple: The length of the sequence is a multiple of this.
        context: None if this rank holds whole rows.
    """

    multiple: int = 1
    context: Context | None = None


class Segment(NamedTuple):
    """Consecutive queries, and the keys of their row up to the last of them.

    Args:
        query: Start and end among this rank's tokens.
        key: Start and end in the whole sequence.
        beyond: Number of those keys that come after the last query, because it belongs to an image that continues.
        prefix: Number of tokens at the start of the sequence that are the first keys of the row, before these.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    beyond: int = 0
    prefix: int = 0

    @property
    def ahead(self) -> int:
        """Distance from a query among this rank's tokens to its own key in the sequence."""
        return self.key[1] - self.beyond - self.query[1]


class Segments:
    """Segments whose queries follow one another, and their bounds on the device.

    Everything but `seen_keys` and `chunked` is computed when it is built, once per microbatch for all layers.

    Attributes:
        lengths: Queries and keys of each segment.
        longest: Maximum number of queries, and of keys, in a segment.
        query_ends: Int32 `[segments + 1]`, where queries start and end.
        key_ends: Int32 `[segments + 1]`, where keys start and end, for all segments one after another.
        keys: Int64 indices of those keys in the sequence; None if they are the sequence.
        shares: True if several segments have the same keys at their beginning.
        blocks: Int64 `[batch, length]`, the image of each token of the sequence, whose tokens see one another; -1 for
            text. None if no tokens see what follows them.
    """

    def __init__(self, items: Sequence[Segment], device: torch.device, blocks: np.ndarray | None = None) -> None:
        self.device = device
        self._items = tuple(items)
        self._masks: dict[int | None, list[Tensor]] = {}
        self.blocks: Tensor | None = None if blocks is None else to_device([blocks], device)[0]
        self._chunked: dict[int, Segments] = {}
        queries = [item.query[1] - item.query[0] for item in items]
        keys = [item.prefix + item.key[1] - item.key[0] for item in items]
        self.lengths = queries, keys
        self.shares = any(item.prefix for item in items)
        self.longest = max(queries), max(keys)
        ends = [np.array([0, *accumulate(lengths)], dtype=np.int32) for lengths in self.lengths]
        are_whole = not self.shares and all(item.query == item.key for item in items)
        ranges = [part for item in items for part in (np.arange(item.prefix), np.arange(*item.key))]
        seen = [] if are_whole else [np.concatenate(ranges)]
        self._host_ends = ends
        self.query_ends, self.key_ends, *found = to_device([*ends, *seen], device)
        self.keys: Tensor | None = found[0] if found else None

    @cached_property
    def seen_keys(self) -> tuple[Tensor, Tensor]:
        """Int64 `[queries]` each: the first and the last key in the sequence that a query may see; among `keys` if
        segments share some."""
        starts, distances = [item.key[0] for item in self._items], [item.ahead for item in self._items]
        if self.shares:
            query_ends, key_ends = self._host_ends
            starts, distances = key_ends[:-1].tolist(), (key_ends[1:] - query_ends[1:]).tolist()
        first, ahead = (np.repeat(values, self.lengths[0]) for values in (starts, distances))
        moved = to_device([first, np.arange(len(ahead)) + ahead], self.device)
        return moved[0], moved[1]

    def block_masks(self, window: int | None) -> list[Tensor]:
        """Return bool `[batch, 1, queries, keys]` of each segment: the keys that each query sees.

        The masks are kept for all layers of the same window.

        Args:
            window: Tokens that each token sees, itself and those after it in its image included; all if None.
        """
        blocks = self.blocks
        assert blocks is not None, "segments without images"
        if window in self._masks:
            return self._masks[window]
        masks = self._masks[window] = []
        for item in self._items:
            query = torch.arange(item.query[0] + item.ahead, item.query[1] + item.ahead, device=self.device)
            key = torch.arange(*item.key, device=self.device)
            of_query, of_key = blocks[:, query, None], blocks[:, None, key]
            distance = query[:, None] - key
            seen = (distance >= 0) | ((of_query == of_key) & (of_query >= 0))
            masks.append((seen if window is None else seen & (distance < window))[:, None])
        return masks

    def chunked(self, size: int) -> Segments:
        """Return the same queries, which see no key before their chunk: `size` consecutive tokens of their row."""
        assert not self.shares, "rows of chunked attention share no tokens"
        if size not in self._chunked:
            parts = []
            for item in self._items:
                row, last = item.key
                ahead = last - item.query[1]
                start = item.query[0] + ahead
                while start < last:
                    first = start - (start - row) % size
                    end = min(first + size, last)
                    parts.append(Segment((start - ahead, end - ahead), (first, end)))
                    start = end
            self._chunked[size] = Segments(parts, self.device)
        return self._chunked[size]


class RowLayout:
    """One forward pass: some rows, and which of their tokens this rank has.

    It is not a dataclass on purpose: FSDP rebuilds every dataclass among the arguments of each layer in order to cast
    its tensors, so that all this would be computed again by every layer, twice under checkpointing.

    Args:
        rows: The rows, whole.
        input_ids: Int64 `[batch, seq]`, of this rank.
        position_ids: Int64, of the same shape; they start at 0 in every row.
        places: Int64 `[batch * seq]`, the index among the rows' tokens of each position; -1 for padding.
        attention_mask: Int64 `[batch, seq]`, 1 on tokens; None if packed.
        held: Tokens of the positions; None if nothing is read of them.
        bounds: Start and end of each row in the whole sequence; the whole sequence if padded, as the end of a row
            cannot be seen from within it. With a prefix, first of the prefix, then of what each row adds to it.
        length: Length of the whole sequence.
        context: The ranks that share the tokens of each row; None if this rank holds whole rows.
        blocks: Int64 `[batch, length]` on the host, the image of each token of the whole sequence, as `IMAGE_BLOCKS`;
            None if no tokens see what follows them.
        prefix: Number of tokens at the start of the sequence that all rows begin with.

    Attributes:
        segments: Keys that this rank's queries attend to; with the `ulysses` method, for its heads of all queries.
        rank_places: Int64 `[length]`, the place in the sequence of each token in the order of context-parallel ranks.
        key_places: Int64 `[length]`, the place in the order of context-parallel ranks of each token of the sequence.
    """

    def __init__(
        self,
        rows: Rows,
        input_ids: Tensor,
        position_ids: Tensor,
        places: Tensor,
        attention_mask: Tensor | None,
        *,
        held: HeldTokens | None = None,
        bounds: Sequence[tuple[int, int]],
        length: int,
        context: Context | None,
        blocks: np.ndarray | None = None,
        prefix: int = 0,
    ) -> None:
        self.rows, self.input_ids, self.position_ids = rows, input_ids, position_ids
        self.places, self.attention_mask, self._held = places, attention_mask, held
        self.bounds, self.context = bounds, context
        device = input_ids.device
        chunks: Sequence[tuple[int, int]] = ((0, length),)
        if context is not None and context.method == "all_gather":
            chunks = zigzag_slices(length, context.size, context.rank)
        self.segments = Segments(_segments(chunks, bounds, blocks, prefix), device, blocks)
        if context is not None:
            order = zigzag_order(length, context.size).numpy()
            self.rank_places, self.key_places = to_device([order, order.argsort()], device)

    @property
    def held(self) -> HeldTokens:
        """The tokens of the positions."""
        assert self._held is not None, "a layout without the tokens that it holds"
        return self._held

    @property
    def shape(self) -> tuple[int, int]:
        """Batch and sequence of this rank."""
        batch, seq = self.input_ids.shape
        return batch, seq


def _segments(
    chunks: Sequence[tuple[int, int]],
    bounds: Sequence[tuple[int, int]],
    blocks: np.ndarray | None = None,
    prefix: int = 0,
) -> list[Segment]:
    """Return the segments of the queries in these chunks of the sequence, chunk by chunk.

    If a chunk ends inside an image, the rest of the image belongs to the keys. With a prefix, whose tokens are the
    first of the sequence, all that follows sees it.
    """
    found, own = [], 0
    for start, end in chunks:
        for first, last in bounds:
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                beyond = 0
                if blocks is not None:
                    image = blocks[:, stop - 1, None]
                    continues = ((blocks[:, stop:last] == image) & (image >= 0)).any(0)
                    beyond = len(continues) if continues.all() else int(continues.argmin())
                queries = (own + begin - start, own + stop - start)
                found.append(Segment(queries, (first, stop + beyond), beyond, prefix if first else 0))
        own += end - start
    return found


def lay_out(rows: Rows, alignment: Alignment, *, is_packed: bool, shares_prefix: bool = False) -> RowLayout:
    """Return the layout of rows for this rank. Everything follows from their lengths, on the host.

    Args:
        rows: The rows.
        alignment: Constraints on the layout.
        is_packed: True to put rows end to end instead of padding them.
        shares_prefix: True to compute the tokens that all rows begin with once, if that is worth it.
    """
    offsets, context = rows.host_offsets, alignment.context
    lengths = np.diff(offsets)
    prefix = _prefix(rows) if shares_prefix else 0
    own = np.arange(int(offsets[-1]))
    position = own - np.repeat(offsets[:-1], lengths)
    # The place of each token of the rows in the sequence.
    sequence = own
    if is_packed:
        # Rows are end to end, followed by one row of padding. What they share stays with the first of them.
        is_kept = (position >= prefix) | (own < prefix)
        ends = is_kept.cumsum()
        sequence = np.where(is_kept, ends - 1, position)
        total = int(ends[-1])
        missing = -total % alignment.multiple
        extra = np.arange(missing)
        position = np.concatenate([position[is_kept], extra])[None]
        places = np.concatenate([own[is_kept], np.full_like(extra, -1)])[None]
        bounds = tuple(pairwise(sorted({0, prefix, *ends[offsets[1:] - 1].tolist(), total + missing})))
        length = total + missing
    else:
        # Each row is a sequence, padded on the right.
        longest = int(lengths.max())
        length = longest + -longest % alignment.multiple
        position = np.tile(np.arange(length), (len(lengths), 1))
        places = np.where(position < lengths[:, None], offsets[:-1, None] + position, -1)
        bounds = ((0, length),)
    blocks = None
    if IMAGE_BLOCKS in rows:
        blocks = np.where(places < 0, -1, rows.host_column(IMAGE_BLOCKS)[places])
    if context is not None:
        chosen = zigzag_tokens(length, context.size, context.rank).numpy()
        places, position = places[:, chosen], position[:, chosen]
    flat = places.reshape(-1)
    device = rows.offsets.device
    read = HeldTokens.arrays(flat, offsets)
    if prefix:
        positions, tokens, followed, followers = HeldTokens.arrays(own, offsets)
        read = [sequence[positions], tokens, sequence[followed], followers]
    position_ids, at, *held = to_device([position, flat, *read], device)
    is_token = at >= 0
    return RowLayout(
        rows,
        rows[TOKENS][at.clamp(min=0)].where(is_token, 0).view(places.shape),
        position_ids,
        at,
        None if is_packed else is_token.long().view(places.shape),
        held=HeldTokens(*held),
        bounds=bounds,
        length=length,
        context=context,
        blocks=blocks,
        prefix=prefix,
    )


def _prefix(rows: Rows) -> int:
    """Return the number of tokens that all rows begin with; 0 if computing them once is not worth it."""
    tokens, offsets = rows.host_column(TOKENS), rows.host_offsets
    shared = tokens[: np.diff(offsets).min()]
    for start in offsets[1:-1]:
        differs = tokens[start : start + len(shared)] != shared
        shared = shared[: differs.argmax()] if differs.any() else shared
    return len(shared) if len(shared) * (len(rows) - 1) >= MIN_SAVED * len(tokens) else 0
