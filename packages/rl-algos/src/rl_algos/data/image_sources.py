"""The bytes of images as rows give them: files, bytes, data URLs, URLs, and images of `datasets` and pillow."""

from __future__ import annotations

import base64
import binascii
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rl_algos.data import cache
from rl_algos.data.config import DatasetConfig
from rl_algos.data.remote import is_remote
from rl_core.images import ImageError, ImageLimits

FETCH_S = 30.0
"""Seconds within which an image must be downloaded."""

_LIMITS = ImageLimits()
_GLOB = "*?["


@dataclass(frozen=True)
class ImageSources:
    """Reads the images of a dataset's rows.

    Args:
        folder: Folder of images that rows name by a path; None if rows may not.
        allow_urls: True to download images.
    """

    folder: Path | None
    allow_urls: bool = False

    @classmethod
    def of(cls, settings: DatasetConfig, *, allow_urls: bool) -> ImageSources:
        """Return the reader for a dataset."""
        return cls(_folder(settings), allow_urls)

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
                return self.read(_of_mapping(source))
            case bytes() | bytearray() | memoryview():
                return bytes(source)
            case str() if source.startswith("data:"):
                return _of_data_url(source)
            case str() if "://" in source:
                return self._fetched(source)
            case str():
                return self._of_file(source)
        if type(source).__module__.startswith("PIL."):
            return _of_pillow(source)
        raise ImageError(
            f"it must be a path, a data URL, bytes, or an object with `bytes` or `path`, got {type(source).__name__}"
        )

    def _of_file(self, name: str) -> bytes:
        if self.folder is None:
            raise ImageError(f"{_short(name)} is a path; set `image_folder` of the dataset to the folder of its images")
        folder = self.folder.resolve()
        try:
            path = (folder / name).resolve()
            if not path.is_relative_to(folder):
                raise ImageError(
                    f"{_short(name)} is outside of {self.folder}; set `image_folder` of the dataset to a folder that "
                    "contains its images"
                )
            if not path.is_file():
                reason = "is not a file" if path.exists() else "does not exist"
                raise ImageError(f"{_short(name)} {reason} in {self.folder}; set `image_folder` of the dataset")
            if path.stat().st_size > _LIMITS.max_bytes:
                raise ImageError(
                    f"{_short(name)} has {path.stat().st_size:,} bytes; at most {_LIMITS.max_bytes:,} are accepted"
                )
            return path.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, ImageError):
                raise
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ImageError(f"{_short(name)} cannot be read: {reason}") from None

    def _fetched(self, url: str) -> bytes:
        if not url.lower().startswith(("http://", "https://")):
            raise ImageError(f"{_short(url)} is not an http or https URL")
        if not self.allow_urls:
            raise ImageError(
                f"{_short(url)} is a URL; set data.allow_image_urls: true to download the images of this data"
            )

        def write(file: IO[bytes]) -> None:
            file.write(fetch(url))

        return cache.stored(f"urls/{cache.digest(url)}", write).read_bytes()


def fetch(url: str, *, max_bytes: int = _LIMITS.max_bytes, timeout_s: float = FETCH_S) -> bytes:
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

    # a server may answer byte by byte, which no timeout of a socket ends
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


def _of_mapping(source: Mapping[str, Any]) -> Any:
    """The bytes of the hub's `Image` feature, or its path; the URL of OpenAI's form."""
    found = next((source[key] for key in ("bytes", "url", "path") if source.get(key) is not None), None)
    if found is None:
        raise ImageError(f"it has neither `bytes` nor `path` nor `url`, but {', '.join(map(str, source)) or 'no key'}")
    return found


def _of_data_url(url: str) -> bytes:
    head, comma, content = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"{_short(url)} is not a data URL in base64: data:image/png;base64,...")
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data URL is not valid base64: {error}") from None


def _of_pillow(image: Any) -> bytes:
    """A PNG file with the pixels, turned as the original file asks for."""
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        plain = upright if upright.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else upright.convert("RGB")
        plain.save(file, "PNG")
    except Exception as error:  # noqa: BLE001 - decoders raise errors of any kind for damaged files
        raise ImageError(f"the image cannot be decoded: {' '.join(str(error).split())[:120]}") from None
    return file.getvalue()


def _folder(settings: DatasetConfig) -> Path | None:
    if settings.image_folder is not None:
        return Path(settings.image_folder).expanduser()
    if settings.data_path is None or is_remote(settings.data_path):
        return None
    path = Path(settings.data_path).expanduser()
    if path.is_dir():
        return path
    fixed = [parent for parent in path.parents if not any(mark in str(parent) for mark in _GLOB)]
    return fixed[0]


def _short(name: str) -> str:
    return repr(name if len(name) <= 100 else f"{name[:60]}...{name[-30:]}")
