"""Weights reach every receiver, from one rank or from each, and a transfer that fails ends on every rank."""

import pytest

from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.received import ranks_apart, receive, receiving_threads, sent_by_every_rank
from rl_core.selfcheck.torch.tiny_model import read_weights, write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.publishing import AdapterPublishingSuite, PublishingSuite
from rl_core.testing.torch.exchanges import WITHOUT_ADAPTERS, ExchangeSuite

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
        assert digests[rank] == [taken]
        assert all(tensors[spec.name].equal(source[spec.name]) for spec in manifest.tensors)


MESHES = {
    "tp2": (2, "qwen3", {"tensor_parallel_size": 2}),
    "fsdp4": (4, "qwen3", {}),
    "pp2 x fsdp2": (4, "qwen3", {"pipeline_parallel_size": 2}),
    "ep2 x tp2 x fsdp2": (4, "qwen3_moe", {"expert_parallel_size": 2, "tensor_parallel_size": 2}),
    "ep2 x fsdp4": (4, "qwen3_moe", {"expert_parallel_size": 2}),
    "tp2 x fsdp2, float8": (4, "qwen3", {"tensor_parallel_size": 2, "qat": {"enabled": True, "format": "float8"}}),
    "tp2, int4": (2, "qwen3", {"tensor_parallel_size": 2, "qat": {"enabled": True, "format": "int4", "group_size": 8}}),
}
"""Ranks, family and settings."""


@pytest.mark.parametrize("mesh", partly_exhaustive(list(MESHES), always=["ep2 x tp2 x fsdp2"]))
class TestExchange(ExchangeSuite):
    per_node = 2

    @pytest.fixture(autouse=True)
    def chosen(self, mesh):
        self.num_ranks, self.family, self.settings = MESHES[mesh]
        if self.family == "qwen3_moe":
            stacks = ["experts.gate_up_proj", "experts.down_proj"]
            self.adapters = LoraConfig(enabled=True, dim=4, target_parameters=stacks)

    def write(self, folder):
        return write_tiny_model(folder, self.family)

    def open(self, ranks, folder, lora=WITHOUT_ADAPTERS):
        if lora.enabled and "qat" in self.settings:
            pytest.skip("weights that are rounded have no adapters")
        config = ModelConfig(model_name=str(folder), precision="float32", lora_cfg=lora)
        return PooledModel(ranks, FACTORY, config, ModelSpec(), self.num_ranks, **self.settings)


class TestPublishing(PublishingSuite):
    def write(self, folder):
        return write_tiny_model(folder)

    def open(self, ranks, folder):
        return open_model(ranks, folder)


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
class TestAdapterPublishing(AdapterPublishingSuite):
    @pytest.fixture(autouse=True)
    def chosen(self, split):
        self.split = split

    def write(self, folder):
        return write_tiny_model(folder)

    def open(self, ranks, folder, lora):
        config = ModelConfig(model_name=str(folder), precision="float32", lora_cfg=lora)
        return PooledModel(ranks, FACTORY, config, ModelSpec(), 2, **{self.split: 2})
