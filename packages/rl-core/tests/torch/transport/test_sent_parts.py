from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transport_peers import KINDS, make_tensors, manifest_of, transport

from rl_core.devices import CPU
from rl_core.errors import WeightSyncError
from rl_core.testing.torch.weight_sender import Corrupting
from rl_core.torch.transport import ReceivingEnd, SendingEnd
from rl_core.torch.transport.bucket import (
    ArrivedBucket,
    Parts,
    Region,
    decoded,
    digest_of,
    encoded,
    in_boxes,
    lay_out,
    parts_to_send,
)
from rl_core.weights import Manifest, TensorSpec, Transport, TransportKind

ROWS, COLUMNS = 300, 100
"""Shape of `large`."""


def half(tensors: Mapping[str, torch.Tensor], place: int) -> Parts:
    """Half the columns of the large matrix, two parts of the last one, one of them alone, and nothing of a third."""
    large = torch.empty(ROWS, COLUMNS)[:, place * 50 : place * 50 + 50]
    last = torch.empty(64, 64)
    parts = {
        "large": [Region.of(large)],
        "last": [Region.of(last[:16]), Region.of(last.t()[32:, 48:])][: 2 - place],
        "brain": [],
    }
    return {name: tuple(regions) for name, regions in parts.items() if name in tensors}


def of_keepers(tensors: Mapping[str, torch.Tensor]) -> dict[int, Parts]:
    """Two receivers that keep the same, one that keeps the other half, and one that keeps everything."""
    return {1: half(tensors, 0), 2: half(tensors, 1), 3: half(tensors, 0), 4: {}}


def expected(tensor: torch.Tensor, regions: tuple[Region, ...] | None) -> torch.Tensor:
    if regions is None:
        return tensor
    whole = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    for region in regions:
        region.read(whole).copy_(region.read(tensor.contiguous()))
    return whole


class Ends:
    """A sender and receivers in threads, with a connection for all transfers."""

    def __init__(self, way: Transport) -> None:
        self.way = way
        self.sending = SendingEnd(CPU)
        self.receiving = {rank: ReceivingEnd(CPU) for rank in range(1, way.num_receivers + 1)}

    def deliver(
        self, tensors: dict[str, torch.Tensor], version: int, keep: Mapping[int, Parts], broken: str = ""
    ) -> tuple[dict[int, dict[str, torch.Tensor]], list[str], int]:
        """The tensors that each receiver got, the digests, and the bytes that travelled."""
        arrived: dict[int, dict[str, torch.Tensor]] = {}
        digests: dict[int, str] = {}
        errors: list[WeightSyncError] = []
        manifest = manifest_of(tensors, version)

        def take(rank: int) -> None:
            try:
                with self.receiving[rank].transfer(manifest, self.way, rank, keep[rank]) as receiver:
                    arrived[rank] = {name: tensor.clone() for name, tensor in receiver}
                digests[rank] = receiver.digest
            except WeightSyncError as error:
                errors.append(error)

        threads = [threading.Thread(target=take, args=(rank,)) for rank in self.receiving]
        for thread in threads if self.way.ends_meet else ():
            thread.start()
        try:
            with self.sending.transfer(manifest, self.way) as sender:
                if broken:
                    sender.links = [Corrupting(link, broken) for link in sender.links]
                for name, tensor in tensors.items():
                    sender.put(name, tensor)
                sent = sender.finish()
        finally:
            for thread in threads:
                if not self.way.ends_meet:
                    thread.start()
                thread.join()
        assert set(digests.values()) == set(sent)
        assert not errors
        return arrived, sent, sender.num_bytes_sent

    def close(self) -> None:
        for end in (self.sending, *self.receiving.values()):
            end.close()


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (
        found.dtype == wanted.dtype
        and torch.equal(found.isnan(), wanted.isnan())
        and found[~found.isnan()].equal(wanted[~wanted.isnan()])
    )


@pytest.mark.parametrize("sends_changes", [False, True])
def test_a_receiver_is_sent_what_it_keeps(sends_changes: bool, tmp_path: Path) -> None:
    way = replace(transport("collective", tmp_path, 4, timeout_s=60), sends_changes=sends_changes)
    ends = Ends(way)
    other = {name: tensor for name, tensor in make_tensors(7).items() if name != "first"}
    for version, tensors in enumerate([make_tensors(1), make_tensors(2), other], 1):
        keep = of_keepers(tensors)
        arrived, digests, num_bytes = ends.deliver(tensors, version, keep)
        for rank, parts in keep.items():
            for name, tensor in tensors.items():
                assert same(arrived[rank][name], expected(tensor, parts.get(name))), (version, rank, name)
        assert len(digests) == 3
        if not sends_changes:
            rest = sum(4 * 64 * -(-t.nbytes // 64) for n, t in tensors.items() if n not in ("large", "last", "brain"))
            assert num_bytes < 2 * make_tensors()["large"].nbytes + 3 * make_tensors()["last"].nbytes + rest
    ends.close()


def test_what_a_group_keeps_may_change_with_what_is_sent(tmp_path: Path) -> None:
    """As adapters that are sent alone, which every rank is given whole."""
    ends, tensors = Ends(transport("collective", tmp_path, 4, timeout_s=60)), make_tensors()
    ends.deliver(tensors, 1, of_keepers(tensors))
    alone = {"first": tensors["first"]}
    arrived, _, _ = ends.deliver(alone, 2, {rank: {} for rank in range(1, 5)})
    assert all(same(arrived[rank]["first"], tensors["first"]) for rank in range(1, 5))
    arrived, _, _ = ends.deliver(tensors, 3, of_keepers(tensors))
    assert same(arrived[2]["large"], expected(tensors["large"], half(tensors, 1)["large"]))
    ends.close()


def test_receivers_of_one_group_that_keep_different_parts_are_refused(tmp_path: Path) -> None:
    ends, tensors = Ends(transport("collective", tmp_path, 4, timeout_s=60)), make_tensors()
    ends.deliver(tensors, 1, of_keepers(tensors))
    with pytest.raises(WeightSyncError, match="receiver rank 3 expects another manifest than the sender's"):
        ends.deliver(tensors, 2, of_keepers(tensors) | {3: half(tensors, 1)})
    ends.close()


@pytest.mark.parametrize("name", ["large", "last"])
def test_parts_that_arrive_broken_are_named(name: str, tmp_path: Path) -> None:
    ends, tensors = Ends(transport("collective", tmp_path, 4, timeout_s=60)), make_tensors()
    with pytest.raises(WeightSyncError, match=f"differs from what was sent, in the buckets of .*{name}"):
        ends.deliver(tensors, 1, of_keepers(tensors), broken=name)
    ends.close()


def test_parts_are_read_in_the_buffer_that_they_arrive_in(tmp_path: Path) -> None:
    """Without a whole tensor; also rows that a layer has several times, and the parts of a transposed one."""
    way, tensors = transport("collective", tmp_path, timeout_s=60), make_tensors()
    row = Region.of(torch.empty(ROWS, COLUMNS)[:1].expand(4, COLUMNS))
    keep = {**half(tensors, 0), "large": (row.once(), Region.of(torch.empty(ROWS, COLUMNS)[5:, 50:]))}
    read: dict[str, list[torch.Tensor]] = {}
    left: list[ArrivedBucket] = []

    def take() -> None:
        with ReceivingEnd(CPU).transfer(manifest_of(tensors), way, 1, keep) as receiver:
            for bucket in receiver.by_bucket():
                left.append(bucket)
                for slot in bucket.slots:
                    wanted = slot.parts or [Region.of(tensors[slot.spec.name].contiguous())]
                    wanted = [row if each == row.once() else each for each in wanted]
                    read[slot.spec.name] = [bucket.read(slot, each).clone() for each in wanted]
                    with suppress(KeyError):
                        bucket.read(slot, Region((1, 1), (1, 1), 3))
                        assert slot.parts is None, "this part has not arrived"

    thread = threading.Thread(target=take)
    thread.start()
    with SendingEnd(CPU).transfer(manifest_of(tensors), way) as sender:
        for name, tensor in tensors.items():
            sender.put(name, tensor)
        sender.finish()
    thread.join()
    assert read.keys() == tensors.keys() - {"brain"}, "nothing is kept of it"
    for name, found in read.items():
        whole = tensors[name].contiguous()
        wanted = [row, keep[name][1]] if name == "large" else keep.get(name, [Region.of(whole)])
        assert [same(part, region.read(whole)) for part, region in zip(found, wanted, strict=True)] == [True] * len(
            found
        )
    assert all(not typed.numel() for bucket in left for typed in bucket._typed.values()), "the buffers are free"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "collective"])
def test_what_is_written_once_for_all_receivers_stays_whole(kind: TransportKind, tmp_path: Path) -> None:
    ends, tensors = Ends(transport(kind, tmp_path, 4, timeout_s=60)), make_tensors()
    arrived, digests, _ = ends.deliver(tensors, 1, of_keepers(tensors))
    assert all(same(arrived[rank][name], tensor) for rank in arrived for name, tensor in tensors.items())
    assert len(digests) == 1
    ends.close()


def test_parts_are_asked_for_only_where_they_are_less_than_the_whole() -> None:
    whole = torch.empty(4, 6)
    read = {
        "all": [Region.of(whole)],
        "rows": [Region.of(whole[:2]), Region.of(whole[2:])],
        "twice": [Region.of(whole[1:2]), Region.of(whole[1:2])],
        "repeated": [Region.of(whole[:1].expand(8, 6))],
        "none": [],
    }
    parts = parts_to_send(read, dict.fromkeys(read, (4, 6)))
    row = Region((1, 6), (6, 1), 6)
    assert parts == {"twice": (row,), "repeated": (Region((1, 6), (0, 1), 0),), "none": ()}
    assert decoded(encoded(parts)) == parts
    assert not digest_of({})
    assert digest_of(parts) != digest_of({**parts, "none": (row,)})


@given(st.data())
def test_regions_are_views(data: st.DataObject) -> None:
    """A slice of a transposed slice, read of another tensor of the same shape."""
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)))
    cuts = [slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape]
    order = data.draw(st.permutations(range(3)))

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[tuple(cuts)].permute(*order)

    values = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape)
    region = Region.of(part(torch.empty(shape)))
    assert region.read(values).equal(part(values))
    assert region.num_values == part(values).numel()


@given(st.data())
def test_a_slice_is_a_box_with_the_dims_of_its_tensor(data: st.DataObject) -> None:
    """Also one that is transposed; and every other row is none."""
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)))
    cuts = [data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda c: c[0] < c[1])) for n in shape]
    order = data.draw(st.permutations(range(3)))
    spec = TensorSpec("tensor", shape, "int64")
    view = torch.empty(shape)[tuple(slice(*cut) for cut in cuts)].permute(*order)
    layout = lay_out(Manifest(1, (spec,)), 2**20).keeping({"tensor": (Region.of(view),)})
    slot = layout.buckets[0].slots[0]
    assert list(slot.boxes) == [tuple(cuts)]
    values = torch.arange(prod(shape)).reshape(shape)
    buffer = torch.zeros(layout.capacity, dtype=torch.uint8)
    slot.boxed(buffer)[0].copy_(values[tuple(slice(*cut) for cut in cuts)])
    expected = torch.zeros_like(buffer)
    slot.fill(expected, values)
    assert buffer.equal(expected)


def test_parts_that_are_not_boxes_are_kept_whole() -> None:
    whole = torch.empty(4, 6)
    parts = {
        "rows": (Region.of(whole[1:3]),),
        "every other": (Region.of(whole[::2]),),
        "flat": (Region.of(whole.view(-1)[3:9]),),
    }
    assert in_boxes(parts, dict.fromkeys(parts, (4, 6))) == {"rows": parts["rows"]}
