"""Families of vision-language models: their parts, and their tokens and features of an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Arrays = Mapping[str, np.ndarray]
"""Results of an image processor by name, for some images."""

GRID = "image_grid_thw"
PIXELS = "pixel_values"
PIXEL_MASK = "pixel_attention_mask"
SIZES = "image_sizes"
PLACES = "image_position_ids"


IMAGE_BLOCKS = "image_blocks"
"""Column of the number of each token's image, int64 `[tokens]`; -1 for text. The tokens of an image see one another.
Rows without such images lack the column."""

WINDOW_BLOCKS = "image_blocks_in_windows"
"""The same for models whose layers without a window show each token only what comes before it."""

Features = tuple[Tensor, Sequence[Tensor]]
"""Results of a vision tower and its projector: `[image tokens, hidden]` in the order of the images' tokens, and more of
them, often none, that are added to the hidden states after each of the first layers."""


@dataclass(frozen=True)
class VisionFamily:
    """A family of vision-language models.

    Args:
        tower: Names of the modules of the vision tower.
        projector: Names of the modules between tower and language model, which may be inside the tower.
        columns: Results of the image processor that the tower takes.
        num_tokens: Function from the config and the columns of one image to the number of its tokens.
        features: Function from the model without its head and arguments for images to their features.
        blank: Function from the config to the columns of the smallest image.
        held: Function from the results for one image to columns that can be joined with those of other images.
        arguments: Function from the columns of some images to arguments of the model.
        processing: Function from the config to arguments of the image processor that the processor of text and images
            passes to it.
        has_axes: True if tokens have three places each (M-RoPE), given by `get_rope_index` of the model.
        blocks: Function from the config to the column of the images whose tokens see one another, also those that
            follow: `IMAGE_BLOCKS` or `WINDOW_BLOCKS`; empty if they do not.
        type_ids: Name of the model's argument that marks the tokens of images; empty if it needs none.
        unused: Names of modules that no feature depends on, such as those for sound.
    """

    tower: tuple[str, ...]
    projector: tuple[str, ...]
    columns: tuple[str, ...]
    num_tokens: Callable[[Any, Arrays], int]
    features: Callable[[Any, Mapping[str, Tensor]], Features]
    blank: Callable[[Any], Arrays]
    held: Callable[[Arrays], Arrays] = lambda results: results
    arguments: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda columns: columns
    processing: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    has_axes: bool = False
    blocks: Callable[[Any], str] = lambda config: ""
    type_ids: str = ""
    unused: tuple[str, ...] = ()


def _grid_tokens(config: Any, image: Arrays) -> int:
    return int(prod(image[GRID][0].tolist())) // config.vision_config.spatial_merge_size**2


def _grid_blank(config: Any) -> Arrays:
    vision = config.vision_config
    side = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {PIXELS: np.zeros((side * side, width), np.float32), GRID: np.array([[1, side, side]], np.int64)}


def _grid_features(model: Any, columns: Mapping[str, Tensor]) -> Features:
    return model.visual(columns[PIXELS], grid_thw=columns[GRID]).pooler_output, ()


def _deep_features(model: Any, columns: Mapping[str, Tensor]) -> Features:
    output = model.visual(columns[PIXELS], grid_thw=columns[GRID])
    return output.pooler_output, output.deepstack_features


def _crop_features(model: Any, columns: Mapping[str, Tensor]) -> Features:
    return model.get_image_features(pixel_values=columns[PIXELS]).pooler_output.flatten(0, 1), ()


def _masked_crop_features(model: Any, columns: Mapping[str, Tensor]) -> Features:
    mask = columns[PIXEL_MASK].bool()
    output = model.get_image_features(pixel_values=columns[PIXELS], pixel_attention_mask=mask)
    return output.pooler_output.flatten(0, 1), ()


def _tile_features(model: Any, columns: Mapping[str, Tensor]) -> Features:
    tiles = model.vision_model(columns[PIXELS]).last_hidden_state
    return model.multi_modal_projector(tiles.flatten(0, 1)), ()


def _sized_features(model: Any, columns: Mapping[str, Tensor]) -> Features:
    return torch.cat(model.get_image_features(**columns).pooler_output), ()


def _crop_size(config: Any) -> tuple[int, int]:
    size = config.vision_config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _crop_blank(config: Any) -> Arrays:
    return {PIXELS: np.zeros((1, 3, *_crop_size(config)), np.float32)}


def _masked_crop_blank(config: Any) -> Arrays:
    # An image of zeros would be taken for padding.
    size = _crop_size(config)
    return {PIXELS: np.ones((1, 3, *size), np.float32), PIXEL_MASK: np.ones((1, *size), np.int64)}


def _flat(results: Arrays) -> Arrays:
    return {**results, PIXELS: results[PIXELS].reshape(-1)}


def _padded(columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return images of several sizes as one tensor, with zeros below and to the right."""
    sizes: list[list[int]] = columns[SIZES].tolist()
    height, width = (max(each) for each in zip(*sizes, strict=True))
    images = columns[PIXELS].split([3 * prod(size) for size in sizes])
    padded = [
        F.pad(image.view(3, *size), (0, width - size[1], 0, height - size[0]))
        for image, size in zip(images, sizes, strict=True)
    ]
    return {**columns, PIXELS: torch.stack(padded)}


def _merged_side(config: Any) -> int:
    return int(config.vision_config.patch_size * config.spatial_merge_size)


def _sized_tokens(config: Any, image: Arrays) -> int:
    return int(prod((image[SIZES][0] // _merged_side(config)).tolist()))


def _sized_blank(config: Any) -> Arrays:
    # transformers 5.19 does not take a single image of one token.
    side = _merged_side(config)
    return {PIXELS: np.zeros(6 * side * side, np.float32), SIZES: np.array([[side, 2 * side]], np.int64)}


def _pooled_tokens(config: Any, image: Arrays) -> int:
    return int((image[PLACES] >= 0).all(-1).sum()) // config.vision_config.pooling_kernel_size**2


def _pooled_blank(config: Any) -> Arrays:
    vision = config.vision_config
    side = vision.pooling_kernel_size
    places = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(1, -1, 2)
    return {PIXELS: np.zeros((1, side * side, 3 * vision.patch_size**2), np.float32), PLACES: places}


def _crop_tokens_of(per_crop: Callable[[Any], int]) -> Callable[[Any, Arrays], int]:
    return lambda config, image: len(image[PIXELS]) * per_crop(config)


def _shuffled_tokens(config: Any) -> int:
    """Return the tokens of a crop whose patches are joined by `scale_factor` in both directions."""
    vision = config.vision_config
    return int((vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2)


def _tile_tokens(config: Any) -> int:
    """Return the tokens of a tile whose patches are joined by `pixel_shuffle_ratio` in both directions."""
    vision = config.vision_config
    return int((vision.image_size // vision.patch_size) ** 2 * vision.pixel_shuffle_ratio**2)


def _qwen(merger: tuple[str, ...], features: Callable[[Any, Mapping[str, Tensor]], Features]) -> VisionFamily:
    return VisionFamily(
        tower=("model.visual",),
        projector=tuple(f"model.visual.{name}" for name in merger),
        columns=(PIXELS, GRID),
        num_tokens=_grid_tokens,
        features=features,
        blank=_grid_blank,
        has_axes=True,
    )


_IDEFICS = VisionFamily(
    tower=("model.vision_model",),
    projector=("model.connector",),
    columns=(PIXELS, PIXEL_MASK),
    num_tokens=_crop_tokens_of(_shuffled_tokens),
    features=_masked_crop_features,
    blank=_masked_crop_blank,
    held=lambda results: {name: values[0] for name, values in results.items()},
    arguments=lambda columns: {name: values[None] for name, values in columns.items()},
)
_GEMMA = VisionFamily(
    tower=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    columns=(PIXELS,),
    num_tokens=_crop_tokens_of(lambda config: int(config.mm_tokens_per_image)),
    features=_crop_features,
    blank=_crop_blank,
    blocks=lambda config: IMAGE_BLOCKS,
    type_ids="token_type_ids",
    unused=("model.vision_tower.head",),
)
_INTERN_TOKENS = _crop_tokens_of(lambda config: int(config.image_seq_length))
_GLM = _qwen(("downsample", "merger"), _grid_features)
_LLAMA = VisionFamily(
    tower=("vision_model",),
    projector=("multi_modal_projector",),
    columns=(PIXELS,),
    num_tokens=_crop_tokens_of(_tile_tokens),
    features=_tile_features,
    blank=_crop_blank,
)
_MISTRAL = VisionFamily(
    tower=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    columns=(PIXELS, SIZES),
    num_tokens=_sized_tokens,
    features=_sized_features,
    blank=_sized_blank,
    held=_flat,
    arguments=_padded,
    processing=lambda config: {"patch_size": _merged_side(config)},
)
_GEMMA_4 = VisionFamily(
    tower=("model.vision_tower",),
    projector=("model.embed_vision",),
    columns=(PIXELS, PLACES),
    num_tokens=_pooled_tokens,
    features=_sized_features,
    blank=_pooled_blank,
    blocks=lambda config: WINDOW_BLOCKS if config.text_config.use_bidirectional_attention == "vision" else "",
    type_ids="mm_token_type_ids",
    unused=("model.audio_tower", "model.embed_audio"),
)

VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": _qwen(("merger",), _grid_features),
    "qwen2_5_vl": _qwen(("merger",), _grid_features),
    "qwen3_vl": _qwen(("merger", "deepstack_merger_list"), _deep_features),
    "qwen3_vl_moe": _qwen(("merger", "deepstack_merger_list"), _deep_features),
    "qwen3_5": _qwen(("merger",), _grid_features),
    "qwen3_5_moe": _qwen(("merger",), _grid_features),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "gemma3": _GEMMA,
    "gemma4": _GEMMA_4,
    "mistral3": _MISTRAL,
    "llama4": _LLAMA,
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "internvl": replace(_GEMMA, num_tokens=_INTERN_TOKENS, blocks=lambda config: "", type_ids="", unused=()),
}
"""Model type to family."""


def as_held(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return pixels in the dtype that the model computes in; half precision as int16 of the same bits, which numpy has.

    Args:
        values: float32.
        dtype: Compute dtype of the model.
    """
    if dtype.itemsize == torch.float32.itemsize:
        return values
    return torch.from_numpy(values).to(dtype).view(torch.int16).numpy()


def as_computed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the pixels that `as_held` returned, on the device, in the dtype that the model computes in."""
    return values.view(dtype) if values.dtype == torch.int16 else values
