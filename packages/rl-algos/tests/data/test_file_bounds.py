"""Small files that hold very much, and files that memory cannot hold: errors that name the file."""

import gzip
import itertools

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rl_algos.data.sources import files
from rl_core.errors import DataError


def write_arrow(path, new):
    batch = pyarrow.record_batch({"a": ["x" * 1000] * 1000})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with new(str(path), batch.schema, options=options) as writer:
        for _ in range(6):
            writer.write_batch(batch)


@pytest.mark.parametrize("new", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_an_arrow_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, monkeypatch, new):
    write_arrow(tmp_path / "a.arrow", new)
    assert len(files.read(tmp_path / "a.arrow")) == 6000
    monkeypatch.setattr(files, "_UNPACKED_BYTES", 3 << 20)
    monkeypatch.setattr(files, "_UNPACKED_TIMES", 5)
    with pytest.raises(DataError, match=r"a\.arrow: too large: it has .* bytes and unpacks to 4,0.*unpack it"):
        files.read(tmp_path / "a.arrow")


def write_parquet(path, *tables, **settings):
    with pyarrow.parquet.ParquetWriter(path, tables[0].schema, compression="zstd", **settings) as writer:
        for table in tables:
            writer.write_table(table)


def long_strings(path):
    write_parquet(path, *[pyarrow.table({"a": ["x" * 100_000] * 10})] * 3, use_dictionary=False)


def one_long_string(path):
    write_parquet(path, pyarrow.table({"a": ["x" * 3_000_000]}), use_dictionary=False)


def nulls(path):
    write_parquet(path, *[pyarrow.table({"a": pyarrow.nulls(200_000, pyarrow.int64())})] * 4)


def a_list_of_zeros(path):
    zeros = pyarrow.array([0]).cast(pyarrow.int8()).take(pyarrow.array([0] * 1000))
    column = pyarrow.ListArray.from_arrays([0, 800_000], pyarrow.concat_arrays([zeros] * 800))
    write_parquet(path, pyarrow.table({"a": column}))


@pytest.mark.parametrize("write", [long_strings, one_long_string, nulls, a_list_of_zeros])
def test_a_parquet_file_that_declares_far_more_than_its_size_is_refused_unread(tmp_path, monkeypatch, write):
    write(tmp_path / "a.parquet")
    monkeypatch.setattr(files, "_UNPACKED_BYTES", 1 << 20)

    def read(*_, **__):
        raise AssertionError("the file was read")

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", read)
    with pytest.raises(DataError, match=r"a\.parquet: too large: it has .* bytes and unpacks to 3,\d\d\d,"):
        files.read(tmp_path / "a.parquet")


def test_a_value_that_is_stored_once_and_repeated_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    """The metadata of such a file show the size of one value."""
    size = 3_000_000
    write_parquet(tmp_path / "a.parquet", pyarrow.table({"a": ["x" * size] * 20}), dictionary_pagesize_limit=1 << 30)
    read = []
    measured = files._check_growth
    monkeypatch.setattr(files, "_check_growth", lambda *given: (read.append(given[2]), measured(*given)))
    monkeypatch.setattr(files, "_ROW_BYTES", 2 * size)
    monkeypatch.setattr(files, "_UNPACKED_BYTES", 10 * size)
    monkeypatch.setattr(files, "_IN_MEMORY_BYTES", size)
    with pytest.raises(DataError, match=r"a\.parquet: too large: "):
        files.read(tmp_path / "a.parquet")
    steps = [after - before for before, after in itertools.pairwise(read)]
    assert max(steps) < 3 * size


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(pyarrow.array([[None] * 20_000]), id="nulls"),
        pytest.param(pyarrow.array([[True] * 20_000]), id="truth values"),
        pytest.param(pyarrow.array([{"b": [[1] * 10_000] * 2}]), id="lists in lists of a struct"),
        pytest.param(pyarrow.array([[1] * 20_000]), id="numbers"),
    ],
)
def test_a_row_with_far_too_many_values_is_refused(tmp_path, monkeypatch, column):
    pyarrow.parquet.write_table(pyarrow.table({"a": column}), tmp_path / "a.parquet")
    rows = files.DataRows.of_files([files.read(tmp_path / "a.parquet")])
    assert rows[0]
    monkeypatch.setattr(files, "_ROW_VALUES", 10_000)
    with pytest.raises(
        DataError, match=r"a\.parquet, row 0 .*: the row has .* bytes and 20,000 values; the limits are"
    ):
        rows[0]


def test_a_line_that_no_model_reads_is_refused_with_its_number(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": "' + "x" * 5000 + '"}\n')
    monkeypatch.setattr(files, "_ROW_BYTES", 1000)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the row has 5,010 bytes"):
        files.DataRows.of_files([files.read(tmp_path / "a.jsonl")])[1]


@pytest.mark.parametrize("name", ["a.csv.gz", "a.tsv.gz", "a.json.gz"])
def test_rows_that_are_held_may_grow_less(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(gzip.compress(b"a\n" * 300_000))
    monkeypatch.setattr(files, "_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(files, "_UNPACKED_TIMES", 10)
    with pytest.raises(DataError, match="too large: "):
        files.read(tmp_path / name)


def test_columns_are_counted_once(tmp_path):
    """With each column compared with all others, this test would take a minute."""
    (tmp_path / "a.csv").write_text(",".join(f"c{n}" for n in range(100_000)) + "\n" + "," * 99_999 + "\n")
    assert len(files.read(tmp_path / "a.csv")) == 1


@pytest.mark.parametrize("error", [pyarrow.lib.ArrowMemoryError, MemoryError, pyarrow.lib.ArrowNotImplementedError])
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_file_that_memory_cannot_hold_is_named(tmp_path, monkeypatch, kind, error):
    write_arrow(tmp_path / "a.arrow", pyarrow.ipc.new_stream)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "a.parquet")

    def fail(*_):
        raise error("malloc of size 17179869184 failed")

    monkeypatch.setattr(files, {"arrow": "_check_growth", "parquet": "_held_batches"}[kind], fail)
    with pytest.raises(DataError, match=rf"a\.{kind}: .*malloc of size"):
        files.read(tmp_path / f"a.{kind}")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_nesting_beyond_the_reader_is_an_error_that_names_the_file(tmp_path, name):
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(DataError, match=rf"{name}.*: .*nested too deeply"):
        files.DataRows.of_files([files.read(tmp_path / name)])[0]
