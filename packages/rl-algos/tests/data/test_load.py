import json

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.load import load_rows
from rl_core.errors import DataError

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
    with pytest.raises(DataError, match="remove `split`"):
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
        ('{"a": 1', "not a JSON object: Expecting ',' delimiter at column 8$"),
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
