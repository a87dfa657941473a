"""Images in rendered conversations: placeholders are replaced by the strings that the model's processor writes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

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
    """

    marks: Callable[[Any], ImageMarks]
    write: Callable[[Any, Mapping[str, Any], ImageMarks, int, int], str]
    limits_pixels: bool = False


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


_QWEN = Expansion(_qwen_marks, _qwen, limits_pixels=True)
_IDEFICS = Expansion(_idefics_marks, _idefics)

EXPANSIONS: Mapping[str, Expansion] = {
    "Gemma3Processor": Expansion(_gemma_marks, _gemma),
    "Idefics3Processor": _IDEFICS,
    "InternVLProcessor": Expansion(_internvl_marks, _internvl),
    "Qwen2_5_VLProcessor": _QWEN,
    "Qwen3VLProcessor": _QWEN,
    "SmolVLMProcessor": _IDEFICS,
}
"""By the name of the processor's class."""


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
    kept = {field: value for field, value in fields.items() if field in ("image_seq_len", "image_seq_length")}
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
    images = _image_processor(model_name, vision, limits_pixels=expansion.limits_pixels, name=name)
    described = json.dumps({"processor_class": name, **kept}, sort_keys=True)
    return ImageTokens(name, described, images, marks, vision.max_images, fields.get("chat_template") or None)


def _image_processor(model_name: str, vision: VisionConfig, *, limits_pixels: bool, name: str) -> tuple[str, str]:
    """Return the class of the image processor, and its fields as JSON with the limits of pixels."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"policy.vision.enabled: images need pillow: {install_command('rl-core[vision]')}") from error
    from transformers import AutoImageProcessor

    limits = {"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels}
    given = {key: value for key, value in limits.items() if value is not None}
    if given and not limits_pixels:
        key = "min_pixels" if vision.min_pixels is not None else "max_pixels"
        problem = f"policy.vision.{key}: {name} does not resize images to a number of pixels"
        raise ConfigError(f"{problem}. Remove this key, or set the size in the preprocessor_config.json of the model")
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
    """Return an image processor, which needs no torch."""
    module, _, name = kind.partition(":")
    return getattr(import_module(module), name).from_dict(json.loads(fields))
