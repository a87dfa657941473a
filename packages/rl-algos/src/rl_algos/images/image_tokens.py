"""Images in rendered conversations: placeholders are replaced by the strings that the model's processor writes."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from rl_core.errors import ConfigError, DataError
from rl_core.images import ImageRef, image_refs
from rl_core.install_command import install_command
from rl_core.model_config import VisionConfig
from rl_core.rollouts.rollout import Message

ATTRIBUTE = "images_of_model"
"""Attribute of a loaded tokenizer; see `image_tokens`."""


class ImageMarks(NamedTuple):
    """Special tokens of a family.

    Args:
        placeholder: String that the chat template writes for an image.
        token: Token that an image has once for each of its embeddings.
        others: Further tokens that no text may contain, such as the token of videos.
    """

    placeholder: str
    token: str
    others: tuple[str, ...] = ()


class Expansion(NamedTuple):
    """How the processor of a family writes an image.

    Attributes:
        marks: Returns the special tokens, from the tokenizer of the model.
        write: Returns the string that takes the place of the placeholder, from the image processor of the model, the
            fields of its processor, its special tokens and the height and width of an image.
        limits_pixels: True if the image processor resizes images to a range of pixels.
        defaults: Fields of an image processor that needs torch, and is therefore not built; None for any other.
    """

    marks: Callable[[Any], ImageMarks]
    write: Callable[[Any, Mapping[str, Any], ImageMarks, int, int], str]
    limits_pixels: bool = False
    defaults: Mapping[str, Any] | None = None


def _qwen_marks(tokenizer: Any) -> ImageMarks:
    image = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
    return ImageMarks(image, image, (getattr(tokenizer, "video_token", None) or "<|video_pad|>",))


def _qwen(images: Any, _fields: Mapping[str, Any], marks: ImageMarks, height: int, width: int) -> str:
    num_patches: int = images.get_number_of_image_patches(height, width, {})
    return marks.token * (num_patches // images.merge_size**2)


def _gemma_marks(tokenizer: Any) -> ImageMarks:
    return ImageMarks(tokenizer.boi_token, tokenizer.image_token, (tokenizer.eoi_token,))


def _gemma(images: Any, fields: Mapping[str, Any], marks: ImageMarks, _height: int, _width: int) -> str:
    if images.do_pan_and_scan:
        raise ValueError("the image processor crops images (`do_pan_and_scan`), which is not supported")
    [end] = marks.others
    return f"\n\n{marks.placeholder}{marks.token * fields.get('image_seq_length', 256)}{end}\n\n"


def _idefics_marks(tokenizer: Any) -> ImageMarks:
    image = getattr(tokenizer, "image_token", None) or "<image>"
    return ImageMarks(image, image, (getattr(tokenizer, "fake_image_token", None) or "<fake_token_around_image>",))


def _idefics(images: Any, fields: Mapping[str, Any], marks: ImageMarks, height: int, width: int) -> str:
    """Write the tiles of a large image row by row, then the whole image at the size of a tile."""
    _, num_rows, num_columns = images.get_number_of_image_patches(height, width, {})
    tokens = marks.token * fields.get("image_seq_len", 169)
    [around] = marks.others
    written = ""
    for row in range(1, num_rows + 1):
        tiles = (f"{around}<row_{row}_col_{column}>{tokens}" for column in range(1, num_columns + 1))
        written += "".join(tiles) + "\n"
    return written + ("\n" if num_rows else "") + f"{around}<global-img>{tokens}{around}"


def _internvl_marks(tokenizer: Any) -> ImageMarks:
    image = tokenizer.context_image_token
    return ImageMarks(image, image, (tokenizer.start_image_token, tokenizer.end_image_token))


def _internvl(images: Any, fields: Mapping[str, Any], marks: ImageMarks, height: int, width: int) -> str:
    num_tiles: int = images.get_number_of_image_patches(height, width, {})
    start, end = marks.others
    return f"{start}{marks.token * (fields.get('image_seq_length', 256) * num_tiles)}{end}"


def _glm_marks(tokenizer: Any) -> ImageMarks:
    image = getattr(tokenizer, "image_token", None) or "<|image|>"
    return ImageMarks(image, image, (getattr(tokenizer, "video_token", None) or "<|video|>",))


def _gemma4_marks(tokenizer: Any) -> ImageMarks:
    return ImageMarks(tokenizer.image_token, tokenizer.image_token, (tokenizer.boi_token, tokenizer.eoi_token))


def _gemma4(images: Any, _fields: Mapping[str, Any], marks: ImageMarks, height: int, width: int) -> str:
    size_of = import_module(type(images).__module__).get_aspect_ratio_preserving_size
    side = images.pooling_kernel_size
    num_patches = images.max_soft_tokens * side**2
    high, wide = size_of(height, width, images.patch_size, num_patches, side)
    start, end = marks.others
    return f"{start}{marks.token * (high * wide // (side * images.patch_size) ** 2)}{end}"


def _pixtral_marks(tokenizer: Any) -> ImageMarks:
    return ImageMarks("[IMG]", "[IMG]", ("[IMG_BREAK]", "[IMG_END]"))


def _pixtral(images: Any, fields: Mapping[str, Any], marks: ImageMarks, height: int, width: int) -> str:
    """Write an image row by row."""
    side = fields.get("patch_size", 16) * fields.get("spatial_merge_size", 1)
    longest = images.size["longest_edge"]
    shrunk = max(height / longest, width / longest, 1.0)
    num_rows, num_columns = (math.ceil(math.floor(size / shrunk) / side) for size in (height, width))
    stop, end = marks.others
    row = marks.token * num_columns
    return (row + stop) * (num_rows - 1) + row + end


def _llama4_marks(tokenizer: Any) -> ImageMarks:
    others = ("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    return ImageMarks("<|image|>", "<|patch|>", others)


def _llama4(images: Any, fields: Mapping[str, Any], marks: ImageMarks, height: int, width: int) -> str:
    """Write the tiles of an image that is larger than one tile, then the whole image at the size of a tile."""
    side = images.size["height"]
    patches = marks.token * int((side // fields.get("patch_size", 14) * fields.get("pixel_shuffle_ratio", 0.5)) ** 2)
    num_rows, num_columns = _llama4_tiles(height, width, side, images.max_patches, images.resize_to_max_canvas)
    start, end, next_column, next_row = marks.others
    tiles = (next_column.join([patches] * num_columns) + next_row) * num_rows if num_rows * num_columns > 1 else ""
    return f"{start}{tiles}{marks.placeholder}{patches}{end}"


def _llama4_tiles(height: int, width: int, side: int, max_tiles: int, largest: bool) -> tuple[int, int]:
    """Return the rows and columns of tiles that hold an image best: it is enlarged as little as possible (or as far as
    possible, with `largest`), or reduced as little as possible, with the fewest tiles.

    The scales are float32, as in transformers, so that ties are the same.
    """
    # Of grids that are equally good, transformers takes the first: by ratio, each from its largest grid on.
    ratios: dict[float, list[tuple[int, int]]] = {}
    for count in range(max_tiles, 0, -1):
        for rows in (number for number in range(1, count + 1) if count % number == 0):
            ratios.setdefault(rows / (count // rows), []).append((rows, count // rows))
    scales = {
        grid: min(
            np.float32(tiles * side) / np.float32(size) for tiles, size in zip(grid, (height, width), strict=True)
        )
        for grids in ratios.values()
        for grid in grids
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = (max if largest else min)(enlarging) if enlarging else max(scales.values())
    return min((grid for grid, scale in scales.items() if scale == chosen), key=lambda grid: grid[0] * grid[1])


_LLAMA4 = {"size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": False}
_QWEN = Expansion(_qwen_marks, _qwen, limits_pixels=True)
_GLM = Expansion(_glm_marks, _qwen)
_IDEFICS = Expansion(_idefics_marks, _idefics)

EXPANSIONS: Mapping[str, Expansion] = {
    "Gemma3Processor": Expansion(_gemma_marks, _gemma),
    "Gemma4Processor": Expansion(_gemma4_marks, _gemma4),
    "Glm46VProcessor": _GLM,
    "Glm4vProcessor": _GLM,
    "Idefics3Processor": _IDEFICS,
    "InternVLProcessor": Expansion(_internvl_marks, _internvl),
    "Llama4Processor": Expansion(_llama4_marks, _llama4, defaults=_LLAMA4),
    "PixtralProcessor": Expansion(_pixtral_marks, _pixtral),
    "Qwen2VLProcessor": _QWEN,
    "Qwen2_5_VLProcessor": _QWEN,
    "Qwen3VLProcessor": _QWEN,
    "SmolVLMProcessor": _IDEFICS,
}
"""By the name of the processor's class."""

FIELDS = "fields"
"""Stands for the class of an image processor of which only the fields are read."""

KEPT_FIELDS = ("image_seq_len", "image_seq_length", "patch_size", "spatial_merge_size", "pixel_shuffle_ratio")
"""Fields of processors that `Expansion.write` reads."""


@dataclass(frozen=True)
class ImageTokens:
    """The strings that a model reads for images. Equal for equal models, and small when it is pickled.

    Args:
        processor: Class of the model's processor, one of `EXPANSIONS`.
        fields: Fields of the processor, as JSON.
        image_processor: Class of the image processor as `module:name`, and its fields as JSON, with the limits of
            pixels in `policy.vision`.
        marks: Special tokens of the family.
        max_images: `policy.vision.max_images`.
        chat_template: Chat template in the files of the processor; None if they have none.
    """

    processor: str
    fields: str
    image_processor: tuple[str, str]
    marks: ImageMarks
    max_images: int
    chat_template: str | None = None

    def of(self, width: int, height: int) -> str:
        """Return the string of an image by its size in pixels.

        Raises:
            DataError: If the image processor refuses such an image.
        """
        return _written(self, width, height)

    def check(self, messages: Sequence[Message]) -> None:
        """Raise a `DataError` if messages cannot be read with their images: the assistant's have one, there are too
        many, or a text has a token of images."""
        count = sum(map(num_images, messages))
        if count > self.max_images:
            limit = f"more than policy.vision.max_images = {self.max_images}"
            raise DataError(f"the conversation has {count} images, {limit}; increase it, or remove the row")
        reserved = (self.marks.placeholder, self.marks.token, *self.marks.others)
        for index, message in enumerate(messages):
            if message.get("role") == "assistant" and num_images(message):
                problem = f"message {index} (from 0) of the assistant has an image, but models write no images"
                raise DataError(f"{problem}; move it to a message of the user")
            for text in texts_of(message):
                found = next((token for token in reserved if token in text), None)
                if found is not None:
                    problem = f"message {index} (from 0) contains {found!r}, a token of images, in its text"
                    remedy = "remove it, or give the image as a part of the message or in a column of images"
                    raise DataError(f"{problem}; {remedy}")

    def expanded(self, text: str, images: Sequence[ImageRef], positions: Sequence[int] = ()) -> tuple[str, list[int]]:
        """Return a rendered text with the strings of its images, and the places of positions of the text in it.

        Args:
            text: Rendered conversation with a placeholder for each image.
            images: Images in the order of the placeholders.
            positions: Positions in the text, none of them within a placeholder.

        Raises:
            DataError: If there is another number of placeholders.
        """
        pieces = text.split(self.marks.placeholder)
        if len(pieces) - 1 != len(images):
            raise DataError(
                f"the chat template writes {len(pieces) - 1} image placeholders ({self.marks.placeholder}) for "
                f"{len(images)} images; set policy.tokenizer.chat_template to the template of the model's processor"
            )
        written = [self.of(image.width, image.height) for image in images]
        ends, moved, end = [0], [0], 0
        for piece, new in zip(pieces, written, strict=False):
            end += len(piece) + len(self.marks.placeholder)
            ends.append(end)
            moved.append(moved[-1] + len(new) - len(self.marks.placeholder))
        places = [position + moved[bisect_right(ends, position) - 1] for position in positions]
        return "".join(each for pair in zip(pieces, [*written, ""], strict=True) for each in pair), places


def image_tokens(tokenizer: Any) -> ImageTokens | None:
    """Return how images are written for the model of a loaded tokenizer; None without `policy.vision.enabled`."""
    found: ImageTokens | None = getattr(tokenizer, ATTRIBUTE, None)
    return found


def check_images(tokenizer: Any, messages: Sequence[Message]) -> None:
    """Raise a `DataError` if messages have images that the model of a tokenizer cannot read; see
    `ImageTokens.check`."""
    tokens = image_tokens(tokenizer)
    if tokens is not None:
        tokens.check(messages)
    elif any(map(num_images, messages)):
        problem = "the conversation has images, but the model is trained without its vision tower"
        remedy = "set policy.vision.enabled: true, with a vision-language model, or remove the images"
        raise DataError(f"{problem}; {remedy}")


def with_images(
    tokenizer: Any, messages: Sequence[Message], text: str, positions: Sequence[int] = ()
) -> tuple[str, list[int]]:
    """Return the rendered text of messages with the strings of their images; see `ImageTokens.expanded`."""
    tokens = image_tokens(tokenizer)
    return (text, list(positions)) if tokens is None else tokens.expanded(text, list(image_refs(messages)), positions)


def num_images(message: Message) -> int:
    """Return the number of images in a message."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return sum(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def texts_of(message: Message) -> Iterator[str]:
    """Yield the strings of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | tuple):
        yield from (part["text"] for part in content if isinstance(part, Mapping) and part.get("type") == "text")


def read_image_tokens(tokenizer: Any, model_name: str, vision: VisionConfig) -> ImageTokens | None:
    """Read how the processor of a model writes images; None without `vision.enabled`.

    Args:
        tokenizer: Tokenizer of the model.
        model_name: Local folder or hub name.
        vision: Section `policy.vision`.

    Raises:
        ConfigError: If the model has no processor, the processor is not supported, or pillow is not installed.
    """
    if not vision.enabled:
        return None
    from transformers.image_processing_base import ImageProcessingMixin
    from transformers.processing_utils import ProcessorMixin

    key = "policy.vision.enabled"
    fields: dict[str, Any] = {}
    for read in (ProcessorMixin.get_processor_dict, ImageProcessingMixin.get_image_processor_dict):
        try:
            fields = {**read(model_name)[0], **fields}
        except (OSError, ValueError):  # One of the two files is enough.
            continue
    name = str(fields.get("processor_class", ""))
    kept = {field: value for field, value in fields.items() if field in KEPT_FIELDS}
    if name not in EXPANSIONS:
        problem = f"{model_name!r} has the processor {name or 'of no class'}, which is not supported"
        raise ConfigError(f"{key}: {problem}; supported: {', '.join(EXPANSIONS)}")
    expansion = EXPANSIONS[name]
    try:
        marks = expansion.marks(tokenizer)
    except AttributeError as error:
        problem = f"the tokenizer of {model_name!r} lacks a token that {name} writes for images ({error})"
        raise ConfigError(f"{key}: {problem}") from None
    known = tokenizer.get_vocab()
    if missing := next((token for token in (marks.placeholder, marks.token) if token not in known), None):
        raise ConfigError(f"{key}: the tokenizer of {model_name!r} has no token {missing!r}, which {name} writes")
    images = _image_processor(model_name, vision, expansion, name=name)
    described = json.dumps({"processor_class": name, **kept}, sort_keys=True)
    return ImageTokens(name, described, images, marks, vision.max_images, fields.get("chat_template") or None)


def _image_processor(model_name: str, vision: VisionConfig, expansion: Expansion, *, name: str) -> tuple[str, str]:
    """Return the class of the image processor, and its fields as JSON with the limits of pixels."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"policy.vision.enabled: images need pillow: {install_command('rl-core[vision]')}") from error
    from transformers import AutoImageProcessor
    from transformers.image_processing_base import ImageProcessingMixin

    limits = {"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels}
    given = {key: value for key, value in limits.items() if value is not None}
    if given and not expansion.limits_pixels:
        key = "min_pixels" if vision.min_pixels is not None else "max_pixels"
        problem = f"policy.vision.{key}: {name} does not resize images to a number of pixels"
        raise ConfigError(f"{problem}. Remove this key, or set the size in the preprocessor_config.json of the model")
    if expansion.defaults is not None:
        fields, _ = ImageProcessingMixin.get_image_processor_dict(model_name)
        return FIELDS, json.dumps({**expansion.defaults, **fields}, sort_keys=True)
    try:
        processor = AutoImageProcessor.from_pretrained(model_name, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        problem = f"the image processor of {model_name!r} cannot be read: {error}"
        raise ConfigError(f"policy.vision.enabled: {problem}") from error
    described = json.loads(processor.to_json_string())
    if given:
        described["size"] = {**{key: described["size"][key] for key in limits}, **given}
    kind = type(processor)
    return f"{kind.__module__}:{kind.__qualname__}", json.dumps(described, sort_keys=True)


@lru_cache(maxsize=1 << 16)
def _written(tokens: ImageTokens, width: int, height: int) -> str:
    processor, fields = _made(*tokens.image_processor), json.loads(tokens.fields)
    try:
        return EXPANSIONS[tokens.processor].write(processor, fields, tokens.marks, height, width)
    except ValueError as error:
        raise DataError(f"an image of {width} x {height} pixels cannot be used: {error}") from None


@lru_cache(maxsize=8)
def _made(kind: str, fields: str) -> Any:
    """Return an image processor, which needs no torch, or only its fields."""
    module, _, name = kind.partition(":")
    if kind == FIELDS:
        return SimpleNamespace(**json.loads(fields))
    return getattr(import_module(module), name).from_dict(json.loads(fields))
