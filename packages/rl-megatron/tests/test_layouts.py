"""Every layout reads and trains as one process does in float64."""

from functools import cache

import numpy as np
import pytest
from layouts import EXPERT_LAYOUTS, LARGE_LAYOUTS, LAYOUTS, write_family

from rl_core.model import ENTROPY, LOGPROBS, ModelSpec, logprobs_at, topk
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import LAYOUTS as BATCHINGS
from rl_core.testing.model_worker import MUON, make_batch

# a learning rate of 1 makes errors of the weights those of the gradients
PLAIN = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})
READS = [LOGPROBS, ENTROPY, topk(3), logprobs_at("candidates")]
# tokens of whose logits no two are equal: the first token of a row that is padding has a state of zeros
DISTINCT = make_batch()
DISTINCT = DISTINCT.with_columns(
    {"tokens": DISTINCT.ragged("tokens").like(DISTINCT.ragged("tokens").values.clip(min=1))}
)
# a mixture of experts on tensor-parallel ranks needs sequence parallelism
MODELS = {
    "qwen3": LAYOUTS,
    "qwen3_moe": {name: LAYOUTS[name] for name in LAYOUTS if name != "tp2"} | EXPERT_LAYOUTS,
    "qwen2_moe": LARGE_LAYOUTS,
    "qwen3_next": {"cp2": LAYOUTS["cp2"]} | LARGE_LAYOUTS,
    "deepseek_v3": LARGE_LAYOUTS,
    "glm4_moe": LARGE_LAYOUTS,
}
FIXED = "packed-16 to one length"
BATCHED = {name: (fields, {}) for name, fields in BATCHINGS.items()} | {
    FIXED: ({**BATCHINGS["packed-16"], "max_total_sequence_length": 24}, {"fixed_length_microbatches": True})
}
"""Fields of the model and of the backend."""
PADDED = [
    ("qwen3", "cp2", FIXED),
    ("qwen3", "tp2+sp", FIXED),
    ("qwen3", "pp2 virtual", FIXED),
    ("qwen3_moe", "tp2 ep2+sp", FIXED),
    ("qwen3_next", "cp2", FIXED),
]
PLACES = [(family, layout) for family in MODELS for layout in MODELS[family]]
PACKED_AND_PADDED = ("packed-16", "padded-3")
CASES = [(*place, batching) for place in PLACES for batching in PACKED_AND_PADDED] + PADDED
IN_ALL = (("qwen3", LAYOUTS), ("qwen3_moe", EXPERT_LAYOUTS), ("deepseek_v3", LARGE_LAYOUTS))
"""Families and layouts of which most others' are parts: dense layers, experts, and latent attention."""
FIRST = [(family, layout) for family, layouts in IN_ALL for layout in layouts]
ALWAYS = [(*place, PACKED_AND_PADDED[number % 2]) for number, place in enumerate(FIRST)]
ALWAYS += [("qwen3_moe", "tp2 ep2+sp", FIXED)]
"""The rows of every other one are packed. Some microbatches are of one length."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A family's folder, what it reads, and a step of its weights, made when first asked for."""

    @cache
    def of(family):
        folder = write_family(tmp_path_factory.mktemp(family), family)
        oracle = Oracle(folder)
        reads = oracle.infer(DISTINCT, READS, 0.8)
        metrics = oracle.train_step(make_batch(), TokenLoss(temperature=0.8), PLAIN, 0.5)
        return folder, reads, metrics, dict(oracle.model.named_parameters())

    return of


@pytest.mark.parametrize(("family", "layout", "batching"), partly_exhaustive(CASES, always=ALWAYS))
def test_reads_gradients_and_weights_are_those_of_one_process(ranks, expected, tmp_path, family, layout, batching):
    folder, reads, metrics, stepped = expected(family)
    num_ranks, settings = (LAYOUTS | EXPERT_LAYOUTS | LARGE_LAYOUTS)[layout]
    fields, padding = BATCHED[batching]
    config = ModelConfig(
        model_name=str(folder), precision="float32", logprob_chunk_size=5, max_grad_norm=0.5, optimizer=PLAIN, **fields
    )
    with PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **settings, **padding) as model:
        assert ranks.run("megatron_factories:fixed_lengths", [()] * num_ranks) == [[24] if padding else []] * num_ranks
        found = model.infer(DISTINCT, READS, temperature=0.8)
        for name, column in reads.items():
            np.testing.assert_allclose(found.ragged(name).values, column, atol=1e-5, rtol=1e-5, err_msg=name)
        trained = model.train_step(make_batch(), TokenLoss(temperature=0.8))
        for name, value in metrics.items():
            assert trained[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        model.export(str(tmp_path / "step"))
    exported = dict(Oracle(tmp_path / "step").model.named_parameters())
    for name, parameter in stepped.items():
        np.testing.assert_allclose(
            exported[name].detach().numpy(), parameter.detach().numpy(), atol=1e-5, rtol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    ("batching", "exchanges_shapes"), [(FIXED, False), pytest.param("packed-16", True, marks=exhaustive)]
)
def test_stages_exchange_shapes_only_of_microbatches_of_several_lengths(ranks, expected, batching, exchanges_shapes):
    folder, _, metrics, _ = expected("qwen3")
    fields, padding = BATCHED[batching]
    num_ranks, settings = LAYOUTS["tp2 pp2+sp"]
    config = ModelConfig(model_name=str(folder), precision="float32", max_grad_norm=0.5, optimizer=PLAIN, **fields)
    with PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **settings, **padding) as model:
        ranks.run("megatron_factories:count_shapes", [()] * num_ranks)
        model.infer(DISTINCT, [LOGPROBS])
        trained = model.train_step(make_batch(), TokenLoss(temperature=0.8))
        counts = ranks.run("megatron_factories:count_shapes", [()] * num_ranks)
    assert [count > 0 for count in counts] == [exchanges_shapes] * num_ranks
    for name, value in metrics.items():
        assert trained[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@exhaustive
@pytest.mark.parametrize("layout", ["tp2+sp", "pp2", "tp2 pp2+sp"])
def test_muon_steps_whole_matrices_on_every_layout(ranks, tmp_path, layout):
    num_ranks, settings = LAYOUTS[layout]
    folder = write_family(tmp_path / "model", "qwen3")
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=MUON)
    oracle = Oracle(folder)
    oracle.step_by_muon(MUON)
    with PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **settings) as model:
        for seed in range(3):
            batch = make_batch(seed=seed)
            expected = oracle.train_step(batch, TokenLoss(), MUON, 1.0)
            assert model.train_step(batch, TokenLoss())["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        model.export(str(tmp_path / "end"))
    trained = dict(Oracle(tmp_path / "end").model.named_parameters())
    for name, parameter in oracle.model.named_parameters():
        np.testing.assert_allclose(trained[name].detach(), parameter.detach(), rtol=1e-5, atol=2e-5, err_msg=name)
