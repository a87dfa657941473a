"""Files as people and programs write them. A case is a line: the file's name, its bytes, and its rows or the reason."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from rl_algos.data.sources import files
from rl_algos.data.sources.files import read
from rl_core.errors import DataError

BOM = b"\xef\xbb\xbf"
ROW = {"a": "x"}


def rows_of(path):
    found = read(path, path.name)
    return [found.rows[index] for index in range(len(found))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param(
            "a.json", BOM + b'[{"a": "x"}]', id="an array behind a byte-order mark [pydantic/pydantic-ai#8316]"
        ),
        pytest.param("a.json", b'{"a": "x"}', id="one object"),
        pytest.param("a.jsonl", b'{"a": "x"}', id="a line without its end [apache/arrow#45394]"),
        pytest.param(
            "a.json", b'{\n  "a":\n  "x"\n}\n', id="one object over several lines [huggingface/datasets#8086]"
        ),
        pytest.param("a.json", BOM + b'{\n  "a": "x"\n}', id="the same behind a byte-order mark"),
        pytest.param("a.jsonl", BOM + b'{"a": "x"}\n', id="lines behind a byte-order mark [huggingface/datasets#8241]"),
        pytest.param("a.jsonl", b'\r\n{"a": "x"}\r\n\r\n', id="line ends of Windows"),
        pytest.param("a.csv", BOM + b"a\r\nx\r\n", id="CSV behind a byte-order mark"),
        pytest.param("a.jsonl.gz", gzip.compress(b'{"a": "x"}\n'), id="compressed lines"),
    ],
)
def test_a_file_is_read_right(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert rows_of(tmp_path / name) == [ROW]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        pytest.param("a.jsonl", '{"a": "x"}\n'.encode("utf-16"), "UTF-16.*iconv", id="UTF-16"),
        pytest.param("a.csv", "a\nx\n".encode("utf-32"), "UTF-32.*iconv", id="UTF-32"),
        pytest.param(
            "a.jsonl",
            b'{\n  "a": "x"\n}\n',
            "one line is one row",
            id="an object over several lines [apache/arrow#40912]",
        ),
        pytest.param(
            "a.jsonl",
            b'{"a": 1}{"a": 2}\n',
            "one line is one row",
            id="two objects in a line [huggingface/datasets#4107]",
        ),
        pytest.param("a.jsonl", b'{"a": 1, "a": 2}\n', "the key 'a' is there twice", id="a key twice"),
        pytest.param(
            "a.jsonl",
            b'{"a": {"b": 1, "b": 2}}\n',
            "the key 'b' is there twice",
            id="a key twice within [Quchaosheng/workbench-mobile-home-robot#197]",
        ),
        pytest.param("a.jsonl", b'{"a": 1,}\n', "no trailing comma", id="a trailing comma"),
        pytest.param("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}\n", "more than 4300 digits", id="a huge integer"),
        pytest.param("a.jsonl", b'{"a": ' + b"[" * 100_000, "nested too deeply", id="deep lines"),
        pytest.param("a.json", b"[" * 100_000, "a.json: not a JSON array: .* nested too deeply", id="a deep array"),
        pytest.param("a.json", b'{\n"a": 1\n}\n{\n"a": 2\n}\n', "one line is one row", id="objects one after another"),
        pytest.param("a.csv", b"a,b,a\n1,2,3\n", "line 1: .*columns 'a'", id="a column twice"),
    ],
)
def test_a_file_of_another_form_is_refused_with_the_remedy(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        rows_of(tmp_path / name)


def test_a_long_field_of_csv_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("a\n" + "x" * 300_000 + "\n")
    assert rows_of(tmp_path / "a.csv") == [{"a": "x" * 300_000}]


def test_rows_are_the_same_from_lines_and_from_columns(tmp_path):
    calls = [{"name": "sum", "arguments": {"x": 1, "y": 2}}, {"name": "weather", "arguments": {"city": "Oslo"}}]
    rows = [{"messages": [{"role": "assistant", "content": "c", "tool_calls": [call]}]} for call in calls]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert rows_of(tmp_path / "a.jsonl") == rows_of(tmp_path / "a.parquet") == rows_of(tmp_path / "a.arrow") == rows


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(files, "_IN_MEMORY_BYTES", 1 << 16)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b" " * (8 << 20)))
    repeated = pyarrow.table({"a": pyarrow.array(["x" * 10_000] * 20_000).dictionary_encode()})
    pyarrow.parquet.write_table(repeated.cast(pyarrow.schema([("a", pyarrow.string())])), tmp_path / "a.parquet")
    for name in ("a.jsonl.gz", "a.parquet"):
        with pytest.raises(DataError, match=f"{name}: too large: it has .* bytes and unpacks to .* or more"):
            rows_of(tmp_path / name)
