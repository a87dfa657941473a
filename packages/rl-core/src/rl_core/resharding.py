"""Plan of an exchange of weights: from the parts of tensors that ranks hold to the parts that they are to keep.

A trainer and an engine on the same GPUs split tensors in different ways. The plan says which rank sends which piece of
which tensor to which other rank, so that each rank ends with the parts for the engine rank on its GPU, and none ever
has a whole model. It is a function of the two ways alone, so that every rank makes the same plan by itself.

A piece that several ranks of a node keep enters the node once, on one of them, which passes it to the others. Large
pieces are cut so that all of them share this work. Tensors that are split alike are of one kind and planned once: a
model of 46,000 tensors has some hundred kinds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

Box = tuple[tuple[int, int], ...]
"""Part of a tensor: start and stop along each dim."""

MIN_CUT_BYTES = 2**18
"""Minimum size in bytes of the pieces that a larger one is cut into for several ranks."""

ALIGNMENT = 8
"""Bytes; a piece starts at a multiple of it in a message, so that it can be viewed as any dtype."""

IN_PLACE, INTO_NODE, WITHIN_NODE = range(3)
"""Ways of a piece: on the rank that holds it, from another node, and from a rank of the same node."""


class Share(NamedTuple):
    """Parts of all tensors that one rank holds, or keeps.

    Args:
        choices: Each different sequence of parts once.
        chosen: int32 `[tensors]`, the place of each tensor's parts in `choices`.
    """

    choices: tuple[tuple[Box, ...], ...]
    chosen: np.ndarray

    @classmethod
    def of(cls, parts: Iterable[Sequence[Box]]) -> Share:
        """Collect the parts of every tensor, in the order of the tensors."""
        known: dict[tuple[Box, ...], int] = {}
        chosen = [known.setdefault(tuple(boxes), len(known)) for boxes in parts]
        return cls(tuple(known), np.array(chosen, np.int32))

    def boxes(self, tensor: int) -> tuple[Box, ...]:
        """Return the parts of a tensor."""
        return self.choices[self.chosen[tensor]]


class TensorPieces(NamedTuple):
    """Pieces of one tensor and their ways; tensors of one kind have the same.

    Args:
        way: int64 `[pieces]`, `IN_PLACE`, `INTO_NODE` or `WITHIN_NODE`.
        is_relayed: int64 `[pieces]`, 1 if the source has received the piece in the same exchange, and 0 if it holds it.
        source: int64 `[pieces]`, rank that sends.
        source_part: int64 `[pieces]`, place of the part of the source that the piece is in, among the parts that it
            holds or, of a relayed piece, that it keeps.
        target: int64 `[pieces]`, rank that receives.
        target_part: int64 `[pieces]`, place of the part among those that the target keeps.
        start: int64 `[pieces, dims]`, where the piece starts in the tensor.
        stop: int64 `[pieces, dims]`, where it stops.
        wave: int64 `[pieces]`, counted from the first wave of the tensor.
    """

    way: np.ndarray
    is_relayed: np.ndarray
    source: np.ndarray
    source_part: np.ndarray
    target: np.ndarray
    target_part: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    wave: np.ndarray

    @property
    def num_values(self) -> np.ndarray:
        """Return int64 `[pieces]`, the number of values of each piece."""
        values: np.ndarray = np.prod(self.stop - self.start, axis=1)
        return values

    def at(self, index: np.ndarray) -> TensorPieces:
        """Return some of the pieces."""
        return TensorPieces(*(column[index] for column in self))


class PlannedTensor(NamedTuple):
    """One tensor of an exchange.

    Args:
        shape: Shape of the whole tensor.
        item_bytes: Bytes of one value.
        bucket: Bucket that it travels in; buckets are numbered in the order of the tensors.
    """

    shape: tuple[int, ...]
    item_bytes: int
    bucket: int


class Wave(NamedTuple):
    """Pieces that travel at one time: first those into nodes, then those within nodes.

    Args:
        bucket: Bucket of the tensors.
        tensors: Tensors, each with the number of its own wave that travels here.
        ways: Ways of pieces between any ranks, in order.
    """

    bucket: int
    tensors: tuple[tuple[int, int], ...]
    ways: tuple[int, ...]


@dataclass(frozen=True)
class ExchangePlan:
    """Pieces of all tensors and the order in which they travel.

    Args:
        tensors: Tensors in the order of the transfer.
        kinds: Pieces of each kind of tensors.
        kind_of: int64 `[tensors]`, kind of each tensor.
        waves: Waves in order; those of one bucket are consecutive.
    """

    tensors: Sequence[PlannedTensor]
    kinds: Sequence[TensorPieces]
    kind_of: np.ndarray
    waves: Sequence[Wave]

    @property
    def fingerprint(self) -> str:
        """Return a digest that differs for another plan."""
        digest = hashlib.sha256(repr((tuple(self.tensors), tuple(self.waves))).encode())
        for column in (self.kind_of, *(column for pieces in self.kinds for column in pieces)):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()[:16]


class UnplannableError(ValueError):
    """The parts that ranks hold of a tensor overlap or leave gaps, so that no plan follows from them.

    Args:
        tensor: Number of the tensor.
    """

    def __init__(self, message: str, tensor: int) -> None:
        super().__init__(message)
        self.tensor = tensor


def plan_exchange(
    tensors: Sequence[PlannedTensor],
    held: Sequence[Share],
    kept: Sequence[Share],
    nodes: Sequence[int],
    *,
    wave_bytes: int,
) -> ExchangePlan:
    """Plan an exchange; equal arguments give equal plans.

    Args:
        tensors: Tensors in the order of the transfer.
        held: Parts that each rank holds.
        kept: Parts that each rank is to have afterwards.
        nodes: Node of each rank.
        wave_bytes: Maximum number of bytes that a rank sends, and that it receives, at one time.

    Raises:
        UnplannableError: If held parts overlap without being equal, or do not cover the kept ones.
    """
    first, kind_of = _kinds(tensors, [*_interned(held), *_interned(kept)])
    kinds = [
        _Planner(tensors[index], held, kept, np.asarray(nodes), turn=turn, wave_bytes=wave_bytes).pieces(int(index))
        for turn, index in enumerate(first)
    ]
    waves = _waves(tensors, kinds, kind_of, len(held), wave_bytes)
    return ExchangePlan(tensors, kinds, kind_of, waves)


def _kinds(tensors: Sequence[PlannedTensor], rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first tensor of each kind, and the kind of each tensor: tensors are of one kind if they have the same
    shape and the same numbers in all rows."""
    known: dict[tuple[tuple[int, ...], int], int] = {}
    shapes = np.array([known.setdefault((each.shape, each.item_bytes), len(known)) for each in tensors], np.int64)
    # A random sum over the rows tells columns apart in a hundredth of the time of a comparison of columns.
    factors = np.random.default_rng(0).integers(1, 2**63 - 1, len(rows) + 1)
    sums = shapes * factors[-1]
    for row, factor in zip(rows, factors, strict=False):
        sums += row * factor
    _, first, kind_of = np.unique(sums, return_index=True, return_inverse=True)
    assert all((row == row[first][kind_of]).all() for row in (shapes, *rows)), "two kinds have the same sum"
    return first, kind_of


def _interned(shares: Sequence[Share]) -> Iterator[np.ndarray]:
    """Yield int64 `[tensors]` for each rank: equal numbers for equal parts."""
    known: dict[tuple[Box, ...], int] = {}
    for share in shares:
        numbers = np.array([known.setdefault(boxes, len(known) + 1) for boxes in share.choices], np.int64)
        yield numbers[share.chosen]


class _Planner:
    """Plans one kind of tensors.

    Args:
        tensor: One of them.
        turn: Number by which choices among equal ranks are moved on, so that other kinds take other ranks.
    """

    def __init__(
        self,
        tensor: PlannedTensor,
        held: Sequence[Share],
        kept: Sequence[Share],
        nodes: np.ndarray,
        *,
        turn: int,
        wave_bytes: int,
    ) -> None:
        self._tensor = tensor
        self._held, self._kept, self._nodes = held, kept, nodes
        self._turn = turn
        self._wave_bytes = wave_bytes
        self._found: list[list[np.ndarray]] = []

    def pieces(self, index: int) -> TensorPieces:
        """Return the pieces of a tensor and their ways."""
        holders: dict[Box, list[tuple[int, int]]] = {}
        for rank, share in enumerate(self._held):
            for place, box in enumerate(share.boxes(index)):
                holders.setdefault(box, []).append((rank, place))
        wanted: dict[Box, dict[int, list[tuple[int, int]]]] = {}
        for rank, share in enumerate(self._kept):
            for place, box in enumerate(share.boxes(index)):
                if all(start < stop for start, stop in box):
                    by_node = wanted.setdefault(box, {})
                    by_node.setdefault(int(self._nodes[rank]), []).append((rank, place))
        dims = len(self._tensor.shape)
        sources = _corners(holders, dims)
        if wanted and _overlap(*sources):
            raise UnplannableError("ranks hold parts of it that overlap without being equal", index)
        most = max(map(len, holders.values()), default=1)
        padded = np.array([(each + [(-1, 0)] * (most - len(each))) for each in holders.values()], np.int64)
        counts = np.array([len(each) for each in holders.values()], np.int64)
        for box, by_node in wanted.items():
            corners = np.array(box, np.int64).reshape(dims, 2)
            start, stop = np.maximum(sources[0], corners[:, 0]), np.minimum(sources[1], corners[:, 1])
            hit = np.flatnonzero((start < stop).all(axis=1))
            start, stop = start[hit], stop[hit]
            if int(np.prod(stop - start, axis=1).sum()) != prod(int(each) for each in corners[:, 1] - corners[:, 0]):
                raise UnplannableError("no rank holds a part of it that a receiver keeps", index)
            for node, wanters in by_node.items():
                self._bring(node, np.array(wanters, np.int64), padded[hit], counts[hit], start, stop)
        columns = [np.concatenate(column) for column in zip(*self._found, strict=True)] if self._found else []
        if not columns:
            none = np.empty(0, np.int64)
            return TensorPieces._make([*[none] * 6, np.empty((0, dims), np.int64), np.empty((0, dims), np.int64), none])
        return self._in_waves(TensorPieces._make([*columns, np.zeros(len(columns[0]), np.int64)]))

    def _bring(
        self,
        node: int,
        wanters: np.ndarray,
        holders: np.ndarray,
        counts: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
    ) -> None:
        """Bring pieces to the ranks of a node that keep them: `[ranks, 2]`, each with the place of its part."""
        is_near = (holders[:, :, 0] >= 0) & (self._nodes[holders[:, :, 0]] == node)
        num_near = is_near.sum(axis=1)
        piece, _, first, last = self._cut(start[num_near > 0], stop[num_near > 0], 1)
        near = np.flatnonzero(num_near)[piece]
        # Holders in this node come first.
        order = np.argsort(~is_near[near], axis=1, kind="stable")
        of_near = np.take_along_axis(holders[near], order[:, :, None], axis=1)
        for number, (rank, place) in enumerate(wanters):
            is_own = of_near[:, :, 0] == rank
            own = is_own.any(axis=1)
            pick = np.where(own, is_own.argmax(axis=1), (number + self._turn) % np.maximum(num_near[near], 1))
            source = of_near[np.arange(len(near)), pick]
            self._add(np.where(own, IN_PLACE, WITHIN_NODE), 0, source, (rank, place), first, last)
        far = np.flatnonzero(num_near == 0)
        if not len(far):
            return
        piece, part, start, stop = self._cut(start[far], stop[far], len(wanters))
        number = piece + part + self._turn
        source = holders[far[piece], (number + node) % counts[far[piece]]]
        doors = number % len(wanters)
        self._add(INTO_NODE, 0, source, wanters[doors], start, stop)
        for further in range(1, len(wanters)):
            to = wanters[(doors + further) % len(wanters)]
            self._add(WITHIN_NODE, 1, wanters[doors], to, start, stop)

    def _cut(self, start: np.ndarray, stop: np.ndarray, num_ranks: int) -> tuple[np.ndarray, ...]:
        """Cut large pieces along their longest dim; returns the number of each piece, its number among the pieces of
        one, and the pieces."""
        sizes = stop - start
        if not sizes.shape[1]:
            return np.arange(len(start)), np.zeros(len(start), np.int64), start, stop
        num_bytes = np.prod(sizes, axis=1) * self._tensor.item_bytes
        dim = sizes.argmax(axis=1)
        every = np.arange(len(start))
        longest = sizes[every, dim]
        # No piece may be larger than a wave.
        in_wave = np.maximum(1, self._wave_bytes // np.maximum(1, num_bytes // np.maximum(1, longest)))
        shared = np.minimum(num_ranks, num_bytes // MIN_CUT_BYTES)
        count = np.maximum(1, np.minimum(longest, np.maximum(shared, -(-longest // in_wave))))
        piece = np.repeat(every, count)
        part = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
        first, last = start[piece], stop[piece]
        along, total, begin = dim[piece], longest[piece], start[every, dim][piece]
        rows = np.arange(len(piece))
        first[rows, along] = begin + total * part // count[piece]
        last[rows, along] = begin + total * (part + 1) // count[piece]
        return piece, part, first, last

    def _add(
        self,
        way: np.ndarray | int,
        is_relayed: int,
        source: np.ndarray,
        target: np.ndarray | tuple[int, int],
        start: np.ndarray,
        stop: np.ndarray,
    ) -> None:
        if not len(start):
            return
        ones, target = np.ones(len(start), np.int64), np.asarray(target)
        row = [way * ones, is_relayed * ones, source[:, 0], source[:, 1], target[..., 0] * ones, target[..., 1] * ones]
        self._found.append([*row, start, stop])

    def _in_waves(self, pieces: TensorPieces) -> TensorPieces:
        """Spread the pieces over several waves if one would bring a rank more than it may send or receive."""
        if _load(pieces, self._tensor.item_bytes, len(self._held)).max() <= self._wave_bytes:
            return pieces
        size = _in_message(pieces, self._tensor.item_bytes)
        relay = pieces.is_relayed == 1
        # A piece and its relays travel in one wave, or the relays in a later one.
        key = pieces.start.tolist(), pieces.target.tolist(), pieces.target_part.tolist()
        order = np.lexsort((pieces.way, pieces.target, *pieces.start.T))
        wave = np.zeros(len(order), np.int64)
        arrived: dict[tuple[int, int, tuple[int, ...]], int] = {}
        filled: dict[tuple[int, int, int, int], int] = {}
        for index in [*order[~relay[order]], *order[relay[order]]]:
            way, source, target = int(pieces.way[index]), int(pieces.source[index]), int(pieces.target[index])
            number = 0
            if relay[index]:
                number = arrived[source, int(pieces.source_part[index]), tuple(key[0][index])]
            if way != IN_PLACE:
                while any(
                    filled.get(side, 0) + size[index] > self._wave_bytes and filled.get(side, 0)
                    for side in ((number, way, 0, source), (number, way, 1, target))
                ):
                    number += 1
                for side in ((number, way, 0, source), (number, way, 1, target)):
                    filled[side] = filled.get(side, 0) + int(size[index])
            wave[index] = number
            arrived[target, key[2][index], tuple(key[0][index])] = number
        return pieces._replace(wave=wave)


def _corners(boxes: Collection[Box], dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 `[boxes, dims]`, the starts and the stops of boxes."""
    found = np.array(list(boxes), np.int64).reshape(len(boxes), dims, 2)
    return found[:, :, 0], found[:, :, 1]


def _overlap(start: np.ndarray, stop: np.ndarray) -> bool:
    """Return whether any two of some boxes have values in common."""
    order = np.lexsort(start.T[::-1]) if start.shape[1] else np.arange(len(start))
    start, stop = start[order], stop[order]
    for index in range(len(start) - 1):
        after = slice(index + 1, int(np.searchsorted(start[:, 0], stop[index, 0])) if start.shape[1] else len(start))
        if ((start[after] < stop[index]) & (start[index] < stop[after])).all(axis=1).any():
            return True
    return False


def _in_message(pieces: TensorPieces, item_bytes: int) -> np.ndarray:
    """Return int64 `[pieces]`, the bytes of each piece in a message."""
    found: np.ndarray = -(-pieces.num_values * item_bytes // ALIGNMENT) * ALIGNMENT
    return found


def _load(pieces: TensorPieces, item_bytes: int, num_ranks: int) -> np.ndarray:
    """Return int64 `[4, ranks]`: bytes that each rank sends and receives into nodes, and within nodes."""
    size = _in_message(pieces, item_bytes)
    rows = [
        np.bincount(side[of_way], weights=size[of_way], minlength=num_ranks)
        for way in (INTO_NODE, WITHIN_NODE)
        for of_way in (pieces.way == way,)
        for side in (pieces.source, pieces.target)
    ]
    return np.stack(rows).astype(np.int64)


def _waves(
    tensors: Sequence[PlannedTensor],
    kinds: Sequence[TensorPieces],
    kind_of: np.ndarray,
    num_ranks: int,
    wave_bytes: int,
) -> list[Wave]:
    """Collect consecutive tensors of a bucket in waves that no rank sends or receives too much in."""
    first = {int(kind): index for index, kind in reversed(list(enumerate(kind_of)))}
    loads: dict[int, list[np.ndarray]] = {}
    for kind, pieces in enumerate(kinds):
        count = int(pieces.wave.max(initial=0)) + 1
        item_bytes = tensors[first[kind]].item_bytes
        loads[kind] = [_load(pieces.at(pieces.wave == number), item_bytes, num_ranks) for number in range(count)]
    waves: list[Wave] = []
    members: list[tuple[int, int]] = []
    bucket, load = 0, np.zeros((4, num_ranks), np.int64)
    for index, tensor in enumerate(tensors):
        for number, own in enumerate(loads[int(kind_of[index])]):
            if members and (tensor.bucket != bucket or (load + own).max() > wave_bytes):
                waves.append(_wave(bucket, members, load))
                members, load = [], np.zeros_like(load)
            bucket = tensor.bucket
            members.append((index, number))
            load = load + own
    if members:
        waves.append(_wave(bucket, members, load))
    return waves


def _wave(bucket: int, members: Sequence[tuple[int, int]], load: np.ndarray) -> Wave:
    ways = ((INTO_NODE, load[:2]), (WITHIN_NODE, load[2:]))
    return Wave(bucket, tuple(members), tuple(way for way, of_way in ways if of_way.any()))
