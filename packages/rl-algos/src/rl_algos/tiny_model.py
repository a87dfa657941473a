"""A language model small enough to learn sums in a minute on one core, made locally and without torch."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = "\n" + " " + string.digits + string.ascii_letters + string.punctuation

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in " + repr(list(ROLES)) + " -%}"
    "{{- raise_exception('unknown role ' ~ message.role) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message.role ~ '|>' -}}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- message.content ~ '" + END + "' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- message.content ~ '" + END + "' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""`<|user|>1+2=<|end|><|assistant|>3<|end|>`: one token per role, and one at the end of every turn."""


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
        folder: Made if it does not exist; files of an earlier model in it are replaced.
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
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
    )
    tensors = save(_weights(config, seed), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(tensors)


def make_tokenizer(characters: str = CHARACTERS, *, model_max_length: int = 1024) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters with `CHAT_TEMPLATE`; special tokens come first, padding is 0.

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


def _weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: np.ones(shape, dtype=np.float32)
        if len(shape) == 1
        else (random.standard_normal(shape, dtype=np.float32) * np.float32(config["initializer_range"]))
        for name, shape in _shapes(config)
    }


def _shapes(config: dict) -> list[tuple[str, tuple[int, ...]]]:
    """Parameters of a Qwen3 by their Hugging Face names; the LM head is the embedding."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    layer = [
        ("input_layernorm", (hidden,)),
        ("self_attn.q_proj", (queries, hidden)),
        ("self_attn.k_proj", (keys, hidden)),
        ("self_attn.v_proj", (keys, hidden)),
        ("self_attn.o_proj", (hidden, queries)),
        ("self_attn.q_norm", (head,)),
        ("self_attn.k_norm", (head,)),
        ("post_attention_layernorm", (hidden,)),
        ("mlp.gate_proj", (inner, hidden)),
        ("mlp.up_proj", (inner, hidden)),
        ("mlp.down_proj", (hidden, inner)),
    ]
    return [
        ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        *(
            (f"model.layers.{index}.{name}.weight", shape)
            for index in range(config["num_hidden_layers"])
            for name, shape in layer
        ),
        ("model.norm.weight", (hidden,)),
    ]


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
