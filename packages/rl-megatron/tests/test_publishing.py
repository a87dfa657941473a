"""Weights reach every receiver, from one rank or from each."""

import pytest
from layouts import EXPERT_LAYOUTS, LAYOUTS, write_family
from safetensors.torch import load_file

from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.received import ranks_apart, receive, receiving_threads, sent_by_every_rank
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import make_batch
from rl_core.testing.publishing import AdapterPublishingSuite, PublishingSuite
from rl_core.testing.torch.exchanges import WITHOUT_ADAPTERS, ExchangeSuite

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
        pytest.param("qwen3", "tp2", marks=exhaustive),
        pytest.param("llama", "pp2", marks=exhaustive),
        ("qwen3", "tp2 pp2+sp"),
        ("qwen3_moe", "ep2"),
        ("deepseek_v3", "tp2 etp2 ep2+sp"),
        ("gpt_oss", "tp2 ep2+sp"),
        pytest.param("llama", "dp2", marks=exhaustive),
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
        assert digests[rank] == [taken]
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


@pytest.mark.parametrize(
    ("family", "layout"),
    partly_exhaustive(
        [("qwen3", "tp2 pp2+sp"), ("qwen3_moe", "ep2"), ("deepseek_v3", "tp2 etp2 ep2+sp"), ("gpt_oss", "ep2")],
        always=[("qwen3", "tp2 pp2+sp")],
    ),
)
class TestExchange(ExchangeSuite):
    per_node = 2

    @pytest.fixture(autouse=True)
    def chosen(self, family, layout):
        self.family, self.layout = family, layout
        self.num_ranks, _ = ALL[layout]

    def write(self, folder):
        return write_family(folder, self.family)

    def open(self, ranks, folder, lora=WITHOUT_ADAPTERS):
        return open_model(ranks, folder, self.layout, lora_cfg=lora)


@pytest.mark.parametrize("layout", partly_exhaustive(["tp2", "pp2"], always=["pp2"]))
class TestPublishing(PublishingSuite):
    @pytest.fixture(autouse=True)
    def chosen(self, layout):
        self.layout = layout

    def write(self, folder):
        return write_family(folder, "llama")

    def open(self, ranks, folder):
        return open_model(ranks, folder, self.layout)


@pytest.mark.parametrize("layout", partly_exhaustive(["tp2", "pp2"], always=["tp2"]))
class TestAdapterPublishing(AdapterPublishingSuite):
    @pytest.fixture(autouse=True)
    def chosen(self, layout):
        self.layout = layout

    def write(self, folder):
        return write_family(folder, "llama")

    def open(self, ranks, folder, lora):
        return open_model(ranks, folder, self.layout, lora_cfg=lora)
