"""The bytes that `rl plan` states are those of real ranks, on every mesh of both backends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="it counts tensors: run it in an environment with the backends (--group cpu)")

from planned_ranks import image_rows, trained_bytes
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_algos.tiny_model import make_tiny_model
from rl_core.data.batch import TOKENS
from rl_core.devices import CPU, CUDA
from rl_core.facts.model_size import ModelSize, trained_size
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig, SequencePackingConfig, VisionConfig
from rl_core.plugins import POLICIES, plugin
from rl_core.selfcheck.rank_pool import RankPool, preload
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.torch.tiny_vision import write_tiny_vision_model
from rl_launch.commands.verified_plan import lines, verify
from rl_launch.planning.accelerators import accelerator_named
from rl_launch.planning.memory import TrainingRank, activation_bytes
from rl_launch.planning.plan import checkpoint_bytes, fields_of, plan_run, vision_of
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
    "dtensor selective": ("dtensor", 1, {"recompute": "selective"}),
    "dtensor full": ("dtensor", 1, {"recompute": "full"}),
    "dtensor fsdp2, selective": ("dtensor", 2, {"recompute": "selective"}),
    "dtensor tp2 with tokens, full": (
        "dtensor",
        2,
        {"tensor_parallel_size": 2, "sequence_parallel": True, "recompute": "full"},
    ),
    "dtensor fsdp2, offload": ("dtensor", 2, {"cpu_offload": True}),
    "dtensor experts": ("dtensor", 1, {}),
    "dtensor experts, ep2": ("dtensor", 2, {"expert_parallel_size": 2}),
    "dtensor experts, full": ("dtensor", 1, {"recompute": "full"}),
    "megatron one rank": ("megatron", 1, {}),
    "megatron dp2": ("megatron", 2, {}),
    "megatron tp2": ("megatron", 2, {"tensor_model_parallel_size": 2}),
    "megatron tp2 with tokens": ("megatron", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "megatron pp2": ("megatron", 2, {"pipeline_model_parallel_size": 2}),
    "megatron cp2": ("megatron", 2, {"context_parallel_size": 2}),
    "megatron tp2 x dp2": ("megatron", 4, {"tensor_model_parallel_size": 2}),
    "megatron selective": ("megatron", 1, {"recompute": "selective"}),
    "megatron full": ("megatron", 1, {"recompute": "full"}),
    "megatron tp2, selective": ("megatron", 2, {"tensor_model_parallel_size": 2, "recompute": "selective"}),
    "megatron tp2 with tokens, full": (
        "megatron",
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute": "full"},
    ),
    "megatron experts": ("megatron", 1, {}),
    "megatron experts, ep2": ("megatron", 2, {"expert_model_parallel_size": 2}),
    "megatron experts, full": ("megatron", 1, {"recompute": "full"}),
}


@pytest.fixture(scope="module")
def pool():
    preload("rl_dtensor.worker")
    with RankPool(4) as found:
        yield found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a dense model, and of one with experts."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("dense", "experts"):
        make_tiny_model(folder / name, hidden_size=256, num_layers=4, num_heads=8, num_key_value_heads=4)
    fields = json.loads((folder / "experts" / "config.json").read_text())
    shared = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "intermediate_size": 256}
    config = Qwen3MoeConfig(**{name: fields[name] for name in shared}, **experts, tie_word_embeddings=True)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "experts")
    return folder


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory):
    """Folder of a model that sees images."""
    folder = tmp_path_factory.mktemp("seeing")
    vision = {"hidden_size": 128, "intermediate_size": 512, "depth": 4, "out_hidden_size": 256}
    text = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    return write_tiny_vision_model(folder, "qwen2_5_vl", vision=vision, **text, num_key_value_heads=4)


def planned(config, backend, num_ranks, settings):
    found = plugin(POLICIES, backend)
    own = found.config(**settings)
    fields, _ = fields_of(config)
    shape, vision = Shape.of(fields), vision_of(config)
    size, training = shape.size, () if vision is None else vision.training(config.vision)
    size = size if vision is None else replace(size, vision=vision.parameters())
    trained, repeated = trained_size(config, fields, size, training), 0.0
    if config.lora_cfg.enabled:
        tensor = found.layout(config, own, num_ranks, CPU).tensor
        seeing = 0 if vision is None else vision.adapters(config.vision, config.lora_cfg)
        trained = ModelSize(adapter_parameters(fields, config.lora_cfg, tensor), vision=seeing)
        repeated = trained.layers - adapter_parameters(fields, config.lora_cfg)
        size = replace(size, layers=size.layers + trained.layers, vision=size.vision + seeing)
    memory = found.memory(config, own, size, num_ranks, trained=trained)
    layout = found.layout(config, own, num_ranks, CPU)
    return TrainingRank(config, shape, size, trained, layout, memory, repeated, vision)


@pytest.mark.parametrize("adapters", partly_exhaustive([False, True], always=[False]), ids=["all weights", "adapters"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_holds_the_bytes_of_the_plan(mesh, adapters, pool, models, tmp_path):
    backend, num_ranks, settings = MESHES[mesh]
    if adapters and "experts" in mesh:
        pytest.skip("adapters of experts are not counted by name")
    config = ModelConfig(
        model_name=str(models / ("experts" if "experts" in mesh else "dense")),
        precision="float32",
        max_total_sequence_length=64,
        sequence_packing=SequencePackingConfig(train_mb_tokens=4096, logprob_mb_tokens=4096),
        optimizer=OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-3}),
        lora_cfg=LoraConfig(enabled=adapters, dim=8),
    )
    rank = planned(config, backend, num_ranks, settings)
    given = (backend, settings, config, LENGTHS, str(tmp_path / "checkpoint"))
    ranks = pool.run(trained_bytes, [given] * num_ranks, timeout_s=600)
    fullest = {name: max(each[name] for each in ranks) for name in ranks[0]}
    memory = rank.memory
    expected = {"kept": kept_bytes(rank), "checkpoint": checkpoint_bytes(rank)}
    if memory.host:
        fullest["host"] = fullest.pop("weights") + fullest.pop("gradients") + fullest.pop("optimizer")
        expected |= {"host": memory.host}
    else:
        parts = rank.state
        expected |= {"weights": parts["weights"], "gradients": parts["gradients"]}
        expected |= {"optimizer": parts["optimizer state"], "copied": rank.copied}
    if mesh == "dtensor pp2":
        # Passes of several microbatches are counted together, and stages keep what they send.
        expected["kept"] *= PIPELINED
    ratios = {name: fullest[name] / size for name, size in expected.items()}
    sys.stdout.write(f"{mesh}, {'adapters' if adapters else 'all weights'}: {ratios}\n")
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=TOLERANCE)


def kept_bytes(rank):
    """What a rank keeps of all its rows when a backward pass begins, no layer of which has been computed again; of a
    pipeline rank too, whose microbatches are counted together."""
    layout = replace(rank.layout, pipeline=1)
    tokens, recomputed = sum(LENGTHS) / layout.data / layout.context, rank.plans()[0]
    size = activation_bytes(rank.shape, layout, rank.model, recomputed, tokens=tokens)
    if recomputed.full + recomputed.selective:
        size -= (
            tokens
            * rank.shape.kept(
                layout, 4, has_experts=bool(rank.shape.experts), has_adapters=rank.model.lora_cfg.enabled
            ).none
        )
    return size


IMAGES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dtensor one rank": ("dtensor", 1, {}),
    "dtensor fsdp2": ("dtensor", 2, {}),
    "dtensor tp2": ("dtensor", 2, {"tensor_parallel_size": 2}),
    "dtensor cp2": ("dtensor", 2, {"context_parallel_size": 2}),
    "megatron one rank": ("megatron", 1, {}),
    "megatron dp2": ("megatron", 2, {}),
    "megatron tp2": ("megatron", 2, {"tensor_model_parallel_size": 2}),
    "megatron pp2": ("megatron", 2, {"pipeline_model_parallel_size": 2}),
}
HOW_IMAGES_TRAIN = {
    "frozen": ("frozen", "frozen"),
    "projector": ("frozen", "trained"),
    "trained": ("trained", "trained"),
    "adapters": ("adapters", "adapters"),
}


@pytest.mark.parametrize(
    "training", partly_exhaustive(list(HOW_IMAGES_TRAIN), always=["trained"]), ids=list(HOW_IMAGES_TRAIN)
)
@pytest.mark.parametrize("mesh", IMAGES)
def test_a_rank_with_images_holds_the_bytes_of_the_plan(mesh, training, pool, seeing_model, tmp_path):
    backend, num_ranks, settings = IMAGES[mesh]
    tower, projector = HOW_IMAGES_TRAIN[training]
    if training == "adapters" and backend != "dtensor":
        pytest.skip("adapters of a tower need dtensor")
    config = ModelConfig(
        model_name=str(seeing_model),
        precision="float32",
        max_total_sequence_length=512,
        sequence_packing=SequencePackingConfig(train_mb_tokens=4096, logprob_mb_tokens=4096),
        optimizer=OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-3}),
        lora_cfg=LoraConfig(enabled=training == "adapters", dim=8),
        vision=VisionConfig(enabled=True, tower=tower, projector=projector),
    )
    rank = planned(config, backend, num_ranks, settings)
    images = str(tmp_path / "images")
    batch = image_rows(str(seeing_model), images)
    given = (backend, settings, config, (), str(tmp_path / "checkpoint"), images)
    ranks = pool.run(trained_bytes, [given] * num_ranks, timeout_s=600)
    fullest = {name: max(each[name] for each in ranks) for name in ranks[0]}
    layout = replace(rank.layout, pipeline=1)
    token = json.loads((seeing_model / "config.json").read_text())["image_token_id"]
    tokens, shown = len(batch.ragged(TOKENS).values) / layout.data, batch.ragged(TOKENS).values == token
    kept = activation_bytes(rank.shape, layout, config, rank.plans()[0], tokens=tokens / layout.context)
    kept += rank.vision.kept(config.vision, shown.sum() / layout.data, 4, recomputed=False)
    expected = {"kept": kept, "checkpoint": checkpoint_bytes(rank), "copied": rank.copied}
    expected |= {name: rank.state[name] for name in ("weights", "gradients")}
    expected["optimizer"] = rank.state["optimizer state"]
    ratios = {name: fullest[name] / size for name, size in expected.items()}
    sys.stdout.write(f"{mesh}, images, {training}: {ratios}\n")
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=TOLERANCE)


@exhaustive
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("grpo-math-8b", ["policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.sequence_parallel=true"]),
        ("sft-lora", []),
        ("grpo-math-8b-megatron", []),
        ("grpo-math-8b-megatron", ["policy.megatron_cfg.context_parallel_size=2"]),
        ("grpo-math-70b-megatron", []),
    ],
)
def test_formulas_agree_with_counts_on_real_layers(recipe, overrides):
    run = read_plan(recipe, overrides)
    found = verify(run, plan_run(run, recipe, accelerator=accelerator_named("h100"), device=CUDA))
    assert {each.part for each in found} >= {"weights", "logits", "activations, recompute none"}
    # Adapters are not on the layers that are counted.
    assert run.config.policy.lora_cfg.enabled or all(each.counted for each in found)
    assert [each for each in found if abs(each.difference) > TOLERANCE] == []


def test_activations_of_routed_tokens_are_not_counted_on_megatron():
    run = read_plan("grpo-qwen3-30b-a3b-megatron")
    found = verify(run, plan_run(run, "experts", accelerator=accelerator_named("h100"), device=CUDA))
    counted = {each.part: each.difference for each in found if each.counted}
    assert counted == pytest.approx(dict.fromkeys(counted, 0.0), abs=TOLERANCE)
    uncounted = [each for each in found if each.counted is None]
    assert all(each.part.startswith("activations") for each in uncounted)
    assert "not" in "".join(lines(uncounted))
