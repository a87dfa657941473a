"""A vision-language model small enough to learn to count squares on a CPU, made locally and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from transformers import PreTrainedTokenizerFast

from rl_algos.tiny_model import CHARACTERS, END, PAD, ROLES, make_tokenizer

PATCH = 14
"""Pixels of a side of a patch; four patches are one token."""

_START, _STOP, _IMAGE, _VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

_CONTENT = (
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '" + _START + _IMAGE + _STOP + "' -}}{%- else -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}{%- if message.role not in " + repr(list(ROLES)) + " -%}"
    "{{- raise_exception('unknown role ' ~ message.role) -}}{%- endif -%}{{- '<|' ~ message.role ~ '|>' -}}"
    "{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content ~ '" + END + "' -}}"
    "{%- endgeneration -%}{%- else -%}" + _CONTENT + "{{- '" + END + "' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_tiny_vision_model(
    folder: str | Path,
    *,
    seed: int = 0,
    characters: str = CHARACTERS,
    hidden_size: int = 128,
    num_layers: int = 3,
    vision_size: int = 64,
    num_vision_layers: int = 2,
    max_position_embeddings: int = 1024,
) -> None:
    """Write an untrained Qwen2.5-VL with tied embeddings, a tokenizer of single characters and a processor, as Hugging
    Face files.

    Args:
        folder: Made if it does not exist; files of an earlier model in it are replaced.
        seed: Seed of the weights.
        characters: The vocabulary except special tokens.
        hidden_size: Width of the language model, a multiple of 32: heads have 32 dimensions.
        num_layers: Number of layers of the language model.
        vision_size: Width of the vision tower, a multiple of 32.
        num_vision_layers: Number of layers of the vision tower.
        max_position_embeddings: Maximum number of tokens of a row.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(characters, max_position_embeddings)
    tokenizer.save_pretrained(str(folder))
    config = _config(tokenizer, hidden_size, num_layers, vision_size, num_vision_layers, max_position_embeddings)
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
        "processor_config.json": {"processor_class": "Qwen2_5_VLProcessor"},
        "preprocessor_config.json": {**_images(), "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**_images(), "video_processor_type": "Qwen2VLVideoProcessor"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    random = np.random.default_rng(seed)
    tensors = {name: _values(name, shape, random) for name, shape in _shapes(config)}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def _tokenizer(characters: str, max_length: int) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(characters, model_max_length=max_length)
    tokenizer.add_special_tokens({"additional_special_tokens": [_START, _STOP, _IMAGE, _VIDEO]}, False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _images() -> dict[str, Any]:
    side = 2 * PATCH
    return {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        # from one token to 64
        "size": {"shortest_edge": side * side, "longest_edge": 64 * side * side},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen2_5_VLProcessor",
    }


def _config(
    tokenizer: Any, hidden: int, num_layers: int, vision: int, num_vision_layers: int, num_positions: int
) -> dict[str, Any]:
    ids = tokenizer.get_vocab()
    ends = {"bos_token_id": None, "eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "tie_word_embeddings": True,
        "image_token_id": ids[_IMAGE],
        "video_token_id": ids[_VIDEO],
        "vision_start_token_id": ids[_START],
        "vision_end_token_id": ids[_STOP],
        "text_config": {
            **ends,
            "model_type": "qwen2_5_vl_text",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": 2 * hidden,
            "max_position_embeddings": num_positions,
            "num_attention_heads": hidden // 32,
            "num_hidden_layers": num_layers,
            "num_key_value_heads": hidden // 64 or 1,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": len(tokenizer),
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": num_vision_layers,
            "hidden_size": vision,
            "intermediate_size": 2 * vision,
            "num_heads": vision // 32,
            "patch_size": PATCH,
            "window_size": 8 * PATCH,
            "fullatt_block_indexes": [num_vision_layers - 1],
            "out_hidden_size": hidden,
            "initializer_range": 0.02,
        },
    }


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if name.endswith("bias"):
        return np.zeros(shape, dtype=np.float32)
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    # a small model learns to see sooner with weights that keep the size of what they read
    scale = 0.02 if "embed_tokens" in name else float(np.prod(shape[1:])) ** -0.5
    return random.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters by their Hugging Face names; the LM head is the embedding."""
    yield from _text_shapes(config["text_config"])
    yield from _vision_shapes(config["vision_config"])


def _text_shapes(text: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    keys = 32 * text["num_key_value_heads"]
    yield "model.embed_tokens.weight", (text["vocab_size"], hidden)
    for index in range(text["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name, size in (("q", hidden), ("k", keys), ("v", keys)):
            yield f"{layer}.self_attn.{name}_proj.weight", (size, hidden)
            yield f"{layer}.self_attn.{name}_proj.bias", (size,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _vision_shapes(vision: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    size, inner = vision["hidden_size"], vision["intermediate_size"]
    yield "visual.patch_embed.proj.weight", (size, 3, 2, PATCH, PATCH)
    linear = {
        "attn.qkv": (3 * size, size),
        "attn.proj": (size, size),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    for index in range(vision["depth"]):
        block = f"visual.blocks.{index}"
        for name, shape in linear.items():
            yield f"{block}.{name}.weight", shape
            yield f"{block}.{name}.bias", shape[:1]
        yield f"{block}.norm1.weight", (size,)
        yield f"{block}.norm2.weight", (size,)
    yield "visual.merger.ln_q.weight", (size,)
    for name, shape in (("0", (4 * size, 4 * size)), ("2", (vision["out_hidden_size"], 4 * size))):
        yield f"visual.merger.mlp.{name}.weight", shape
        yield f"visual.merger.mlp.{name}.bias", shape[:1]
