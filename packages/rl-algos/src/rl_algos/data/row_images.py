"""The images of a row: kept in the image store, and referred to by digest in its conversation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_algos.data import cache
from rl_algos.data.config import DatasetConfig
from rl_algos.data.example import Example, column
from rl_algos.data.image_sources import ImageSources
from rl_algos.data.messages import joined_parts
from rl_algos.images.image_tokens import image_tokens, texts_of
from rl_core.errors import ConfigError, DataError
from rl_core.images import STORE_VARIABLE, ImageError, ImageStore
from rl_core.rollouts.rollout import Message

PLACE = "<image>"
"""Text that an image of the row's column takes the place of."""

_COLUMNS = ("images", "image")

_PLACES = re.compile(
    r"<\|?(?:image|video|audio)(?:_pad|_soft_token|[_ ]?\d+)?\|?>|<start_of_(?:image|audio)>|<IMG_CONTEXT>|\[IMG\]",
    re.IGNORECASE,
)
"""Placeholders that data and model families write for images, videos and sounds."""


@dataclass(frozen=True)
class RowImages:
    """Places the images of a dataset's rows.

    Args:
        sources: Reads the images as rows give them.
        key: `images_key` of the dataset.
    """

    sources: ImageSources
    key: str | None

    @classmethod
    def of(cls, settings: DatasetConfig, *, allow_urls: bool) -> RowImages:
        """Return what places the images of a dataset."""
        return cls(ImageSources.of(settings, allow_urls=allow_urls), settings.images_key)

    def place(self, example: Example, row: Mapping[str, Any]) -> tuple[Example, Mapping[str, Any]]:
        """Return an example with its images in the store, and the row with digests in place of their bytes.

        The images in the row's column take the places of `PLACE` in texts of the prompt, except the assistant's, and of
        parts without an image.

        Raises:
            DataError: If an image cannot be read, or there are too many or too few.
            ConfigError: If pillow is not installed.
        """
        name, given = images_column(row, self.key)
        num_places = sum(_num_places(message, bool(name)) for message in example.messages)
        if name and num_places != len(given) and (num_places or self.key is not None):
            raise DataError(
                f"the row has {_counted(len(given), 'image')} in {name!r} but {_counted(num_places, 'place')} for "
                f"images in its messages; write {PLACE} once where each image goes"
            )
        placing = _Placing(self.sources, [(f"{name}[{index}]", each) for index, each in enumerate(given)])
        if not num_places:
            placing.left = iter(())
        messages = tuple(placing.message(message, has_column=bool(name)) for message in example.messages)
        responses = tuple(
            replace(response, messages=tuple(map(placing.message, response.messages))) for response in example.responses
        )
        unplaced = len(given) if given and not num_places else 0
        if not placing.digests:
            return replace(example, num_unplaced_images=unplaced) if unplaced else example, row
        is_text = example.is_text and messages == example.messages
        placed = replace(example, messages=messages, responses=responses, is_text=is_text, num_unplaced_images=unplaced)
        return placed, {key: placing.without_bytes(value) for key, value in row.items()}


@dataclass
class _Placing:
    """Puts the images of one row into the store.

    Args:
        sources: Reads the images.
        images: Images in the row's column, each with its name.
    """

    sources: ImageSources
    images: Sequence[tuple[str, Any]]
    digests: dict[int, str] = field(default_factory=dict)
    """Digests by the identity of what the row has."""
    left: Iterator[tuple[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.left = iter(self.images)

    def message(self, message: Message, *, has_column: bool = False) -> Message:
        """Return a message with its images as references."""
        content = message.get("content")
        if isinstance(content, str):
            if not has_column or not _num_places(message, has_column):
                return message
            return {**message, "content": joined_parts(self._filled(content))}
        if not isinstance(content, list | tuple):
            return message
        parts: list[str | Mapping[str, Any]] = []
        for part in content:
            if part["type"] == "image":
                parts.append(self._image(part))
            elif has_column and message["role"] != "assistant":
                parts += self._filled(part["text"])
            else:
                parts.append(part["text"])
        return {**message, "content": joined_parts(parts)}

    def _filled(self, text: str) -> Iterator[str | Mapping[str, Any]]:
        first, *others = text.split(PLACE)
        yield first
        for other in others:
            found = next(self.left, None)
            yield PLACE if found is None else self._kept(*found)
            yield other

    def _image(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        if "image" in part:
            return self._kept("an image", part["image"])
        found = next(self.left, None)
        if found is None:
            raise DataError(
                "a message has a part of type 'image' without an image; add it to the part, or set `images_key` to the "
                "column of the row's images"
            )
        return self._kept(*found)

    def _kept(self, name: str, source: Any) -> Mapping[str, Any]:
        try:
            ref = image_store().put(self.sources.read(source))
        except ImageError as error:
            raise DataError(f"{name}: {error}") from None
        except ImportError as error:
            raise ConfigError(f"data: {error}") from None
        self.digests[id(source)] = ref.digest
        return ref.part()

    def without_bytes(self, value: Any) -> Any:
        """Return a value of the row with digests in place of images that are more than a path."""
        if id(value) in self.digests and not (isinstance(value, str) and not value.startswith("data:")):
            return self.digests[id(value)]
        if isinstance(value, Mapping):
            return {key: self.without_bytes(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.without_bytes(item) for item in value]
        return value


def images_column(row: Mapping[str, Any], key: str | None) -> tuple[str, Sequence[Any]]:
    """Return the name of a row's column of images, empty if it has none, and the images in it.

    Args:
        row: Row as it was read.
        key: `images_key` of its dataset.

    Raises:
        DataError: If the row has no column `key`.
    """
    if key is not None:
        name, value = key, column(row, key)
    else:
        there = [name for name in _COLUMNS if name in row]
        name = next((name for name in there if row[name] is not None), there[0] if there else "")
        value = row.get(name)
    if value is None:
        return name, ()
    return name, [each for each in value if each is not None] if isinstance(value, list | tuple) else [value]


def check_placed(tokenizer: Any, example: Example) -> None:
    """Raise a `DataError` if the model of a tokenizer reads images, and a row's images have no place in its
    conversation, or a place in it has no image. Other models do not look at columns of images."""
    if image_tokens(tokenizer) is None:
        return
    if count := example.num_unplaced_images:
        raise DataError(
            f"the row has {_counted(count, 'image')} in a column, but no place for images in its messages; write "
            f"{PLACE} where each image goes, or set `processor` to one that does"
        )
    messages = [*example.messages, *(message for response in example.responses for message in response.messages)]
    # imports tokenizers, which the plugins of datasets do without
    from rl_algos.special_tokens import special_tokens, splits_prompts

    if splits_prompts(tokenizer):
        messages = special_tokens(tokenizer).hidden(messages)
    asked = [text for message in messages if message["role"] != "assistant" for text in texts_of(message)]
    said = [text for message in messages if message["role"] == "assistant" for text in texts_of(message)]
    _check_no_place(asked, said, example)


def _check_no_place(asked: Sequence[str], said: Sequence[str], example: Example) -> None:
    """Raise a `DataError` if texts have a place for an image, a video or a sound that was not filled."""
    found = [match for text in (*asked, *said) for match in _PLACES.finditer(text)]
    if not found:
        return
    text, kind = found[0][0], next((name for name in ("video", "audio") if name in found[0][0].lower()), "image")
    if kind != "image":
        raise DataError(f"the row has {text!r} in its text, but {kind} is not supported; remove the row")
    in_asked = sum(len(_PLACES.findall(each)) for each in asked)
    if not in_asked:
        raise DataError(
            f"the assistant's text contains {text!r}, a place for an image, but models write no images; remove it, or "
            "move it to a message of the user"
        )
    there = [name for name in _COLUMNS if name in example.info]
    if there or text != PLACE:
        what = f"in addition to the images of {there[0]!r}" if there else "and no image there"
        raise DataError(
            f"the row has {text!r} in its text, {what}; write {PLACE} once where each image goes, and remove all "
            "other placeholders"
        )
    raise DataError(
        f"the row has {_counted(in_asked, 'place')} for {'an image' if in_asked == 1 else 'images'} ({PLACE}), but no "
        f"column images or image; the columns are {', '.join(sorted(example.info)) or 'only those of the messages'}. "
        "Set `images_key` to the column of the images, or remove the place"
    )


def image_store() -> ImageStore:
    """Return the store of the images that data has: the run's, or that of the data cache outside of a run."""
    return ImageStore(os.environ.get(STORE_VARIABLE) or cache.claimed("images"))


def _num_places(message: Message, has_column: bool) -> int:
    """Places for images of the row's column in a message."""
    content = message.get("content")
    if isinstance(content, str):
        return content.count(PLACE) if has_column and message["role"] != "assistant" else 0
    if not isinstance(content, list | tuple):
        return 0
    texts = [part["text"] for part in content if part["type"] == "text"]
    is_read = has_column and message["role"] != "assistant"
    in_texts = sum(text.count(PLACE) for text in texts) if is_read else 0
    return in_texts + sum(part["type"] == "image" and "image" not in part for part in content)


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit}" + ("" if number == 1 else "s")
