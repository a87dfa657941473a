"""Gradients of several microbatches are brought together once, or after each of them."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig

from rl_core.data.batch import Batch
from rl_core.data.microbatch import shard
from rl_core.devices import DeviceMemory
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.selfcheck import SGD, write_random
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.torch.optim.parameters import OptimizedParameter
from rl_dtensor.model.tiny import SMALL, shrink
from rl_dtensor.parallel import fsdp
from rl_dtensor.parallel.accumulation import GradientMemory, keeps_whole_gradients
from rl_dtensor.selfcheck import CHECK, streamed, write_tiny

NUM_LAYERS, NUM_MICROBATCHES = 2, 3
MAX_GRAD_NORM = 0.01
UNSHARDED = {"gradient_accumulation": "unsharded"}
GATHERED = {"reshard_after": "step"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = AutoConfig.for_model("llama", tie_word_embeddings=False, num_hidden_layers=NUM_LAYERS)
    return write_tiny(config, tmp_path_factory.mktemp("llama"))


def open_model(ranks, folder, num_ranks, **settings):
    packing = SequencePackingConfig(enabled=True, train_mb_tokens=16, logprob_mb_tokens=16)
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        optimizer=SGD,
        sequence_packing=packing,
        max_grad_norm=MAX_GRAD_NORM,
    )
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), num_ranks, **settings)


def even_batch(num_shards, seed=0):
    """A batch of which every shard is three microbatches."""
    batch = CHECK.batch(seed)
    return Batch.concat([batch.select(np.array([2]))] * NUM_MICROBATCHES * num_shards)


def shards(batch, num_shards):
    return [batch.select(rows) for rows in shard(batch.ragged("tokens").lengths, num_shards)]


def counts(ranks, folder, num_ranks, **settings):
    with open_model(ranks, folder, num_ranks, **settings) as model:
        num_shards = model.call("coordinates")[0].along("dp")
        args = [(part, TokenLoss()) for part in shards(even_batch(num_shards), num_shards)]
        return ranks.run("accumulation_cases:counted_step", args)


def test_every_unit_is_gathered_for_each_pass_and_reduced_as_often_as_the_accumulation_says(ranks, folder):
    each = counts(ranks, folder, 2, gradient_accumulation="sharded")[0]
    once = counts(ranks, folder, 2, **UNSHARDED)[0]
    # the embedding and the end are gathered once, layers for both directions
    assert each["gathers"] == once["gathers"] == NUM_MICROBATCHES * (2 + 2 * NUM_LAYERS)
    assert once["scatters"] == 2 + NUM_LAYERS
    assert each["scatters"] == NUM_MICROBATCHES * once["scatters"]
    assert each["elements of scatters"] == NUM_MICROBATCHES * once["elements of scatters"]


def test_parameters_that_stay_gathered_are_gathered_once_a_step(ranks, folder):
    once = counts(ranks, folder, 2, gradient_accumulation="sharded", **GATHERED)[0]
    assert once["gathers"] == 2 + NUM_LAYERS
    assert once["scatters"] == NUM_MICROBATCHES * once["gathers"]
    with open_model(ranks, folder, 2, gradient_accumulation="sharded") as model:
        args = [(part,) for part in shards(even_batch(2), 2)]
        reads = 1 + NUM_MICROBATCHES * (1 + NUM_LAYERS)  # Without a backward pass the end stays gathered anyway.
        assert ranks.run("accumulation_cases:gathers_of_reads", args) == [reads] * 2
        # A plan that is made at the first step decides later than the first passes.
        model.call("_model.keep_gathered")
        assert ranks.run("accumulation_cases:gathers_of_reads", args) == [2 + NUM_LAYERS] * 2
        assert ranks.run("accumulation_cases:gathered_bytes", [()] * 2) == [0] * 2
        steps = ranks.run("accumulation_cases:counted_step", [(part, TokenLoss()) for (part,) in args])
        assert steps[0] == once
        assert ranks.run("accumulation_cases:gathered_bytes", [()] * 2) == [0] * 2


EXPERTS = {"expert_parallel_size": 2}
MESHES = [
    ("llama", 2, {}),
    ("llama", 2, UNSHARDED),
    ("llama", 4, {"dp_replicate_size": 2, "recompute": "selective"}),
    ("llama", 4, {"tensor_parallel_size": 2, "sequence_parallel": True, **UNSHARDED}),
    ("llama", 4, {"pipeline_parallel_size": 2, "recompute": "full"}),
    ("llama", 2, {"pipeline_parallel_size": 2, "pipeline_chunks_per_rank": 2, **UNSHARDED}),
    ("llama", 2, {"cpu_offload": True}),
    ("mixtral", 4, {**EXPERTS, "recompute": "full"}),
    ("mixtral", 4, {**EXPERTS, "tensor_parallel_size": 2, **UNSHARDED}),
]


@pytest.mark.parametrize(
    ("family", "num_ranks", "settings"), partly_exhaustive(MESHES, always=[MESHES[4], MESHES[7]]), ids=str
)
def test_parameters_that_stay_gathered_train_to_the_same_bits(ranks, tmp_path, family, num_ranks, settings):
    config = shrink(AutoConfig.for_model(family, tie_word_embeddings=False))
    config.num_hidden_layers = 2 * settings.get("pipeline_chunks_per_rank", 1)
    folder = write_random(config, tmp_path / "model", 0)
    found = []
    for chosen in ("layer", "step"):
        with open_model(ranks, folder, num_ranks, reshard_after=chosen, **settings) as model:
            num_shards = model.call("coordinates")[0].along("dp")
            batches = [even_batch(num_shards, seed) for seed in range(3)]
            # The step in the middle is skipped; the gradients of all are clipped.
            batches[1] = poisoned(batches[1])
            metrics = model.train_steps(batches, TokenLoss())
            logprobs = model.infer(batches[0], [LOGPROBS]).ragged("logprobs").values
            found.append((metrics, logprobs, streamed(model)))
    (metrics, logprobs, weights), (others, other_logprobs, other_weights) = found
    assert [each["skipped_steps"] for each in metrics] == [0, 1, 0]
    assert metrics[0]["grad_norm"] > MAX_GRAD_NORM
    np.testing.assert_equal(metrics, others)
    np.testing.assert_array_equal(logprobs, other_logprobs)
    assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


ALIKE = [
    ("llama", 2, {"recompute": "full"}),
    ("llama", 2, {**UNSHARDED, **GATHERED}),
    ("llama", 2, {"recompute": "selective", "cpu_offload": True}),
    ("gemma2", 4, {"tensor_parallel_size": 2, "recompute": "full"}),
    ("qwen3", 2, {"pipeline_parallel_size": 2, "recompute": "full"}),
]


@pytest.mark.parametrize(("family", "num_ranks", "settings"), partly_exhaustive(ALIKE, always=ALIKE[:2]), ids=str)
def test_small_layers_that_share_a_unit_train_to_the_same_bits(ranks, tmp_path, family, num_ranks, settings):
    config = shrink(AutoConfig.for_model(family, tie_word_embeddings=False))
    config.num_hidden_layers = 8 * settings.get("pipeline_parallel_size", 1)
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * config.num_hidden_layers)[: config.num_hidden_layers]
    folder = write_random(config, tmp_path / "model", 0)
    (limit,) = ranks.run("accumulation_cases:limit_units", [(0,)])
    found = []
    for num_bytes in (0, limit):
        ranks.run("accumulation_cases:limit_units", [(num_bytes,)] * num_ranks)
        with open_model(ranks, folder, num_ranks, **settings) as model:
            num_shards = model.call("coordinates")[0].along("dp")
            metrics = model.train_steps([even_batch(num_shards, seed) for seed in range(2)], TokenLoss())
            args = [(part, TokenLoss()) for part in shards(even_batch(num_shards), num_shards)]
            sent = ranks.run("accumulation_cases:counted_step", args)[0] if num_shards == num_ranks else {}
            found.append((metrics, streamed(model), sent))
    (metrics, weights, sent), (others, other_weights, other_sent) = found
    np.testing.assert_equal(metrics, others)
    assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())
    if sent:  # Eight layers are four units.
        ends = 2 if settings.get("reshard_after") else 2 * NUM_MICROBATCHES
        assert sent["gathers"] - ends == 2 * (other_sent["gathers"] - ends)
        assert other_sent["elements of scatters"] == sent["elements of scatters"]


@pytest.mark.parametrize(
    ("num_layers", "num_bytes", "expected"),
    [(28, 31_500_000, 7), (28, 100_700_000, 2), (36, 386_000_000, 1), (30, 10**6, 6), (7, 10**6, 1), (2, 1, 1)],
)
def test_units_have_as_many_layers_as_their_size_allows(num_layers, num_bytes, expected):
    assert fsdp.layers_of_unit(num_layers, num_bytes) == expected


def poisoned(batch):
    """A batch with a weight that is not finite."""
    weights = batch.ragged("weights")
    values = weights.values.copy()
    values[:2] = np.inf
    mask = batch.ragged("loss_mask")
    return batch.with_columns({"weights": weights.like(values), "loss_mask": mask.like(np.ones_like(mask.values))})


def test_replicas_add_up_gradients_once_a_step(ranks, folder):
    each = counts(ranks, folder, 4, dp_replicate_size=2, gradient_accumulation="sharded")[0]
    once = counts(ranks, folder, 4, dp_replicate_size=2, **UNSHARDED)[0]
    assert each["all-reduces"] == once["all-reduces"] == 2 + NUM_LAYERS
    assert each["elements of all-reduces"] == once["elements of all-reduces"]
    assert each["scatters"] == NUM_MICROBATCHES * once["scatters"]


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    partly_exhaustive(
        [(2, UNSHARDED), (2, {**UNSHARDED, **GATHERED}), (4, {"dp_replicate_size": 2, **GATHERED})],
        always=[(2, {**UNSHARDED, **GATHERED})],
    ),
    ids=str,
)
def test_a_pass_that_failed_leaves_nothing_to_the_next(ranks, folder, num_ranks, settings):
    batch = even_batch(num_ranks, seed=1)
    with open_model(ranks, folder, num_ranks, **settings) as model:
        expected = model.train_steps([batch], TokenLoss())
    with open_model(ranks, folder, num_ranks, **settings) as model:
        args = [(part,) for part in shards(even_batch(num_ranks), num_ranks)]
        assert ranks.run("accumulation_cases:fail", args) == ["the second microbatch"] * num_ranks
        assert model.train_steps([batch], TokenLoss()) == expected


def test_stacks_of_fewer_experts_than_ranks_lie_on_all_of_them(ranks, tmp_path):
    config = AutoConfig.for_model("mixtral")
    folder = write_tiny(config, tmp_path / "model", sizes={**SMALL, "num_local_experts": 2})
    with open_model(ranks, folder, 4):
        found = ranks.run("accumulation_cases:placements", [("experts",)] * 4)
    for parts in found:
        assert {placed for placed, _ in parts.values()} == {"(Shard(dim=1),)", "(Shard(dim=2),)"}
        assert all(parts[name][1] == found[0][name][1] > 0 for name in parts)


@pytest.fixture
def alone():
    """A group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def mesh_with(capacity, num_gradients=8):
    memory = None if capacity is None else DeviceMemory(capacity, capacity, 0, 0)
    kind = SimpleNamespace(memory=lambda: memory)
    return SimpleNamespace(kind=kind, control=None, rank=0, num_gradients=num_gradients)


def test_whole_gradients_are_kept_if_they_fit_and_save_something(alone, caplog):
    caplog.set_level(logging.INFO)
    matrix, frozen = nn.Parameter(torch.zeros(10, 10)), nn.Parameter(torch.zeros(7), False)
    described = {matrix: OptimizedParameter(("up",), is_norm_or_bias=False, pieces=lambda _: ())}
    muon = OptimizerConfig(name="torch.optim.Muon")
    memory = GradientMemory.of([matrix, frozen], muon, described, cpu_offload=False)
    assert memory == GradientMemory(state=107 * 4 + 100 * 8, whole=400)
    memory = GradientMemory.of([matrix, frozen], OptimizerConfig(), described, cpu_offload=False)
    assert memory == GradientMemory(state=107 * 4 + 100 * 12, whole=400)
    needed = 2 * (memory.state + memory.whole)
    assert keeps_whole_gradients("auto", memory, mesh_with(needed))
    assert "keeps unsharded gradients" in caplog.text
    assert not keeps_whole_gradients("auto", memory, mesh_with(needed - 1))
    assert not keeps_whole_gradients("auto", memory, mesh_with(needed, num_gradients=1))
    assert not keeps_whole_gradients("auto", memory, mesh_with(None))
    assert keeps_whole_gradients("unsharded", memory, mesh_with(None))
    assert not keeps_whole_gradients("sharded", memory, mesh_with(needed))
