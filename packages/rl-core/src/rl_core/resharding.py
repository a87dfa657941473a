"""Plan of an exchange of weights: from the parts of tensors that ranks hold to the parts that they are to keep.

A trainer and an engine on the same GPUs split tensors in different ways. The plan says which rank sends which piece of
which tensor to which other rank, so that each rank ends with the parts for the engine rank on its GPU, and none ever
has a whole model. It is a function of the two ways alone, so that every rank makes the same plan by itself.

A piece enters each node once, on one of the ranks that keep it, which passes it to the others. If few ranks hold what
many nodes keep, such as an expert or the layers of a pipeline stage, each holder sends every piece only once: to one of
these nodes, in turn, which sends it on to all others. So all links work at the same time, and a transfer takes at most
twice as long as the last byte needs to enter a rank, whoever holds it. Large pieces are cut so that all ranks share
this work. Tensors that are split alike are of one kind and planned once: a model of 46,000 tensors has some thousand
kinds.
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

MIN_CUT_BYTES = 2**16
"""Minimum size in bytes of the pieces that a larger one is cut into for several ranks."""

ALIGNMENT = 8
"""Bytes; a piece starts at a multiple of it in a message, so that it can be viewed as any dtype."""

NUM_RUNS = 4
"""Number of runs of consecutive tensors that are sent side by side, since neighbours often have the same few holders.
An engine keeps layers that have not arrived completely in memory, so that there are not many."""

SLOT_BYTES = 64
"""Bytes; the parts of a tensor start at a multiple of it in a bucket."""

IN_PLACE, INTO_NODE, ONWARD, WITHIN_NODE = range(4)
"""Ways of a piece, in the order of a wave: on the rank that holds it, from a holder in another node, from a rank in
another node that it has just entered, and from a rank of the same node."""

TRAVELLING = (INTO_NODE, ONWARD, WITHIN_NODE)
"""Ways of pieces between ranks."""


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
        way: int64 `[pieces]`, `IN_PLACE`, `INTO_NODE`, `ONWARD` or `WITHIN_NODE`.
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
    """Pieces that travel at one time, on one way after the other.

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
        waves: Waves in order; the waves of one bucket are consecutive.
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
    rows = [*_interned(held)], [*_interned(kept)]
    first, kind_of = _kinds(tensors, [*rows[0], *rows[1]])
    numbers = [np.stack([row[first] for row in of_ranks], axis=1) for of_ranks in rows]
    planner = _Planner(held, kept, np.asarray(nodes), wave_bytes)
    kinds = [
        planner.pieces(int(index), tensors[index], numbers[0][turn], numbers[1][turn], turn)
        for turn, index in enumerate(first)
    ]
    waves = _waves(tensors, kinds, kind_of, len(held), wave_bytes)
    return ExchangePlan(tensors, kinds, kind_of, waves)


def assign_buckets(tensors: Sequence[PlannedTensor], kept: Sequence[Share], bucket_bytes: int) -> list[int]:
    """Return the bucket of each tensor, so that every rank keeps about as much of each bucket.

    Each rank gets its tensors in order, in `NUM_RUNS` runs side by side. Ranks that keep different layers or experts
    fill the same buckets.

    Args:
        tensors: Tensors in the order in which receivers want them; their own buckets do not count.
        kept: Parts that each rank is to have.
        bucket_bytes: Maximum number of bytes that a rank keeps of one bucket, a single larger tensor excepted.
    """
    rows = [*_interned(kept)]
    # Replicas of an engine keep the same.
    ranks = list({row.tobytes(): rank for rank, row in enumerate(rows)}.values())
    first, kind_of = _kinds(tensors, [rows[rank] for rank in ranks])
    sizes = np.array(
        [[_num_values(kept[rank].boxes(index)) * tensors[index].item_bytes for rank in ranks] for index in first]
    )
    sizes = -(-sizes // SLOT_BYTES) * SLOT_BYTES
    whole = np.cumsum([prod(each.shape) * each.item_bytes for each in tensors])
    order = np.argsort((whole - whole[:1]) % -(-whole[-1:] // NUM_RUNS), kind="stable")
    last, filled = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
    found = np.zeros(len(tensors), np.int64)
    for index, kind in zip(order, kind_of[order], strict=True):
        keeps = sizes[kind] > 0
        bucket = int(last[keeps].max(initial=0))
        here = np.where(last == bucket, filled, 0)
        if ((here > 0) & keeps & (here + sizes[kind] > bucket_bytes)).any():
            bucket, here = bucket + 1, np.zeros_like(here)
        filled[keeps] = (here + sizes[kind])[keeps]
        last[keeps] = bucket
        found[index] = bucket
    buckets: list[int] = found.tolist()
    return buckets


def _num_values(boxes: Iterable[Box]) -> int:
    return sum(prod(stop - start for start, stop in box) for box in boxes)


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
    """Plans kinds of tensors."""

    def __init__(self, held: Sequence[Share], kept: Sequence[Share], nodes: np.ndarray, wave_bytes: int) -> None:
        self._held, self._kept, self._nodes = held, kept, nodes
        self._wave_bytes = wave_bytes
        self._found: list[list[np.ndarray]] = []
        self._num_groups = 0

    def pieces(self, index: int, tensor: PlannedTensor, held: np.ndarray, kept: np.ndarray, turn: int) -> TensorPieces:
        """Return the pieces of a tensor and their ways.

        Args:
            index: Number of the tensor.
            tensor: The tensor.
            held: int64 `[ranks]`, equal numbers for ranks that hold equal parts of it.
            kept: The same of the parts that ranks keep.
            turn: Number by which choices among equal ranks are moved on, so that other kinds take other ranks.
        """
        dims = len(tensor.shape)
        self._item_bytes, self._turn, self._found, self._num_groups = tensor.item_bytes, turn, [], 0
        holders, wanted = _by_box(self._held, held, index), _by_box(self._kept, kept, index)
        sources = _corners(holders, dims)
        if wanted and _overlap(*sources):
            raise UnplannableError("ranks hold parts of it that overlap without being equal", index)
        counts = np.array([len(each) for each in holders.values()], np.int64)
        padded = np.full((len(holders), int(counts.max(initial=1)), 2), -1, np.int64)
        for row, each in zip(padded, holders.values(), strict=True):
            row[: len(each)] = each
        arrivals = []
        for box, ranks in wanted.items():
            corners = np.array(box, np.int64).reshape(dims, 2)
            start, stop = np.maximum(sources[0], corners[:, 0]), np.minimum(sources[1], corners[:, 1])
            hit = np.flatnonzero((start < stop).all(axis=1))
            start, stop = start[hit], stop[hit]
            if int(np.prod(stop - start, axis=1).sum()) != prod(int(each) for each in corners[:, 1] - corners[:, 0]):
                raise UnplannableError("no rank holds a part of it that a receiver keeps", index)
            arrivals.append(_Arrival(self._nodes, ranks, padded[hit], counts[hit], start, stop))
        is_relayed = self._should_relay(arrivals)
        for arrival in arrivals:
            self._bring_near(arrival)
            if arrival.is_far.any():
                self._bring_far(arrival, is_relayed=is_relayed)
        if not self._found:
            none = np.empty(0, np.int64)
            return TensorPieces._make([*[none] * 6, np.empty((0, dims), np.int64), np.empty((0, dims), np.int64), none])
        *columns, group = [np.concatenate(column) for column in zip(*self._found, strict=True)]
        return self._in_waves(TensorPieces._make([*columns, np.zeros(len(group), np.int64)]), group)

    def _should_relay(self, arrivals: Sequence[_Arrival]) -> bool:
        """Return whether the nodes that keep a tensor get it sooner from one another than each from its holders."""
        direct, once = np.zeros(len(self._nodes)), np.zeros(len(self._nodes))
        onward, entering = 0.0, 0.0
        for each in arrivals:
            size = np.prod(each.stop - each.start, axis=1) * self._item_bytes
            num_far = each.is_far.sum(axis=1)
            rows = np.repeat(np.arange(len(size)), each.counts)
            ranks = each.holders[:, :, 0][each.holders[:, :, 0] >= 0]
            np.add.at(direct, ranks, (size * num_far / each.counts)[rows])
            np.add.at(once, ranks, (size * (num_far > 1) / each.counts)[rows])
            doors = int(each.num_wanters.min())
            share = np.maximum(1, np.minimum(num_far * doors, size // MIN_CUT_BYTES))
            sent_on = size * np.maximum(0, num_far - 1)
            # All ranks that a part enters on share what is sent on, in whole pieces.
            onward = max(onward, float((sent_on / share).max(initial=0)))
            onward = max(onward, float((sent_on / np.maximum(1, num_far * doors)).sum()))
            entering = max(entering, float(size[num_far > 0].sum()) / doors)
        return bool(once.max() + max(onward, entering) < max(direct.max(), entering))

    def _bring_near(self, arrival: _Arrival) -> None:
        """Bring pieces to the ranks of nodes with ranks that hold them."""
        region, node = np.nonzero(~arrival.is_far)
        if not len(region):
            return
        pair, _, start, stop = self._cut(arrival.start[region], arrival.stop[region], np.ones(len(region), np.int64), 1)
        region, node = region[pair], node[pair]
        # One row for each rank of a node that keeps the piece.
        row, number = np.nonzero(np.arange(arrival.wanters.shape[1]) < arrival.num_wanters[node][:, None])
        region, node = region[row], node[row]
        target = arrival.wanters[node, number]
        ranks = arrival.holders[region][:, :, 0]
        is_own = ranks == target[:, :1]
        own = is_own.any(axis=1)
        is_near = (ranks >= 0) & (self._nodes[ranks] == arrival.nodes[node][:, None])
        # Holders in this node come first.
        order = np.argsort(~is_near, axis=1, kind="stable")
        every = np.arange(len(row))
        pick = order[every, (number + self._turn) % is_near.sum(axis=1)]
        source = arrival.holders[region, np.where(own, is_own.argmax(axis=1), pick)]
        group = self._new_groups(len(row))
        self._add(np.where(own, IN_PLACE, WITHIN_NODE), 0, source, target, start[row], stop[row], group)

    def _bring_far(self, arrival: _Arrival, *, is_relayed: bool) -> None:
        """Bring pieces into nodes without ranks that hold them, and there to every rank that keeps them."""
        num_far, most = arrival.is_far.sum(axis=1), int(arrival.num_wanters.max())
        region = np.flatnonzero(num_far)
        ones = np.ones(len(region), np.int64)
        # Each block enters every node on one rank.
        block, _, start, stop = self._cut(arrival.start[region], arrival.stop[region], most * ones, max(most - 1, 1))
        region, turn = region[block], np.arange(len(block)) + self._turn
        row, node = np.nonzero(arrival.is_far[region])
        door = turn[row] % arrival.num_wanters[node]
        doors = arrival.wanters[node, door]
        if is_relayed:
            group = self._new_groups(len(region))
            of_row = group[row]
            # Each piece of a block enters one of the nodes, which sends it on to the others.
            piece, _, first, last = self._cut(start, stop, num_far[region], max(int(num_far.max()) - 1, 1))
            number = np.arange(len(piece)) + self._turn
            far = np.argsort(~arrival.is_far, axis=1, kind="stable")  # Far nodes come first.
            relay = far[region[piece], number % num_far[region[piece]]]
            relays = arrival.wanters[relay, turn[piece] % arrival.num_wanters[relay]]
            source = arrival.holders[region[piece], number % arrival.counts[region[piece]]]
            self._add(INTO_NODE, 0, source, relays, first, last, group[piece])
            one, other = np.nonzero(arrival.is_far[region[piece]])
            one, other = one[other != relay[one]], other[other != relay[one]]
            to = arrival.wanters[other, turn[piece[one]] % arrival.num_wanters[other]]
            self._add(ONWARD, 1, relays[one], to, first[one], last[one], group[piece[one]])
        else:
            of_row = self._new_groups(len(row))
            source = arrival.holders[region[row], (turn[row] + arrival.nodes[node]) % arrival.counts[region[row]]]
            self._add(INTO_NODE, 0, source, doors, start[row], stop[row], of_row)
        for further in range(1, most):
            more = further < arrival.num_wanters[node]
            target = arrival.wanters[node, (door + further) % arrival.num_wanters[node]]
            self._add(WITHIN_NODE, 1, doors[more], target[more], start[row[more]], stop[row[more]], of_row[more])

    def _cut(self, start: np.ndarray, stop: np.ndarray, num_shares: np.ndarray, fan: int) -> tuple[np.ndarray, ...]:
        """Cut large pieces along their longest dim; returns the number of each piece, its number among the pieces of
        one, and the pieces.

        Args:
            start: int64 `[pieces, dims]`, where they start.
            stop: int64 `[pieces, dims]`, where they stop.
            num_shares: int64 `[pieces]`, number of ranks that share the work for each.
            fan: Number of times that a rank sends one of the results.
        """
        sizes = stop - start
        if not sizes.shape[1]:
            return np.arange(len(start)), np.zeros(len(start), np.int64), start, stop
        num_bytes = np.prod(sizes, axis=1) * self._item_bytes
        dim = sizes.argmax(axis=1)
        every = np.arange(len(start))
        longest = sizes[every, dim]
        # A rank sends no more of one piece than in a wave.
        in_wave = np.maximum(1, self._wave_bytes // fan // np.maximum(1, num_bytes // np.maximum(1, longest)))
        shared = np.maximum(1, np.minimum(num_shares, num_bytes // MIN_CUT_BYTES))
        # Each share has as many pieces as the others.
        needed = -(-longest // in_wave)
        count = np.maximum(1, np.minimum(longest, -(-needed // shared) * shared))
        piece = np.repeat(every, count)
        part = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
        first, last = start[piece], stop[piece]
        along, total, begin = dim[piece], longest[piece], start[every, dim][piece]
        rows = np.arange(len(piece))
        first[rows, along] = begin + total * part // count[piece]
        last[rows, along] = begin + total * (part + 1) // count[piece]
        return piece, part, first, last

    def _new_groups(self, count: int) -> np.ndarray:
        """Return numbers for pieces that each travel in one wave, together with their relays."""
        self._num_groups += count
        return np.arange(self._num_groups - count, self._num_groups)

    def _add(
        self,
        way: np.ndarray | int,
        is_relayed: int,
        source: np.ndarray,
        target: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
        group: np.ndarray,
    ) -> None:
        if len(start):
            ones = np.ones(len(start), np.int64)
            row = [way * ones, is_relayed * ones, source[:, 0], source[:, 1], target[:, 0], target[:, 1]]
            self._found.append([*row, start, stop, group])

    def _in_waves(self, pieces: TensorPieces, group: np.ndarray) -> TensorPieces:
        """Spread the pieces over several waves if one would bring a rank more than it may send or receive."""
        num_ranks = len(self._nodes)
        count = -(-int(_load(pieces, self._item_bytes, num_ranks).max()) // self._wave_bytes)
        while count > 1:
            # Neighbours take different links, so that each wave has pieces of all links.
            wave = group % count
            loads = _load(pieces._replace(wave=wave), self._item_bytes, num_ranks, count)
            if loads.max() <= self._wave_bytes or count == self._num_groups:
                return pieces._replace(wave=wave)
            count = min(self._num_groups, count + 1 + count // 8)
        return pieces


class _Arrival:
    """A part of a tensor that ranks of several nodes keep, and the regions that others hold of it.

    Args:
        nodes: int64 `[all ranks]`.
        ranks: int64 `[ranks that keep it, 2]`, each with the place of its part, in the order of ranks.
        holders: int64 `[regions, holders, 2]`, the same of the ranks that hold each region, filled up with -1.
        counts: int64 `[regions]`, number of holders.
        start: int64 `[regions, dims]`.
        stop: int64 `[regions, dims]`.

    Attributes:
        nodes: int64 `[nodes]`, nodes of the ranks that keep it.
        wanters: int64 `[nodes, ranks, 2]`, the ranks of each of these nodes.
        num_wanters: int64 `[nodes]`, the number of them.
        is_far: bool `[regions, nodes]`, True if no rank of the node holds the region.
    """

    def __init__(
        self,
        nodes: np.ndarray,
        ranks: np.ndarray,
        holders: np.ndarray,
        counts: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
    ) -> None:
        self.holders, self.counts, self.start, self.stop = holders, counts, start, stop
        self.nodes, row, self.num_wanters = np.unique(nodes[ranks[:, 0]], return_inverse=True, return_counts=True)
        order = np.argsort(row, kind="stable")
        place = np.arange(len(row)) - np.repeat(np.cumsum(self.num_wanters) - self.num_wanters, self.num_wanters)
        self.wanters = np.full((len(self.nodes), int(self.num_wanters.max()), 2), -1, np.int64)
        self.wanters[row[order], place] = ranks[order]
        homes = np.where(holders[:, :, 0] >= 0, nodes[holders[:, :, 0]], -1)
        self.is_far = ~(homes[:, :, None] == self.nodes).any(axis=1)


def _by_box(shares: Sequence[Share], numbers: np.ndarray, index: int) -> dict[Box, np.ndarray]:
    """Return each part of a tensor with int64 `[ranks, 2]`: ranks that have it, and its place among their parts. Parts
    without values are left out.

    Args:
        shares: Parts of every rank.
        numbers: int64 `[ranks]`, equal numbers for ranks with equal parts.
        index: Number of the tensor.
    """
    found: dict[Box, list[np.ndarray]] = {}
    different, first = np.unique(numbers, return_index=True)
    for number, rank in zip(different, first, strict=True):
        ranks: np.ndarray | None = None
        for place, box in enumerate(shares[rank].boxes(index)):
            ranks = np.flatnonzero(numbers == number) if ranks is None else ranks
            found.setdefault(box, []).append(np.stack([ranks, np.full(len(ranks), place)], axis=1))
    joined = {
        box: np.concatenate(several) for box, several in found.items() if all(start < stop for start, stop in box)
    }
    return {box: ranks[np.argsort(ranks[:, 0], kind="stable")] for box, ranks in joined.items()}


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


def _load(pieces: TensorPieces, item_bytes: int, num_ranks: int, num_waves: int = 1) -> np.ndarray:
    """Return int64 `[waves, ways, 2, ranks]`: bytes that each rank sends and receives on each of `TRAVELLING`."""
    size = _in_message(pieces, item_bytes)
    travels = pieces.way != IN_PLACE
    at = pieces.wave * len(TRAVELLING) + pieces.way - INTO_NODE
    shape = num_waves, len(TRAVELLING), num_ranks
    sides = [
        np.bincount((at * num_ranks + side)[travels], weights=size[travels], minlength=prod(shape)).reshape(shape)
        for side in (pieces.source, pieces.target)
    ]
    return np.stack(sides, axis=2).astype(np.int64)


def _waves(
    tensors: Sequence[PlannedTensor],
    kinds: Sequence[TensorPieces],
    kind_of: np.ndarray,
    num_ranks: int,
    wave_bytes: int,
) -> list[Wave]:
    """Collect consecutive tensors of a bucket in waves that no rank sends or receives too much in."""
    first = {int(kind): index for index, kind in reversed(list(enumerate(kind_of)))}
    loads = [
        _load(pieces, tensors[first[kind]].item_bytes, num_ranks, int(pieces.wave.max(initial=0)) + 1)
        for kind, pieces in enumerate(kinds)
    ]
    waves: list[Wave] = []
    members: list[tuple[int, int]] = []
    bucket, load = 0, np.zeros((len(TRAVELLING), 2, num_ranks), np.int64)
    for index, tensor in enumerate(tensors):
        for number, own in enumerate(loads[int(kind_of[index])]):
            if members and (tensor.bucket != bucket or (load + own).max() > wave_bytes):
                waves.append(_wave(bucket, members, load))
                members, load = [], np.zeros_like(load)
            bucket = tensor.bucket
            members.append((index, number))
            load += own
    if members:
        waves.append(_wave(bucket, members, load))
    return waves


def _wave(bucket: int, members: Sequence[tuple[int, int]], load: np.ndarray) -> Wave:
    return Wave(
        bucket, tuple(members), tuple(way for way, of_way in zip(TRAVELLING, load, strict=True) if of_way.any())
    )
