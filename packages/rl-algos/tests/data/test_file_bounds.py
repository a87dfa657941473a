"""Small files that hold very much, and files that memory cannot hold: errors that name the file."""

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rl_algos.data import files
from rl_core.errors import DataError


def write_arrow(path, new, *, compression="zstd", num_batches=6):
    batch = pyarrow.record_batch({"a": ["x" * 1000] * 1000})
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with new(str(path), batch.schema, options=options) as writer:
        for _ in range(num_batches):
            writer.write_batch(batch)


@pytest.mark.parametrize("new", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_an_arrow_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, monkeypatch, new):
    write_arrow(tmp_path / "a.arrow", new)
    assert len(files.read(tmp_path / "a.arrow")) == 6000
    monkeypatch.setattr(files, "_UNPACKED_BYTES", 3 << 20)
    monkeypatch.setattr(files, "_UNPACKED_TIMES", 5)
    with pytest.raises(DataError, match=r"a\.arrow: it has .* bytes and unpacks to more than 4,0.*unpack it"):
        files.read(tmp_path / "a.arrow")


@pytest.mark.parametrize("error", [pyarrow.lib.ArrowMemoryError, MemoryError, pyarrow.lib.ArrowNotImplementedError])
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_file_that_memory_cannot_hold_is_named(tmp_path, monkeypatch, kind, error):
    write_arrow(tmp_path / "a.arrow", pyarrow.ipc.new_stream)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "a.parquet")

    def fail(*_):
        raise error("malloc of size 17179869184 failed")

    monkeypatch.setattr(files, {"arrow": "_grown_within_bounds", "parquet": "_held_batches"}[kind], fail)
    with pytest.raises(DataError, match=rf"a\.{kind}: .*malloc of size"):
        files.read(tmp_path / f"a.{kind}")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_nesting_beyond_the_reader_is_an_error_that_names_the_file(tmp_path, name):
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(DataError, match=rf"{name}.*: .*nested too deeply"):
        files.Rows.of_files([files.read(tmp_path / name)])[0]
