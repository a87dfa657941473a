"""Tensors that stay float32 do so in compute, in what is sent and in what is saved."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from rl_core.model import LOGPROBS, SCORES, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import exhaustive
from rl_core.torch.files.model_files import WeightFiles
from rl_dtensor.generation.loading import load_model
from rl_dtensor.model.precision import computed_in_float32, kept_by_family, kept_by_files, widen
from rl_dtensor.model.weights import Catalog, ShardedWeights, persistent
from rl_dtensor.selfcheck import CHECK, shrink, streamed, write_tiny

BIAS = "mlp.gate.e_score_correction_bias"
MODEL_FILE = "model.safetensors"


def kinds(names):
    return {re.sub(r"^model\.(layers\.\d+\.)?", "", name) for name in names}


def built(config, device="meta"):
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        pytest.param("llama", set(), id="nothing"),
        pytest.param("gpt_oss", set(), id="what is kept in float16 alone is not"),
        pytest.param("deepseek_v3", {BIAS}, id="a buffer made in the model's dtype [sgl-project/sglang#31213]"),
        pytest.param("glm4_moe", {BIAS}, id="a buffer made in float32"),
        pytest.param("hy_v3", {"mlp.e_score_correction_bias"}, id="a buffer of another module"),
        pytest.param(
            "ernie4_5_moe",
            {"mlp.gate.weight", "mlp.gate.moe_statics.e_score_correction_bias"},
            id="routers [vllm-project/vllm-ascend#9617]",
        ),
        pytest.param(
            "hunyuan_v1_moe",
            {"mlp.gate.wg.weight"},
            id="made in float32 and not named [vllm-project/vllm-xpu-kernels#465]",
        ),
        pytest.param("olmo_hybrid", {"linear_attn.A_log"}, id="a parameter of a mixer, made in float32"),
        pytest.param(
            "inkling_text",
            {f"{name}.conv1d.weight" for name in ("attn_sconv", "mlp_sconv", "self_attn.k_sconv", "self_attn.v_sconv")},
            id="convolutions",
        ),
    ],
)
def test_what_a_family_keeps_is_what_transformers_loads_in_float32(family, expected):
    config = shrink(AutoConfig.for_model(family))
    found = kept_by_family(built(config), torch.bfloat16)
    weights = {name: torch.zeros(tensor.shape) for name, tensor in persistent(built(config)).items()}
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = kind.from_pretrained(None, config=config, state_dict=weights, dtype=torch.bfloat16)
    assert found == {name for name, tensor in persistent(loaded).items() if tensor.dtype == torch.float32}
    assert kinds(found) == expected


@pytest.fixture(scope="module")
def qwen():
    """A tiny model on `meta` and the names and shapes in its files."""
    model = built(shrink(AutoConfig.for_model("qwen3")))
    catalog = Catalog.of(model, lambda name: 0)
    return catalog, {piece.name: piece.shape for entry in catalog.entries for piece in entry.pieces}


BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NORM = "model.norm.weight"


ALMOST_ALL = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("most", "others", "stated", "expected"),
    [
        pytest.param(BF16, {}, "bfloat16", set(), id="all bfloat16"),
        pytest.param(F32, {}, "float32", set(), id="all float32: nothing is kept on purpose"),
        pytest.param(F32, {}, "bfloat16", set(), id="all float32, whatever the config says"),
        pytest.param(BF16, {NORM: F32}, "bfloat16", {NORM}, id="one in float32"),
        pytest.param(BF16, {NORM: F32}, None, {NORM}, id="one in float32, and the config does not say"),
        pytest.param(BF16, {NORM: F32}, "float32", {NORM}, id="one in float32, and the config is wrong"),
        pytest.param(BF16, {NORM: F64}, "bfloat16", {NORM}, id="one in float64"),
        pytest.param(F16, {NORM: F32}, "float16", {NORM}, id="among float16"),
        pytest.param(BF16, {NORM: F16}, "bfloat16", set(), id="one in another half precision"),
        pytest.param(F32, {NORM: BF16}, "float32", set(), id="float32 with one in bfloat16"),
        pytest.param(BF16, {"lm_head.weight": F32}, "bfloat16", {"lm_head.weight"}, id="a head in float32"),
        pytest.param(
            BF16, dict.fromkeys(ALMOST_ALL, F32), "bfloat16", set(ALMOST_ALL), id="most values, against the config"
        ),
    ],
)
def test_what_the_files_keep_is_sent_in_float32(tmp_path, qwen, most, others, stated, expected):
    catalog, shapes = qwen
    tensors = {name: torch.zeros(shape, dtype=others.get(name, most)) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / MODEL_FILE)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": stated}))
    found = kept_by_files(catalog, WeightFiles.of(tmp_path))
    assert found == expected
    weights = ShardedWeights(catalog.keeping(found), [], mesh=None)
    sent = {spec.name: spec.dtype for spec in weights.specs("bfloat16")}
    assert sent == {name: "float32" if name in expected else "bfloat16" for name in shapes}
    assert {spec.dtype for spec in weights.specs("float32")} == {"float32"}


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        pytest.param("llama", "model.layers.0.input_layernorm.weight", False, id="a norm that widens its output"),
        pytest.param("gpt_oss", "model.layers.0.input_layernorm.weight", True, id="a norm that narrows its output"),
        pytest.param("llama", "model.embed_tokens.weight", False, id="an embedding"),
        pytest.param("qwen3_moe", "model.layers.0.mlp.gate.weight", False, id="a router in the model's dtype"),
        pytest.param(
            "minimax_m2",
            "model.layers.0.mlp.gate.weight",
            True,
            id="a router in its own dtype [vllm-project/vllm-xpu-kernels#465]",
        ),
        pytest.param("minimax_m2", "model.layers.0.mlp.experts.down_proj", False, id="experts"),
        pytest.param("bamba", "model.layers.0.mamba.A_log", True, id="decays [ml-explore/mlx-lm#1028]"),
        pytest.param("bamba", "model.layers.0.mamba.nothing", False, id="of no tiny model"),
        pytest.param("jamba", "model.layers.0.mamba.D", True, id="skips of a selective scan"),
    ],
)
def test_a_tensor_computes_in_float32_if_its_familys_code_takes_it(family, name, expected):
    config = shrink(AutoConfig.for_model(family))
    assert computed_in_float32(config, set(), {name}, torch.bfloat16) == ({name} if expected else set())


@pytest.mark.parametrize(
    ("family", "names", "expected"),
    [
        pytest.param("llama", {NORM}, set(), id="the code does not take it"),
        pytest.param("deepseek_v3", {f"model.layers.1.{BIAS}"}, {f"model.layers.1.{BIAS}"}, id="the code takes it"),
        pytest.param("llama", {NORM, "model.of.another.size"}, {"model.of.another.size"}, id="no tiny model has it"),
        pytest.param(
            "deepseek_v4",
            {"model.layers.0.self_attn.sinks", "model.layers.0.input_layernorm.weight"},
            {"model.layers.0.self_attn.sinks"},
            id="some of them",
        ),
    ],
)
def test_what_a_family_keeps_computes_in_float32_unless_its_code_fails(family, names, expected):
    config = shrink(AutoConfig.for_model(family))
    assert computed_in_float32(config, names, set(), torch.bfloat16) == expected


def test_finding_out_draws_no_random_numbers():
    before = torch.get_rng_state()
    computed_in_float32(shrink(AutoConfig.for_model("llama")), set(), {NORM}, torch.bfloat16)
    assert torch.get_rng_state().equal(before)


def test_only_named_tensors_are_widened():
    model = built(shrink(AutoConfig.for_model("deepseek_v3")))
    biases = kept_by_family(model, torch.bfloat16)
    widen(model, biases)
    assert {name for name, tensor in persistent(model).items() if tensor.dtype == torch.float32} == biases
    widen(model)
    assert {tensor.dtype for tensor in persistent(model).values()} == {torch.float32}


def write_mixed(folder, family, *patterns):
    """A tiny model in bfloat16 but for tensors of some names, biases of routers near 7 among them."""
    write_tiny(AutoConfig.for_model(family), folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(folder / MODEL_FILE).items():
        if not any(re.search(pattern, name) for pattern in patterns):
            tensor = tensor.bfloat16()
        elif name.endswith("bias"):
            tensor = 7 + 0.1 * torch.rand(tensor.shape, generator=generator)
        tensors[name] = tensor
    save_file(tensors, folder / MODEL_FILE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder


def open_model(ranks, folder, num_ranks, spec=None, *, lora=False, config=None, **settings):
    fields = {
        "precision": "bfloat16",
        "lora_cfg": LoraConfig(enabled=lora),
        "optimizer": OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0}),
        "train_micro_batch_size": 3,
    }
    config = ModelConfig(model_name=str(folder), **{**fields, **(config or {})})
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, spec or ModelSpec(), num_ranks, **settings)


def logprobs_of(hf, batch):
    """Logprobs by `transformers`, row by row."""
    found = []
    with torch.no_grad():
        for row in range(len(batch)):
            tokens = torch.as_tensor(batch.ragged("tokens")[row]).long()
            logits = hf(input_ids=tokens[None]).logits[0, :-1].float()
            found += [0.0, *logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].tolist()]
    return np.array(found)


ROUTER = (r"gate\.weight$", r"e_score_correction_bias$")


@pytest.mark.parametrize(
    ("family", "patterns", "num_ranks", "settings"),
    [
        pytest.param("deepseek_v3", [r"e_score_correction_bias$"], 2, {}, id="buffers [sgl-project/sglang#31213]"),
        pytest.param(
            *("ernie4_5_moe", ROUTER, 2, {}), id="parameters, and rotary embeddings in float32", marks=exhaustive
        ),
        pytest.param("ernie4_5_moe", ROUTER, 2, {"pipeline_parallel_size": 2}, id="pipeline"),
        pytest.param("ernie4_5_moe", ROUTER, 2, {"lora": True, "cpu_offload": True}, id="frozen below adapters"),
        pytest.param(*("ernie4_5_moe", ROUTER, 2, {"spec": ModelSpec(trains=False)}), id="frozen", marks=exhaustive),
    ],
)
def test_a_model_computes_sends_and_saves_in_bfloat16_as_transformers(
    ranks, tmp_path, family, patterns, num_ranks, settings
):
    folder = write_mixed(tmp_path / "model", family, *patterns)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    batch, source = CHECK.batch(0), load_file(folder / MODEL_FILE)
    with open_model(ranks, folder, num_ranks, **settings) as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        assert found == pytest.approx(logprobs_of(hf, batch), abs=1e-5)
        sent = streamed(model)
        model.export(str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported" / MODEL_FILE)
    for found in (sent, exported):
        assert found.keys() >= source.keys() - {"lm_head.weight"}
        assert [name for name in found if found[name].dtype != source[name].dtype] == []
        assert [name for name in found if not found[name].equal(source[name])] == []
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("family", "packs"),
    [
        pytest.param("olmo2", True, id="rotary embeddings in float32 [NVIDIA-NeMo/Automodel#2549]"),
        pytest.param("mpt", False, id="biases of attention in float32"),
        pytest.param("mamba", False, id="a residual in float32"),
        pytest.param("xglm", False, id="positions in the model's dtype"),
        pytest.param("openai-gpt", False, id="a mask in the model's dtype"),
        pytest.param("hy_v4", False, id="a head in float32"),
    ],
)
def test_a_family_computes_in_the_dtypes_of_transformers(ranks, tmp_path, family, packs):
    folder = write_mixed(tmp_path, family)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    batch, packing = CHECK.batch(0), {"sequence_packing": {"enabled": packs}}
    with open_model(ranks, folder, 1, ModelSpec(trains=False), config=packing) as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
    assert np.abs(found - logprobs_of(hf, batch)).mean() < 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_ranks": 4, "dp_replicate_size": 2}, id="hsdp 2x2", marks=exhaustive),
        pytest.param(
            {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True}, id="tp2+sp", marks=exhaustive
        ),
        pytest.param({"num_ranks": 4, "expert_parallel_size": 2}, id="ep2 x fsdp2"),
    ],
)
def test_what_computes_in_float32_trains_alike_on_any_mesh(ranks, tmp_path, settings):
    folder = write_mixed(tmp_path / "model", "ernie4_5_moe", *ROUTER)
    moved = []
    for mesh in ({"num_ranks": 1}, settings):
        with open_model(ranks, folder, **mesh) as model:
            norm = model.train_step(CHECK.batch(0), TokenLoss())["grad_norm"]
            after = streamed(model)
        before = load_file(folder / MODEL_FILE)
        steps = {name: after[name] - before[name] for name in before if name.endswith("gate.weight")}
        moved.append((norm, steps))
    (norm, alone), (norm_split, split) = moved
    assert norm_split == pytest.approx(norm, rel=0.01)
    assert alone
    for name, step in alone.items():
        assert step.abs().max() > 0
        assert (split[name] - step).norm() < 0.1 * step.norm(), name


def test_what_computes_in_float32_resumes_on_another_mesh(ranks, tmp_path):
    folder = write_mixed(tmp_path / "model", "ernie4_5_moe", *ROUTER)
    adamw = {"optimizer": OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-3})}
    with open_model(ranks, folder, 2, config=adamw) as model:
        model.train_step(CHECK.batch(0), TokenLoss())
        model.save(str(tmp_path / "saved"))
        model.train_step(CHECK.batch(1), TokenLoss())
        expected = streamed(model)
    with open_model(ranks, folder, 1, config=adamw) as model:
        model.load(str(tmp_path / "saved"))
        model.train_step(CHECK.batch(1), TokenLoss())
        found = streamed(model)
    for name in (name for name in expected if name.endswith("gate.weight")):
        assert (found[name] - expected[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("trains", [True, False])
def test_a_reward_model_keeps_them_too(ranks, tmp_path, trains):
    folder = write_mixed(tmp_path / "model", "deepseek_v3", r"e_score_correction_bias$")
    batch, source = CHECK.batch(0), load_file(folder / MODEL_FILE)
    if not trains:
        # Otherwise its scores would be random.
        width = source["model.norm.weight"].shape[0]
        source["score.weight"] = torch.randn(1, width, generator=torch.Generator().manual_seed(1)).bfloat16()
        save_file(source, folder / MODEL_FILE, {"format": "pt"})
    with open_model(ranks, folder, 2, ModelSpec(role="reward_model", trains=trains)) as model:
        scores = model.infer(batch, [SCORES]).array("scores")
        model.export(str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported" / MODEL_FILE)
    assert all(tensor.equal(source[name]) for name, tensor in exported.items() if name in source)
    kind = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    with torch.no_grad():
        rows = [torch.as_tensor(row).long()[None] for row in batch.ragged("tokens")]
        hidden = torch.stack([kind.base_model(input_ids=row).last_hidden_state[0, -1].float() for row in rows])
        expected = hidden @ kind.score.weight.float()[0]
    assert scores == pytest.approx(expected.numpy(), abs=0.01)


def test_the_generator_computes_in_float32_with_what_the_trainer_does(ranks, tmp_path):
    folder = write_mixed(tmp_path / "model", "bamba", r"A_log$", r"dt_bias$")
    config = ModelConfig(model_name=str(folder), precision="bfloat16", sequence_packing={"enabled": False})
    module = load_model(config, "eager", torch.device("cpu"))
    wide = {name: tensor for name, tensor in module.state_dict().items() if tensor.dtype == torch.float32}
    source = load_file(folder / MODEL_FILE)
    assert kinds(wide) == {"mamba.A_log", "mamba.dt_bias"}
    assert all(tensor.equal(source[name]) for name, tensor in wide.items())
