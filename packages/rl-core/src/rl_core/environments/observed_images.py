"""Images in what environments and tools answer, put into the run's store by the process that has them.

An answer then has the digests and sizes of its images, and their bytes go no further than the node's file system.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.images import ImageError, ImageStore
from rl_core.rollouts.rollout import Message

IMAGE, TEXT = "image", "text"
"""Types of the parts of a content."""


def is_image(value: Any) -> bool:
    """Return whether a value is an image of pillow, which need not be installed."""
    return any(each.__module__ == "PIL.Image" and each.__qualname__ == "Image" for each in type(value).__mro__)


def parts_of(result: Any) -> tuple[Mapping[str, Any], ...] | None:
    """Return the parts of a content with images: an image of pillow, or a list of parts, images of pillow and strings;
    None for anything else.

    Args:
        result: Result of a tool, or content of a message.
    """
    if is_image(result):
        return ({"type": IMAGE, "image": result},)
    if not isinstance(result, list | tuple):
        return None
    parts: list[Mapping[str, Any]] = []
    for each in result:
        if isinstance(each, str):
            parts.append({"type": TEXT, "text": each})
        elif is_image(each):
            parts.append({"type": IMAGE, "image": each})
        elif isinstance(each, Mapping) and each.get("type") in (IMAGE, TEXT) and each["type"] in each:
            parts.append(each)
        else:
            return None
    return tuple(parts) if any(part["type"] == IMAGE for part in parts) else None


def with_kept_images(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages whose images are in the run's store.

    An image part has under `image` the bytes of a file, a data URL, an image of pillow, or the digest of an image that
    is in the store with its `width` and `height`, as prompts have it.

    Args:
        messages: Observation of an environment.

    Raises:
        ImageError: For anything else, and for an image that is not accepted.
        ImportError: If pillow is not installed.
    """
    given: Sequence[Any] = messages
    kept = []
    for message in given:
        # A message of another type is refused later, as any answer of a wrong form.
        parts = parts_of(message.get("content")) if isinstance(message, Mapping) else None
        if parts is not None:
            content = [_kept_part(part) if part["type"] == IMAGE else part for part in parts]
            message = {**message, "content": content}
        kept.append(message)
    return tuple(kept)


def _kept_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    image = part.get("image")
    if isinstance(image, str) and not image.startswith("data:"):
        if not {"width", "height"} <= part.keys():
            raise ImageError(
                f"an image part has {image[:80]!r}; give the bytes of a file, a data URL, an image of pillow, or what "
                "`ImageRef.part` returns"
            )
        return part
    return ImageStore.of_run().put(_bytes_of(image)).part()


def _bytes_of(image: Any) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str):
        kind, comma, data = image.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise ImageError(f"the data URL {image[:40]!r} must begin with data:image/FORMAT;base64,")
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise ImageError(f"the data URL {image[:40]!r} is not valid base64: {error}") from None
    if is_image(image):
        file = io.BytesIO()
        image.save(file, format="PNG")
        return file.getvalue()
    raise ImageError(
        f"an image part has a {type(image).__qualname__}; give the bytes of a file, a data URL, or an image of pillow"
    )
