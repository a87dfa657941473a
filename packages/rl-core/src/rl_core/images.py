"""Images of conversations: files by digest in a folder that all processes of a run share.

Messages, prompts, rollouts and batches refer to an image by its digest and size; the bytes lie in the `ImageStore` of
the run and are read by the processes that look at them: the model's workers, the engine, and people. They never pass
through the driver or Ray's object store.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.rollouts.rollout import Message

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES = "images"
"""Column of a batch, uint8 `[images of the row, DIGEST_BYTES]`: the digests of each row's images in the order of their
tokens. Its rows have other lengths than those of `tokens`."""

DIGEST_BYTES = 16

STORE_VARIABLE = "RL_IMAGES"
"""Environment variable of all processes of a run that names the folder of its images."""


class ImageError(ValueError):
    """Raised for an image that cannot be used; the message says what is wrong with it, in one line."""


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


@dataclass(frozen=True)
class ImageLimits:
    """What is accepted as an image.

    Args:
        max_bytes: Maximum size of a file.
        max_pixels: Maximum number of pixels, which bounds what a small file may grow to when it is decoded.
    """

    max_bytes: int = 32 * 2**20
    max_pixels: int = 64 * 2**20


class ImageStore:
    """Images in a folder, each in a file named by its digest.

    Args:
        folder: The folder; made at the first image.
        limits: What is accepted.
    """

    def __init__(self, folder: Path | str, limits: ImageLimits = ImageLimits()) -> None:
        self.folder = Path(folder)
        self.limits = limits

    @classmethod
    def of_run(cls) -> ImageStore:
        """Return the store of the run that this process belongs to."""
        folder = os.environ.get(STORE_VARIABLE, "")
        if not folder:
            raise ImageError(f"this process belongs to no run with images: {STORE_VARIABLE} is not set")
        return cls(folder)

    def path(self, digest: str) -> Path:
        """Return the file of an image."""
        return self.folder / digest[:2] / digest

    def put(self, data: bytes) -> ImageRef:
        """Keep an image. Equal bytes are kept once.

        Args:
            data: Bytes of a file in a format that pillow reads.

        Raises:
            ImageError: If it is none, has more than one frame, or is larger than accepted.
        """
        raise NotImplementedError

    def open(self, digest: str) -> Image:
        """Return the pixels of an image in RGB, turned as its file asks for.

        Raises:
            ImageError: If it is not there.
        """
        raise NotImplementedError


def digest_of(data: bytes) -> str:
    """Return the digest of a file's bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def image_refs(messages: Sequence[Message]) -> Iterator[ImageRef]:
    """Yield the images of messages, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") == "image":
                yield ImageRef(part["image"], part["width"], part["height"])
