"""The images of a row: read from its source, kept in the image store, and referred to by digest in its conversation.

Rows give images as files, bytes, data URLs, URLs, and images of `datasets` and pillow.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.rows.example import IMAGE_COLUMNS, PLACE, Example, images_column
from rl_algos.data.rows.messages import joined_parts
from rl_algos.data.sources import cache
from rl_algos.data.sources.remote import is_remote
from rl_algos.images.image_tokens import image_tokens, texts_of
from rl_core.errors import ConfigError, DataError
from rl_core.images import MAX_IMAGE_BYTES, STORE_VARIABLE, ImageError, ImageStore, evenly, frames_of
from rl_core.rollouts.rollout import Message

FETCH_S = 30.0
"""Maximum number of seconds for the download of an image."""

_PLACES = re.compile(
    r"<\|?(?:image|video|audio)(?:_pad|_soft_token|[_ ]?\d+)?\|?>|<start_of_(?:image|audio)>|<IMG_CONTEXT>|\[IMG\]",
    re.IGNORECASE,
)
"""Placeholders that data and model families write for images, videos and sounds."""


@dataclass(frozen=True)
class RowImages:
    """Places the images of a dataset's rows.

    Args:
        folder: Folder of images that rows give by a path; None if rows may not.
        allow_urls: True to download images.
        key: `images_key` of the dataset.
        max_frames: Maximum number of frames of a video.
    """

    folder: Path | None
    allow_urls: bool = False
    key: str | None = None
    max_frames: int = 8

    @classmethod
    def of(cls, settings: DatasetConfig, config: DataConfig) -> RowImages:
        """Return the object that places the images of a dataset."""
        folder = None
        if settings.image_folder is not None:
            folder = Path(settings.image_folder).expanduser()
        elif settings.data_path is not None and not is_remote(settings.data_path):
            path = Path(settings.data_path).expanduser()
            fixed = [parent for parent in path.parents if not any(mark in str(parent) for mark in "*?[")]
            folder = path if path.is_dir() else fixed[0]
        return cls(folder, config.allow_image_urls, settings.images_key, config.max_video_frames)

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
        images = [(f"{name}[{index}]", each) for index, each in enumerate(given)] if num_places else []
        placing = _Placing(self, iter(images))
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

    def read(self, source: Any) -> bytes:
        """Return the bytes of an image's file.

        Args:
            source: Path, URL, data URL, bytes, image of pillow, or a mapping with `bytes`, `path` or `url`.

        Raises:
            ImageError: If it cannot be read, or may not be.
            DataError: If the cache of downloads cannot be written.
        """
        match source:
            case Mapping():
                # The hub's `Image` feature has bytes or a path, and OpenAI's form has a URL.
                found = next((source[key] for key in ("bytes", "url", "path") if source.get(key) is not None), None)
                if found is None:
                    keys = ", ".join(map(str, source)) or "no key"
                    raise ImageError(f"it has neither `bytes` nor `path` nor `url`, but {keys}")
                return self.read(found)
            case bytes() | bytearray() | memoryview():
                return bytes(source)
            case str() if source.startswith("data:"):
                head, comma, content = source.partition(",")
                if not comma or not head.endswith(";base64"):
                    raise ImageError(f"{_short(source)} is not a data URL in base64: data:image/png;base64,...")
                try:
                    return base64.b64decode("".join(content.split()), validate=True)
                except (binascii.Error, ValueError) as error:
                    raise ImageError(f"the data URL is not valid base64: {error}") from None
            case str() if "://" in source:
                if not source.lower().startswith(("http://", "https://")):
                    raise ImageError(f"{_short(source)} is not an http or https URL")
                if not self.allow_urls:
                    remedy = "set data.allow_image_urls: true to download the images of this data"
                    raise ImageError(f"{_short(source)} is a URL; {remedy}")

                def write(file: IO[bytes]) -> None:
                    file.write(fetch(source))

                return cache.stored(f"urls/{cache.digest(source)}", write).read_bytes()
            case str():
                return self._of_file(source)
        if type(source).__module__.startswith("PIL."):
            return _of_pillow(source)
        raise ImageError(
            f"it must be a path, a data URL, bytes, or an object with `bytes` or `path`, got {type(source).__name__}"
        )

    def frames(self, source: Any) -> list[bytes]:
        """Return the files of the frames of a video, at most `max_frames` of them, evenly spaced.

        Args:
            source: List of images, or an animated image (GIF, WebP, PNG or TIFF), as `read` takes them.

        Raises:
            ImageError: If it cannot be read, or may not be.
        """
        if isinstance(source, list | tuple):
            if not source:
                raise ImageError("it is an empty list; give at least one frame")
            return [self.read(source[index]) for index in evenly(len(source), self.max_frames)]
        return frames_of(self.read(source), self.max_frames)

    def _of_file(self, name: str) -> bytes:
        short, remedy = _short(name), "set `image_folder` of the dataset"
        if self.folder is None:
            raise ImageError(f"{short} is a path; {remedy} to the folder of its images")
        folder = self.folder.resolve()
        try:
            path = (folder / name).resolve()
            if not path.is_relative_to(folder):
                raise ImageError(f"{short} is outside of {self.folder}; {remedy} to a folder that contains its images")
            if not path.is_file():
                reason = "is not a file" if path.exists() else "does not exist"
                raise ImageError(f"{short} {reason} in {self.folder}; {remedy}")
            size = path.stat().st_size
            if size > MAX_IMAGE_BYTES:
                raise ImageError(f"{short} has {size:,} bytes; at most {MAX_IMAGE_BYTES:,} are accepted")
            return path.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, ImageError):
                raise
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ImageError(f"{short} cannot be read: {reason}") from None


class _Placing:
    """Puts the images of one row into the store.

    Args:
        reader: Reads the images.
        left: Images in the row's column, each with its name, that have no place yet.

    Attributes:
        digests: Digest of an image, or digests of the frames of a video, by the identity of the row's value.
    """

    def __init__(self, reader: RowImages, left: Iterator[tuple[str, Any]]) -> None:
        self._reader = reader
        self._left = left
        self.digests: dict[int, str | list[str]] = {}

    def message(self, message: Message, *, has_column: bool = False) -> Message:
        """Return a message with its images as references."""
        content = message.get("content")
        if isinstance(content, str):
            if not _num_places(message, has_column):
                return message
            return {**message, "content": joined_parts(self._filled(content))}
        if not isinstance(content, list | tuple):
            return message
        parts: list[str | Mapping[str, Any]] = []
        for part in content:
            if part["type"] == "image":
                if "image" in part:
                    found: tuple[str, Any] | None = ("an image", part["image"])
                else:
                    found = next(self._left, None)
                if found is None:
                    problem = "a message has a part of type 'image' without an image"
                    remedy = "add it to the part, or set `images_key` to the column of the row's images"
                    raise DataError(f"{problem}; {remedy}")
                parts.append(self._kept(*found))
            elif part["type"] == "video":
                parts += self._frames(part["video"])
            elif has_column and message["role"] != "assistant":
                parts += self._filled(part["text"])
            else:
                parts.append(part["text"])
        return {**message, "content": joined_parts(parts)}

    def _filled(self, text: str) -> Iterator[str | Mapping[str, Any]]:
        first, *others = text.split(PLACE)
        yield first
        for other in others:
            found = next(self._left, None)
            yield PLACE if found is None else self._kept(*found)
            yield other

    def _kept(self, name: str, source: Any) -> Mapping[str, Any]:
        with _named(name):
            ref = _store().put(self._reader.read(source))
        self.digests[id(source)] = ref.digest
        return ref.part()

    def _frames(self, source: Any) -> list[Mapping[str, Any]]:
        with _named("a video"):
            refs = [_store().put(frame) for frame in self._reader.frames(source)]
        self.digests[id(source)] = [ref.digest for ref in refs]
        return [ref.part() for ref in refs]

    def without_bytes(self, value: Any) -> Any:
        """Return a value of the row with digests in place of images that are more than a path."""
        if id(value) in self.digests and not (isinstance(value, str) and not value.startswith("data:")):
            return self.digests[id(value)]
        if isinstance(value, Mapping):
            return {key: self.without_bytes(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.without_bytes(item) for item in value]
        return value


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Raise the errors of an image with its name in the row."""
    try:
        yield
    except ImageError as error:
        raise DataError(f"{name}: {error}") from None
    except ImportError as error:
        raise ConfigError(f"data: {error}") from None


def _store() -> ImageStore:
    return ImageStore(os.environ.get(STORE_VARIABLE) or cache.claimed("images"))


def check_placed(tokenizer: Any, example: Example) -> None:
    """Raise a `DataError` if the model of a tokenizer reads images, and a row's images have no place in its
    conversation, or a place in it has no image. Other models do not look at columns of images."""
    if image_tokens(tokenizer) is None:
        return
    if count := example.num_unplaced_images:
        problem = f"the row has {_counted(count, 'image')} in a column, but no place for images in its messages"
        raise DataError(f"{problem}; write {PLACE} where each image goes, or set `processor` to one that does")
    messages = [*example.messages, *(message for response in example.responses for message in response.messages)]
    # This imports tokenizers, which the plugins of datasets do without.
    from rl_algos.special_tokens import special_tokens, splits_prompts

    if splits_prompts(tokenizer):
        messages = special_tokens(tokenizer).hidden(messages)
    asked = [text for message in messages if message["role"] != "assistant" for text in texts_of(message)]
    answered = [text for message in messages if message["role"] == "assistant" for text in texts_of(message)]
    found = [match[0] for text in (*asked, *answered) for match in _PLACES.finditer(text)]
    if not found:
        return
    text = found[0]
    kind = next((name for name in ("video", "audio") if name in text.lower()), "image")
    if kind != "image":
        remedy = "give the video as a part of a message, or remove the row" if kind == "video" else "remove the row"
        raise DataError(f"the row has {text!r} in its text, but {kind} is not supported there; {remedy}")
    in_asked = sum(len(_PLACES.findall(each)) for each in asked)
    if not in_asked:
        problem = f"the assistant's text contains {text!r}, a place for an image, but models write no images"
        raise DataError(f"{problem}; remove it, or move it to a message of the user")
    there = [name for name in IMAGE_COLUMNS if name in example.info]
    if there or text != PLACE:
        others = f"in addition to the images of {there[0]!r}" if there else "and no image there"
        problem = f"the row has {text!r} in its text, {others}"
        raise DataError(f"{problem}; write {PLACE} once where each image goes, and remove all other placeholders")
    raise DataError(
        f"the row has {_counted(in_asked, 'place')} for {'an image' if in_asked == 1 else 'images'} ({PLACE}), but no "
        f"column images or image; the columns are {', '.join(sorted(example.info)) or 'only those of the messages'}. "
        "Set `images_key` to the column of the images, or remove the place"
    )


def fetch(url: str, *, max_bytes: int = MAX_IMAGE_BYTES, timeout_s: float = FETCH_S) -> bytes:
    """Download a file, within a size and a time.

    Raises:
        ImageError: If it is larger or takes longer, or the server does not give it.
    """
    outcome: list[bytes | Exception] = []

    def work() -> None:
        try:
            outcome.append(_download(url, max_bytes, time.monotonic() + timeout_s))
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            outcome.append(error)

    # A server may answer byte by byte, which no timeout of a socket ends.
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise ImageError(f"{_short(url)} did not arrive within {timeout_s:g} seconds")
    if isinstance(outcome[0], ImageError):
        raise outcome[0]
    if isinstance(outcome[0], Exception):
        raise ImageError(f"{_short(url)} cannot be downloaded: {' '.join(str(outcome[0]).split())}")
    return outcome[0]


def _download(url: str, max_bytes: int, deadline: float) -> bytes:
    pieces, size = [], 0
    try:
        with urlopen(Request(url, headers={"User-Agent": "rl-algos"}), timeout=10) as answer:
            while piece := answer.read1(1 << 16):
                pieces.append(piece)
                size += len(piece)
                if size > max_bytes:
                    raise ImageError(f"{_short(url)} has more than {max_bytes:,} bytes, which are accepted at most")
                if time.monotonic() > deadline:
                    break
    except HTTPError as error:
        raise ImageError(f"{_short(url)} cannot be downloaded: the server answers {error.code}") from None
    except URLError as error:
        raise ImageError(f"{_short(url)} cannot be downloaded: {error.reason}") from None
    return b"".join(pieces)


def _of_pillow(image: Any) -> bytes:
    """Return a PNG file with the pixels, turned as the original file asks for."""
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        plain = upright if upright.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else upright.convert("RGB")
        plain.save(file, "PNG")
    except Exception as error:  # noqa: BLE001 - decoders raise errors of any kind for damaged files
        raise ImageError(f"the image cannot be decoded: {' '.join(str(error).split())[:120]}") from None
    return file.getvalue()


def _short(name: str) -> str:
    return repr(name if len(name) <= 100 else f"{name[:60]}...{name[-30:]}")


def _num_places(message: Message, has_column: bool) -> int:
    """Count the places for images of the row's column in a message."""
    content = message.get("content")
    is_read = has_column and message["role"] != "assistant"
    if isinstance(content, str):
        return content.count(PLACE) if is_read else 0
    if not isinstance(content, list | tuple):
        return 0
    in_texts = sum(part["text"].count(PLACE) for part in content if part["type"] == "text") if is_read else 0
    return in_texts + sum(part["type"] == "image" and "image" not in part for part in content)


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit}" + ("" if number == 1 else "s")
