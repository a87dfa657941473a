"""Models with fused layers compute what they did."""

from collections.abc import Iterator

import fusion_cases
import pytest
import torch
from test_formulas import tiny
from transformers import AutoConfig

from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool
from rl_core.selfcheck.torch.selfcheck import case_on
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.torch.interpreted import interpret_kernels
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.layers.fusion import fuse_layers
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.selfcheck import CHECK, MESHES, write_tiny


@pytest.fixture(scope="module")
def interpreter() -> Iterator[RankPool]:
    """Two ranks in which Triton's interpreter runs the kernels."""
    with RankPool(2) as pool:
        pool.run(interpret_kernels, [(), ()])
        yield pool


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"norms": 5, "mlps": 2, "rotations": 2, "residuals": 2}),
        ("qwen3", {"norms": 9, "mlps": 2, "rotations": 2, "normed rotations": 2, "residuals": 2}),
        ("mixtral", {"norms": 5, "experts": 2, "rotations": 2, "residuals": 2}),
        ("phi3", {"norms": 5, "mlps": 2, "rotations": 2}),
        ("olmo2", {"norms": 9, "mlps": 2}),
        ("gpt2", {}),
    ],
)
def test_modules_are_fused_by_what_they_compute(family, expected):
    model = tiny(family, attention=ROWS)
    assert +fuse_layers(model, decoder_layers(model)) == expected


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "phi3"])
def test_a_cpu_computes_as_before_to_the_last_bit(family):
    plain, fused = (fusion_cases.trained(family, torch.float32, is_fused=is_fused) for is_fused in (False, True))
    assert plain.keys() == fused.keys()
    assert all(plain[name].equal(fused[name]) for name in plain)


@pytest.mark.parametrize("family", partly_exhaustive(["qwen3", "gemma2"], always=["gemma2"]))
def test_half_precision_is_as_near_to_double_as_without_kernels(interpreter, family):
    ((fused, plain),) = interpreter.run(fusion_cases.half_precision_errors, [(family,)])
    assert fused.keys() == plain.keys()
    assert 0 < max(fused.values()) < 0.1
    # single values round one way or the other; all together they do not get worse
    assert sum(fused.values()) < 1.1 * sum(plain.values())


MESH_CASES = [
    ("qwen3", "tp2+sp", True, True, {}),
    ("qwen3_moe", "fsdp2", True, False, {"recompute": "selective"}),
    ("gemma2", "cp2", False, False, {}),
    ("mixtral", "ep2 x fsdp2", True, False, {}),
    ("qwen3_moe", "tp2", True, True, {}),
    ("llama", "pp2", False, True, {"recompute": "full"}),
    ("phi3", "tp2", True, False, {}),
]
"""Family, mesh, whether rows are packed, whether adapters train, further settings."""


@pytest.mark.parametrize(
    ("family", "mesh", "is_packed", "lora", "settings"), partly_exhaustive(MESH_CASES, always=MESH_CASES[:1])
)
def test_fused_layers_can_be_split_sharded_adapted_and_recomputed(
    ranks, tmp_path, monkeypatch, family, mesh, is_packed, lora, settings
):
    num_ranks, sizes = MESHES[mesh]
    monkeypatch.setitem(MESHES, mesh, (num_ranks, {**sizes, **settings}))
    folder = write_tiny(AutoConfig.for_model(family), tmp_path / "model")
    case = case_on(MESHES, mesh, is_packed=is_packed, has_adapters=lora)
    ranks.run(fusion_cases.fuse_formulas, [()] * num_ranks)
    try:
        outcome = CHECK.check_case(ranks, folder, case, CHECK.expect(folder, has_adapters=lora))
    finally:
        fused = ranks.run(fusion_cases.fuse_nothing, [()] * num_ranks)
    assert outcome.verdict == "exact", outcome
    assert all(len(counts) == 1 and counts[0] > 8 for counts in fused)


def test_no_layer_is_fused_if_the_key_is_off(ranks, tmp_path):
    folder = write_tiny(AutoConfig.for_model("llama"), tmp_path / "model")
    config = ModelConfig(model_name=str(folder))
    ranks.run(fusion_cases.fuse_formulas, [()])
    for settings in ({"fused_kernels": False}, {}):
        PooledModel(ranks, "dtensor_factories:build", config, ModelSpec(), 1, **settings).close()
    (fused,) = ranks.run(fusion_cases.fuse_nothing, [()])
    assert len(fused) == 1


RUNS = [
    ("qwen3", "tp2+sp", True, True),
    ("qwen3", "1", False, False),
    ("llama", "fsdp2", True, False),
    ("qwen3_moe", "1", True, True),
    ("mixtral", "1", True, False),
    ("phi3", "tp2", True, False),
]


@pytest.mark.parametrize(("family", "mesh", "is_packed", "lora"), partly_exhaustive(RUNS, always=[]))
def test_fused_models_train_as_transformers_does_in_one_process(interpreter, tmp_path, family, mesh, is_packed, lora):
    folder = write_tiny(AutoConfig.for_model(family), tmp_path / "model")
    case = case_on(MESHES, mesh, is_packed=is_packed, has_adapters=lora)
    interpreter.run(fusion_cases.count_launches, [()] * case.num_ranks)
    outcome = CHECK.check_case(interpreter, folder, case, CHECK.expect(folder, has_adapters=lora))
    assert outcome.verdict == "exact", outcome
    assert min(interpreter.run(fusion_cases.launched, [()] * case.num_ranks)) > 0
