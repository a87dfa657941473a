"""Exchange of parts of tensors among the ranks that send them, each of which then has the parts for its receiver.

Every rank sends and receives what `rl_core.resharding` plans, in messages between pairs of ranks. The digest of each
message is compared with the sender's at the end, so that a value that changes on its way is noticed and the tensors
that it may be in are named.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.errors import WeightSyncError
from rl_core.resharding import (
    ALIGNMENT,
    IN_PLACE,
    WITHIN_NODE,
    Box,
    ExchangePlan,
    PlannedTensor,
    Share,
    UnplannableError,
    Wave,
    assign_buckets,
    plan_exchange,
)
from rl_core.torch.transport.bucket import DTYPES, Bucket, Layout
from rl_core.torch.transport.changes import ChangedLanes
from rl_core.torch.transport.digest import PendingDigest, begin_digest, read_digests
from rl_core.weights import ITEM_BYTES

MASK = 2**63 - 1

Given = TypeVar("Given")

MAX_SHOWN = 8
"""Maximum number of names in an error."""


class HeldPart(NamedTuple):
    """Part of a tensor that a rank holds.

    Args:
        box: Place in the whole tensor.
        values: View of the values, with the shape of the box, in whatever floating dtype the rank has; or a function
            that makes them, if receivers get other values than the rank holds. It is called in each wave that takes
            something from them, so that no more than the parts of a wave exist at one time.
    """

    box: Box
    values: Tensor | Callable[[], Tensor]

    def read(self) -> Tensor:
        """Return the values."""
        return self.values if isinstance(self.values, Tensor) else self.values()

    def with_product(self, left: Tensor, right: Tensor, scale: float) -> HeldPart:
        """Return the part with its share of `scale * left @ right` added in float32.

        The share is computed for the whole part, whatever pieces are sent of it, so that ranks that hold equal parts
        send equal bits.

        Args:
            left: `[..., rows, dim]`, for the whole tensor.
            right: `[..., dim, columns]`, for the whole tensor.
            scale: Factor of the product.
        """
        *outer, columns = [slice(*each) for each in self.box]
        # Copies, because a view would keep the factors of all ranks in memory.
        rows, inputs = left[tuple(outer)].clone(), right[(*outer[:-1], slice(None), columns)].clone()
        return HeldPart(self.box, lambda: self.read().to(rows.device, torch.float32) + scale * (rows @ inputs))

    def with_factor(self, factor: Tensor) -> HeldPart:
        """Return the part multiplied by its share of a factor of rows or columns, in float32.

        Args:
            factor: `[rows, 1]` or `[1, columns]`, for the whole matrix.
        """
        rows, columns = (slice(*span) for span in self.box)
        own = (factor[:, columns] if len(factor) == 1 else factor[rows]).clone()
        return HeldPart(self.box, lambda: self.read().to(own.device, torch.float32) * own)


Holdings = Mapping[str, Sequence[HeldPart]]
"""Names of tensors to the parts that a rank holds. Ranks hold equal parts or such as do not overlap, and together all
of each tensor."""


class OwnPiece(NamedTuple):
    """A piece of a tensor that this rank sends or receives.

    Args:
        peer: Rank at the other end.
        part: Place of the part that it is in, among those that this rank keeps or holds.
        is_kept: True if the part is one that this rank keeps, False if it is one that it holds.
        within: Slices of the part.
    """

    peer: int
    part: int
    is_kept: bool
    within: tuple[slice, ...]

    @property
    def shape(self) -> list[int]:
        """Shape of the piece."""
        return [each.stop - each.start for each in self.within]


class RankShare(NamedTuple):
    """The part of one rank in an exchange, from which all ranks plan.

    Args:
        held: Parts that it holds.
        kept: Parts that it is to have afterwards.
        node: Name of its node.
    """

    held: Share
    kept: Share
    node: str

    @classmethod
    def of(cls, layout: Layout, holdings: Holdings) -> RankShare:
        """Return the share of this process.

        Args:
            layout: Layout with the parts that it keeps.
            holdings: Parts that it holds.
        """
        slots = [slot for bucket in layout.buckets for slot in bucket.slots]
        held = Share.of([part.box for part in holdings.get(slot.spec.name, ())] for slot in slots)
        return cls(held, Share.of(slot.boxes for slot in slots), node_name())

    def at(self, order: Sequence[int]) -> RankShare:
        """Return the share with the tensors in another order."""
        held, kept = (each._replace(chosen=each.chosen[order]) for each in (self.held, self.kept))
        return RankShare(held, kept, self.node)

    def key(self, layout: Layout, wave_bytes: int) -> str:
        """Return a digest that differs for another share, for other tensors, and for waves of another size."""
        names = repr([(slot.spec, bucket.index) for bucket in layout.buckets for slot in bucket.slots])
        digest = hashlib.sha256(repr((self.held.choices, self.kept.choices, self.node, names, wave_bytes)).encode())
        for each in (self.held, self.kept):
            digest.update(each.chosen.tobytes())
        return digest.hexdigest()[:16]


class KeptPlan(NamedTuple):
    """One rank's part of a plan, kept for the exchanges that follow.

    Args:
        keys: Digest of the parts that each rank holds and keeps.
        buckets: Bucket of each tensor of the layout that was given, if the plan is for other buckets.
        fingerprint: Digest of the whole plan.
        waves: Waves of all ranks.
        kind_of: Kind of each tensor.
        pieces: Pieces that this rank sends, and those that it receives, by the kind of tensor, the wave among those of
            the tensor, and the way.
    """

    keys: Sequence[str]
    buckets: Sequence[int]
    fingerprint: str
    waves: Sequence[Wave]
    kind_of: Sequence[int]
    pieces: Mapping[tuple[int, int, int], tuple[list[OwnPiece], list[OwnPiece]]]


def planned(
    kept: KeptPlan | None, layout: Layout, holdings: Holdings, control: dist.ProcessGroup, wave_bytes: int
) -> KeptPlan:
    """Return the plan of an exchange, the last one if nothing has changed for any rank; collective.

    It is for buckets that every rank keeps about as much of, `KeptPlan.buckets`.

    Args:
        kept: The last plan.
        layout: Layout with the parts that this rank's receiver keeps; all ranks have the same tensors in order.
        holdings: Parts that this rank holds.
        control: All ranks, on gloo.
        wave_bytes: Maximum number of bytes that a rank sends, that it receives, and that it keeps, at one time.

    Raises:
        WeightSyncError: If the held parts do not make up the tensors, or the ranks made different plans.
    """
    own = RankShare.of(layout, holdings)
    keys = _from_all(own.key(layout, wave_bytes), control)
    if kept is not None and kept.keys == keys:
        return kept
    shares, grouped, buckets = balanced(_from_all(own, control), layout, wave_bytes)
    made = plan_of(shares, grouped, dist.get_rank(control), keys, wave_bytes=wave_bytes)._replace(buckets=buckets)
    prints = _from_all(made.fingerprint, control)
    if len(set(prints)) > 1:
        raise WeightSyncError(f"the ranks made different plans of an exchange of weights: {', '.join(prints)}")
    return made


def balanced(
    shares: Sequence[RankShare], layout: Layout, bucket_bytes: int
) -> tuple[list[RankShare], Layout, list[int]]:
    """Return the shares of all ranks and the layout in buckets that every rank keeps about as much of, and the number
    of the bucket of each tensor, in the order of the given layout."""
    buckets = assign_buckets(_tensors(layout), [share.kept for share in shares], bucket_bytes)
    order = sorted(range(len(buckets)), key=lambda place: buckets[place])
    return [share.at(order) for share in shares], layout.grouped(buckets), buckets


def plan_of(
    shares: Sequence[RankShare], layout: Layout, rank: int, keys: Sequence[str], *, wave_bytes: int
) -> KeptPlan:
    """Return one rank's part of the plan that follows from the shares of all ranks.

    Raises:
        WeightSyncError: If the held parts do not make up the tensors.
    """
    slots = [slot for bucket in layout.buckets for slot in bucket.slots]
    nodes: dict[str, int] = {}
    try:
        plan = plan_exchange(
            _tensors(layout),
            [share.held for share in shares],
            [share.kept for share in shares],
            [nodes.setdefault(share.node, len(nodes)) for share in shares],
            wave_bytes=wave_bytes,
        )
    except UnplannableError as error:
        name = slots[error.tensor].spec.name
        raise WeightSyncError(f"{name} cannot be exchanged: {error}", (name,)) from error
    own = shares[rank]
    pieces = dict(_own_pieces(plan, rank, own.held, own.kept))
    return KeptPlan(keys, (), plan.fingerprint, plan.waves, plan.kind_of.tolist(), pieces)


def _tensors(layout: Layout) -> list[PlannedTensor]:
    return [
        PlannedTensor(slot.spec.shape, ITEM_BYTES[slot.spec.dtype], bucket.index)
        for bucket in layout.buckets
        for slot in bucket.slots
    ]


def _own_pieces(
    plan: ExchangePlan, rank: int, held: Share, kept: Share
) -> Iterator[tuple[tuple[int, int, int], tuple[list[OwnPiece], list[OwnPiece]]]]:
    """Yield what a rank sends and receives: kind, wave and way, and the pieces."""
    found: dict[tuple[int, int, int], tuple[list[OwnPiece], list[OwnPiece]]] = {}
    for kind, every in enumerate(plan.kinds):
        tensor = int((plan.kind_of == kind).argmax())
        pieces = every.at((every.source == rank) | (every.target == rank))
        boxes = held.boxes(tensor), kept.boxes(tensor)
        for way, is_relayed, source, source_part, target, target_part, start, stop, wave in zip(
            *(column.tolist() for column in pieces), strict=True
        ):
            sent, received = found.setdefault((kind, wave, way), ([], []))
            for rows, own, peer, part, is_kept in (
                (sent, source, target, source_part, bool(is_relayed)),
                (received, target, source, target_part, True),
            ):
                if own == rank:
                    corner = [first for first, _ in boxes[is_kept][part]]
                    within = zip(start, stop, corner, strict=True)
                    slices = tuple(slice(first - base, last - base) for first, last, base in within)
                    rows.append(OwnPiece(peer, part, is_kept, slices))
    yield from found.items()


def node_name() -> str:
    """Return a name of this process's node."""
    return socket.gethostname()


def _from_all(own: Given, control: dist.ProcessGroup) -> list[Given]:
    """Return what every rank gives, in the order of ranks; collective."""
    given: list[Given] = [own] * dist.get_world_size(control)
    dist.all_gather_object(given, own, group=control)
    return given


Travel = Callable[[Tensor, Tensor, list[int], list[int]], None]
"""Sends a message to all ranks and fills another from all: what arrives, what is sent, and the bytes for each rank of
both. As `torch.distributed.all_to_all_single`."""


class Exchange:
    """One rank's part in an exchange.

    Args:
        plan: This rank's part of the plan.
        layout: Layout with the parts that this rank's receiver keeps.
        holdings: Parts that this rank holds.
        device: Device of the messages.
        travel: Sends the messages of a wave; collective.
        rank: This rank.
        names: Names of all ranks, for errors.
        lanes: Messages of the last exchange, to send only their changes between nodes; None to send everything.

    Attributes:
        num_bytes_sent: Bytes that this rank has sent to others.
        num_bytes_planned: Bytes that it would have sent if everything had changed.
    """

    def __init__(
        self,
        plan: KeptPlan,
        layout: Layout,
        holdings: Holdings,
        device: torch.device,
        *,
        travel: Travel,
        rank: int,
        names: Sequence[str],
        lanes: ChangedLanes | None = None,
    ) -> None:
        self._plan = plan
        self._lanes = lanes
        if lanes is not None:
            lanes.begin(plan.fingerprint, layout.manifest)
        self.num_bytes_sent = self.num_bytes_planned = 0
        self._device = device
        self._slots = [slot for bucket in layout.buckets for slot in bucket.slots]
        self._held = [holdings.get(slot.spec.name, ()) for slot in self._slots]
        self._read: dict[tuple[int, int], Tensor] = {}
        self._travel_by = travel
        self._rank, self._names = rank, names
        self._size = len(names)
        self._sent: list[tuple[int, PendingDigest]] = []
        self._received: list[tuple[int, PendingDigest, list[str]]] = []
        self._waves = {bucket: list(waves) for bucket, waves in groupby(plan.waves, lambda wave: wave.bucket)}

    @classmethod
    def among_senders(
        cls, plan: KeptPlan, layout: Layout, holdings: Holdings, device: torch.device, lanes: ChangedLanes | None = None
    ) -> Exchange:
        """Return an exchange among the ranks of the default group."""
        names = [f"rank {rank}" for rank in range(dist.get_world_size())]
        travel, rank = dist.all_to_all_single, dist.get_rank()
        return cls(plan, layout, holdings, device, travel=travel, rank=rank, names=names, lanes=lanes)

    @torch.no_grad()
    def fill(self, bucket: Bucket, buffer: Tensor) -> None:
        """Fill the buffer of a bucket with the parts for this rank's receiver; collective.

        Args:
            bucket: Bucket of the layout.
            buffer: uint8, at least as large as the bucket.
        """
        for wave in self._waves.get(bucket.index, ()):
            self._read.clear()
            kept = {tensor: self._slots[tensor].boxed(buffer) for tensor, _ in wave.tensors}
            for tensor, number in wave.tensors:
                sent, received = self._pieces(tensor, number, IN_PLACE)
                for source, target in zip(sent, received, strict=True):
                    kept[tensor][target.part][target.within].copy_(self._values(tensor, source.part)[source.within])
            for way in wave.ways:
                self._travel(wave, way, kept)
        self._read.clear()

    def told_digests(self) -> dict[int, list[int]]:
        """Return the digests of the messages for this rank as `compare` takes them; collective."""
        sent = self.sent_digests()
        own = [digest for peer in sorted(sent) for digest in sent[peer]]
        received = [[peer for peer, _, _ in self._received].count(rank) for rank in range(self._size)]
        told = torch.empty(sum(received), dtype=torch.int64, device=self._device)
        message = torch.tensor(own, dtype=torch.int64, device=self._device)
        self._travel_by(told, message, received, [len(sent.get(rank, ())) for rank in range(self._size)])
        return {peer: each.tolist() for peer, each in enumerate(told.split(received)) if len(each)}

    def sent_digests(self) -> dict[int, list[int]]:
        """Return the digests of the messages that this rank sent, in their order, by the rank that they went to."""
        return _by_rank([peer for peer, _ in self._sent], [digest for _, digest in self._sent])

    def received_digests(self) -> dict[int, list[int]]:
        """Return the digests of the messages that arrived, in their order, by the rank that they came from."""
        return _by_rank([peer for peer, _, _ in self._received], [digest for _, digest, _ in self._received])

    def compare(self, told: Mapping[int, Sequence[int]]) -> None:
        """Compare the digests of the received and the sent parts.

        Args:
            told: Digests of the messages for this rank, in their order, by the rank that sent them.

        Raises:
            WeightSyncError: Naming the tensors of a message that arrived otherwise.
        """
        found = {peer: iter(digests) for peer, digests in self.received_digests().items()}
        sent = {peer: iter(digests) for peer, digests in told.items()}
        wrong = [
            (peer, names)
            for peer, _, names in self._received
            if next(found[peer]) != next(sent.get(peer, iter(())), None)
        ]
        if wrong:
            names = list(dict.fromkeys(name for _, several in wrong for name in several))
            raise WeightSyncError(
                f"{self._names[self._rank]} received from {self._names[wrong[0][0]]} other values than that rank sent, "
                f"in {', '.join(names[:MAX_SHOWN])}",
                tuple(names),
            )

    def _pieces(self, tensor: int, number: int, way: int) -> tuple[list[OwnPiece], list[OwnPiece]]:
        return self._plan.pieces.get((self._plan.kind_of[tensor], number, way), ([], []))

    def _values(self, tensor: int, part: int) -> Tensor:
        """Return the values of a part that this rank holds; they are read only once in a wave."""
        if (tensor, part) not in self._read:
            self._read[tensor, part] = self._held[tensor][part].read()
        return self._read[tensor, part]

    def _travel(self, wave: Wave, way: int, kept: Mapping[int, Sequence[Tensor]]) -> None:
        """Send and receive the pieces of a wave on one of their ways."""
        sides: tuple[list[tuple[int, OwnPiece]], list[tuple[int, OwnPiece]]] = ([], [])
        for tensor, number in wave.tensors:
            for side, pieces in zip(sides, self._pieces(tensor, number, way), strict=True):
                side += [(tensor, piece) for piece in pieces]
        messages, places, splits = zip(*(self._lay_out(side) for side in sides), strict=True)
        sources = [
            (kept[tensor][piece.part] if piece.is_kept else self._values(tensor, piece.part))[piece.within]
            for (tensor, piece), _ in places[0]
        ]
        _copy([place for _, place in places[0]], sources)
        self._sent += [(peer, begin_digest(part)) for peer, part in self._by_peer(messages[0], splits[0])]
        self.num_bytes_planned += messages[0].numel()
        if self._lanes is None or way == WITHIN_NODE:
            self._travel_by(messages[1], messages[0], splits[1], splits[0])
            self.num_bytes_sent += messages[0].numel()
        else:
            self._travel_changed(wave, way, self._lanes, messages, splits)
        for peer, part in self._by_peer(messages[1], splits[1]):
            names = [self._slots[tensor].spec.name for (tensor, piece), _ in places[1] if piece.peer == peer]
            self._received.append((peer, begin_digest(part), list(dict.fromkeys(names))))
        targets = [kept[tensor][piece.part][piece.within] for (tensor, piece), _ in places[1]]
        _copy(targets, [place for _, place in places[1]])

    def _travel_changed(
        self, wave: Wave, way: int, lanes: ChangedLanes, messages: Sequence[Tensor], splits: Sequence[list[int]]
    ) -> None:
        """Send what has changed of a message since the last exchange, and complete another."""
        sizes = torch.zeros(self._size, dtype=torch.int64, device=self._device)
        changed = []
        # The first tensor of a wave and its number there occur in no other wave.
        lane = wave.tensors[0], way
        for peer, part in self._by_peer(messages[0], splits[0]):
            changed.append(lanes.packed((lane, peer), part))
            sizes[peer] = changed[-1].numel()
        arriving = torch.empty_like(sizes)
        ones = [1] * self._size
        self._travel_by(arriving, sizes, ones, ones)
        sent, received = sizes.tolist(), arriving.tolist()
        arrived = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        self._travel_by(arrived, torch.cat([*changed, messages[0][:0]]), received, sent)
        self.num_bytes_sent += sum(sent)
        found = dict(self._by_peer(arrived, received))
        for peer, part in self._by_peer(messages[1], splits[1]):
            lanes.put_into(part, (lane, peer), found[peer])

    def _lay_out(
        self, side: list[tuple[int, OwnPiece]]
    ) -> tuple[Tensor, list[tuple[tuple[int, OwnPiece], Tensor]], list[int]]:
        """Return a message to or from all ranks, the place of each piece in it, and the bytes for each rank."""
        side.sort(key=lambda each: each[1].peer)
        splits, starts, end = [0] * self._size, [], 0
        for tensor, piece in side:
            size = prod(piece.shape) * ITEM_BYTES[self._slots[tensor].spec.dtype]
            size = -(-size // ALIGNMENT) * ALIGNMENT
            starts.append(end)
            splits[piece.peer] += size
            end += size
        message = torch.zeros(end, dtype=torch.uint8, device=self._device)
        places = []
        for (tensor, piece), start in zip(side, starts, strict=True):
            spec = self._slots[tensor].spec
            size = prod(piece.shape) * ITEM_BYTES[spec.dtype]
            place = message[start : start + size].view(DTYPES[spec.dtype]).view(piece.shape)
            places.append(((tensor, piece), place))
        return message, places, splits

    def _by_peer(self, message: Tensor, splits: list[int]) -> list[tuple[int, Tensor]]:
        return [(peer, part) for peer, part in enumerate(message.split(splits)) if part.numel()]


def _by_rank(peers: Sequence[int], pending: Sequence[PendingDigest]) -> dict[int, list[int]]:
    """Return digests by rank, each without its highest bit: an int64 then holds it."""
    found: dict[int, list[int]] = {}
    for peer, digest in zip(peers, read_digests(pending), strict=True):
        found.setdefault(peer, []).append(int(digest.rpartition("-")[2], 16) & MASK)
    return found


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors to others of the same shapes, in one call: there are thousands of small ones."""
    if targets:
        torch._foreach_copy_(targets, sources)
