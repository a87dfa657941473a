"""Conformance suites of publishing weights, for a training backend of any layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.errors import WeightSyncError, WorkerError
from rl_core.model import LOGPROBS
from rl_core.model_config import LoraConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool, free_port
from rl_core.selfcheck.torch.received import Received, ranks_apart, receive, receiving_threads, sent_by_every_rank
from rl_core.selfcheck.torch.tiny_model import read_weights
from rl_core.testing.model_worker import make_batch
from rl_core.weights import Manifest, Transport, WeightForm


class PublishingSuite(ABC):
    """Publishing of weights by a training backend. Subclass it in a module with a fixture `ranks`, a `RankPool`."""

    @abstractmethod
    def write(self, folder: Path) -> Path:
        """Write the files of a tiny model; returns their folder."""

    @abstractmethod
    def open(self, ranks: RankPool, folder: Path) -> PooledModel:
        """Return a model of these files that is split over two ranks."""

    @pytest.fixture
    def apart(self, ranks: RankPool) -> Iterator[None]:
        """Make each rank's sender wait at its own place, and receivers ask for the rank in their thread's name."""
        with ranks_apart(ranks):
            yield

    @pytest.mark.usefixtures("apart")
    def test_a_rank_whose_receiver_does_not_come_ends_the_transfer_of_all(
        self, ranks: RankPool, tmp_path: Path
    ) -> None:
        with self.open(ranks, self.write(tmp_path)) as model:
            generation = ranks.generation
            manifest, transport = model.manifest(1), sent_by_every_rank(timeout_s=2)

            def take() -> WeightSyncError:
                with pytest.raises(WeightSyncError) as caught:
                    receive(manifest, transport)
                return caught.value

            with receiving_threads(1, take) as failures, pytest.raises(WorkerError, match="receiver"):
                model.call("send", manifest, transport)
            assert isinstance(failures[0], WeightSyncError)
            model.infer(make_batch(), [LOGPROBS])
            assert ranks.generation == generation

    def test_receivers_that_do_not_come_leave_no_rank_waiting(self, ranks: RankPool, tmp_path: Path) -> None:
        with self.open(ranks, self.write(tmp_path)) as model:
            generation = ranks.generation
            transport = Transport("ipc", f"127.0.0.1:{free_port()}", 1, timeout_s=2)
            with pytest.raises(WorkerError, match="receiver"):
                model.send(model.manifest(1), transport)
            model.infer(make_batch(), [LOGPROBS])
            assert ranks.generation == generation

    def test_weights_of_several_ranks_travel_through_files_that_are_gone_afterwards(
        self, ranks: RankPool, tmp_path: Path
    ) -> None:
        folder, weights = self.write(tmp_path), tmp_path / "weights"
        transport = Transport("disk", str(weights), 1, bucket_bytes=4096, timeout_s=60)
        with self.open(ranks, folder) as model:
            for version in (1, 2):
                manifest = model.manifest(version)
                digest = model.send(manifest, transport)
                tensors, received = receive(manifest, transport)
                assert received == digest
                assert len(list(weights.iterdir())) == 1
        source = read_weights(folder)
        assert all(tensors[spec.name].equal(source[spec.name]) for spec in manifest.tensors)
        assert not weights.exists()


class AdapterPublishingSuite(ABC):
    """Publishing of adapters by a training backend. Subclass it in a module with a fixture `ranks`, a `RankPool`."""

    @abstractmethod
    def write(self, folder: Path) -> Path:
        """Write the files of a tiny model; returns their folder."""

    @abstractmethod
    def open(self, ranks: RankPool, folder: Path, lora: LoraConfig) -> PooledModel:
        """Return a float32 model of these files that is split over two ranks, with adapters as configured."""

    def test_weights_and_adapters_travel_apart(self, ranks: RankPool, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        source = read_weights(self.write(tmp_path))
        with self.open(ranks, tmp_path, LoraConfig(enabled=True, dim=4)) as model:
            model.train_step(make_batch(), TokenLoss())
            model.export_adapter(str(tmp_path / "adapter"))
            both, received_both = self._sent(ranks, model, "factored")
            alone, received_alone = self._sent(ranks, model, "adapter")
        exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        factors = {name.removeprefix("base_model.model."): factor for name, factor in exported.items()}
        assert (both.form, alone.form) == ("factored", "adapter")
        assert both.without_factors().tensors + alone.tensors == both.tensors
        assert {spec.name for spec in both.tensors} == {*source, *factors} - set(both.tied)
        assert alone.num_bytes == sum(factor.nbytes for factor in factors.values())
        assert any(factor.any() for name, factor in factors.items() if name.endswith("lora_B.weight"))
        for received, wanted in ((received_both, {**source, **factors}), (received_alone, factors)):
            assert len(received) == 2
            for tensors, _ in received:
                assert all(tensor.equal(wanted[name]) for name, tensor in tensors.items())

    def test_a_model_without_adapters_sends_none(self, ranks: RankPool, tmp_path: Path) -> None:
        with (
            self.open(ranks, self.write(tmp_path), LoraConfig()) as model,
            pytest.raises(WorkerError, match="cannot send adapters"),
        ):
            model.manifest(1, "adapter")

    def _sent(self, ranks: RankPool, model: PooledModel, form: WeightForm) -> tuple[Manifest, list[Received]]:
        """Return tensors that the receivers of each of two ranks get."""
        manifest, transport = model.manifest(1, form), sent_by_every_rank()
        with ranks_apart(ranks), receiving_threads(2, lambda: receive(manifest, transport)) as received:
            digests = model.call("send", manifest, transport)
        assert [[received[rank][1]] for rank in range(2)] == digests
        return manifest, list(received.values())
