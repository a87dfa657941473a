"""The string that the processor of a family writes for an image, by the image's size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ImageMarks:
    """Special tokens of a family.

    Args:
        placeholder: String that the chat template writes for an image.
        token: Token of which an image has one for each of its embeddings.
        others: Further tokens that no text may contain, such as the token of videos.
    """

    placeholder: str
    token: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expansion:
    """How the processor of a family writes an image.

    Args:
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


_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


def _idefics_marks(tokenizer: Any) -> ImageMarks:
    image = getattr(tokenizer, "image_token", None) or "<image>"
    return ImageMarks(image, image, (getattr(tokenizer, "fake_image_token", None) or _AROUND,))


def _idefics(images: Any, fields: Mapping[str, Any], marks: ImageMarks, height: int, width: int) -> str:
    """The tiles of a large image row by row, then the whole image at the size of a tile."""
    _, num_rows, num_columns = images.get_number_of_image_patches(height, width, {})
    tokens = marks.token * fields.get("image_seq_len", 169)
    [around] = marks.others
    rows = (
        "".join(f"{around}<row_{row}_col_{column}>{tokens}" for column in range(1, num_columns + 1)) + "\n"
        for row in range(1, num_rows + 1)
    )
    return "".join(rows) + ("\n" if num_rows else "") + f"{around}{_WHOLE}{tokens}{around}"


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
