"""The cache of data: rows that run no code, one owner, damage and size."""

import os
import pickle
import stat
import time

import numpy as np
import pytest

from rl_algos.data import encoding
from rl_algos.data.encoding import EncodingFailure, encode_on_disk, from_bytes, to_bytes
from rl_algos.data.sources import cache as data_cache
from rl_algos.preference.data import EncodedResponse
from rl_core.errors import DataError

TOKENS = np.array([1, 2, 70_000], np.int32)
MASK = np.array([0, 1, 1], np.uint8)


def shown(value):
    """A row with its arrays as lists and dtypes, which compare."""
    match value:
        case np.ndarray():
            return value.dtype.str, value.tolist()
        case tuple() | list():
            return type(value), [shown(item) for item in value]
        case EncodedResponse():
            return "response", shown(value.tokens), shown(value.loss_mask)
    return type(value), value


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(TOKENS, id="prompt"),
        pytest.param(np.array([], np.int32), id="empty"),
        pytest.param((TOKENS, MASK), id="conversation"),
        pytest.param([(EncodedResponse(TOKENS, MASK), EncodedResponse(TOKENS[:1], MASK[:1]), None)], id="pair"),
        pytest.param([(EncodedResponse(TOKENS, MASK), 0.1)], id="judged"),
        pytest.param(EncodingFailure("line 3: \ud800 is half a character"), id="failure"),
    ],
)
def test_a_row_is_read_as_it_was_written(row):
    assert shown(from_bytes(to_bytes(row))) == shown(row)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(pickle.dumps(os.getcwd), id="pickle"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x0c\x00\x00\x00" + b'["Popen","ls"]'[:12], id="cut short"),
        pytest.param(b'\x0e\x00\x00\x00["Popen","ls"]', id="another class"),
        pytest.param(b'\x11\x00\x00\x00["array","|O8",1]' + b"x" * 8, id="array of objects"),
        pytest.param(to_bytes(TOKENS)[:-1], id="short array"),
        pytest.param(b"\x00\x00\x01\x00" + b"[" * 65536, id="nested"),
    ],
)
def test_bytes_that_are_not_a_row_are_refused_and_run_nothing(content):
    with pytest.raises(ValueError):
        from_bytes(content)


def doubled(item):
    return np.array([item, 2 * item], np.int32)


def encoded(count=20):
    return [row.tolist() for row in encode_on_disk(range(count), doubled, 0, name="numbers")]


@pytest.fixture
def chunks(monkeypatch):
    """Files of eight rows."""
    monkeypatch.setattr(encoding, "_CHUNK", 8)


def files(cache):
    return sorted(path for path in cache.rglob("*") if path.is_file())


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def changed(path):
    content = bytearray(path.read_bytes())
    content[12] ^= 1
    path.write_bytes(content)


def linked(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("damage", [cut, changed, linked, lambda path: path.write_bytes(b"")])
def test_a_file_that_cannot_be_used_is_made_again(cache, damage):
    expected = encoded()
    whole = [path.read_bytes() for path in files(cache)]
    assert len(whole) == 3
    for path in files(cache):
        damage(path)
    assert encoded() == expected
    assert [path.read_bytes() for path in files(cache) if not path.suffix and not path.is_symlink()] == whole


@pytest.mark.usefixtures("chunks")
def test_a_file_of_another_user_is_made_again(cache, monkeypatch):
    expected = encoded()
    planted = files(cache)[0]
    planted.write_bytes(b"planted")
    real = os.geteuid()
    monkeypatch.setattr(data_cache.os, "geteuid", lambda: real + 1)
    assert data_cache.found(str(planted.relative_to(cache))) is None
    monkeypatch.undo()
    monkeypatch.setattr(encoding, "_CHUNK", 8)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    assert encoded() == expected


def test_the_folder_is_for_its_owner_only(cache, monkeypatch):
    cache.mkdir(parents=True, mode=0o777)
    cache.chmod(0o777)
    encoded()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    real = os.geteuid()
    monkeypatch.setattr(data_cache.os, "geteuid", lambda: real + 1)
    with pytest.raises(DataError, match=rf"another user \(id {real}\); set XDG_CACHE_HOME to"):
        encoded()


@pytest.mark.usefixtures("chunks")
def test_the_files_unused_for_longest_are_removed_beyond_a_size(cache):
    encoded()
    first, second, third = files(cache)
    for days, path in ((30, second), (20, first), (1, third)):
        then = time.time() - days * 86400
        os.utime(path, (then, then))
    sizes = {path: path.stat().st_size for path in files(cache)}
    total = sum(sizes.values())
    assert data_cache.evict(total, 0.0) == 0
    assert data_cache.evict(total - 1, 14 * 86400.0) == 1
    assert files(cache) == sorted([first, third])
    assert data_cache.evict(0, 14 * 86400.0) == 1, "the last one is still in use"
    assert files(cache) == [third]


@pytest.mark.usefixtures("chunks")
def test_use_is_noted_without_changing_what_identifies_a_file(cache):
    encoded()
    [path, *_] = files(cache)
    os.utime(path, (1.0, 1.0))
    encoded()
    assert path.stat().st_mtime == 1.0
    assert time.time() - path.stat().st_atime < 600
