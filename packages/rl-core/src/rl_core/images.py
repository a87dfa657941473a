"""Images of conversations: files by digest in a folder that all processes of a run share.

Messages, prompts, rollouts and batches refer to an image by its digest and size; the `ImageStore` of the run holds the
bytes, which are read by the processes that look at them: the model's workers, the engine, and people. They never pass
through the driver or Ray's object store.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

IMAGES = "images"
"""Column of a batch, uint8 `[images of the row, DIGEST_BYTES]`: the digests of each row's images in the order of their
tokens. Its rows are as long as a row's images need, whatever the length of `tokens`."""

DIGEST_BYTES = 16

STORE_VARIABLE = "RL_IMAGES"
"""Environment variable of all processes of a run with the folder of its images."""

MAX_IMAGE_BYTES = 32 * 2**20
"""Maximum size of the file of an image."""
MAX_PIXELS = 64 * 2**20
"""Maximum number of pixels of an image, which bounds what a small file may grow to when it is decoded."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read. Others that pillow knows start programs (EPS), or are rare as photographs."""

_PLAIN = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "I;16", "I;16L", "I;16B")
_TRANSPARENT = ("LA", "PA", "RGBA", "RGBa")
_ORIENTATION = 0x0112
_TURNED = range(5, 9)
"""Values of the EXIF orientation that exchange width and height."""
_DIGEST = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class ImageError(ValueError):
    """Raised for an image that cannot be used; the message has the reason, in one line."""


@dataclass(frozen=True)
class ImageRef:
    """An image in the store.

    Args:
        digest: Of its file's bytes; hexadecimal, `2 * DIGEST_BYTES` characters.
        width, height: Size in pixels, after the rotation that its file asks for.
    """

    digest: str
    width: int
    height: int

    def part(self) -> Mapping[str, Any]:
        """Return the part of a message's content that shows it."""
        return {"type": "image", "image": self.digest, "width": self.width, "height": self.height}


class ImageStore:
    """Images in a folder, each in a file named by its digest.

    Args:
        folder: The folder; made at the first image.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    @classmethod
    def of_run(cls) -> ImageStore:
        """Return the store of the run that this process belongs to."""
        folder = os.environ.get(STORE_VARIABLE, "")
        if not folder:
            raise ImageError(f"this process belongs to no run with images: {STORE_VARIABLE} is not set")
        return cls(folder)

    def path(self, digest: str) -> Path:
        """Return the file of an image.

        Raises:
            ImageError: If it is not a digest.
        """
        if not _DIGEST.fullmatch(digest):
            raise ImageError(f"{digest[:80]!r} is not the digest of an image; put the image into the store first")
        return self.folder / digest[:2] / digest

    def put(self, data: bytes) -> ImageRef:
        """Keep an image. Equal bytes are kept once, and several processes may keep images at the same time.

        Args:
            data: Bytes of a file in one of `FORMATS`.

        Raises:
            ImageError: If it is not a valid image, has several frames, or is larger than accepted.
            ImportError: If pillow is not installed.
        """
        if not data:
            raise ImageError("the image is empty: it has 0 bytes")
        if len(data) > MAX_IMAGE_BYTES:
            raise ImageError(f"the image has {len(data):,} bytes; at most {MAX_IMAGE_BYTES:,} are accepted")
        digest = digest_of(data)
        path = self.path(digest)
        with _refusals():
            image = _opened(data)
            width, height = image.size
            value = image.getexif().get(_ORIENTATION, 1)
            turned = (value if isinstance(value, int) else 1) in _TURNED
            is_kept = path.is_file() and path.stat().st_size == len(data)
            if not is_kept:
                # Reads the whole file, of a JPEG at an eighth of its size.
                image.draft("RGB", (max(width // 8, 1), max(height // 8, 1)))
                image.load()
        if not is_kept:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
                try:
                    file.write(data)
                    file.flush()
                    Path(file.name).replace(path)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        return ImageRef(digest, *((height, width) if turned else (width, height)))

    def open(self, digest: str) -> Image:
        """Return the pixels of an image in RGB, turned as its file asks for; transparent parts are white.

        Raises:
            ImageError: If it is not in the store, or its file is damaged.
            ImportError: If pillow is not installed.
        """
        data = self._bytes(digest)
        with _refusals():
            image = _opened(data)
            from PIL import ImageOps

            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I;16"):  # 16 bits of grey, which `convert` would cut off at 255
                return image.point(lambda value: value / 256).convert("L").convert("RGB")
            if image.mode in _TRANSPARENT or "transparency" in image.info:
                image = image.convert("RGBA")
                white = _pillow().new("RGBA", image.size, (255, 255, 255, 255))
                image = _pillow().alpha_composite(white, image)
            return image.convert("RGB")

    def data_url(self, digest: str) -> str:
        """Return the file of an image as a data URL.

        Raises:
            ImageError: If it is not in the store, or its file is damaged.
            ImportError: If pillow is not installed.
        """
        data = self._bytes(digest)
        with _refusals():
            return f"data:{_opened(data).get_format_mimetype()};base64,{base64.b64encode(data).decode()}"

    def _bytes(self, digest: str) -> bytes:
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise ImageError(f"the image {digest} is not in {self.folder}") from None
        if digest_of(data) != digest:
            raise ImageError(f"the file of the image {digest} in {self.folder} is damaged; remove it")
        return data


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` indices of a sequence, evenly spaced and in order; all of a sequence that is no longer.

    Args:
        count: Length of the sequence.
        most: Maximum number of indices, at least 1.
    """
    return list(range(count)) if count <= most else [(2 * index + 1) * count // (2 * most) for index in range(most)]


def frames_of(data: bytes, most: int) -> list[bytes]:
    """Return frames of an animated image as PNG files, evenly spaced; a still image has one.

    Args:
        data: Bytes of a file in one of `FORMATS`.
        most: Maximum number of frames.

    Raises:
        ImageError: If it is another file, such as a video that needs a decoder, or a frame is larger than accepted.
        ImportError: If pillow is not installed.
    """
    pillow = _pillow()
    try:
        with _refusals():
            image = pillow.open(BytesIO(data), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(_too_large(f"{image.width} x {image.height}"))
            frames = []
            for index in evenly(getattr(image, "n_frames", 1), most):
                image.seek(index)
                file = BytesIO()
                image.convert("RGBA").save(file, "PNG")
                frames.append(file.getvalue())
            return frames
    except ImageError as error:
        if not str(error).startswith("it is not an image"):
            raise
        raise ImageError(
            "it is not an animated image, and video files need a decoder that this project does not have; write its "
            "frames as images (ffmpeg -i video.mp4 -vf fps=1 frames/%04d.png), and give the list of their paths"
        ) from None


def _opened(data: bytes) -> ImageFile:
    """Return the image of a file before any pixel is decoded: its size is checked first."""
    image: ImageFile = _pillow().open(BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"the image has no pixels: its size is {width} x {height}")
    if width * height > MAX_PIXELS:
        raise ImageError(_too_large(f"{width} x {height}"))
    # The second frame of an MPO file is a preview, or the picture of a second lens.
    num_frames = getattr(image, "n_frames", 1)
    if image.format != "MPO" and num_frames > 1:
        raise ImageError(f"the image is animated or has pages: it has {num_frames} frames; keep one of them")
    if image.mode not in (*_PLAIN, *_TRANSPARENT):
        raise ImageError(f"the image has pixels of the mode {image.mode!r}; convert it to RGB")
    return image


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise the errors of decoders as an `ImageError`."""
    pillow = _pillow()
    try:
        yield
    except (ImageError, ImportError):
        raise
    except pillow.UnidentifiedImageError:
        raise ImageError(f"it is not an image in one of the formats {', '.join(FORMATS)}") from None
    except pillow.DecompressionBombError:
        raise ImageError(_too_large("far too many")) from None
    except Exception as error:  # noqa: BLE001 - decoders raise errors of any kind for damaged files
        shown = " ".join(str(error).split())[:120] or type(error).__name__
        raise ImageError(f"the image is truncated or damaged ({shown})") from None


def _too_large(size: str) -> str:
    return f"the image has {size} pixels; at most {MAX_PIXELS:,} are accepted. Reduce it"


def digest_of(data: bytes) -> str:
    """Return the digest of a file's bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def image_refs(messages: Sequence[Mapping[str, Any]]) -> Iterator[ImageRef]:
    """Yield the images of messages, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") == "image":
                yield ImageRef(part["image"], part["width"], part["height"])


@cache
def _pillow() -> Any:
    """Return the module `PIL.Image` with the plugins of `FORMATS`, and without its warnings of large images: they are
    refused."""
    try:
        from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401
    except ImportError as error:
        from rl_core.install_command import install_command

        raise ImportError(f"images need pillow: {install_command('rl-core[vision]')}; {error}") from error
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    return Image


def image_digests(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the digests of the images of messages, in order."""
    return tuple(ref.digest for ref in image_refs(messages))
