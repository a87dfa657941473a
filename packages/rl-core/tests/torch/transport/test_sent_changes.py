from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_peers import make_tensors, manifest_of, transport

from rl_core.devices import CPU
from rl_core.errors import WeightSyncError
from rl_core.torch.transport import ReceivingEnd, SendingEnd
from rl_core.torch.transport.changes import BLOCK, base_of, pack, unpack
from rl_core.weights import Transport, TransportKind

LINKS: tuple[TransportKind, ...] = ("collective", "disk")


def way_of(kind: TransportKind, folder: Path, num_receivers: int = 1) -> Transport:
    return replace(transport(kind, folder, num_receivers, timeout_s=60), sends_changes=True)


def put(sending: SendingEnd, tensors: dict[str, torch.Tensor], version: int, way: Transport) -> int:
    """Send a version; returns the bytes that travelled."""
    with sending.transfer(manifest_of(tensors, version), way) as sender:
        for name, tensor in tensors.items():
            sender.put(name, tensor)
        sender.finish()
        return sender.num_bytes_sent


def take(receiving: ReceivingEnd, like: dict[str, torch.Tensor], version: int, way: Transport, rank: int = 1):  # type: ignore[no-untyped-def]
    with receiving.transfer(manifest_of(like, version), way, rank) as receiver:
        return {name: tensor.clone() for name, tensor in receiver}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
    }


def step(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The tensors with a few values changed, among them a zero's sign."""
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(seed)
    for name in ("first", "brain", "large"):
        flat = found[name].view(-1)
        flat[torch.randint(0, len(flat), (3,), generator=generator)] = float(seed)
        flat[-1] = -0.0 if seed % 2 else 0.0
    return found


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 3 * BLOCK), st.integers(0, 300), st.integers(0, 1000))
def test_changes_give_the_same_bytes(lane: int, num_values: int, num_changed: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 256, (lane * num_values,), dtype=torch.uint8, generator=generator)
    whole = before.clone()
    whole[torch.randint(0, len(whole), (num_changed,), generator=generator)] ^= 1
    packed = pack(whole, before, lane, base=-seed)
    if packed is None:
        # each change takes its value and two bytes, beside the counts of blocks
        assert num_changed * (lane + 2) + 4 * (num_values // BLOCK + 1) + 16 >= len(whole)
        return
    assert len(packed) < len(whole)
    assert base_of(packed) == -seed
    assert unpack(packed, before, lane)
    assert torch.equal(before, whole)


def test_broken_changes_are_not_applied() -> None:
    before, whole = torch.zeros(4000, dtype=torch.uint8), torch.zeros(4000, dtype=torch.uint8)
    whole[3999] = 1
    packed = pack(whole, before, 2, base=1)
    assert packed is not None
    for place in (8, len(packed) - 1):
        broken = packed.clone()
        broken[place] ^= 127
        target = before.clone()
        assert not unpack(broken, target, 2)
        assert torch.equal(target, before)


@pytest.mark.parametrize("kind", LINKS)
def test_every_version_arrives_bit_equal(kind: TransportKind, tmp_path: Path) -> None:
    way = way_of(kind, tmp_path, 2)
    sending, receiving = SendingEnd(CPU), {rank: ReceivingEnd(CPU) for rank in (1, 2)}
    first = make_tensors()
    other = {name: tensor for name, tensor in step(first, 3).items() if name != "half"}
    versions = [first, step(first, 1), step(first, 2), make_tensors(9), other, step(other, 4)]
    travelled = []
    for version, tensors in enumerate(versions, 1):
        arrived = {}

        def receive(rank: int, tensors: dict[str, torch.Tensor] = tensors, version: int = version) -> None:
            arrived[rank] = take(receiving[rank], tensors, version, way, rank)  # noqa: B023 - joined below

        threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
        for thread in threads if way.ends_meet else ():
            thread.start()
        travelled.append(put(sending, tensors, version, way))
        for thread in threads:
            if not way.ends_meet:
                thread.start()
            thread.join()
        assert [bits(arrived[rank]) for rank in (1, 2)] == [bits(tensors)] * 2
    for end in (sending, *receiving.values()):
        end.close()
    whole, second, third, fourth, fifth, last = travelled
    assert second < whole / 50
    assert third < whole / 50
    # all values differ, or the buckets hold other tensors
    assert fourth > whole / 2
    assert fifth > whole / 2
    assert last < whole / 50


def test_a_receiver_that_missed_a_version_is_sent_all(tmp_path: Path) -> None:
    way, again = way_of("disk", tmp_path / "1"), way_of("disk", tmp_path / "2")
    sending, receiving = SendingEnd(CPU), ReceivingEnd(CPU)
    versions = {version: step(make_tensors(), version) for version in (1, 2, 3)}
    put(sending, versions[1], 1, way)
    take(receiving, versions[1], 1, way)
    put(sending, versions[2], 2, way)
    put(sending, versions[3], 3, way)
    with pytest.raises(WeightSyncError, match="receiver rank 1 was sent the changes since a version that it does not"):
        take(receiving, versions[3], 3, way)
    put(sending, versions[3], 3, again)
    assert bits(take(receiving, versions[3], 3, again)) == bits(versions[3])
    sending.close()
    receiving.close()


@pytest.mark.parametrize("kind", LINKS)
def test_a_restarted_receiver_is_sent_all(kind: TransportKind, tmp_path: Path) -> None:
    way, again = way_of(kind, tmp_path / "1"), way_of(kind, tmp_path / "2")
    sending, first, second, tensors = SendingEnd(CPU), ReceivingEnd(CPU), ReceivingEnd(CPU), make_tensors()
    arrived: list[dict[str, torch.Tensor]] = []

    def deliver(receiving: ReceivingEnd, way: Transport, version: int) -> None:
        thread = threading.Thread(target=lambda: arrived.append(take(receiving, tensors, version, way)))
        if way.ends_meet:
            thread.start()
        put(sending, tensors, version, way)
        if not way.ends_meet:
            thread.start()
        thread.join()

    deliver(first, way, 1)
    first.close()
    if way.ends_meet:
        with pytest.raises(WeightSyncError):
            put(sending, tensors, 2, way)
    else:
        put(sending, tensors, 2, way)
        with pytest.raises(WeightSyncError, match="does not hold"):
            take(second, tensors, 2, way)
    deliver(second, again, 3)
    assert [bits(each) for each in arrived] == [bits(tensors)] * 2
    sending.close()
    second.close()


def test_shared_memory_always_sends_all() -> None:
    with pytest.raises(ValueError, match="one that sends alone shares its memory"):
        Transport("ipc", "here:1", 1, sends_changes=True)
