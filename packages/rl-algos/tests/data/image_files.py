"""Images as bytes, for tests."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image


def picture(width: int = 60, height: int = 30, colour: tuple[int, ...] = (9, 80, 200), mode: str = "RGB") -> Any:
    return Image.new(mode, (width, height), colour if mode == "RGB" else 0)


def png(*args: Any, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture(*args).save(file, form, **options)
    return file.getvalue()


def animated() -> bytes:
    file = io.BytesIO()
    picture().save(file, "GIF", save_all=True, append_images=[picture(colour=(1, 2, 3))])
    return file.getvalue()


def bomb() -> bytes:
    """A file of a few bytes whose header promises 81 million pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b"")
