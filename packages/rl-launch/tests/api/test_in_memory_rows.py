"""Rows in a config from Python, as files."""

import json

import numpy as np
import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.sources.load import load_rows
from rl_core.errors import ConfigError
from rl_launch.api.in_memory_rows import without_rows
from rl_launch.run_session.directory.row_files import RowFile

ROWS = [{"prompt": "1+1=", "answer": 2, "level": 0.5}, {"prompt": "2+2=", "tags": ["a"]}]


def file_of(value, key=("data", "train")):
    replaced, files = without_rows(value, key)
    assert replaced == {"data_path": files[0]}
    return files[0]


def read_back(file, folder):
    file.write(folder)
    return list(load_rows(DatasetConfig(data_path=str(folder / file.name)), "train"))


def test_a_list_of_dicts_is_read_as_it_was(tmp_path):
    assert read_back(file_of(ROWS), tmp_path) == ROWS


def test_numbers_and_arrays_of_numpy_are_stored_as_plain_ones(tmp_path):
    row = {"a": np.int64(3), "b": np.array([[1, 2]]), "c": (np.float32(0.5), np.bool_(True)), "d": {"e": None}}
    assert read_back(file_of([row]), tmp_path) == [{"a": 3, "b": [[1, 2]], "c": [0.5, True], "d": {"e": None}}]


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets")


def test_a_dataset_keeps_its_types_and_the_rows_that_were_selected(datasets, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{n}"}], "n": n, "raw": b"\x00"} for n in range(600)]
    dataset = datasets.Dataset.from_list(rows).filter(lambda row: row["n"] % 2)
    file = file_of(dataset)
    assert file.name.endswith(".arrow")
    assert read_back(file, tmp_path) == rows[1::2]
    again = datasets.Dataset.from_list(rows[1::2])
    assert file_of(again).name == file.name
    assert file_of(again.select(range(3))).name != file.name


def test_a_dataset_that_makes_its_rows_is_stored_as_they_are_made(datasets, tmp_path):
    dataset = datasets.Dataset.from_list([{"n": 1}, {"n": 2}])
    dataset.set_transform(lambda batch: {"prompt": [f"{n}+1=" for n in batch["n"]]})
    assert read_back(file_of(dataset), tmp_path) == [{"prompt": "1+1="}, {"prompt": "2+1="}]
    streamed = datasets.IterableDataset.from_generator(lambda: iter(ROWS[:1]))
    assert read_back(file_of(streamed), tmp_path) == ROWS[:1]


def test_several_splits_are_refused_with_their_names(datasets):
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:1])})
    with pytest.raises(
        ConfigError, match=r"data\.train: got a DatasetDict with the splits train; .* dataset\['train'\]"
    ):
        without_rows(splits, ("data", "train"))
    with pytest.raises(ConfigError, match=r"data\.train\.data_path: got a DatasetDict"):
        without_rows({"data_path": splits}, ("data", "train"))


def test_a_table_of_pandas_is_refused_with_the_remedy():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ConfigError, match=r"got a DataFrame of pandas; give datasets\.Dataset\.from_pandas"):
        without_rows(pandas.DataFrame(ROWS), ("data", "train"))


def test_sections_of_datasets_are_left_alone():
    for value in ({"data_path": "x.jsonl"}, [{"data_path": "x.jsonl"}, {"dataset_name": "a/b"}], None, [{"weight": 1}]):
        assert without_rows({"data": {"train": value}}, ()) == ({"data": {"train": value}}, [])


def test_a_list_holds_datasets_of_both_kinds():
    config = {"data": {"train": [{"data_path": "x.jsonl"}, ROWS, {"data_path": ROWS, "weight": 2}]}}
    replaced, files = without_rows(config, ())
    first, second, third = replaced["data"]["train"]
    assert first == {"data_path": "x.jsonl"}
    assert second == {"data_path": files[0]}
    assert third == {"data_path": files[1], "weight": 2}
    assert [file.name.rpartition("-")[0] for file in files] == ["train-1", "train-2"]


def test_a_file_is_written_once(tmp_path):
    file = file_of(ROWS)
    assert isinstance(file, RowFile)
    file.write(tmp_path)
    [path] = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    file.write(tmp_path)
    assert path.stat().st_mtime_ns == written
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
