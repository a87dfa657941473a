"""Conformance suite of exchanges of parts of weights, for a training backend of any layout."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.devices import CPU
from rl_core.errors import WeightSyncError, WorkerError
from rl_core.model_config import LoraConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import Rank, RankPool, free_port
from rl_core.selfcheck.torch.received import Received, ranks_apart, receive, receiving_threads, sent_by_every_rank
from rl_core.testing.model_worker import make_batch
from rl_core.torch.transport import ReceivingEnd, exchange, open_receiver
from rl_core.torch.transport.bucket import Parts, Region, layout_of, parts_to_send
from rl_core.weights import Manifest, Transport

BUCKET_BYTES = 2**15

WITHOUT_ADAPTERS = LoraConfig()

MAX_COLLECTIVES = 8
"""Maximum number of messages of a rank for each bucket, the digests included."""


class ExchangeSuite(ABC):
    """Exchanges of parts by a training backend. Subclass it in a module with a fixture `ranks`, a `RankPool`."""

    num_ranks: ClassVar[int] = 2
    per_node: ClassVar[int] = 1
    adapters: LoraConfig = LoraConfig(enabled=True, dim=4)

    @abstractmethod
    def write(self, folder: Path) -> Path:
        """Write the files of a tiny model; returns their folder."""

    @abstractmethod
    def open(self, ranks: RankPool, folder: Path, lora: LoraConfig = WITHOUT_ADAPTERS) -> PooledModel:
        """Return a float32 model of these files that is split over `num_ranks` ranks, with adapters as configured."""

    @pytest.fixture
    def exchanging(self, ranks: RankPool) -> Iterator[None]:
        """Have the ranks count their messages, with `per_node` of them on each node."""
        with ranks_apart(ranks):
            arguments = [(self.per_node,)] * ranks.num_ranks
            ranks.run(_count_messages, arguments)
            generation = ranks.generation
            try:
                yield
            finally:
                if ranks.generation == generation:
                    ranks.run(_stop_counting, [()] * ranks.num_ranks)

    @pytest.mark.usefixtures("exchanging")
    def test_each_rank_gets_the_parts_that_its_receiver_keeps(self, ranks: RankPool, tmp_path: Path) -> None:
        with self.open(ranks, self.write(tmp_path)) as model:
            manifest = model.manifest(1)
            assert manifest.is_held_in_parts
            keeps = [parts_of_engine_rank(manifest, rank, self.num_ranks) for rank in range(self.num_ranks)]
            for _ in range(2):
                wholes, _ = self._sent(model, replace(manifest, is_held_in_parts=False))[0]
                transport, ends = sent_by_every_rank(BUCKET_BYTES), [ReceivingEnd(CPU) for _ in keeps]
                for version in (1, 2):
                    manifest = replace(manifest, version=version)
                    ranks.run(_begin_counting, [()] * ranks.num_ranks)
                    received = self._sent(model, manifest, transport, ends, keeps)
                    counted = ranks.run(_counted, [()] * ranks.num_ranks)
                    for rank, (tensors, _) in received.items():
                        for spec in manifest.tensors:
                            found, whole = tensors[spec.name], wholes[spec.name].contiguous()
                            regions = keeps[rank].get(spec.name, [Region.of(whole)])
                            assert all(each.read(found).equal(each.read(whole)) for each in regions), (rank, spec.name)
                            assert found.isnan().sum() == found.numel() - sum(each.num_values for each in regions)
                        kept = layout_of(manifest, transport).keeping(keeps[rank]).buckets
                        assert counted[rank][1] <= sum(bucket.num_bytes for bucket in kept)
                    assert len({calls for calls, _ in counted[: self.num_ranks]}) == 1
                    # It follows from the bytes, not from the number of tensors.
                    assert 0 < counted[0][0] <= MAX_COLLECTIVES * len(kept)
                for end in ends:
                    end.close()
                model.train_step(make_batch(), TokenLoss())

    def test_engines_apart_get_the_parts_that_they_keep(self, ranks: RankPool, tmp_path: Path) -> None:
        """Two replicas of two ranks, each of them in one group with all ranks of the policy."""
        with self.open(ranks, self.write(tmp_path)) as model:
            manifest = model.manifest(1)
            keeps = [parts_of_engine_rank(manifest, rank % 2, 2) for rank in range(4)]
            for version in (1, 2, 3):
                if version != 2:  # The second transfer uses the connection and the plan again.
                    address = f"127.0.0.1:{free_port()}"
                    apart = Transport("collective", address, len(keeps), BUCKET_BYTES, 60, every_rank_sends=True)
                    ends = [ReceivingEnd(CPU) for _ in keeps]
                found = self._received_apart(model, replace(manifest, version=version), apart, ends, keeps)
                if version == 1:
                    continue
                for end in ends:
                    end.close()
                whole = replace(apart, address=f"127.0.0.1:{free_port()}", every_rank_sends=False)
                broadcast = replace(manifest, version=version, is_held_in_parts=False)
                wanted = self._received_apart(model, broadcast, whole, [ReceivingEnd(CPU) for _ in keeps], keeps)
                for rank, (tensors, _) in found.items():
                    for name, tensor in wanted[rank][0].items():
                        bits = [each.reshape(-1).view(torch.uint8) for each in (tensors[name], tensor)]
                        assert bits[0].equal(bits[1]), (version, rank, name)
                model.train_step(make_batch(), TokenLoss())

    @pytest.mark.usefixtures("exchanging")
    def test_parts_have_adapters_added(self, ranks: RankPool, tmp_path: Path) -> None:
        """Receivers that keep equal parts get equal bits. A product of whole factors may be rounded otherwise."""
        with self.open(ranks, self.write(tmp_path), self.adapters) as model:
            base = model.manifest(1)
            before = self._sent(model, replace(base, is_held_in_parts=False))[0][0]
            for _ in range(2):
                model.train_step(make_batch(), TokenLoss())
            manifest = replace(base, version=2)
            wholes = self._sent(model, replace(manifest, is_held_in_parts=False))[0][0]
            whole = {spec.name: [Region.of(torch.empty(spec.shape, device="meta"))] for spec in manifest.tensors}
            keeps = [parts_to_send(whole, {spec.name: spec.shape for spec in manifest.tensors})] * self.num_ranks
            received = self._sent(
                model, manifest, sent_by_every_rank(BUCKET_BYTES), [ReceivingEnd(CPU) for _ in keeps], keeps
            )
        assert manifest.is_held_in_parts
        changed = [name for name, tensor in wholes.items() if not tensor.equal(before[name])]
        assert len(changed) >= len(self.adapters.target_modules)
        for spec in manifest.tensors:
            found = [tensors[spec.name] for tensors, _ in received.values()]
            assert all(each.equal(found[0]) for each in found), spec.name
            torch.testing.assert_close(found[0], wholes[spec.name], rtol=1e-6, atol=1e-7)
            assert spec.name in changed or found[0].equal(before[spec.name])

    @pytest.mark.usefixtures("exchanging")
    def test_a_broken_message_and_a_lost_receiver_end_the_transfer_of_all(
        self, ranks: RankPool, tmp_path: Path
    ) -> None:
        with self.open(ranks, self.write(tmp_path)) as model:
            generation = ranks.generation
            manifest = model.manifest(1)
            keeps = [parts_of_engine_rank(manifest, rank, self.num_ranks) for rank in range(self.num_ranks)]

            def take() -> Exception | None:
                rank = int(threading.current_thread().name)
                try:
                    with open_receiver(manifest, transport, 1, CPU, keeps[rank]) as receiver:
                        for _ in receiver:
                            if not number and rank == 0:
                                raise KeyError("no parameter of that name")
                except (KeyError, WeightSyncError) as error:
                    return error
                return None

            broken = r"received from rank \d other values than that rank sent, in "
            number = -1
            transport = sent_by_every_rank(BUCKET_BYTES)
            ranks.run(_begin_counting, [()] * ranks.num_ranks)
            with receiving_threads(self.num_ranks, take) as received:
                model.call("send", manifest, transport)
            assert not any(received.values())
            arrived = ranks.run(_num_arrived, [()] * ranks.num_ranks)
            # On some meshes a rank already holds all that it keeps.
            target, last = int(np.argmax(arrived)), max(arrived)
            broken_numbers = sorted({1, last}) if last else []
            for number, reason in (*((each, broken) for each in broken_numbers), (0, "no parameter of that name")):
                # A sender learns of a lost receiver when it fills a buffer again, so there are more buckets.
                transport = sent_by_every_rank(BUCKET_BYTES if number else BUCKET_BYTES // 8)
                ranks.run(_break_message, [(number, target)] * ranks.num_ranks)
                with receiving_threads(self.num_ranks, take) as received, pytest.raises(WorkerError, match=reason):
                    model.call("send", manifest, transport)
                assert all(received.values())
                assert ranks.generation == generation
            # The next transfer is as right as any.
            assert len(self._sent(model, manifest, sent_by_every_rank(BUCKET_BYTES))) == self.num_ranks

    def _received_apart(
        self,
        model: PooledModel,
        manifest: Manifest,
        transport: Transport,
        ends: Sequence[ReceivingEnd],
        keeps: Sequence[Parts],
    ) -> dict[int, Received]:
        """Send; return the tensors and the digest of each receiver."""

        def take() -> Received:
            rank = int(threading.current_thread().name)
            with ends[rank].transfer(manifest, transport, rank + 1, keeps[rank]) as receiver:
                tensors = {name: tensor.clone() for name, tensor in receiver}
            return tensors, receiver.digest

        with receiving_threads(len(keeps), take) as received:
            digests = model.call("send", manifest, transport)
        assert {digest for _, digest in received.values()} == {digest for sent in digests for digest in sent}
        return received

    def _sent(
        self,
        model: PooledModel,
        manifest: Manifest,
        transport: Transport | None = None,
        ends: Sequence[ReceivingEnd] = (),
        keeps: Sequence[Parts] = (),
    ) -> dict[int, Received]:
        """Send; return the tensors that each rank's receiver gets, and their digest."""
        transport = transport or sent_by_every_rank()

        def take() -> Received:
            rank = int(threading.current_thread().name)
            if not ends:
                return receive(manifest, transport)
            with ends[rank].transfer(manifest, transport, 1, keeps[rank]) as receiver:
                tensors = {name: tensor.clone() for name, tensor in receiver}
            return tensors, receiver.digest

        with receiving_threads(self.num_ranks, take) as received:
            digests = model.call("send", manifest, transport)
        assert [[received[rank][1]] for rank in range(self.num_ranks)] == digests
        return received


def parts_of_engine_rank(manifest: Manifest, rank: int, size: int) -> Parts:
    """Return parts that an engine rank could keep: rows or columns of a matrix, a half of them in two pieces, some
    experts, and vectors whole."""
    read: dict[str, list[Region]] = {}
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    for place, (name, shape) in enumerate(shapes.items()):
        whole = torch.empty(shape, device="meta")
        if ".experts." in name:
            read[name] = [Region.of(whole)] if place % size == rank else []
        elif len(shape) == 2:
            dim = int(name.endswith(("o_proj.weight", "down_proj.weight")))
            width = max(1, shape[dim] // size)
            own = whole.narrow(dim, min(rank, shape[dim] // width - 1) * width, width)
            halves = own.tensor_split(2, 0) if place % 2 else [own]
            read[name] = [Region.of(each) for each in halves]
    return parts_to_send(read, shapes)


def _count_messages(rank: Rank, per_node: int) -> None:
    counts = rank.held["messages"] = [0, 0, 0, 0]

    def all_to_all_single(arrived: Tensor, message: Tensor, *splits: Any) -> None:
        counts[0] += 1
        counts[1] += arrived.numel() * (arrived.dtype == torch.uint8)
        dist.all_to_all_single(arrived, message, *splits)
        if arrived.dtype == torch.uint8 and arrived.numel():
            counts[3] += 1
            if counts[3] == counts[2]:
                arrived[len(arrived) // 2] ^= 1

    exchanging = SimpleNamespace(**{**vars(dist), "all_to_all_single": all_to_all_single})
    patches: list[Any] = [
        mock.patch.object(exchange, "dist", exchanging),
        mock.patch.object(exchange, "node_name", return_value=f"node {rank.rendezvous.rank // per_node}"),
    ]
    rank.held["patches"] = patches
    for each in patches:
        each.start()


def _stop_counting(rank: Rank) -> None:
    for each in rank.held.pop("patches"):
        each.stop()


def _begin_counting(rank: Rank) -> None:
    rank.held["messages"][:] = [0, 0, 0, 0]


def _counted(rank: Rank) -> tuple[int, int]:
    """Return the number of collectives and of received bytes."""
    calls, num_bytes, *_ = rank.held["messages"]
    return calls, num_bytes


def _num_arrived(rank: Rank) -> int:
    """Return the number of messages of weights that arrived."""
    found: int = rank.held["messages"][3]
    return found


def _break_message(rank: Rank, number: int, target: int) -> None:
    """Change a bit of a message that arrives on a rank, by its number; 0 for none."""
    rank.held["messages"][:] = [0, 0, number if rank.rendezvous.rank == target else 0, 0]
