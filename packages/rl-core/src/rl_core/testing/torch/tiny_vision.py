"""Tiny random vision-language models for tests: weights, tokenizer and processor files, made without a network."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from rl_core.selfcheck.torch.tiny_model import SIZES

if TYPE_CHECKING:
    from PIL.Image import Image

VOCAB_SIZE = 384

EOS_TOKEN_ID: int = SIZES["eos_token_id"]

TEXT: Mapping[str, Any] = {
    **SIZES,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}
"""Fields of the language model's config, the same in all families."""


class TinyFamily(NamedTuple):
    """A family at a tiny size.

    Args:
        text: Fields of its language model in addition to `TEXT`.
        vision: Fields of its vision tower.
        whole: Fields of the composite config; a token is replaced by its id.
        tokens: Special tokens of its tokenizer, in addition to the common ones.
        named: Attributes of its tokenizer that processors look for.
        image: Text of an image in its chat template.
        processor: Class and fields of its processor.
        image_processor: Class and fields of its image processor.
        video_processor: Class of its video processor; empty if it has none.
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    whole: Mapping[str, Any]
    tokens: Sequence[str]
    image: str
    processor: Mapping[str, Any]
    image_processor: Mapping[str, Any]
    named: Mapping[str, str] | None = None
    video_processor: str = ""


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_NORMALISED = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.15,
}
_QWEN3_VISION = {**_QWEN_VISION, "patch_size": 16, "num_position_embeddings": 64}


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _glm(text: Mapping[str, Any], kind: str) -> TinyFamily:
    start, end, image = _GLM_TOKENS[:3]
    video_start, video_end, video = _GLM_TOKENS[3:]
    return TinyFamily(
        text={
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
            # The logits of this family are large.
            "initializer_range": 0.08,
            **text,
        },
        vision={**_QWEN_VISION, "patch_size": 14, "image_size": 112, "initializer_range": 0.08},
        whole={
            "image_token_id": image,
            "video_token_id": video,
            "image_start_token_id": start,
            "image_end_token_id": end,
            "video_start_token_id": video_start,
            "video_end_token_id": video_end,
        },
        tokens=_GLM_TOKENS,
        image=f"{start}{image}{end}",
        processor={"processor_class": f"{kind}Processor"},
        image_processor={
            "image_processor_type": f"{kind}ImageProcessor",
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            # Pixels of both frames that an image is shown as.
            "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 16 * 28 * 28},
            **_NORMALISED,
        },
        video_processor=f"{kind}VideoProcessor",
    )


_GLM_TOKENS = (
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|video|>",
)


def _qwen(
    text: Mapping[str, Any], vision: Mapping[str, Any], processor: str = "Qwen3VL", video_processor: str = "Qwen3VL"
) -> TinyFamily:
    # Images have at least as many pixels as one merged patch, and at most as many as 16 of them.
    side = 2 * vision["patch_size"]
    start, end, image, video = _QWEN_TOKENS
    return TinyFamily(
        text=text,
        vision=vision,
        whole={
            "image_token_id": image,
            "video_token_id": video,
            "vision_start_token_id": start,
            "vision_end_token_id": end,
        },
        tokens=_QWEN_TOKENS,
        image=f"{start}{image}{end}",
        processor={"processor_class": f"{processor}Processor"},
        image_processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": vision["patch_size"],
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": side * side, "longest_edge": 16 * side * side},
            **_NORMALISED,
        },
        video_processor=f"{video_processor}VideoProcessor",
    )


_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
    "initializer_range": 0.15,
}

_IDEFICS_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)


def _idefics(kind: str, **processor: Any) -> TinyFamily:
    images = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": 112},
        "max_image_size": {"longest_edge": 56},
        **_NORMALISED,
    }
    return TinyFamily(
        text={"model_type": "llama"},
        vision={**_SIGLIP, "image_size": 56},
        whole={"image_token_id": "<image>", "scale_factor": 2, "pad_token_id": 0},
        tokens=_IDEFICS_TOKENS,
        image="<image>",
        processor={"processor_class": f"{kind}Processor", "image_seq_len": 4, **processor},
        image_processor=images,
        video_processor="SmolVLMVideoProcessor" if kind == "SmolVLM" else "",
    )


_QWEN3_5 = {
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
_QWEN3_VL = {"rope_parameters": {**_MROPE, "mrope_interleaved": True}}
_DEEP_VISION = {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]}
_MISTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_LLAMA_TOKENS = (
    "<|image|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)

FAMILIES: Mapping[str, TinyFamily] = {
    "qwen2_vl": _qwen(
        text={"rope_parameters": _MROPE, "num_attention_heads": 2},
        vision={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 14,
            "initializer_range": 0.15,
        },
        processor="Qwen2VL",
        video_processor="Qwen2VL",
    ),
    "qwen2_5_vl": _qwen(
        # Its heads are as wide as they can be.
        text={"rope_parameters": _MROPE, "num_attention_heads": 2},
        vision={**_QWEN_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        processor="Qwen2_5_VL",
        video_processor="Qwen2VL",
    ),
    "qwen3_vl": _qwen(text=_QWEN3_VL, vision=_DEEP_VISION),
    "qwen3_vl_moe": _qwen(text={**_QWEN3_VL, **_EXPERTS}, vision=_DEEP_VISION),
    "qwen3_5": _qwen(text=_QWEN3_5, vision=_QWEN3_VISION),
    "qwen3_5_moe": _qwen(text={**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 24}, vision=_QWEN3_VISION),
    "glm4v": _glm({}, "Glm4v"),
    "glm4v_moe": _glm(
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
        "Glm4v",
    ),
    "glm46v": _glm({}, "Glm46V"),
    "mistral3": TinyFamily(
        text={"model_type": "mistral", "sliding_window": None},
        vision={**_SIGLIP, "image_size": 112},
        whole={"image_token_index": "[IMG]"},
        tokens=_MISTRAL_TOKENS,
        image="[IMG]",
        processor={"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
        image_processor={
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 14, "width": 14},
            "size": {"longest_edge": 112},
            **_NORMALISED,
        },
    ),
    "llama4": TinyFamily(
        text={
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "intermediate_size": 24,
            "attention_chunk_size": 64,
            "attn_temperature_tuning": False,
        },
        vision={
            **_SIGLIP,
            "intermediate_size": 128,
            "image_size": 56,
            "vision_output_dim": 48,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
        },
        whole={
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        tokens=_LLAMA_TOKENS,
        image="<|image|>",
        processor={"processor_class": "Llama4Processor", "patch_size": 14, "pixel_shuffle_ratio": 0.5},
        image_processor={
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": 56, "width": 56},
            "max_patches": 4,
            **_NORMALISED,
        },
    ),
    "gemma4": TinyFamily(
        text={
            "global_head_dim": 32,
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": 0,
        },
        vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 8,
            "pooling_kernel_size": 3,
            "position_embedding_size": 64,
            "initializer_range": 0.15,
        },
        whole={
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "audio_token_id": "<|audio|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
        },
        tokens=("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>"),
        named={
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
        image="<|image|>",
        processor={
            "processor_class": "Gemma4Processor",
            "image_seq_length": 70,
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        },
        image_processor={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 8,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
        video_processor="Gemma4VideoProcessor",
    ),
    "gemma3": TinyFamily(
        text={
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision={**_SIGLIP, "image_size": 56},
        whole={
            "mm_tokens_per_image": 4,
            "initializer_range": 0.15,
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"),
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        image="<start_of_image>",
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
        image_processor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_seq_length": 4,
            **_NORMALISED,
        },
    ),
    "idefics3": _idefics("Idefics3"),
    "smolvlm": _idefics("SmolVLM"),
    "internvl": TinyFamily(
        text={"model_type": "qwen2"},
        vision={**_SIGLIP, "image_size": [56, 56], "patch_size": [14, 14], "layer_scale_init_value": 0.5},
        whole={"image_token_id": "<IMG_CONTEXT>", "image_seq_length": 4},
        tokens=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        image="<IMG_CONTEXT>\n",
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            "size": {"height": 56, "width": 56},
            **_NORMALISED,
        },
        video_processor="InternVLVideoProcessor",
    ),
}
"""The families by their `model_type`."""


def write_tiny_vision_model(
    folder: Path,
    family: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    vision: Mapping[str, Any] | None = None,
    **text: Any,
) -> Path:
    """Write a random vision-language model of 10^5 parameters with its tokenizer and processor.

    Args:
        folder: Folder of the model; made.
        family: One of `FAMILIES`.
        dtype: Dtype of the weights.
        seed: Seed of the weights.
        vision: Fields of the vision tower's config, which replace fields of the family.
        **text: Fields of the language model's config, which replace fields of `TEXT` and the family.
    """
    kind = FAMILIES[family]
    tokenizer = _tokenizer(kind)
    ids = tokenizer.get_vocab()
    settings = {
        **{name: ids.get(value, value) if isinstance(value, str) else value for name, value in kind.whole.items()},
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "text_config": {**TEXT, "tie_word_embeddings": False, **kind.text, **text},
        "vision_config": {**kind.vision, **(vision or {})},
    }
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
        # Vectors move away from the zeros and ones that they start with, so that each counts.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1 or not parameter.any():
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # `AutoProcessor` and `AutoImageProcessor` read these files. Processors would write the same, but some need packages
    # that only videos use.
    files: dict[str, Mapping[str, Any]] = {
        "preprocessor": {**kind.image_processor, "processor_class": kind.processor["processor_class"]},
        "processor": kind.processor,
    }
    if kind.video_processor:
        fields = {name: value for name, value in kind.image_processor.items() if name != "image_processor_type"}
        files["video_preprocessor"] = {**fields, "video_processor_type": kind.video_processor}
    for name, content in files.items():
        (folder / f"{name}_config.json").write_text(json.dumps(content, indent=2, sort_keys=True))
    return folder


def tiny_image(seed: int, width: int = 56, height: int = 56) -> Image:
    """Return an image of coarse random blocks, in RGB."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (4, 4, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(blocks.numpy(), "RGB").resize((width, height), Image.Resampling.NEAREST)


def tiny_png(seed: int, width: int = 56, height: int = 56) -> bytes:
    """Return `tiny_image` as the bytes of a PNG file."""
    file = io.BytesIO()
    tiny_image(seed, width, height).save(file, format="PNG")
    return file.getvalue()


def _tokenizer(kind: TinyFamily) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    common = ["<pad>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([*common, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token in kind.tokens if token.strip()]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*common, *special)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in kind.tokens if not token.strip()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        extra_special_tokens=dict(kind.named or {}),
        chat_template=_template(kind.image),
    )


def _template(image: str) -> str:
    """Return ChatML with the family's placeholder for each part of a content that is an image."""
    return (
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}"
        "{%- else -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'image' -%}{{- " + json.dumps(image) + " -}}"
        "{%- else -%}{{- part['text'] -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
