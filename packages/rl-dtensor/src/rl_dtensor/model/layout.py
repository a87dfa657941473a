"""The tokens of some rows in one rank's forward pass: packed or padded, and split over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.data.batch import TOKENS
from rl_core.data.prefixes import SharedPrefixes
from rl_core.torch.heads.reads import HeldTokens
from rl_core.torch.host_arrays import to_device
from rl_core.torch.loss import Rows, followers_of
from rl_core.torch.rows import zigzag_order, zigzag_slices, zigzag_tokens
from rl_core.torch.vision.families import IMAGE_BLOCKS, WINDOW_BLOCKS


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
        before: Start and end in the whole sequence of the first keys of the row, before these, if they are shared with
            rows that come earlier.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    beyond: int = 0
    before: tuple[tuple[int, int], ...] = ()

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """Start and end of all keys of the row, in order."""
        return (*self.before, self.key)

    @property
    def ahead(self) -> int:
        """Distance from a query among this rank's tokens to its own key in the sequence."""
        return self.key[1] - self.beyond - self.query[1]


class RowTree(NamedTuple):
    """Rows that share what they begin with, as one sequence in which each token is there once; on the host.

    Each row adds a run of tokens to the sequence. Those before the run are in the runs of earlier rows.

    Args:
        before: Start and end in the sequence of the tokens before each run, in the order of their places.
        positions: Int64 `[length]`, the place of each token of the sequence in its rows.
        ends: Int64 `[length]`, the place in the sequence after the last token whose row has this one.
        places: Int64 `[length]`, the index of each token of the sequence among the rows' tokens; -1 for padding.
        sequence: Int64 `[tokens]`, the place in the sequence of each token of the rows.
        lengths: Tokens of each row.
    """

    before: tuple[tuple[tuple[int, int], ...], ...]
    positions: np.ndarray
    ends: np.ndarray
    places: np.ndarray
    sequence: np.ndarray
    lengths: tuple[int, ...]

    @property
    def num_shared(self) -> int:
        """Number of tokens of the rows that are in the sequence for another row."""
        return len(self.sequence) - int((self.places >= 0).sum())


class TreeMask(NamedTuple):
    """Keys that queries of a `RowTree` see: those that come no later in the sequence, in rows that the query is in.

    Args:
        own: Int64 `[queries]`, the place of each query's own key in the sequence.
        first: Int64 `[queries]`, the place in its row of the first key that each query may see.
        positions: Int64 `[length]`, as in `RowTree`.
        ends: Int64 `[length]`, as in `RowTree`.
    """

    own: Tensor
    first: Tensor
    positions: Tensor
    ends: Tensor


class Segments:
    """Segments whose queries follow one another, and their bounds on the device.

    Everything but `seen_keys`, `tree_mask` and `chunked` is computed when it is built, once per microbatch for all
    layers.

    Attributes:
        lengths: Queries and keys of each segment.
        longest: Maximum number of queries, and of keys, in a segment.
        query_ends: Int32 `[segments + 1]`, where queries start and end.
        key_ends: Int32 `[segments + 1]`, where keys start and end, for all segments one after another.
        keys: Int64 indices of those keys in the sequence; None if they are the sequence.
        tree: Rows that share prefixes; None if no segments have keys in common.
        blocks: Int64 `[batch, length]`, the image of each token of the sequence, whose tokens see one another; -1 for
            text. None if no tokens see what follows them.
    """

    def __init__(
        self,
        items: Sequence[Segment],
        device: torch.device,
        blocks: np.ndarray | None = None,
        tree: RowTree | None = None,
    ) -> None:
        self.device, self.tree = device, tree
        self._items = tuple(items)
        self._masks: dict[int | None, list[Tensor]] = {}
        self.blocks: Tensor | None = None if blocks is None else to_device([blocks], device)[0]
        self._chunked: dict[int, Segments] = {}
        queries = [item.query[1] - item.query[0] for item in items]
        keys = [sum(end - start for start, end in item.keys) for item in items]
        self.lengths = queries, keys
        self.longest = max(queries), max(keys)
        ends = [np.array([0, *accumulate(lengths)], dtype=np.int32) for lengths in self.lengths]
        are_whole = tree is None and all(item.query == item.key for item in items)
        seen = [] if are_whole else [np.concatenate([np.arange(*part) for item in items for part in item.keys])]
        self.query_ends, self.key_ends, *found = to_device([*ends, *seen], device)
        self.keys: Tensor | None = found[0] if found else None

    @cached_property
    def seen_keys(self) -> tuple[Tensor, Tensor]:
        """Int64 `[queries]` each: the first and the last key in the sequence that a query may see, if no rows share
        keys."""
        first, ahead = (
            np.repeat(values, self.lengths[0])
            for values in ([item.key[0] for item in self._items], [item.ahead for item in self._items])
        )
        moved = to_device([first, np.arange(len(ahead)) + ahead], self.device)
        return moved[0], moved[1]

    @cached_property
    def tree_mask(self) -> TreeMask:
        """The keys that queries see, if rows share some."""
        assert self.tree is not None, "rows that share no keys"
        positions = self.tree.positions
        firsts = [
            positions[item.key[1] - 1] + 1 - count for item, count in zip(self._items, self.lengths[1], strict=True)
        ]
        first, ahead = (np.repeat(values, self.lengths[0]) for values in (firsts, [item.ahead for item in self._items]))
        return TreeMask(*to_device([np.arange(len(ahead)) + ahead, first, positions, self.tree.ends], self.device))

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
        if size not in self._chunked:
            parts = []
            for item, num_keys in zip(self._items, self.lengths[1], strict=True):
                # Places in the row, whose first key is the first of the segment.
                start, ahead = num_keys - (item.query[1] - item.query[0]), num_keys - item.query[1]
                while start < num_keys:
                    first = start - start % size
                    end = min(first + size, num_keys)
                    *before, key = _cut(item.keys, first, end)
                    parts.append(Segment((start - ahead, end - ahead), key, before=tuple(before)))
                    start = end
            self._chunked[size] = Segments(parts, self.device, tree=self.tree)
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
            cannot be seen from within it. In a tree, of the run that each row adds.
        length: Length of the whole sequence.
        context: The ranks that share the tokens of each row; None if this rank holds whole rows.
        blocks: Int64 `[batch, length]` on the host, the image of each token of the whole sequence, as `IMAGE_BLOCKS`;
            None if no tokens see what follows them.
        tree: Rows that share what they begin with; None if each has all of its tokens.
        host_places: `places` on the host, if they are there.
        blocks_need_window: True if tokens of an image see what follows them only in layers with a window.

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
        tree: RowTree | None = None,
        host_places: np.ndarray | None = None,
        blocks_need_window: bool = False,
    ) -> None:
        self.host_places = host_places
        self.rows, self.input_ids, self.position_ids = rows, input_ids, position_ids
        self.places, self.attention_mask, self._held = places, attention_mask, held
        self.bounds, self.context, self.tree = bounds, context, tree
        device = input_ids.device
        chunks: Sequence[tuple[int, int]] = ((0, length),)
        if context is not None and context.method == "all_gather":
            chunks = zigzag_slices(length, context.size, context.rank)
        before = () if tree is None else tree.before
        self.segments = Segments(_segments(chunks, bounds, blocks, before), device, blocks, tree)
        self._causal = self.segments
        if blocks_need_window:
            self._causal = Segments(_segments(chunks, bounds, None, before), device, None, tree)
        if context is not None:
            order = zigzag_order(length, context.size).numpy()
            self.rank_places, self.key_places = to_device([order, order.argsort()], device)

    @cached_property
    def whole_rows(self) -> tuple[Tensor, Tensor]:
        """Int64 `[tokens]` and `[length]`: the place in a tree's sequence of each token of the rows, and the index
        among these of each token of the sequence, any for padding."""
        assert self.tree is not None, "rows that are whole"
        places, sequence = self.tree.places, self.tree.sequence
        moved = to_device([sequence, places.clip(min=0)], self.input_ids.device)
        return moved[0], moved[1]

    def segments_of(self, window: int | None) -> Segments:
        """Return the keys that this rank's queries attend to in a layer with this window; None for a layer without
        one."""
        return self._causal if window is None else self.segments

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
    before: Sequence[tuple[tuple[int, int], ...]] = (),
) -> list[Segment]:
    """Return the segments of the queries in these chunks of the sequence, chunk by chunk.

    If a chunk ends inside an image, the rest of the image belongs to the keys. In a tree, a run also sees the tokens
    before it in its row.
    """
    found, own = [], 0
    for start, end in chunks:
        for (first, last), earlier in zip(bounds, before or ((),) * len(bounds), strict=True):
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                beyond = 0
                if blocks is not None:
                    image = blocks[:, stop - 1, None]
                    continues = ((blocks[:, stop:last] == image) & (image >= 0)).any(0)
                    beyond = len(continues) if continues.all() else int(continues.argmin())
                queries = (own + begin - start, own + stop - start)
                found.append(Segment(queries, (first, stop + beyond), beyond, earlier))
        own += end - start
    return found


def _cut(ranges: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return the part of ranges that starts at their `first` place and ends before their `last`."""
    parts, passed = [], 0
    for start, end in ranges:
        begin, stop = max(start, start + first - passed), min(end, start + last - passed)
        if begin < stop:
            parts.append((begin, stop))
        passed += end - start
    return parts


class _Taken(torch.autograd.Function):
    """An `index_select` of entries that may be taken several times, whose gradients are summed in float32 at least, in
    an order that does not change from run to run."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, places: Tensor) -> Tensor:
        ctx.dim, ctx.length = dim, values.shape[dim]
        ctx.save_for_backward(places)
        return values.index_select(dim, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        each = grad.movedim(ctx.dim, 0).to(torch.promote_types(grad.dtype, torch.float32))
        total = each.new_zeros((ctx.length, *each.shape[1:])).index_put_((places,), each, accumulate=True)
        return total.movedim(0, ctx.dim).to(grad.dtype), None, None


def taken(values: Tensor, dim: int, places: Tensor) -> Tensor:
    """Return the entries at these places of a dimension, which may repeat.

    Args:
        values: Tensor of any shape.
        dim: Dimension to select in.
        places: Int64 `[n]`.
    """
    result: Tensor = _Taken.apply(values, dim, places)
    return result


def lay_out(
    rows: Rows,
    alignment: Alignment,
    *,
    is_packed: bool,
    shares_prefixes: bool = False,
    inputs: Sequence[str] = (),
    reads_columns: bool = False,
) -> RowLayout:
    """Return the layout of rows for this rank. Everything follows from their lengths, on the host.

    Args:
        rows: The rows.
        alignment: Constraints on the layout.
        is_packed: True to put rows end to end instead of padding them.
        shares_prefixes: True to compute tokens that packed rows begin with in common once, if that is worth it.
        inputs: Columns that hidden states follow from, in addition to the tokens; shared tokens agree in them.
        reads_columns: True if results depend on further columns of the tokens, so that shared tokens are read for each
            row.
    """
    offsets, context = rows.host_offsets, alignment.context
    lengths = np.diff(offsets)
    own = np.arange(int(offsets[-1]))
    position = own - np.repeat(offsets[:-1], lengths)
    tree = None
    if is_packed and shares_prefixes and len(lengths) > 1:
        found = SharedPrefixes.of(offsets, [rows.host_column(name) for name in (TOKENS, *inputs)])
        if found.shared.any():
            tree, bounds = _tree(offsets, found, alignment.multiple)
    if tree is not None:
        position, places, length = tree.positions[None], tree.places[None], len(tree.places)
    elif is_packed:
        # Rows are end to end, followed by one row of padding.
        total = int(offsets[-1])
        missing = -total % alignment.multiple
        extra = np.arange(missing)
        position = np.concatenate([position, extra])[None]
        places = np.concatenate([own, np.full_like(extra, -1)])[None]
        bounds = tuple(pairwise(sorted({*offsets.tolist(), total + missing})))
        length = total + missing
    else:
        # Each row is a sequence, padded on the right.
        longest = int(lengths.max())
        length = longest + -longest % alignment.multiple
        position = np.tile(np.arange(length), (len(lengths), 1))
        places = np.where(position < lengths[:, None], offsets[:-1, None] + position, -1)
        bounds = ((0, length),)
    blocks = None
    for name in (IMAGE_BLOCKS, WINDOW_BLOCKS):
        if name in rows:
            blocks = np.where(places < 0, -1, rows.host_column(name)[places])
    chosen = np.arange(length)
    if context is not None:
        chosen = zigzag_tokens(length, context.size, context.rank).numpy()
        places, position = places[:, chosen], position[:, chosen]
    flat = places.reshape(-1)
    device = rows.offsets.device
    read = HeldTokens.arrays(flat, offsets) if tree is None else _held(tree, offsets, chosen, reads_columns)
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
        tree=tree,
        host_places=flat,
        blocks_need_window=WINDOW_BLOCKS in rows,
    )


def _tree(offsets: np.ndarray, found: SharedPrefixes, multiple: int) -> tuple[RowTree, tuple[tuple[int, int], ...]]:
    """Return rows as a tree, and the start and end in the sequence of the runs that rows add, followed by padding.

    Args:
        offsets: Where rows start and end among their tokens.
        found: SharedPrefixes of the rows.
        multiple: The length of the sequence is a multiple of this.
    """
    total = int(np.diff(offsets).sum() - found.shared.sum())
    length = total + -total % multiple
    positions, places = np.arange(length) - total, np.full(length, -1)
    ends, sequence = np.full(length, length), np.zeros(int(offsets[-1]), dtype=np.int64)
    before: list[tuple[tuple[int, int], ...]] = []
    bounds: list[tuple[int, int]] = []
    # The tokens of the last row, in the sequence.
    path: list[tuple[int, int]] = []
    start = 0
    for row, shared in zip(found.order.tolist(), found.shared.tolist(), strict=True):
        first, last = int(offsets[row]), int(offsets[row + 1])
        # No later row has the tokens that this one does not share with the last.
        left_out, path = _cut(path, shared, total), _cut(path, 0, shared)
        for part in left_out:
            ends[slice(*part)] = start
        end = start + last - first - shared
        if bounds and shared and path[-1][1] == start:  # The row continues the last one, so both are one run.
            bounds[-1], path[-1] = (bounds[-1][0], end), (path[-1][0], end)
        elif end > start:
            before.append(tuple(path))
            bounds.append((start, end))
            path.append((start, end))
        positions[start:end], places[start:end] = np.arange(shared, last - first), np.arange(first + shared, last)
        sequence[first:last] = np.concatenate([np.arange(*part) for part in path])
        start = end
    for part in path:
        ends[slice(*part)] = total
    if length > total:
        before.append(())
        bounds.append((total, length))
    tree = RowTree(tuple(before), positions, ends, places, sequence, tuple(np.diff(offsets).tolist()))
    return tree, tuple(bounds)


def _held(tree: RowTree, offsets: np.ndarray, chosen: np.ndarray, reads_columns: bool) -> list[np.ndarray]:
    """Return the fields of `HeldTokens` of a rank that has the `chosen` places of a tree's sequence."""
    at = np.full(len(tree.places), -1)
    at[chosen] = np.arange(len(chosen))
    originals = tree.places[tree.sequence]
    own = np.arange(len(originals))
    is_read = np.full(len(own), reads_columns) | (originals == own)
    tokens, followers = np.flatnonzero(is_read), followers_of(offsets)
    followers = followers[is_read[followers]]
    positions, followed = at[tree.sequence[tokens]], at[tree.sequence[followers - 1]]
    here, there = positions >= 0, followed >= 0
    fields = [positions[here], tokens[here], followed[there], followers[there]]
    return fields if reads_columns else [*fields, originals]
