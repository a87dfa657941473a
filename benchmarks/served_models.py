"""Tiny random models of any family at sizes that vLLM takes, with the fields that configs on the hub have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SYNC_SIZES = {
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "head_dim": 32,
    "rotary_dim": 16,
    "query_pre_attn_scalar": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "v_head_dim": 32,
    "mamba_d_head": 64,
    "mamba_d_ssm": 256,
    "attention_chunk_size": 128,
}
"""Sizes of a tiny model that vLLM's kernels on CPU take, in place of the self-check's."""

CORRECTION = ("e_score_correction_bias", "expert_bias")
"""Ends of the names of biases that correct the load of experts."""

CORRECTED_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "use_routing_bias": True}
"""How routers with a bias that corrects the load of experts choose; the code of transformers knows it."""

STATED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "num_dense_layers": 2,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
}
"""Fields by family that configs on the hub state, and without which no model runs, or not all its kinds of layers."""


def config_of(family: str) -> Any:
    """Return the family's default config.

    Raises:
        ConfigError: if the family needs what only files state.
    """
    from transformers import AutoConfig

    from rl_core.errors import ConfigError

    try:
        return AutoConfig.for_model(family, **STATED.get(family, {}))
    except Exception as error:  # noqa: BLE001  # any kind, from a family's own code
        raise ConfigError(f"{family} models have no config by default: {one_line(str(error))}") from None


def write_served(config: Any, folder: Path, *, seed: int, sizes: Mapping[str, Any] = SYNC_SIZES) -> Path:
    """Write a random model of the family at sizes that vLLM's kernels on CPU take, as Hugging Face files; return its
    folder.

    Args:
        sizes: Sizes in place of the self-check's.

    Raises:
        ConfigError: if the family's own code refuses a config of such sizes.
    """
    from rl_dtensor.model.tiny import SMALL
    from rl_dtensor.selfcheck import write_tiny

    write_tiny(config, folder, seed, {**SMALL, **{name: value for name, value in sizes.items() if name in SMALL}})
    _spread_corrections(folder, seed)
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**_said_on_the_hub(folder, fields), **fields}, indent=2) + "\n", encoding="utf-8")
    return folder


def _spread_corrections(folder: Path, seed: int) -> None:
    """Give experts different corrections of their load, which are zero in a model that was not trained: an engine that
    leaves them out would not show."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith(CORRECTION):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    save_file(tensors, path, {"format": "pt"})


def _said_on_the_hub(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of configs on the hub that vLLM reads and that transformers has no values for."""
    from rl_core.torch.files.model_files import WeightFiles

    files = WeightFiles.of(folder)
    said: dict[str, Any] = {}
    if any(name.endswith("e_score_correction_bias") for name in files.names):
        said |= CORRECTED_ROUTING
    if "mlp_layer_types" in fields:  # GLM-4.7-Flash, Hunyuan 3
        said["first_k_dense_replace"] = fields["mlp_layer_types"].count("dense")
    if fields["model_type"] == "afmoe":
        said |= {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
    if fields["model_type"] == "mimo_v2_flash":
        rope = fields["rope_parameters"]
        said |= {
            "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in fields["layer_types"]],
            "moe_layer_freq": [int(kind == "sparse") for kind in fields["mlp_layer_types"]],
            "layernorm_epsilon": fields["rms_norm_eps"],
            "sliding_window_size": fields["sliding_window"],
            "swa_num_attention_heads": fields["num_attention_heads"],
            "swa_num_key_value_heads": 2 * fields["num_key_value_heads"],
            "swa_head_dim": fields["head_dim"],
            "swa_v_head_dim": fields["v_head_dim"],
            "add_swa_attention_sink_bias": True,
            "rope_theta": rope["full_attention"]["rope_theta"],
            "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
            "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
        }
    if fields["model_type"] == "hy_v3":
        said |= {"expert_hidden_dim": fields["moe_intermediate_size"], "route_norm": True, "qk_norm": True}
    if "conv_L_cache" in fields:  # LFM2
        said |= dict.fromkeys(("block_dim", "conv_dim"), fields["hidden_size"])
    queries = next((name for name in files.names if name.endswith("self_attn.q_proj.weight")), None)
    has_latent = "kv_lora_rank" in fields  # whose heads have sizes by other names
    if queries is not None and "num_attention_heads" in fields and not has_latent:
        with files.open() as opened:
            said["head_dim"] = opened.read(queries, ()).shape[0] // fields["num_attention_heads"]
        rotated = (fields.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
        said["rotary_dim"] = int(rotated * fields.get("head_dim", said["head_dim"]))
    return said


def one_line(text: str, most: int = 400) -> str:
    """Return the end of a message, which contains the cause, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else "... " + line[-most:]
