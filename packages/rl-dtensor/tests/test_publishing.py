"""Weights reach every receiver, from one rank or from each, and a transfer that fails ends on every rank."""

import threading

import pytest

from rl_core.errors import WeightSyncError, WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.testing.model_worker import make_batch
from rl_core.testing.pooled_model import PooledModel
from rl_core.testing.rank_pool import free_port
from rl_core.testing.torch.received import receive
from rl_core.testing.torch.tiny_model import read_weights, write_tiny_model
from rl_core.torch.transport import ipc
from rl_core.weights import Transport

FACTORY = "dtensor_factories:build"


@pytest.fixture
def apart(ranks, monkeypatch):
    """Each rank's senders wait at a place of their own; receivers ask for the rank in their thread's name."""
    original = ipc._meeting_place
    ranks.run("dtensor_factories:meet_apart", [()] * ranks.num_ranks)
    monkeypatch.setattr(ipc, "_meeting_place", lambda *place: f"{original(*place)}/{threading.current_thread().name}")
    generation = ranks.generation
    yield
    if ranks.generation == generation:
        ranks.run("dtensor_factories:meet_again", [()] * ranks.num_ranks)


def every_rank(timeout_s=60):
    return Transport("ipc", f"127.0.0.1:{free_port()}", 1, 4096, timeout_s, every_rank_sends=True)


def open_model(ranks, folder):
    config = ModelConfig(model_name=str(folder), precision="float32")
    return PooledModel(ranks, FACTORY, config, ModelSpec(), 2, tensor_parallel_size=2)


def test_every_rank_sends_everything_to_receivers_of_its_own(ranks, apart, tmp_path):
    folder = write_tiny_model(tmp_path)
    received = {}
    with open_model(ranks, folder) as model:
        manifest, transport = model.manifest(1), every_rank()

        def take():
            received[threading.current_thread().name] = receive(manifest, transport)

        receivers = [threading.Thread(target=take, name=str(rank)) for rank in range(2)]
        for receiver in receivers:
            receiver.start()
        digests = model.call("send", manifest, transport)
        for receiver in receivers:
            receiver.join(60)
    source = read_weights(folder)
    for rank in range(2):
        tensors, taken = received[str(rank)]
        assert digests[rank] == taken
        assert all(tensors[spec.name].equal(source[spec.name]) for spec in manifest.tensors)


def test_a_rank_whose_receiver_does_not_come_ends_the_transfer_of_all(ranks, apart, tmp_path):
    with open_model(ranks, write_tiny_model(tmp_path)) as model:
        generation = ranks.generation
        manifest, transport = model.manifest(1), every_rank(timeout_s=2)
        failures = []

        def take():
            with pytest.raises(WeightSyncError) as caught:
                receive(manifest, transport)
            failures.append(caught.value)

        receiver = threading.Thread(target=take, name="0")
        receiver.start()
        with pytest.raises(WorkerError, match="receiver"):
            model.call("send", manifest, transport)
        receiver.join(60)
        assert len(failures) == 1
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
