"""Weights reach every receiver, from one rank or from each, and a transfer that fails ends on every rank."""

import pytest

from rl_core.errors import WeightSyncError, WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.testing.model_worker import make_batch
from rl_core.testing.pooled_model import PooledModel
from rl_core.testing.rank_pool import free_port
from rl_core.testing.torch.received import ranks_apart, receive, receiving_threads, sent_by_every_rank
from rl_core.testing.torch.tiny_model import read_weights, write_tiny_model
from rl_core.weights import Transport

FACTORY = "dtensor_factories:build"


@pytest.fixture
def apart(ranks):
    """Each rank's senders wait at a place of their own; receivers ask for the rank in their thread's name."""
    with ranks_apart(ranks):
        yield


def open_model(ranks, folder):
    config = ModelConfig(model_name=str(folder), precision="float32")
    return PooledModel(ranks, FACTORY, config, ModelSpec(), 2, tensor_parallel_size=2)


def test_every_rank_sends_everything_to_receivers_of_its_own(ranks, apart, tmp_path):
    folder = write_tiny_model(tmp_path)
    with open_model(ranks, folder) as model:
        manifest, transport = model.manifest(1), sent_by_every_rank()
        with receiving_threads(2, lambda: receive(manifest, transport)) as received:
            digests = model.call("send", manifest, transport)
    source = read_weights(folder)
    for rank in range(2):
        tensors, taken = received[rank]
        assert digests[rank] == taken
        assert all(tensors[spec.name].equal(source[spec.name]) for spec in manifest.tensors)


def test_a_rank_whose_receiver_does_not_come_ends_the_transfer_of_all(ranks, apart, tmp_path):
    with open_model(ranks, write_tiny_model(tmp_path)) as model:
        generation = ranks.generation
        manifest, transport = model.manifest(1), sent_by_every_rank(timeout_s=2)

        def take():
            with pytest.raises(WeightSyncError) as caught:
                receive(manifest, transport)
            return caught.value

        with receiving_threads(1, take) as failures, pytest.raises(WorkerError, match="receiver"):
            model.call("send", manifest, transport)
        assert isinstance(failures[0], WeightSyncError)
        model.infer(make_batch(), [LOGPROBS])
        assert ranks.generation == generation


def test_receivers_that_do_not_come_leave_no_rank_waiting(ranks, tmp_path):
    with open_model(ranks, write_tiny_model(tmp_path)) as model:
        generation = ranks.generation
        transport = Transport("ipc", f"127.0.0.1:{free_port()}", 1, timeout_s=2)
        with pytest.raises(WorkerError, match="receiver"):
            model.send(model.manifest(1), transport)
        model.infer(make_batch(), [LOGPROBS])
        assert ranks.generation == generation


def test_weights_of_several_ranks_travel_through_files_that_are_gone_afterwards(ranks, tmp_path):
    folder, weights = write_tiny_model(tmp_path), tmp_path / "weights"
    transport = Transport("disk", str(weights), 1, bucket_bytes=4096, timeout_s=60)
    with open_model(ranks, folder) as model:
        for version in (1, 2):
            manifest = model.manifest(version)
            digest = model.send(manifest, transport)
            tensors, received = receive(manifest, transport)
            assert received == digest
            assert len(list(weights.iterdir())) == 1
    source = read_weights(folder)
    assert all(tensors[spec.name].equal(source[spec.name]) for spec in manifest.tensors)
    assert not weights.exists()
