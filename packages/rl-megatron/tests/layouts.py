"""Layouts of ranks, and tiny models that fit them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rl_core.selfcheck.torch.tiny_model import write_tiny_model

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
CP = "context_parallel_size"
EP = "expert_model_parallel_size"
ETP = "expert_tensor_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {TP: 2}),
    "tp2+sp": (2, {TP: 2, "sequence_parallel": True}),
    "pp2": (2, {PP: 2}),
    "pp2 virtual": (2, {PP: 2, VPP: 2}),
    "pp2 uneven": (2, {PP: 2, "num_layers_in_first_pipeline_stage": 3}),
    "cp2": (2, {CP: 2}),
    "dp2": (2, {}),
    "tp2 pp2+sp": (4, {TP: 2, PP: 2, "sequence_parallel": True}),
}
"""Number of ranks and settings."""

EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {EP: 2}),
    "tp2 ep2+sp": (2, {TP: 2, EP: 2, ETP: 1, "sequence_parallel": True}),
    "tp2 etp2 ep2+sp": (4, {TP: 2, EP: 2, "sequence_parallel": True}),
}

LARGE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 pp2 dp2 ep2+sp": (8, {TP: 2, PP: 2, EP: 2, "sequence_parallel": True})
}

SHARED_KEYS_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"tp4+sp": (4, {TP: 4, "sequence_parallel": True})}
"""More tensor-parallel ranks than key-value heads."""

MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    # a padding token has zeros as its embedding, behind which gradients of biases are 1e11
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40, "pad_token_id": None},
    "qwen3_moe": {**MOE, "num_experts": 4, "norm_topk_prob": True},
    "qwen3_next": {
        **MOE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "pad_token_id": None,
        # heads of linear attention whose outputs are near zero are normed: gradients behind them are 1e4 otherwise
        "rms_norm_eps": 1e-2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **MOE,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {
        **MOE,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "pad_token_id": None,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "swiglu_limit": 1.0},
    "gemma3_text": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 11,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    },
    "qwen3_5_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "pad_token_id": None,
        "rms_norm_eps": 1e-2,
    },
}

FAMILIES["qwen3_5_moe_text"] = {
    **MOE,
    **FAMILIES["qwen3_5_text"],
    "num_experts": 4,
    "shared_expert_intermediate_size": 40,
}
FAMILIES["glm4_moe_lite"] = {**FAMILIES["deepseek_v3"], "q_lora_rank": None}

MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
"""Fields of Moonlight, which is a `deepseek_v3`."""

EXPERT_FAMILIES = tuple(family for family, fields in FAMILIES.items() if "num_experts_per_tok" in fields)


LINEAR_FAMILIES = tuple(family for family, fields in FAMILIES.items() if "linear_num_key_heads" in fields)
LATENT_FAMILIES = ("deepseek_v3", "glm4_moe_lite")


def fits(family: str, layout: str) -> bool:
    """Whether a family is trained on one of `LAYOUTS` or `EXPERT_LAYOUTS`."""
    _, settings = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    if family not in EXPERT_FAMILIES:
        return layout in LAYOUTS
    # megatron-core does not spread experts with biases over tensor-parallel ranks
    is_whole = settings.get(ETP, settings.get(TP, 1)) == 1
    return layout != "tp2" and (is_whole or family != "gpt_oss")


def write_family(folder: Path, family: str, **fields: Any) -> Path:
    """A tiny model of four layers."""
    return write_tiny_model(folder, family, **{"num_hidden_layers": 4, **FAMILIES[family], **fields})


def write_mixed(folder: Path, family: str, pattern: str, **fields: Any) -> Path:
    """A tiny model in bfloat16 except for tensors whose names match a pattern, which are float32."""
    write_family(folder, family, **fields)
    rewrite(folder, lambda name: torch.float32 if re.search(pattern, name) else torch.bfloat16, "bfloat16")
    return folder


def rewrite(folder: Path, dtype_of: Callable[[str], torch.dtype], stated: str | None) -> None:
    """Change the dtypes of the tensors in a folder, and the one that its config states."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.to(dtype_of(name)) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": stated}))
