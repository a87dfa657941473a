"""What is recomputed: an estimate of memory that is compared with counts, and the choice that it leads to."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from layouts import write_family
from megatron.core import transformer
from transformers import AutoConfig

from rl_core.config import Config, load
from rl_core.config import resolve as resolve_config
from rl_core.errors import ConfigProblems
from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_megatron.config import MegatronConfig
from rl_megatron.model.architecture import transformer_config
from rl_megatron.model.recompute import SWITCHES, cheap_modules, layers_per_rank, put_into_effect, recompute_fields
from rl_megatron.selfcheck import CHECK

LENGTHS = [11, 32, 21]
LARGE = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8, "head_dim": 16}
"""Sizes with which matrices outweigh what the formulas leave out."""
EXPERTS = {**LARGE, "moe_intermediate_size": 96}
LATENT = {**EXPERTS, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}


def open_model(ranks, folder, num_ranks=1, precision="float32", **backend):
    packing = SequencePackingConfig(enabled=True)
    config = ModelConfig(model_name=str(folder), precision=precision, sequence_packing=packing)
    return PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **backend)


def run(ranks, name, *args):
    return ranks.run(f"megatron_factories:{name}", [args])[0]


@pytest.mark.parametrize(
    ("family", "fields", "precision", "modules", "near"),
    [
        ("llama", LARGE, "float32", ["mlp"], 0.02),
        ("qwen3", LARGE, "bfloat16", ["mlp"], 0.03),
        ("qwen3_moe", EXPERTS, "float32", ["moe"], 0.02),
        # Low-rank projections are estimated roughly.
        ("deepseek_v3", LATENT, "float32", ["moe", "mlp"], 0.25),
    ],
)
def test_the_estimate_is_what_layers_keep(ranks, tmp_path, family, fields, precision, modules, near):
    """Without recomputation and with it."""
    folder = write_family(tmp_path / "model", family, **fields)
    with open_model(ranks, folder, precision=precision):
        held, estimated = run(ranks, "num_parameters")
        assert estimated == held
        estimates = run(ranks, "estimated_by_layers", modules)
        found = {"none": run(ranks, "kept_by_layers", LENGTHS)}
        run(ranks, "set_full_recomputation")
        found["full"] = run(ranks, "kept_by_layers", LENGTHS)
    with open_model(ranks, folder, precision=precision, recompute="selective", recompute_modules=modules):
        found["selective"] = run(ranks, "kept_by_layers", LENGTHS)
    for name, counted in found.items():
        estimated = [getattr(layer, name) for layer in estimates]
        # Token ids and numbers of whole rows are left out.
        assert estimated == pytest.approx(counted, rel=near, abs=40), name


MODELS = {
    "dense": (
        "qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    "experts": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
    ),
}
"""Sizes of Qwen3-8B and Qwen3-30B-A3B."""


def shape_of(name, **settings):
    family, fields = MODELS[name]
    hf = AutoConfig.for_model(family, **fields)
    backend = MegatronConfig(**settings)
    return hf, backend, transformer_config(hf, backend, dtype=torch.bfloat16, is_cuda=True, has_te=True)


def chosen(name, gb, *, world=8, tokens=8192, trains=True, has_te=True, lora=False, **settings):
    """The fields for a device of so many GB."""
    hf, backend, shape = shape_of(name, **settings)
    packing = SequencePackingConfig(enabled=True, train_mb_tokens=tokens)
    config = ModelConfig(
        model_name="m", max_total_sequence_length=4096, sequence_packing=packing, lora_cfg=LoraConfig(enabled=lora)
    )
    tp, pp, ep = shape.tensor_model_parallel_size, shape.pipeline_model_parallel_size, shape.expert_model_parallel_size
    mesh = SimpleNamespace(
        kind=SimpleNamespace(memory=lambda: gb),
        rank=0,
        layout={"world": world, "tp": tp, "pp": pp, "cp": shape.context_parallel_size, "ep": ep, "etp": tp},
    )
    fields, memory = recompute_fields(config, backend, hf, shape, mesh=mesh, has_te=has_te, trains=trains)
    if memory is None:
        return fields
    plan, step = memory.plan(round(0.9 * gb * 1e9))
    logging.getLogger(__name__).info(step.decision)
    if plan != memory.plans[-1].of_chunks(memory.chunks):
        assert sum(step.parts.values()) <= 0.9 * gb * 1e9
    effect = SimpleNamespace(**{"recompute_granularity": None, **fields})
    if memory.choice == "auto":
        put_into_effect(plan, [], effect)
    if not effect.recompute_granularity:
        return {}
    return {
        name: value
        for name, value in vars(effect).items()
        if effect.recompute_granularity != "full" or name != "recompute_modules"
    }


WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def test_a_dense_model_recomputes_as_many_layers_as_must_be(engine_kernels, caplog):
    caplog.set_level(logging.INFO)
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert chosen("dense", None, **split) == chosen("dense", 1000, **split) == {}
    assert "megatron_cfg.recompute=auto: no layer recomputed: " in caplog.text
    numbers = []
    for gb in (80, 70, 60, 50):
        fields = chosen("dense", gb, **split)
        numbers.append(fields.get("recompute_num_layers", 0))
        assert not fields or (fields["recompute_granularity"], fields["recompute_method"]) == ("full", "block")
    assert numbers == sorted(numbers)
    assert 0 < numbers[-1] <= 36
    assert f"megatron_cfg.recompute=auto: {numbers[-1]} in full of 36 layers recomputed: " in caplog.text
    assert chosen("dense", 1, **split)["recompute_num_layers"] == 36


def test_experts_recompute_first_what_costs_little(engine_kernels):
    plans = [chosen("experts", gb, world=32, expert_model_parallel_size=8) for gb in (200, 100, 40)]
    assert plans[0] == {}
    assert plans[1] == {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
    assert plans[2]["recompute_granularity"] == "full"
    # parts that cost nearly a layer come after as few layers
    costly = chosen("experts", 100, world=32, expert_model_parallel_size=8, recompute_modules=["moe"])
    assert costly["recompute_granularity"] == "full"


def test_virtual_stages_recompute_the_first_layers_of_each(engine_kernels):
    split = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3, "tokens": 4096}
    assert chosen("dense", 60, **split)["recompute_num_layers"] == 3
    assert chosen("dense", 1, **split)["recompute_num_layers"] == 6


def test_every_part_that_a_layer_can_recompute_has_a_switch():
    """Megatron decides on them when it builds a module, by its config."""
    switch = re.compile(r"self\.(\w+) = \(\s*(?:self\.)?config\.recompute_granularity == 'selective'")
    in_a_layer = re.compile(r"self\.(recompute_\w+) = True")
    folder = Path(transformer.__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py") if path.name != "transformer_config.py"]
    found = {name for source in sources for name in switch.findall(source) + in_a_layer.findall(source)}
    assert found == {*SWITCHES}


@pytest.mark.parametrize(
    ("family", "fields", "modules"),
    [("qwen3", LARGE, ["mlp", "core_attn"]), ("deepseek_v3", LATENT, ["moe", "mlp", "core_attn"])],
)
def test_memory_decides_at_the_first_step_what_a_built_model_recomputes(ranks, tmp_path, family, fields, modules):
    """The model is then the same as one that was built so, and its steps are."""
    folder = write_family(tmp_path / "model", family, **fields)
    batch, steps, found = CHECK.batch(0), {}, {}

    def step(name, **backend):
        with open_model(ranks, folder, **backend) as model:
            metrics = model.train_step(batch, TokenLoss())
            steps[name] = metrics["loss"], metrics["grad_norm"]
            # The routers of a mixture expect the microbatches of a step.
            kept = None if "moe" in modules else run(ranks, "kept_by_layers", LENGTHS)
            found[name] = run(ranks, "switched_on"), kept

    step("none", recompute="none")
    step("selective", recompute="selective", recompute_modules=modules)
    step("full", recompute="full")
    for name, room in (("none", 10**12), ("full", 0)):
        run(ranks, "show_memory", room)
        try:
            step(f"{name} by memory", recompute_modules=modules)
        finally:
            run(ranks, "hide_memory")
    assert found["none by memory"] == found["none"] != found["selective"]
    assert found["full by memory"] == found["full"]
    assert len({*steps.values()}) == 1


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, 36),
        ({"pipeline_model_parallel_size": 4}, 9),
        ({"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 12}, 12),
        ({"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 8}, 14),
        (
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "megatron_kwargs": {"pipeline_model_parallel_layout": "Et*10|t*9|t*6|t*11L"},
            },
            20,
        ),
    ],
)
def test_the_largest_pipeline_rank_decides(engine_kernels, settings, layers):
    assert layers_per_rank(shape_of("dense", **settings)[2]) == layers


def test_what_is_chosen_by_hand_is_what_megatron_gets(engine_kernels):
    assert chosen("dense", 1, recompute="none") == chosen("dense", 1, recompute="full", trains=False) == {}
    assert chosen("dense", None, recompute="full") == WHOLE
    by_hand = {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}
    assert chosen("dense", None, **by_hand) == {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
    }
    hf, backend, _ = shape_of("dense", **by_hand)
    config = transformer_config(
        hf, backend, dtype=torch.bfloat16, is_cuda=True, has_te=True, recompute=chosen("dense", None, **by_hand)
    )
    assert config.recompute_modules == ["core_attn", "mlp"]


def test_parts_that_layers_lack_are_refused(engine_kernels):
    with pytest.raises(ValueError, match=r"\['moe'\]: the model's layers have no such part.*core_attn, mlp"):
        chosen("dense", None, recompute="selective", recompute_modules=["moe"])
    with pytest.raises(ValueError, match=r"\['layernorm'\] needs Transformer Engine"):
        chosen("experts", None, recompute="selective", recompute_modules=["layernorm"], has_te=False)


def test_parts_of_little_cost_follow_from_model_and_layers(engine_kernels):
    assert cheap_modules(shape_of("dense")[2], has_te=True) == ["mlp"]
    assert cheap_modules(shape_of("experts")[2], has_te=False) == ["moe"]
    in_8_bit = shape_of("experts")[2]
    in_8_bit.fp8, in_8_bit.fp8_recipe = "hybrid", "delayed"
    assert cheap_modules(in_8_bit, has_te=True) == ["moe"]


def test_layers_without_a_formula_are_recomputed_whole(engine_kernels, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    hf = AutoConfig.from_pretrained(write_family(tmp_path, "qwen3_next"))
    backend = MegatronConfig()
    shape = transformer_config(hf, backend, dtype=torch.bfloat16, is_cuda=True, has_te=True)
    layout = {"world": 1, "tp": 1, "pp": 1, "cp": 1}
    mesh = SimpleNamespace(kind=SimpleNamespace(memory=lambda: "some"), rank=0, layout=layout)
    config = ModelConfig(model_name="m")
    fields, memory = recompute_fields(config, backend, hf, shape, mesh=mesh, has_te=True, trains=True)
    assert fields == WHOLE
    plan, step = memory.plan(10**12)
    assert (plan.num_full, [*step.parts]) == (hf.num_hidden_layers, ["logits"])
    assert "cannot be counted (there is no formula for linear attention)" in caplog.text


class Root(Config):
    megatron_cfg: MegatronConfig = MegatronConfig()


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ({"activation_checkpointing": True}, r"is now megatron_cfg\.recompute=full"),
        ({"activation_checkpointing": False}, r"is now megatron_cfg\.recompute=none"),
        (
            {"activation_checkpointing": True, "recompute_granularity": "selective"},
            r"is now megatron_cfg\.recompute=selective(.|\n)*is now megatron_cfg\.recompute=selective",
        ),
        ({"recompute_granularity": "full"}, "Remove this line"),
    ],
)
def test_earlier_keys_are_answered_with_the_present_one(written, answer):
    with pytest.raises(ConfigProblems, match=answer):
        resolve_config(load({"megatron_cfg": written}), Root, checks=[])


@pytest.mark.parametrize(
    ("is_on", "granularity", "modules"), [(False, "full", None), (True, "full", None), (True, "selective", ["mlp"])]
)
def test_modules_that_version_0_1_recorded_are_kept_if_they_had_an_effect(is_on, granularity, modules):
    recorded = {"activation_checkpointing": is_on, "recompute_granularity": granularity, "recompute_modules": ["mlp"]}
    upgraded, _ = load({"megatron_cfg": recorded}).upgraded(Root)
    config = resolve_config(upgraded, Root, checks=[]).config.megatron_cfg
    assert config.recompute == (granularity if is_on else "none")
    assert config.recompute_modules == modules
