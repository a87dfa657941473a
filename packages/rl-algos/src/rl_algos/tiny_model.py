"""A language model that learns sums in a minute on one core, and a vision-language model that learns to count squares
on a CPU, made locally and without torch."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Mapping
from importlib.resources import files as resource
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = "\n" + " " + string.digits + string.ascii_letters + string.punctuation

PATCH = 14
"""Pixels of a side of a patch; four patches are one token."""

_START, _STOP, _IMAGE, _VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

_CONTENT = (
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '" + _START + _IMAGE + _STOP + "' -}}{%- else -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
)


def _template(content: str) -> str:
    """Return a chat template that writes the turns of others with the given part."""
    return (
        "{%- for message in messages -%}{%- if message.role not in " + repr(list(ROLES)) + " -%}"
        "{{- raise_exception('unknown role ' ~ message.role) -}}{%- endif -%}{{- '<|' ~ message.role ~ '|>' -}}"
        "{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content ~ '" + END + "' -}}"
        "{%- endgeneration -%}{%- else -%}" + content + "{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )


CHAT_TEMPLATE = _template("{{- message.content ~ '" + END + "' -}}")
"""`<|user|>1+2=<|end|><|assistant|>3<|end|>`: one token per role, and one at the end of every turn."""

VISION_CHAT_TEMPLATE = _template(_CONTENT + "{{- '" + END + "' -}}")


def make_tiny_model(
    folder: str | Path,
    *,
    seed: int = 0,
    characters: str = CHARACTERS,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 1024,
) -> None:
    """Write an untrained Qwen3 with tied embeddings and a tokenizer of single characters, as Hugging Face files.

    The weights follow from the seed: normal with standard deviation 0.02, norms 1. The tokenizer has a chat template
    that marks the assistant's text.

    Args:
        folder: Folder of the files. It is made if it does not exist; files of an earlier model are replaced.
        seed: Seed of the weights.
        characters: The vocabulary except special tokens; other characters become `<|unknown|>`.
        hidden_size: Width of the model; a multiple of `num_heads`, with an even quotient.
        num_layers: Number of transformer layers.
        num_heads: Number of query heads; a multiple of `num_key_value_heads`.
        num_key_value_heads: Number of key and value heads.
        max_position_embeddings: Maximum number of tokens of a row.

    Raises:
        ValueError: If sizes do not fit one another or a character occurs twice.
    """
    if hidden_size % num_heads or (hidden_size // num_heads) % 2 or num_heads % num_key_value_heads:
        raise ValueError(
            f"hidden_size {hidden_size} must be a multiple of num_heads {num_heads} with an even quotient, "
            f"and num_heads a multiple of num_key_value_heads {num_key_value_heads}"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(characters, model_max_length=max_position_embeddings)
    tokenizer.save_pretrained(str(folder))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": tokenizer.eos_token_id,
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 2 * hidden_size,
        "max_position_embeddings": max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_key_value_heads,
        "pad_token_id": tokenizer.pad_token_id,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": len(tokenizer),
    }
    ends = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    _write_json(folder, {"config.json": config, "generation_config.json": ends})
    random = np.random.default_rng(seed)
    scale = np.float32(config["initializer_range"])
    tensors = {}
    for name, shape in _shapes(config):
        if len(shape) == 1:
            tensors[name] = np.ones(shape, dtype=np.float32)
        else:
            tensors[name] = random.standard_normal(shape, dtype=np.float32) * scale
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def make_tokenizer(characters: str = CHARACTERS, *, model_max_length: int = 1024) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters with `CHAT_TEMPLATE`; special tokens come first, padding is 0.

    Raises:
        ValueError: If a character occurs twice, or there is none.
    """
    if not characters or len(set(characters)) != len(characters):
        raise ValueError(f"characters must be unique, got {characters!r}")
    special = [PAD, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def _shapes(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of a Qwen3 by their Hugging Face names; the LM head is the embedding."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"model.layers.{index}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)


def _write_json(folder: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make_tiny_vision_model(folder: str | Path) -> None:
    """Write an untrained Qwen2.5-VL with tied embeddings, a tokenizer of single characters and a processor, as Hugging
    Face files.

    Args:
        folder: Folder of the files. It is made if it does not exist; files of an earlier model are replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [_START, _STOP, _IMAGE, _VIDEO]}, False)
    tokenizer.chat_template = VISION_CHAT_TEMPLATE
    tokenizer.save_pretrained(str(folder))
    content = json.loads(resource("rl_algos").joinpath("tiny_vision_files.json").read_text(encoding="utf-8"))
    _write_json(folder, content)
    random = np.random.default_rng(0)
    tensors = {name: _values(name, shape, random) for name, shape in _vision_model_shapes(content["config.json"])}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if name.endswith("bias"):
        return np.zeros(shape, dtype=np.float32)
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    # A small model learns to see sooner with weights that keep the size of their inputs.
    scale = 0.02 if "embed_tokens" in name else float(np.prod(shape[1:])) ** -0.5
    return random.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def _vision_model_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield parameters by their Hugging Face names; the LM head is the embedding."""
    text, vision = config["text_config"], config["vision_config"]
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
