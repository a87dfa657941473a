from __future__ import annotations

import json
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_peers import KINDS, MEETING, Peer, make_tensors, manifest_of, receive, send, transport

from rl_core.devices import CPU
from rl_core.errors import WeightSyncError
from rl_core.torch.transport import ReceivingEnd, SendingEnd, interrupt, ipc, open_receiver, open_sender
from rl_core.torch.transport.bucket import ALIGNMENT, Bucket, lay_out
from rl_core.torch.transport.collective import _Broadcasts, listening_store
from rl_core.torch.transport.ipc import IpcReceiverLink
from rl_core.torch.transport.rendezvous import accept_receivers
from rl_core.weights import Manifest, TensorSpec, Transport, TransportKind, num_bytes

SOON_S = 120.0
"""A death is noticed long before the time-out of 600 s, however busy the machine is."""


def _stays_in_shared_memory(content: bytes) -> list[str]:
    """Files of shared memory, whoever made them, that hold these bytes."""
    found = []
    for path in Path("/dev/shm").iterdir():
        try:
            found += [path.name] if path.is_file() and content in path.read_bytes() else []
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("sender_fault", "receiver_fault"), [("killed", ""), ("", "killed"), ("", "raises"), ("", "")])
def test_nothing_stays_in_shared_memory(sender_fault: str, receiver_fault: str, tmp_path: Path) -> None:
    way = transport("ipc", tmp_path, 2)
    peers = [Peer(receive, 7, way, 1), Peer(receive, 7, way, 2, receiver_fault), Peer(send, 7, way, sender_fault)]
    for peer in peers:
        peer.process.join(30)
    assert _stays_in_shared_memory(make_tensors(7)["first"].numpy().tobytes()) == []


def test_a_folder_is_swept_of_what_a_killed_sender_left(tmp_path: Path) -> None:
    way = transport("disk", tmp_path)
    Peer(send, 0, way, "killed").process.join(30)
    assert any(tmp_path.iterdir())
    end, tensors = SendingEnd(CPU), make_tensors()
    for version in (1, 2):
        with end.transfer(manifest_of(tensors, version), way) as sender:
            for name, tensor in tensors.items():
                sender.put(name, tensor)
            sender.finish()
        (only,) = tmp_path.iterdir()
        assert json.loads((only / "model.safetensors.index.json").read_text())["weight_map"].keys() == tensors.keys()
    end.close()
    assert not tmp_path.exists()


@contextmanager
def sent(seed: int, way: Transport) -> Iterator[str]:
    """The digest of a version that stays where it is until the block has been left."""
    end, tensors = SendingEnd(CPU), make_tensors(seed)
    with end.transfer(manifest_of(tensors), way) as sender:
        for name, tensor in tensors.items():
            sender.put(name, tensor)
        (digest,) = sender.finish()
    yield digest
    end.close()


@pytest.mark.parametrize("num_receivers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_arrive_bit_equal(kind: TransportKind, num_receivers: int, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, num_receivers)
    peers = [Peer(receive, 0, way, rank) for rank in range(1, num_receivers + 1)]
    with sent(0, way) as digest:
        for peer in peers:
            (wrong, received), _ = peer.result()
            assert wrong == []
            assert received == digest
    assert not tmp_path.exists() or not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_or_an_address_serves_again(kind: TransportKind, tmp_path: Path) -> None:
    way = transport(kind, tmp_path)
    for seed in (1, 2):
        peer = Peer(receive, seed, way, 1)
        with sent(seed, way):
            assert peer.result()[0][0] == []


@pytest.mark.parametrize("kind", MEETING)
@pytest.mark.parametrize("fault", ["killed", "raises"])
def test_a_lost_receiver_is_named_soon(kind: TransportKind, fault: str, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, 2)
    peers = [Peer(receive, 0, way, 1), Peer(receive, 0, way, 2, fault)]
    error, seconds = Peer(send, 0, way).result()
    assert isinstance(error, WeightSyncError)
    assert "receiver rank 2" in str(error)
    assert seconds < SOON_S
    # the other receiver hears of it as well, unless it had everything by then
    result, seconds = peers[0].result()
    assert isinstance(result, WeightSyncError) or result[0] == []
    assert seconds < SOON_S


def test_a_receivers_reason_reaches_the_sender(tmp_path: Path) -> None:
    kinds: list[TransportKind] = ["ipc", "collective"]
    for kind in kinds:
        way = transport(kind, tmp_path)
        Peer(receive, 0, way, 1, "raises")
        with pytest.raises(WeightSyncError, match="no parameter of that name"):
            send(0, way)


@pytest.mark.parametrize("kind", MEETING)
@pytest.mark.parametrize("fault", ["killed", "raises"])
def test_a_lost_sender_is_named_soon(kind: TransportKind, fault: str, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, 2)
    peers = [Peer(receive, 0, way, rank) for rank in (1, 2)]
    Peer(send, 0, way, fault)
    for peer in peers:
        error, seconds = peer.result()
        assert isinstance(error, WeightSyncError)
        assert "sender" in str(error)
        assert seconds < SOON_S


@pytest.mark.parametrize("kind", MEETING)
def test_a_time_out_names_the_receiver_and_the_phase(kind: TransportKind, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, 2, timeout_s=1.5)
    peers = [Peer(receive, 0, way, 1), Peer(receive, 0, way, 2, "hangs")]
    error, seconds = Peer(send, 0, way).result()
    assert isinstance(error, WeightSyncError)
    assert "timed out" in str(error)
    assert "rank" in str(error)
    assert "bucket" in str(error)
    assert seconds < SOON_S
    for peer in peers:
        peer.end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_out_at_a_receiver_names_it(kind: TransportKind, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, 1, timeout_s=1.5)
    sender = Peer(send, 0, way, "hangs")
    error, seconds = Peer(receive, 0, way, 1).result()
    assert isinstance(error, WeightSyncError)
    assert "timed out" in str(error)
    assert "receiver rank 1" in str(error)
    assert seconds < SOON_S
    sender.end()


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_there_is_a_time_out_of_the_rendezvous(kind: TransportKind, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, timeout_s=0.3)
    if kind in MEETING:
        with pytest.raises(WeightSyncError, match=r"timed out after 0\.3 s: sender rank 0 in rendezvous"):
            send(0, way)
    with pytest.raises(WeightSyncError, match=r"timed out after 0\.3 s: receiver rank 4"):
        receive(0, way, 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", MEETING)
def test_a_sender_that_waits_for_nobody_can_be_interrupted(kind: TransportKind, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, timeout_s=600)
    interrupting = threading.Timer(0.3, interrupt, (way, "its receivers died"))
    interrupting.start()
    with pytest.raises(WeightSyncError, match=r"interrupted during sender rank 0 in rendezvous.*its receivers died"):
        send(0, way)
    interrupting.join()


@pytest.mark.parametrize("kind", MEETING)
def test_a_sender_whose_receiver_hangs_can_be_interrupted(kind: TransportKind, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, timeout_s=600)
    peer = Peer(receive, 0, way, 1, "hangs")
    interrupting = threading.Timer(1.0, interrupt, (way, "the receiver is given up"))
    interrupting.start()
    with pytest.raises(WeightSyncError, match=r"interrupted during .*the receiver is given up"):
        send(0, way)
    peer.end()


@pytest.mark.parametrize("kind", MEETING)
def test_ends_with_other_manifests_refuse_each_other(kind: TransportKind, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, timeout_s=5)
    tensors = make_tensors()
    other = manifest_of({**tensors, "first": torch.zeros(33, 8)})

    def receive_other() -> None:
        with pytest.raises(WeightSyncError), open_receiver(other, way, 1, CPU) as receiver:
            list(receiver)

    thread = threading.Thread(target=receive_other)
    thread.start()
    with pytest.raises(WeightSyncError, match="another manifest"):
        send(0, way)
    thread.join()


@pytest.mark.parametrize("kind", ["ipc", "collective"])
def test_corruption_on_the_way_is_found_and_named(
    kind: TransportKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_core.torch.transport.collective import CollectiveReceiverLink

    link = IpcReceiverLink if kind == "ipc" else CollectiveReceiverLink
    honest = link.receive

    def corrupting(self, bucket):  # type: ignore[no-untyped-def]
        buffer = honest(self, bucket)
        for slot in bucket.slots:
            if slot.spec.name == "brain":
                buffer[slot.offset + 1000] += 1
        return buffer

    monkeypatch.setattr(link, "receive", corrupting)
    way = transport(kind, tmp_path)
    found = []

    def take() -> None:
        with pytest.raises(WeightSyncError) as refused:
            receive(0, way, 1)
        found.append(refused.value)

    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises(WeightSyncError) as caught:
        send(0, way)
    thread.join()
    assert "brain" in caught.value.tensors
    assert caught.value.tensors == found[0].tensors == bucket_of("brain", way)


def bucket_of(name: str, way: Transport) -> tuple[str, ...]:
    """All tensors that travel in one bucket with this one."""
    layout = lay_out(manifest_of(make_tensors()), way.bucket_bytes)
    buckets = [tuple(slot.spec.name for slot in bucket.slots) for bucket in layout.buckets]
    return next(names for names in buckets if name in names)


def test_corruption_on_disk_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_core.torch.transport import disk

    def corrupting(tensors: dict[str, torch.Tensor], path: Path) -> None:
        honest({name: tensor + 1 if name == "last" else tensor for name, tensor in tensors.items()}, path)

    honest = disk.save_file
    monkeypatch.setattr(disk, "save_file", corrupting)
    way = transport("disk", tmp_path)
    with sent(0, way), pytest.raises(WeightSyncError) as caught:
        receive(0, way, 1)
    assert caught.value.tensors == bucket_of("last", way)


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match=r"sender rank 0 could not write .*file"):
        send(0, transport("disk", tmp_path / "file" / "weights"))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    way = transport("disk", tmp_path)
    with sent(0, way):
        gone = next(tmp_path.rglob("model-00001-*"))
        gone.unlink()
        with pytest.raises(WeightSyncError, match=f"receiver rank 1 could not read .*{gone.name}"):
            receive(0, way, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_serves_many_transfers(kind: TransportKind, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, 2)
    sending, receiving = SendingEnd(CPU), {rank: ReceivingEnd(CPU) for rank in (1, 2)}
    links: set[int] = set()

    def take(rank: int, version: int, tensors: dict[str, torch.Tensor]) -> None:
        with receiving[rank].transfer(manifest_of(tensors, version), way, rank) as receiver:
            arrived[rank] = {name: tensor.clone() for name, tensor in receiver}
        links.add(id(receiving[rank]._link))

    for version in range(1, 6):
        # the third is larger than what the buffers hold
        tensors = make_tensors(version) | ({"huge": torch.randn(90_000)} if version == 3 else {})
        arrived: dict[int, dict[str, torch.Tensor]] = {}
        threads = [threading.Thread(target=take, args=(rank, version, tensors)) for rank in (1, 2)]
        for thread in threads if way.ends_meet else ():
            thread.start()
        with sending.transfer(manifest_of(tensors, version), way) as sender:
            for name, tensor in tensors.items():
                sender.put(name, tensor)
            sender.finish()
        links.update(map(id, sending._links))
        for thread in threads:
            if not way.ends_meet:
                thread.start()
            thread.join()
        for rank in (1, 2):
            assert all(torch.equal(arrived[rank][name], tensors[name]) for name in tensors)
    assert len(links) == 3
    for end in (sending, *receiving.values()):
        end.close()


@pytest.mark.parametrize("kind", MEETING)
def test_a_sender_brings_tensors_together_before_its_receivers_are_ready(kind: TransportKind, tmp_path: Path) -> None:
    way = transport(kind, tmp_path, timeout_s=20)
    sending, receiving, tensors = SendingEnd(CPU), ReceivingEnd(CPU), make_tensors()
    arrived: list[list[str]] = []

    def take(version: int, is_gathered: threading.Event) -> None:
        assert version == 1 or is_gathered.wait(60)
        with receiving.transfer(manifest_of(tensors, version), way, 1) as receiver:
            arrived.append([name for name, _ in receiver])

    for version in (1, 2):
        is_gathered = threading.Event()
        thread = threading.Thread(target=take, args=(version, is_gathered))
        thread.start()
        with sending.transfer(manifest_of(tensors, version), way) as sender:
            is_gathered.set()
            for name, tensor in tensors.items():
                sender.put(name, tensor)
            sender.finish()
        thread.join()
    assert arrived == [list(tensors)] * 2
    sending.close()
    receiving.close()


@pytest.mark.parametrize("kind", MEETING)
def test_a_connection_that_failed_is_opened_again_elsewhere(kind: TransportKind, tmp_path: Path) -> None:
    way, other = transport(kind, tmp_path), transport(kind, tmp_path)
    sending, receiving, tensors = SendingEnd(CPU), ReceivingEnd(CPU), make_tensors()

    def take(way: Transport) -> None:
        with suppress(WeightSyncError), receiving.transfer(manifest_of(tensors), way, 1) as receiver:
            arrived.append([name for name, _ in receiver])

    def put(way: Transport, omit: str = "") -> None:
        thread = threading.Thread(target=take, args=(way,))
        thread.start()
        try:
            with sending.transfer(manifest_of(tensors), way) as sender:
                for name, tensor in tensors.items():
                    if name != omit:
                        sender.put(name, tensor)
                sender.finish()
        finally:
            thread.join()

    arrived: list[list[str]] = []
    put(way)
    with pytest.raises(WeightSyncError, match="where the manifest has large"):
        put(way, omit="large")
    put(other)
    assert arrived == [list(tensors)] * 2
    sending.close()
    receiving.close()


def _refused(put: list[tuple[str, torch.Tensor]], tmp_path: Path) -> WeightSyncError:
    way = transport("ipc", tmp_path, num_receivers=0)
    manifest = manifest_of({"a": torch.zeros(2, 3), "b": torch.zeros(4)})

    def send_all() -> None:
        with open_sender(manifest, way, CPU) as sender:
            for name, tensor in put:
                sender.put(name, tensor)
            sender.finish()

    with pytest.raises(WeightSyncError) as caught:
        send_all()
    return caught.value


def test_a_sender_keeps_to_the_manifest(tmp_path: Path) -> None:
    a, b = torch.zeros(2, 3), torch.zeros(4)
    assert _refused([("b", b)], tmp_path).tensors == ("b", "a")
    assert _refused([("a", a.t())], tmp_path).tensors == ("a",)
    assert _refused([("a", a.double())], tmp_path).tensors == ("a",)
    assert _refused([("a", a)], tmp_path).tensors == ("b",)
    assert _refused([("a", a), ("b", b), ("c", b)], tmp_path).tensors == ("c",)


def test_a_dtype_that_no_transport_carries_is_named() -> None:
    with pytest.raises(WeightSyncError, match=r"q has dtype complex64; .*bfloat16"):
        lay_out(Manifest(0, (TensorSpec("q", (2,), "complex64"),)), 100)


def test_two_receivers_of_one_rank_are_refused(tmp_path: Path) -> None:
    way = transport("ipc", tmp_path, 2, timeout_s=5)
    peers = [Peer(receive, 0, way, 1), Peer(receive, 0, way, 1)]
    with pytest.raises(WeightSyncError, match="two receivers have rank 1"):
        send(0, way)
    assert all(isinstance(peer.result()[0], WeightSyncError) for peer in peers)


def test_receivers_that_stop_early_are_noticed(tmp_path: Path) -> None:
    way = transport("ipc", tmp_path)

    def stop_early() -> None:
        with pytest.raises(WeightSyncError), open_receiver(manifest_of(make_tensors()), way, 1, CPU) as receiver:
            next(iter(receiver))

    thread = threading.Thread(target=stop_early)
    thread.start()
    with pytest.raises(WeightSyncError, match="left before the last tensor"):
        send(0, way)
    thread.join()


SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(SHAPES, st.sampled_from(["float32", "bfloat16", "uint8", "int64", "bool"])), max_size=12)


@given(SPECS, st.integers(1, 600))
def test_a_layout_gives_each_tensor_its_own_aligned_place(
    specs: list[tuple[tuple[int, ...], str]], bucket_bytes: int
) -> None:
    tensors = tuple(TensorSpec(f"t{index}", shape, dtype) for index, (shape, dtype) in enumerate(specs))
    layout = lay_out(Manifest(0, tensors), bucket_bytes)
    assert [slot.spec for bucket in layout.buckets for slot in bucket.slots] == list(tensors)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for bucket in layout.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset >= end
            end = slot.offset + num_bytes(slot.spec)
        assert end <= bucket.num_bytes
        assert sum(slot.num_bytes for slot in bucket.slots) <= bucket_bytes or len(bucket.slots) == 1


@settings(max_examples=15, deadline=None)
@given(SPECS, st.integers(1, 600), st.sampled_from(KINDS))
def test_any_tensors_arrive(
    tmp_path_factory: pytest.TempPathFactory,
    specs: list[tuple[tuple[int, ...], str]],
    bucket_bytes: int,
    kind: TransportKind,
) -> None:
    tensors = {
        f"t{index}": torch.randint(0, 2, shape).to(getattr(torch, dtype)) for index, (shape, dtype) in enumerate(specs)
    }
    way = replace(transport(kind, tmp_path_factory.mktemp("shared")), bucket_bytes=bucket_bytes)
    manifest = manifest_of(tensors)
    arrived: dict[str, torch.Tensor] = {}

    def take(way: Transport) -> None:
        with open_receiver(manifest, way, 1, CPU) as receiver:
            arrived.update({name: tensor.clone() for name, tensor in receiver})

    thread = threading.Thread(target=take, args=(way,))
    thread.start()
    end = SendingEnd(CPU)
    with end.transfer(manifest, way) as sender:
        for name, tensor in tensors.items():
            sender.put(name, tensor)
        sender.finish()
    thread.join()
    end.close()
    assert list(arrived) == list(tensors)
    assert all(torch.equal(arrived[name], tensors[name]) for name in tensors)
    assert all(arrived[name].dtype == tensors[name].dtype for name in tensors)


def test_stores_listen_on_the_address_they_are_given_alone() -> None:
    store = listening_store("127.0.0.1", timeout_s=60)
    store.set("met", "yes")
    assert store.get("met") == b"yes"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))


def test_a_store_that_dies_while_a_receiver_joins_names_the_sender(tmp_path: Path) -> None:
    way = transport("collective", tmp_path)
    host, port = "127.0.0.1", int(way.address.rpartition(":")[2])

    def offer_a_store_that_nobody_serves() -> None:
        with socket.create_server((host, port)) as listener, socket.create_server((host, 0)) as unserved:
            channels = accept_receivers(listener, way)
            channels[1].send({"store": unserved.getsockname()[1], "size": 2, "rank": 1}, "joining")
            channels[1].abort("the sender gave up")
            ended.wait()

    ended = threading.Event()
    thread = threading.Thread(target=offer_a_store_that_nobody_serves)
    thread.start()
    with pytest.raises(WeightSyncError, match="the sender gave up during receiver rank 1, joining"):
        receive(0, way, 1)
    ended.set()
    thread.join()


def _mapped() -> list[str]:
    """Mappings of this process that are buffers of an ipc transfer."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:weights" in line]


@pytest.mark.parametrize("kind", ["ipc", "collective", "changes"])
def test_buffers_are_gone_after_each_transfer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a receiver holds the last tensor. The receivers let a device's buffer go before the sender frees it;
    here the host's take their place."""
    monkeypatch.setattr(ipc.HostBuffers, "need_release", True)
    freed, mapped_then, buffers = ipc.HostBuffers.close, [], []
    lent = _Broadcasts.buffer

    def free(own: ipc.HostBuffers) -> None:
        mapped_then.append(len(_mapped()) - len(own.tensors))
        freed(own)

    def lend(group: _Broadcasts, bucket: Bucket) -> torch.Tensor:
        buffers.append(weakref.ref(lent(group, bucket)))
        return lent(group, bucket)

    monkeypatch.setattr(ipc.HostBuffers, "close", free)
    monkeypatch.setattr(_Broadcasts, "buffer", lend)
    way = transport("ipc" if kind == "ipc" else "collective", tmp_path, 2)
    way = replace(way, sends_changes=kind == "changes")
    sending, versions = SendingEnd(CPU), [make_tensors(seed) for seed in (0, 1)]
    done = threading.Barrier(3, timeout=SOON_S)

    def take(rank: int) -> None:
        end = ReceivingEnd(CPU)
        for version, tensors in enumerate(versions, start=1):
            with end.transfer(manifest_of(tensors, version), way, rank) as receiver:
                for name, tensor in receiver:
                    assert torch.equal(tensor, tensors[name])
                done.wait()
                done.wait()
        end.close()

    with ThreadPoolExecutor(2) as pool:
        taking = [pool.submit(take, rank) for rank in (1, 2)]
        with ExitStack() as stack:
            stack.callback(done.abort)
            stack.callback(sending.close)
            for version, tensors in enumerate(versions, start=1):
                with sending.transfer(manifest_of(tensors, version), way) as sender:
                    for name, tensor in tensors.items():
                        sender.put(name, tensor)
                    sender.finish()
                done.wait()
                assert _mapped() == []
                assert [buffer for buffer in buffers if buffer() is not None] == []
                done.wait()
            for each in taking:
                each.result()
    assert mapped_then == ([0, 0] if kind == "ipc" else [])
    assert bool(buffers) == (kind != "ipc")


def test_memory_of_a_transfer_that_breaks_off_is_freed_after_every_receiver_has_let_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc.HostBuffers, "need_release", True)
    events = []
    freed, let_go = ipc.HostBuffers.close, IpcReceiverLink.close

    def close_receiver(link: IpcReceiverLink) -> None:
        events.append("let go")
        let_go(link)

    def free(buffers: ipc.HostBuffers) -> None:
        events.append("freed")
        freed(buffers)

    monkeypatch.setattr(IpcReceiverLink, "close", close_receiver)
    monkeypatch.setattr(ipc.HostBuffers, "close", free)
    way = transport("ipc", tmp_path, 2)

    def take(rank: int) -> None:
        with suppress(WeightSyncError):
            receive(0, way, rank)

    threads = [threading.Thread(target=take, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    with pytest.raises(KeyError, match="no parameter"):
        send(0, way, "raises")
    for thread in threads:
        thread.join()
    assert events == ["let go", "let go", "freed"]
