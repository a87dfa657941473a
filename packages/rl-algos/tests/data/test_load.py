import bz2
import gzip
import json
import re

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.sources.load import load_rows, settings_problem
from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.plugins import DatasetPlugin, Requirement

ROWS = [{"question": f"q{index}", "answer": str(index)} for index in range(5)]


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".parquet":
            pyarrow.parquet.write_table(table, path)
        case ".arrow":
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
    return path


def rows(path, split=None):
    return list(load_rows(DatasetConfig(data_path=str(path), split=split), "train"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_file_is_read_in_order(tmp_path, name):
    assert rows(write(tmp_path / name)) == ROWS


def test_the_arrow_file_format_is_read_as_well(tmp_path):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert rows(tmp_path / "a.arrow") == ROWS


def test_folders_and_patterns_are_read_in_the_order_of_names(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[2:])
    write(tmp_path / "a.parquet", ROWS[:2])
    (tmp_path / "README.md").write_text("not data")
    assert rows(tmp_path) == ROWS
    assert rows(tmp_path / "*.jsonl") == ROWS[2:]


def test_a_split_chooses_files_of_a_folder(tmp_path):
    write(tmp_path / "train-0.jsonl", ROWS[:2])
    write(tmp_path / "validation" / "0.jsonl", ROWS[2:])
    assert rows(tmp_path, "train") == ROWS[:2]
    assert rows(tmp_path, "validation") == ROWS[2:]
    with pytest.raises(DataError, match="whose names start with 'test'"):
        rows(tmp_path, "test")
    with pytest.raises(DataError, match="Remove `split`"):
        rows(tmp_path / "train-0.jsonl", "train")


def test_what_datasets_saved_is_read(tmp_path):
    import datasets

    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path / "many")
    assert rows(tmp_path / "one") == ROWS
    assert rows(tmp_path / "many", "test") == ROWS[1:2]
    with pytest.raises(DataError, match="has the splits train, test, got 'dev'"):
        rows(tmp_path / "many", "dev")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"a": 1', "not a JSON object: Expecting ',' delimiter at column 8; one line is one row"),
        ('{"a": "b\tc"}', r"not a JSON object: Invalid control character at column 9; write \\t for a tab"),
        ("{'a': 1}", "in double quotes at column 2; JSON has double quotes"),
        ("[1]", "a row must be a JSON object, got list"),
        ("\xff", "not a JSON object: it is not text in UTF-8"),
    ],
)
def test_a_malformed_line_is_reported_with_file_and_number(tmp_path, line, problem):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 0}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=problem) as error:
        rows(path)
    assert str(error.value).startswith(f"{path}, line 3: ")


def test_a_row_has_its_place(tmp_path):
    write(tmp_path / "a.parquet", ROWS[:2])
    (tmp_path / "b.jsonl").write_text('{"a": 0}\n\n{"a": 1}\n')
    found = load_rows(DatasetConfig(data_path=str(tmp_path)), "train")
    assert [found.place(index) for index in range(4)] == [
        f"{tmp_path}/a.parquet, row 0 (from 0)",
        f"{tmp_path}/a.parquet, row 1 (from 0)",
        f"{tmp_path}/b.jsonl, line 1",
        f"{tmp_path}/b.jsonl, line 3",
    ]
    generated = load_rows(DatasetConfig(dataset_name="arithmetic"), "train")
    assert generated.place(3) == "arithmetic (train), row 3 (from 0)"


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_compressed_text_is_read_with_its_lines(tmp_path, ending, pack):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(b"\n" + b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)))
    found = load_rows(DatasetConfig(data_path=str(path)), "train")
    assert list(found) == ROWS
    assert found.place(1) == f"{path}, line 3"
    path.write_bytes(pack(json.dumps(ROWS[3]).encode()))
    assert rows(path) == ROWS[3:4]


@pytest.mark.parametrize("ending", [".zst", ".lz4"])
def test_other_compressions_are_read(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    with pyarrow.output_stream(str(path), compression={".zst": "zstd", ".lz4": "lz4"}[ending]) as out:
        out.write("".join(json.dumps(row) + "\n" for row in ROWS).encode())
    assert rows(path) == ROWS


def test_a_json_array_and_a_table_are_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "b.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "c.csv").write_text('question,answer\n"a ""b"",\nc",1\nd,\n')
    assert rows(tmp_path / "a.json") == rows(tmp_path / "b.json") == ROWS
    found = load_rows(DatasetConfig(data_path=str(tmp_path / "c.csv")), "train")
    assert list(found) == [{"question": 'a "b",\nc', "answer": "1"}, {"question": "d", "answer": ""}]
    assert [found.place(index) for index in (0, 1)] == [f"{tmp_path / 'c.csv'}, line {line}" for line in (2, 4)]


def test_json_that_describes_other_files_is_no_data(tmp_path):
    write(tmp_path / "a.jsonl")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert rows(tmp_path) == ROWS


def test_files_of_an_object_store_are_copied_once_and_read_in_order(cache):
    import fsspec

    store = fsspec.filesystem("memory")
    for name, part in (("train-0.jsonl", ROWS[:2]), ("train-1.jsonl", ROWS[2:4]), ("test/0.jsonl", ROWS[4:])):
        store.pipe(f"/bucket/data/{name}", "".join(json.dumps(row) + "\n" for row in part).encode())
    store.pipe("/bucket/data/README.md", b"not data")
    try:
        assert rows("memory://bucket/data", "train") == ROWS[:4]
        assert rows("memory://bucket/data", "test") == ROWS[4:]
        assert rows("memory://bucket/data/train-*.jsonl") == ROWS[:4]
        found = load_rows(DatasetConfig(data_path="memory://bucket/data/train-1.jsonl"), "train")
        assert list(found) == ROWS[2:4]
        assert found.place(1) == "memory:///bucket/data/train-1.jsonl, line 2"
        assert len(list((cache / "copied").rglob("*.jsonl"))) == 3
        store.pipe("/bucket/data/train-1.jsonl", json.dumps(ROWS[0]).encode())
        assert rows("memory://bucket/data/train-1.jsonl") == ROWS[:1]
        with pytest.raises(DataError, match="no data at 'memory://bucket/none"):
            rows("memory://bucket/none.jsonl")
        with pytest.raises(DataError, match=r"cannot read 'README\.md'"):
            rows("memory://bucket/data/README.md")
    finally:
        store.rm("/bucket", recursive=True)


def test_a_store_of_an_unknown_kind_is_refused():
    with pytest.raises(DataError, match=r"'nowhere://bucket/a\.jsonl' cannot be read: .*nowhere"):
        rows("nowhere://bucket/a.jsonl")


def test_what_is_not_there_or_not_readable_is_refused(tmp_path):
    with pytest.raises(DataError, match="no data at"):
        rows(tmp_path / "missing.jsonl")
    (tmp_path / "a.txt").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"cannot read .*a\.txt.*: expected \.jsonl"):
        rows(tmp_path / "a.txt")
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"b\.parquet: not a Parquet file"):
        rows(tmp_path / "b.parquet")
    (tmp_path / "b.arrow").write_text("no arrow at all")
    with pytest.raises(DataError, match=r"b\.arrow: not an Arrow file"):
        rows(tmp_path / "b.arrow")
    with pytest.raises(DataError, match=r"c\.jsonl' has no rows"):
        rows(write(tmp_path / "c.jsonl", []))


def test_a_plugin_is_loaded_with_its_settings_and_the_split_of_its_purpose():
    settings = DatasetConfig(dataset_name="arithmetic", settings={"max_operand": 9})
    train, validation = load_rows(settings, "train"), load_rows(settings, "validation")
    assert len(train) + len(validation) == 100
    assert list(load_rows(settings.model_copy(update={"split": "validation"}), "train")) == list(validation)


def test_a_dataset_on_a_hub_that_is_out_of_reach_is_refused_before_anything_asks_for_it(monkeypatch):
    monkeypatch.setattr("rl_algos.hub.problem", lambda kind, name: f"{kind} {name} is out of reach")
    with pytest.raises(DataError, match=r"is not an installed one \(arithmetic.*\), dataset openai/gsm8k is out of"):
        load_rows(DatasetConfig(dataset_name="openai/gsm8k"), "train")


def test_wrong_settings_of_a_plugin_name_the_key():
    with pytest.raises(DataError, match=r"settings of the dataset 'arithmetic': max_operand: .*\(got -1\)"):
        load_rows(DatasetConfig(dataset_name="arithmetic", settings={"max_operand": -1}), "train")
    with pytest.raises(DataError, match="`subset` is for datasets on the hub"):
        load_rows(DatasetConfig(dataset_name="arithmetic", subset="main"), "train")


class MySettings(Config):
    """Rows of a test."""

    top: int = 3
    """Number of rows."""


def load_mine(settings, split):
    return [{"settings": settings, "split": split}]


@pytest.fixture
def mine(monkeypatch):
    """Makes a dataset `mine` from another package with this declaration of its settings."""

    def offer(settings, load="test_load:load_mine"):
        declared = DatasetPlugin("mine", load, Requirement("mydata-pkg"), settings)
        monkeypatch.setattr("rl_algos.data.sources.load.names", lambda group: ["mine"])
        monkeypatch.setattr("rl_algos.data.sources.load.plugin", lambda group, name: declared)
        monkeypatch.setattr("rl_algos.data.sources.load.load_problem", lambda group, name: "")

    return offer


def test_settings_that_a_plugin_declares_are_completed_by_their_defaults(mine):
    mine(MySettings)
    assert load_rows(DatasetConfig(dataset_name="mine"), "train")[0] == {"settings": {"top": 3}, "split": "train"}
    chosen = DatasetConfig(dataset_name="mine", settings={"top": 5})
    assert load_rows(chosen, "train")[0]["settings"] == {"top": 5}


def test_settings_that_a_plugin_does_not_declare_are_refused_before_rows_are_read(mine):
    mine(MySettings, load="no_such_module:load")
    message = "settings of the dataset 'mine': topp: no such setting (got 3); did you mean top?; allowed: top"
    wrong = DatasetConfig(dataset_name="mine", settings={"topp": 3})
    assert settings_problem(wrong) == message
    with pytest.raises(DataError, match=re.escape(message)):
        load_rows(wrong, "train")
    assert "top: Input should be" in settings_problem(DatasetConfig(dataset_name="mine", settings={"top": "x"}))


def test_settings_of_a_plugin_that_declares_none_are_passed_as_they_are(mine):
    mine(None)
    assert load_rows(DatasetConfig(dataset_name="mine", settings={"any": 1}), "train")[0]["settings"] == {"any": 1}


def test_a_plugin_whose_function_cannot_be_imported_is_named(mine):
    mine(MySettings, load="no_such_module:load")
    with pytest.raises(DataError, match="the dataset 'mine' cannot be loaded by no_such_module:load: No module"):
        load_rows(DatasetConfig(dataset_name="mine"), "train")


def test_a_name_that_nothing_has_names_the_plugin_it_resembles(monkeypatch):
    import datasets

    # the network alone is stood in for
    def unreachable(*args, **kwargs):
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr("rl_algos.hub.problem", lambda kind, name: "")
    with pytest.raises(DataError, match=r"no dataset 'aritmetic' is installed; did you mean arithmetic\?"):
        load_rows(DatasetConfig(dataset_name="aritmetic"), "train")
    with pytest.raises(DataError, match="the hub cannot be reached"):
        load_rows(DatasetConfig(dataset_name="openai/gsm8k"), "train")
    with pytest.raises(DataError, match="`settings` is for installed datasets"):
        load_rows(DatasetConfig(dataset_name="openai/gsm8k", settings={"a": 1}), "train")
