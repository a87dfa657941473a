"""The bytes that `rl plan` states are those of real ranks, on every mesh of both backends."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="it counts tensors: run it in an environment with the backends (--group cpu)")

from planned_ranks import trained_bytes

from rl_algos.tiny_model import make_tiny_model
from rl_core.devices import CPU, CUDA
from rl_core.facts.model_size import ModelSize
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.plugins import POLICIES, plugin
from rl_core.selfcheck.rank_pool import RankPool, preload
from rl_launch.commands.verified_plan import verify
from rl_launch.planning.accelerators import accelerator_named
from rl_launch.planning.memory import Recomputed, TrainingRank, activation_bytes
from rl_launch.planning.plan import checkpoint_bytes, fields_of, plan_run
from rl_launch.planning.shapes import Shape, adapter_parameters
from rl_launch.run_config.reading import read_plan

LENGTHS = (64, 64, 64, 64)
"""Rows of equal length, so that every rank has as many tokens."""
TOLERANCE = 0.1
PIPELINED = 1.1
"""Factor of what autograd keeps on a pipeline rank of DTensor; what travels between stages is not in the plan."""
MESHES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dtensor one rank": ("dtensor", 1, {}),
    "dtensor fsdp2": ("dtensor", 2, {}),
    "dtensor tp2": ("dtensor", 2, {"tensor_parallel_size": 2}),
    "dtensor tp2 with tokens": ("dtensor", 2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "dtensor pp2": ("dtensor", 2, {"pipeline_parallel_size": 2}),
    "dtensor cp2": ("dtensor", 2, {"context_parallel_size": 2}),
    "dtensor tp2 x fsdp2": ("dtensor", 4, {"tensor_parallel_size": 2}),
    "megatron one rank": ("megatron", 1, {}),
    "megatron dp2": ("megatron", 2, {}),
    "megatron tp2": ("megatron", 2, {"tensor_model_parallel_size": 2}),
    "megatron tp2 with tokens": ("megatron", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "megatron pp2": ("megatron", 2, {"pipeline_model_parallel_size": 2}),
    "megatron cp2": ("megatron", 2, {"context_parallel_size": 2}),
    "megatron tp2 x dp2": ("megatron", 4, {"tensor_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def pool():
    preload("rl_dtensor.worker")
    with RankPool(4) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, hidden_size=256, num_layers=4, num_heads=8, num_key_value_heads=4)
    return folder


def planned(config, backend, num_ranks, settings):
    found = plugin(POLICIES, backend)
    own = found.config(**settings)
    fields, _ = fields_of(config)
    shape = Shape.of(fields)
    size = trained = shape.size
    repeated = 0.0
    if config.lora_cfg.enabled:
        tensor = found.layout(config, own, num_ranks, CPU).tensor
        trained = ModelSize(adapter_parameters(fields, config.lora_cfg, tensor))
        repeated = trained.layers - adapter_parameters(fields, config.lora_cfg)
        size = ModelSize(size.layers + trained.layers, embedding=size.embedding, head=size.head)
    memory = found.memory(config, own, size, num_ranks, trained=trained)
    return TrainingRank(config, shape, size, trained, found.layout(config, own, num_ranks, CPU), memory, repeated)


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_holds_the_bytes_of_the_plan(mesh, adapters, pool, model, tmp_path):
    backend, num_ranks, settings = MESHES[mesh]
    config = ModelConfig(
        model_name=str(model),
        precision="float32",
        max_total_sequence_length=64,
        sequence_packing=SequencePackingConfig(train_mb_tokens=4096, logprob_mb_tokens=4096),
        optimizer=OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-3}),
        lora_cfg=LoraConfig(enabled=adapters, dim=8),
    )
    rank = planned(config, backend, num_ranks, settings)
    given = (backend, settings, config, LENGTHS, str(tmp_path / "checkpoint"))
    ranks = pool.run(trained_bytes, [given] * num_ranks, timeout_s=600)
    parts = rank.state
    expected = {
        "weights": parts["weights"],
        "gradients": parts["gradients"],
        "optimizer": parts["optimizer state"],
        "saved": saved_bytes(rank),
        "checkpoint": checkpoint_bytes(rank),
    }
    if mesh == "dtensor pp2":
        # Passes of several microbatches are counted together, and stages keep what they send.
        expected["saved"] *= PIPELINED
    fullest = {name: max(each[name] for each in ranks) for name in expected}
    ratios = {name: found / expected[name] for name, found in fullest.items()}
    sys.stdout.write(f"{mesh}, {'adapters' if adapters else 'all weights'}: {ratios}\n")
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=TOLERANCE)


def saved_bytes(rank):
    """What autograd keeps of all rows of a rank; of a pipeline rank too, whose microbatches are counted together."""
    layout = replace(rank.layout, pipeline=1)
    tokens = sum(LENGTHS) / layout.data / layout.context
    return activation_bytes(rank.shape, layout, rank.model, Recomputed(0, 0, rank.layers), tokens=tokens)


@pytest.mark.parametrize("recipe", ["grpo-math-8b", "sft-lora"])
def test_formulas_agree_with_counts_on_real_layers(recipe):
    """With `sequence_parallel` the count lacks the gathered inputs of blocks, which the ranks above keep."""
    run = read_plan(recipe)
    found = verify(run, plan_run(run, recipe, accelerator=accelerator_named("h100"), device=CUDA))
    assert {each.part for each in found} >= {"weights", "logits", "activations, recompute none"}
    # Adapters are not among the layers that are counted.
    parts = [each for each in found if not run.config.policy.lora_cfg.enabled or "activations" not in each.part]
    assert [each for each in parts if abs(each.difference) > TOLERANCE] == []
