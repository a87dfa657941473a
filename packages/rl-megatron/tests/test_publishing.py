"""Weights reach every receiver, from one rank or from each."""

import pytest
from layouts import EXPERT_LAYOUTS, LAYOUTS, write_family
from safetensors.torch import load_file

from rl_core.errors import WeightSyncError, WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.testing.losses import TokenLoss
from rl_core.testing.model_worker import make_batch
from rl_core.testing.pooled_model import PooledModel
from rl_core.testing.rank_pool import free_port
from rl_core.testing.torch.received import ranks_apart, receive, receiving_threads, sent_by_every_rank
from rl_core.weights import Transport

ALL = LAYOUTS | EXPERT_LAYOUTS
BUCKET_BYTES = 4096
"""Smaller than some of the weights and larger than others."""


@pytest.fixture
def apart(ranks):
    """Each rank's senders wait at a place of their own; receivers ask for the rank in their thread's name."""
    with ranks_apart(ranks):
        yield


def open_model(ranks, folder, layout, **settings):
    num_ranks, backend = ALL[layout]
    config = ModelConfig(model_name=str(folder), precision="float32", **settings)
    return PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **backend)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "tp2"),
        ("llama", "pp2"),
        ("qwen3", "tp2 pp2+sp"),
        ("qwen3_moe", "ep2"),
        ("deepseek_v3", "tp2 etp2 ep2+sp"),
        ("llama", "dp2"),
    ],
)
def test_every_rank_sends_everything_to_receivers_of_its_own(ranks, apart, tmp_path, family, layout):
    folder = write_family(tmp_path, family)
    num_ranks, _ = ALL[layout]
    with open_model(ranks, folder, layout) as model:
        manifest, transport = model.manifest(1), sent_by_every_rank(BUCKET_BYTES)
        with receiving_threads(num_ranks, lambda: receive(manifest, transport)) as received:
            digests = model.call("send", manifest, transport)
    source = load_file(folder / "model.safetensors")
    assert {spec.name for spec in manifest.tensors} == set(source) - set(manifest.tied)
    for rank in range(num_ranks):
        tensors, taken = received[rank]
        assert digests[rank] == taken
        assert all(tensors[spec.name].equal(source[spec.name]) for spec in manifest.tensors)


def test_every_rank_sends_what_adapters_add(ranks, apart, tmp_path):
    folder = write_family(tmp_path, "llama")
    with open_model(ranks, folder, "tp2 pp2+sp", lora_cfg=LoraConfig(enabled=True, dim=4)) as model:
        model.train_step(make_batch(), TokenLoss())
        model.export(str(tmp_path / "exported"))
        manifest, transport = model.manifest(1), sent_by_every_rank(BUCKET_BYTES)
        with receiving_threads(4, lambda: receive(manifest, transport)) as received:
            model.call("send", manifest, transport)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for tensors, _ in received.values():
        assert all(tensors[spec.name].equal(exported[spec.name]) for spec in manifest.tensors)
    source = load_file(folder / "model.safetensors")
    assert not all(exported[name].equal(source[name]) for name in source)


def test_a_rank_whose_receiver_does_not_come_ends_the_transfer_of_all(ranks, apart, tmp_path):
    with open_model(ranks, write_family(tmp_path, "llama"), "tp2") as model:
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
    with open_model(ranks, write_family(tmp_path, "llama"), "pp2") as model:
        generation = ranks.generation
        transport = Transport("ipc", f"127.0.0.1:{free_port()}", 1, timeout_s=2)
        with pytest.raises(WorkerError, match="receiver"):
            model.send(model.manifest(1), transport)
        model.infer(make_batch(), [LOGPROBS])
        assert ranks.generation == generation


def test_weights_of_several_ranks_travel_through_files_that_are_gone_afterwards(ranks, tmp_path):
    folder, weights = write_family(tmp_path, "llama"), tmp_path / "weights"
    transport = Transport("disk", str(weights), 1, bucket_bytes=4096, timeout_s=60)
    with open_model(ranks, folder, "tp2 pp2+sp") as model:
        for version in (1, 2):
            manifest = model.manifest(version)
            digest = model.send(manifest, transport)
            tensors, received = receive(manifest, transport)
            assert received == digest
            assert len(list(weights.iterdir())) == 1
    source = load_file(folder / "model.safetensors")
    assert all(tensors[spec.name].equal(source[spec.name]) for spec in manifest.tensors)
    assert not weights.exists()
