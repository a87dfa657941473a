from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_core import images
from rl_core.images import ImageError, ImageRef, ImageStore, digest_of, evenly, frames_of, image_refs


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def coloured(width: int = 8, height: int = 4, colour: tuple[int, ...] = (200, 30, 90)) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def png_of_size(width: int, height: int) -> bytes:
    """A PNG file of few bytes whose header promises many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def test_an_image_is_kept_once_and_opens_with_its_pixels(store: ImageStore) -> None:
    data = encoded(coloured())
    ref = store.put(data)
    written = store.path(ref.digest).stat().st_mtime_ns
    assert ref == ImageRef(digest_of(data), 8, 4) == store.put(data)
    assert store.path(ref.digest).stat().st_mtime_ns == written
    assert [file.name for file in store.folder.rglob("*") if file.is_file()] == [ref.digest]
    opened = store.open(ref.digest)
    assert opened.mode == "RGB"
    assert (np.asarray(opened) == np.asarray(coloured())).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_file_asks_for(store: ImageStore, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    ref = store.put(encoded(coloured(), "JPEG", exif=exif))
    assert (ref.width, ref.height) == store.open(ref.digest).size == ((4, 8) if orientation > 4 else (8, 4))


def test_every_mode_becomes_rgb_with_transparent_parts_white(store: ImageStore) -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0] * 256)
    deep = Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16))
    cases = {
        "clear": (encoded(clear), (255, 255, 255)),
        "half": (encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128))), (127, 127, 127)),
        "grey with alpha": (encoded(Image.new("LA", (4, 4), (9, 0))), (255, 255, 255)),
        "grey": (encoded(Image.new("L", (4, 4), 77)), (77, 77, 77)),
        "black and white": (encoded(Image.new("1", (4, 4), 1)), (255, 255, 255)),
        "palette": (encoded(palette), (255, 0, 0)),
        "clear palette": (encoded(palette, transparency=0), (255, 255, 255)),
        "cmyk": (encoded(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "TIFF"), (255, 0, 0)),
        "16 bits": (encoded(deep), (128, 128, 128)),
        "gif": (encoded(coloured(), "GIF"), (200, 30, 90)),
        "webp": (encoded(coloured(), "WEBP", lossless=True), (200, 30, 90)),
        "bmp": (encoded(coloured(), "BMP"), (200, 30, 90)),
    }
    for name, (data, expected) in cases.items():
        opened = store.open(store.put(data).digest)
        assert (opened.mode, opened.getpixel((1, 1))) == ("RGB", expected), name


def test_a_bad_image_is_refused_with_its_reason_and_nothing_is_kept(store: ImageStore) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    frames = [coloured(), coloured(colour=(1, 2, 3))]
    cases = {
        b"": "0 bytes",
        b"hello": "not an image",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>": "not an image",
        encoded(coloured(), "EPS"): "not an image",
        encoded(noise)[:200]: "truncated or damaged",
        encoded(noise, "JPEG")[:-300]: "truncated or damaged",
        encoded(noise, "GIF")[:-300]: "truncated or damaged",
        encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]): "2 frames",
        encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]): "2 frames",
        encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]): "2 frames",
        encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]): "2 frames",
        encoded(Image.new("F", (4, 4)), "TIFF"): "mode 'F'",
        png_of_size(9000, 9000): "9000 x 9000",
        png_of_size(65000, 65000): "far too many",
        png_of_size(0, 4): "not an image",
        png_of_size(8, 8): "truncated or damaged",
    }
    for data, reason in cases.items():
        with pytest.raises(ImageError, match=reason) as raised:
            store.put(data)
        assert "\n" not in str(raised.value)
    assert not store.folder.exists()


def test_a_file_of_too_many_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(coloured())
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", len(data) - 1)
    with pytest.raises(ImageError, match=rf"has {len(data)} bytes; at most {len(data) - 1} "):
        ImageStore(tmp_path).put(data)
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", len(data))
    assert ImageStore(tmp_path).put(data)


def test_several_writers_of_an_image_leave_it_whole(store: ImageStore) -> None:
    images = [encoded(coloured(64, 64, (index, 0, 0))) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        refs = list(pool.map(store.put, images * 8))
    assert len({ref.digest for ref in refs}) == 8
    assert sorted(file.name for file in store.folder.rglob("*") if file.is_file()) == sorted({r.digest for r in refs})
    for ref in refs[:8]:
        store.open(ref.digest)


def test_a_missing_or_damaged_image_and_a_name_that_is_no_digest_are_refused(store: ImageStore) -> None:
    ref = store.put(encoded(coloured()))
    with pytest.raises(ImageError, match="is not in"):
        store.open(digest_of(b"another"))
    with pytest.raises(ImageError, match="not the digest"):
        store.open("../../etc/passwd")
    store.path(ref.digest).write_bytes(encoded(coloured(colour=(0, 0, 0))))
    with pytest.raises(ImageError, match="damaged"):
        store.open(ref.digest)


def test_a_file_that_was_cut_off_is_written_again(store: ImageStore) -> None:
    data = encoded(coloured())
    ref = store.put(data)
    store.path(ref.digest).write_bytes(data[:10])
    assert store.put(data) == ref
    assert store.open(ref.digest).size == (8, 4)


def test_the_store_of_a_run_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL_IMAGES", raising=False)
    with pytest.raises(ImageError, match="RL_IMAGES is not set"):
        ImageStore.of_run()
    monkeypatch.setenv("RL_IMAGES", str(tmp_path))
    assert ImageStore.of_run().folder == tmp_path


def test_the_images_of_messages_come_in_order() -> None:
    first, second = ImageRef("a" * 32, 3, 4), ImageRef("b" * 32, 5, 6)
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": ({"type": "text", "text": "?"}, second.part())},
        {"role": "user", "content": [first.part()]},
    ]
    assert list(image_refs(messages)) == [second, first]


def test_pillow_is_imported_only_when_an_image_is_read() -> None:
    code = "import sys, rl_core.images; assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("count", "most", "expected"), [(3, 8, [0, 1, 2]), (8, 8, list(range(8))), (10, 3, [1, 5, 8])])
def test_frames_are_chosen_evenly(count: int, most: int, expected: list[int]) -> None:
    assert evenly(count, most) == expected


@pytest.mark.parametrize("count", range(1, 40))
def test_chosen_frames_are_different_and_in_order(count: int) -> None:
    for most in range(1, 40):
        chosen = evenly(count, most)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(count, most)
        assert 0 <= chosen[0] <= chosen[-1] < count


def test_frames_of_an_animation_have_its_pixels_and_its_transparency(store: ImageStore) -> None:
    first, *others = [Image.new("RGBA", (4, 4), (index, 0, 0, 255 * (index > 0))) for index in range(3)]
    data = encoded(first, "PNG", save_all=True, append_images=others)
    kept = [store.open(store.put(frame).digest).getpixel((0, 0)) for frame in frames_of(data, 8)]
    assert kept == [(255, 255, 255), (1, 0, 0), (2, 0, 0)]
    assert len(frames_of(encoded(coloured()), 8)) == 1


def test_frames_of_many_pixels_and_truncated_files_are_refused() -> None:
    with pytest.raises(ImageError, match="at most"):
        frames_of(png_of_size(2**15, 2**15), 8)
    with pytest.raises(ImageError, match="truncated or damaged"):
        frames_of(encoded(coloured())[:-30], 8)
    with pytest.raises(ImageError, match="need a decoder"):
        frames_of(b"RIFF" + bytes(100), 8)
