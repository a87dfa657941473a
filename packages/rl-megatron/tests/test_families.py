"""Every family reads as transformers does, and its weights come back bit for bit from every layout."""

import numpy as np
import pytest
import torch
from layouts import EXPERT_FAMILIES, EXPERT_LAYOUTS, FAMILIES, LAYOUTS, MOONLIGHT, fits, write_family
from safetensors.torch import load_file, save_file

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import make_batch
from rl_megatron.plugin import HELD_FAMILIES

ALL = LAYOUTS | EXPERT_LAYOUTS
PLAIN = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})


# without the padding token, whose embedding of zeros makes gradients of 1e12 in a model without biases to start from
BATCH = make_batch()
BATCH = BATCH.with_columns({"tokens": BATCH.ragged("tokens").like(BATCH.ragged("tokens").values.clip(min=1))})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: write_family(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def open_model(ranks, folder, layout, *, trains=False, **settings):
    num_ranks, backend = ALL[layout]
    config = ModelConfig(model_name=str(folder), precision="float32", logprob_chunk_size=7, **settings)
    return PooledModel(ranks, "megatron_factories:build", config, ModelSpec(trains=trains), num_ranks, **backend)


def widest(family):
    if family not in EXPERT_FAMILIES:
        return "tp2 pp2+sp"
    return "tp2 etp2 ep2+sp" if fits(family, "tp2 etp2 ep2+sp") else "tp2 ep2+sp"


CASES = [(family, layout) for family in FAMILIES for layout in ALL if fits(family, layout)]
ALWAYS = [
    (family, layout)
    for family, layout in CASES
    if (family == "llama" and layout in LAYOUTS)
    or (family == "deepseek_v3" and layout in EXPERT_LAYOUTS)
    or layout == widest(family)
]
"""Every family in the layout that splits it most, dense weights in every layout, and experts in those of experts."""


@pytest.mark.parametrize(("family", "layout"), partly_exhaustive(CASES, always=ALWAYS))
def test_weights_come_back_bit_for_bit(ranks, folders, tmp_path, family, layout):
    folder = folders[family]
    with open_model(ranks, folder, layout) as model:
        model.export(str(tmp_path))
        manifest = model.manifest(1)
    original, exported = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert exported.keys() == original.keys() - dict(manifest.tied).keys()
    assert {spec.name for spec in manifest.tensors} == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, original[name]), name


ELSEWHERE = ("qwen3", "qwen3_moe")
"""Families that `test_layouts` holds on every layout."""
COMPARED = [
    (family, layout)
    for layout in ("tp1", "tp2+sp", "pp2", "cp2", "ep2", "tp2 ep2+sp")
    for family in FAMILIES
    if family not in ELSEWHERE and fits(family, layout)
]
ALWAYS_COMPARED = [
    # Windows, states, latent attention, and routers with groups.
    *((family, "tp2+sp") for family in ("mistral", "qwen3_next", "deepseek_v3", "glm4_moe")),
    # Norms of outputs and rotation by kind of layer; sinks and experts with biases; states whose inputs lie apart.
    *(("gemma3_text", layout) for layout in ("tp2+sp", "pp2")),
    *(("gpt_oss", layout) for layout in ("pp2", "tp2 ep2+sp")),
    *(("qwen3_5_text", "tp2+sp"), ("qwen3_5_moe_text", "ep2")),
]


# on one rank the layers compute the same without a split
@pytest.mark.parametrize(("family", "layout"), partly_exhaustive(COMPARED, always=ALWAYS_COMPARED))
def test_logprobs_and_gradients_are_those_of_transformers(ranks, folders, tmp_path, family, layout):
    oracle = Oracle(folders[family])
    expected = oracle.infer(BATCH, [LOGPROBS])["logprobs"]
    metrics = oracle.train_step(BATCH, TokenLoss(), PLAIN, 0.5)
    with open_model(ranks, folders[family], layout, trains=True, optimizer=PLAIN, max_grad_norm=0.5) as model:
        found = model.infer(BATCH, [LOGPROBS]).ragged("logprobs").values
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
        trained = model.train_step(BATCH, TokenLoss())
        for name, value in metrics.items():
            assert trained[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        model.export(str(tmp_path))
    exported = dict(Oracle(tmp_path).model.named_parameters())
    for name, parameter in oracle.model.named_parameters():
        difference = (exported[name] - parameter).abs().max().item()
        assert difference < 1e-5, (name, difference)


ROTARY = {
    "llama": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "qwen3": {"rope_type": "yarn", "factor": 4.0},
    "glm4_moe": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    "deepseek_v3": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("family", ROTARY)
def test_scaled_rotary_embeddings_are_those_of_transformers(ranks, tmp_path, family):
    rope = {**ROTARY[family], "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    folder = write_family(tmp_path, family, rope_parameters=rope)
    batch = make_batch((40, 9))
    expected = Oracle(folder).infer(batch, [LOGPROBS])["logprobs"]
    plain = Oracle(write_family(tmp_path / "plain", family)).infer(batch, [LOGPROBS])["logprobs"]
    with open_model(ranks, folder, "tp1") as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    assert np.abs(plain - expected).max() > 1e-3


PLAIN_GLM = {"use_qk_norm": False, "attention_bias": False, "n_group": 1, "rope_parameters": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("family", "fields"),
    [("deepseek_v3", {}), ("deepseek_v3", MOONLIGHT), ("glm4_moe", {}), ("glm4_moe", PLAIN_GLM), ("glm4_moe_lite", {})],
)
def test_biases_of_routers_choose_experts_as_in_transformers(ranks, tmp_path, family, fields):
    folder = write_family(tmp_path, family, **fields)
    unbiased = Oracle(folder).infer(BATCH, [LOGPROBS])["logprobs"]
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = torch.tensor([0.3, -0.3, 0.1, 0.0])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    expected = Oracle(folder).infer(BATCH, [LOGPROBS])["logprobs"]
    with open_model(ranks, folder, "tp1") as model:
        found = model.infer(BATCH, [LOGPROBS]).ragged("logprobs").values
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    assert np.abs(unbiased - expected).max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_group": 1, "num_experts_per_tok": 1}, "best num_experts_per_tok / topk_group experts"),
        ({"n_group": 1, "num_experts_per_tok": 1}, "not the weight of one"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False and num_experts_per_tok=2"),
    ],
)
def test_routing_that_megatron_computes_otherwise_is_refused(ranks, tmp_path, fields, message):
    with pytest.raises(WorkerError, match=message):
        open_model(ranks, write_family(tmp_path, "glm4_moe", **fields), "tp1")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_other_rotary_embeddings_are_refused(ranks, tmp_path, family):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    with pytest.raises(WorkerError, match="rotary embedding of type 'dynamic'"):
        open_model(ranks, write_family(tmp_path, family, rope_parameters=rope), "tp1")


def test_experts_with_biases_are_refused_on_tensor_parallel_ranks(ranks, folders):
    with pytest.raises(WorkerError, match=r"expert_tensor_parallel_size.*must be 1 for a gpt_oss model"):
        open_model(ranks, folders["gpt_oss"], "tp2+sp")


def test_a_family_without_a_mapping_is_refused_naming_the_plugin(ranks, tmp_path):
    folder = write_tiny_model(tmp_path, "gemma2")
    with pytest.raises(WorkerError, match=r"no weight mapping.*'gemma2'.*rl_megatron\.families"):
        open_model(ranks, folder, "tp1")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_model_parallel_size": 3}, r"num_attention_heads \(4\)"),
        ({"pipeline_model_parallel_size": 3}, "layers that cannot be spread evenly"),
        ({"expert_model_parallel_size": 2}, "has no experts"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(ranks, folders, layout, message):
    num_ranks = max(layout.values())
    config = ModelConfig(model_name=str(folders["llama"]), precision="float32")
    with pytest.raises(WorkerError, match=message):
        PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **layout)


def test_experts_that_files_stack_are_read_and_written_so(ranks, tmp_path):
    folder = write_family(tmp_path / "model", "qwen3_5_moe_text")
    expected = Oracle(folder).infer(BATCH, [LOGPROBS])["logprobs"]
    weights = load_file(folder / "model.safetensors")
    for layer in range(4):
        theirs = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([weights.pop(f"{theirs}.{expert}.{name}_proj.weight") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        weights |= {f"{theirs}.gate_up_proj": torch.cat([gate, up], 1), f"{theirs}.down_proj": down}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with open_model(ranks, folder, "tp2 etp2 ep2+sp") as model:
        found = model.infer(BATCH, [LOGPROBS]).ragged("logprobs").values
        model.export(str(tmp_path / "exported"))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(exported[name].equal(tensor) for name, tensor in weights.items())


def test_the_families_that_a_run_need_not_check_are_those_held_here():
    only_with_images = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}  # test_vision.py trains them
    assert set(FAMILIES) | only_with_images == HELD_FAMILIES
