"""Plain peft loads the adapters that a run exports as the model that was trained, or the run does not start."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, SCORES, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import PairLoss, TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.tiny_model import write_composite, write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import make_batch, make_pairs
from rl_core.testing.torch.tiny_vision import write_tiny_vision_model
from rl_dtensor.selfcheck import write_tiny

STACKS = ["experts.gate_up_proj", "experts.down_proj"]
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})
PATTERNS = {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6}, "alpha_pattern": {"0.self_attn.q_proj": 3}}


@dataclass(frozen=True)
class Case:
    """An adapter on a tiny model.

    Args:
        family: `model_type` of the model, or of the text of a composite one.
        lora: Settings of the adapter.
        kind: `model_type` of a composite model that is trained as its language model.
        sees: `model_type` of a composite model that is trained with its vision tower, which has adapters too.
        role: Role of the model.
        fields: Fields of its config.
        refused: Part of the message with which the start refuses it.
        loading: Arguments by which transformers computes what the model defines.
    """

    family: str
    lora: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    sees: str = ""
    role: str = "policy"
    fields: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    loading: dict[str, Any] = field(default_factory=dict)


OF_LLAMA = ("idefics3", "janus", "llava", "llava_next", "smolvlm", "vipllava")
OF_QWEN = ("got_ocr2", "internvl", "llava_onevision", "video_llama_3")
SEEING = ("gemma3", "qwen2_5_vl", "qwen3_vl")

CASES = {
    "llama": Case("llama"),
    "rslora": Case("llama", {"use_rslora": True}),
    "dropout": Case("llama", {"dropout": 0.1}),
    "patterns": Case("llama", PATTERNS),
    "patterns rslora": Case("llama", PATTERNS | {"use_rslora": True}),
    "gpt2 patterns": Case("gpt2", {"rank_pattern": {"c_attn": 2}, "alpha_pattern": {"1.mlp.c_proj": 5}}),
    "gemma3 patterns": Case("gemma3_text", PATTERNS, kind="gemma3"),
    "deepseek_v3 patterns": Case("deepseek_v3", {"rank_pattern": {"gate_proj": 2}, "alpha_pattern": {"q_b_proj": 5}}),
    "dora": Case("llama", {"use_dora": True}),
    "dora dropout": Case("llama", {"use_dora": True, "dropout": 0.1}),
    "dora gpt2": Case("gpt2", {"use_dora": True}),
    "dora patterns": Case("qwen3", PATTERNS | {"use_dora": True}),
    "gemma3 dora": Case("gemma3_text", {"use_dora": True}, kind="gemma3"),
    "pissa": Case("llama", {"init": "pissa"}),
    "pissa rslora patterns": Case("llama", PATTERNS | {"init": "pissa", "use_rslora": True}),
    "pissa dora": Case("llama", {"init": "pissa", "use_dora": True}),
    "gemma3 pissa": Case("gemma3_text", {"init": "pissa"}, kind="gemma3"),
    "pissa reward model": Case("llama", {"init": "pissa"}, role="reward_model"),
    "targets": Case("llama", {"match_all_linear": False, "target_modules": ["q_proj", "layers.1.mlp.up_proj"]}),
    "excluded": Case("llama", {"exclude_modules": ["layers.0.mlp.down_proj"]}),
    "reward model": Case("llama", role="reward_model"),
    "qwen3": Case("qwen3"),
    "gpt2": Case("gpt2"),
    "phi3": Case("phi3"),
    "gemma2": Case("gemma2", loading={"attn_implementation": "eager"}),
    "deepseek_v3": Case("deepseek_v3"),
    "deepseek_v3 dropout": Case("deepseek_v3", {"dropout": 0.1}),
    "deepseek_v3 experts": Case("deepseek_v3", {"target_parameters": STACKS}),
    "deepseek_v3 mlp": Case(
        "deepseek_v3", {"match_all_linear": False, "target_modules": ["q_b_proj", "gate_proj", "down_proj"]}
    ),
    "deepseek_v3 reward model": Case("deepseek_v3", role="reward_model"),
    "deepseek_v2": Case("deepseek_v2"),
    "qwen2_moe": Case("qwen2_moe"),
    "qwen2_moe experts": Case("qwen2_moe", {"target_parameters": STACKS}),
    "qwen3_moe": Case("qwen3_moe"),
    "qwen3_moe experts": Case("qwen3_moe", {"target_parameters": STACKS, "use_rslora": True}),
    "qwen3_next": Case("qwen3_next"),
    "glm4_moe": Case("glm4_moe"),
    "ernie4_5_moe": Case("ernie4_5_moe"),
    "hunyuan_v1_moe": Case("hunyuan_v1_moe"),
    "dots1": Case("dots1"),
    "mixtral": Case("mixtral"),
    "gpt_oss": Case("gpt_oss", {"target_parameters": STACKS}),
    "olmoe": Case("olmoe"),
    "falcon_h1": Case("falcon_h1"),
    "jamba": Case("jamba"),
    "bamba": Case("bamba"),
    "nemotron_h": Case("nemotron_h"),
    "gemma3": Case("gemma3_text", kind="gemma3"),
    "gemma3 reward model": Case("gemma3_text", kind="gemma3", role="reward_model"),
    "mistral3": Case("mistral", kind="mistral3", fields={"tie_word_embeddings": False}),
    "qwen3_5": Case("qwen3_5_text", kind="qwen3_5", fields={"layer_types": ["linear_attention", "full_attention"]}),
    "idefics2": Case("mistral", kind="idefics2", fields={"tie_word_embeddings": False}),
    "lfm2_vl": Case("lfm2", kind="lfm2_vl"),
    **{kind: Case("llama", kind=kind, fields={"tie_word_embeddings": False}) for kind in OF_LLAMA},
    **{kind: Case("qwen2", kind=kind, fields={"tie_word_embeddings": False}) for kind in OF_QWEN},
    **{f"{kind} with images": Case("", {"exclude_modules": ["k_proj"]}, sees=kind) for kind in SEEING},
    "llama4": Case(
        "llama4_text",
        kind="llama4",
        fields={"num_local_experts": 4, "intermediate_size_mlp": 24, "attention_chunk_size": 4},
    ),
}


def write_base(case, folder):
    if case.sees:
        return write_tiny_vision_model(folder / "base", case.sees)
    if case.kind:
        language = write_tiny_model(folder / "language", case.family, **case.fields)
        return write_composite(folder / "composite", case.kind, language)
    if case.family in ("llama", "qwen3"):
        return write_tiny_model(folder / "base", case.family, **case.fields)
    return write_tiny(AutoConfig.for_model(case.family, **case.fields), folder / "base")


def open_model(ranks, base, case, **start):
    lora = LoraConfig(**{"enabled": True, "dim": 4, "alpha": 12} | case.lora | start)
    seen = {"enabled": True, "tower": "adapters", "projector": "adapters"} if case.sees else {}
    config = ModelConfig(model_name=str(base), precision="float32", optimizer=SGD, lora_cfg=lora, vision=seen)
    return PooledModel(ranks, "dtensor_factories:build", config, ModelSpec(role=case.role, seed=3), 1)


def settings_of(folder):
    """Return settings that start from an adapter, whose layers are named as in its files."""
    described = json.loads((folder / "adapter_config.json").read_text())
    stacks = [name for name in described["target_parameters"] or () if not name.endswith(".weight")]
    names = [name.removeprefix("base_model.model.") for name in load_file(folder / "adapter_model.safetensors")]
    layers = sorted({name.partition(".lora_")[0] for name in names if ".lora_" in name})
    linear = [layer for layer in layers if not re.search(r"\.experts(\.base_layer)*$", layer)]
    chosen = {"match_all_linear": False, "target_modules": linear, "exclude_modules": [], "target_parameters": stacks}
    sizes = {"dim": described["r"], "alpha": described["lora_alpha"], "init": "default"}
    patterns = {name: described[name] for name in ("rank_pattern", "alpha_pattern")}
    return {"adapter": str(folder), **chosen, **sizes, **patterns}


def logprobs_of(model, batch):
    """Return the logprobs of the tokens of rows, which transformers computes row by row."""
    rows = []
    for row in range(len(batch)):
        ids = torch.as_tensor(batch.ragged("tokens")[row]).long()[None]
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
        rows.append(np.concatenate([[0.0], logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()]))
    return np.concatenate(rows)


def scores_of(model, batch):
    rows = [torch.as_tensor(batch.ragged("tokens")[row]).long()[None] for row in range(len(batch))]
    return np.array([model(input_ids=ids).logits[0, 0].item() for ids in rows])


@torch.no_grad()
def loaded(case, folder):
    """Return the models that peft makes of an adapter, by the ways that the documents show."""
    if case.role == "reward_model":
        return [AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)]
    models = [AutoPeftModelForCausalLM.from_pretrained(folder, **case.loading)]
    if case.kind or case.sees:
        base = models[0].get_base_model()
        whole = getattr(transformers, type(base).__name__).from_pretrained(base.config._name_or_path, **case.loading)
        models.append(PeftModel.from_pretrained(whole, folder))
    return models


@pytest.mark.parametrize(
    "name",
    partly_exhaustive(
        CASES, always=["llama", "patterns", "dora", "pissa rslora patterns", "deepseek_v3", "gemma3 patterns"]
    ),
)
def test_peft_loads_what_was_trained_or_the_start_says_no(ranks, tmp_path, name):
    case = CASES[name]
    base = write_base(case, tmp_path)
    if case.refused:
        with pytest.raises(WorkerError, match=case.refused):
            open_model(ranks, base, case)
        return
    is_policy = case.role == "policy"
    batch, loss = (make_batch((9, 3, 17)), TokenLoss()) if is_policy else (make_pairs(), PairLoss())
    read = LOGPROBS if is_policy else SCORES
    with open_model(ranks, base, case) as model:
        before = model.infer(batch, [read])
        for _ in range(2):
            model.train_step(batch, loss)
        model.export_adapter(str(tmp_path / "adapter"))
        trained = model.infer(batch, [read])
    values = [each.ragged(read.name).values if is_policy else each.array(read.name) for each in (before, trained)]
    assert np.abs(values[1] - values[0]).max() > 1e-2
    if is_policy:
        with open_model(ranks, base, case, **settings_of(tmp_path / "adapter")) as model:
            np.testing.assert_allclose(model.infer(batch, [read]).ragged(read.name).values, values[1], atol=1e-5)
    for peft in loaded(case, tmp_path / "adapter"):
        with torch.no_grad():
            found = (logprobs_of if is_policy else scores_of)(peft.eval(), batch)
        np.testing.assert_allclose(found, values[1], atol=1e-4)
