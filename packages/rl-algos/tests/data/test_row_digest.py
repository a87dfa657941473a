"""Digests of datasets: they follow the contents of rows, and nothing else."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import RowDigest, load_datasets
from rl_algos.data.flow import Flow, FlowStream
from rl_algos.data.sources.files import read
from rl_algos.data.stream import Stream
from rl_core.errors import DataChanged

ROWS = [{"prompt": f"What is {number}?", "response": str(number), "level": number} for number in range(6)]


def written(folder, rows, name):
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def digest(folder, rows, name="rows.jsonl", **settings):
    path = written(folder, rows, name)
    config = DataConfig.model_validate({"train": {"data_path": str(path), **settings}, "validation": None})
    return load_datasets(config, "train")[0].digest


def changed(row, **values):
    return [{**each, **values} if index == row else each for index, each in enumerate(ROWS)]


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet", "other.jsonl"])
def test_the_same_rows_have_the_same_digest_in_every_file(tmp_path, name):
    assert digest(tmp_path, ROWS, name) == digest(tmp_path, ROWS)


@pytest.mark.parametrize(
    "rows",
    [
        changed(5, response="6"),
        changed(0, level=1),
        changed(0, level="0"),
        [ROWS[1], ROWS[0], *ROWS[2:]],
        ROWS[:-1],
        [*ROWS, ROWS[0]],
    ],
)
def test_other_rows_have_another_digest(tmp_path, rows):
    assert digest(tmp_path, rows) != digest(tmp_path, ROWS)


def test_only_the_rows_to_train_on_count(tmp_path):
    held_out = {"split_validation_size": 2}
    alike = [
        digest(tmp_path, changed(row, response="x"), **held_out) == digest(tmp_path, ROWS, **held_out)
        for row in range(6)
    ]
    assert sum(alike) == 2


def test_values_of_every_kind_count_and_addresses_do_not():
    def of(value):
        whole = RowDigest()
        whole.add({"value": value})
        return whole.hexdigest()

    pairs = [
        (b"png", b"gif"),
        (np.arange(3), np.arange(4)),
        (np.float32(1), np.float32(2)),
        ({"a": [1]}, {"a": [2]}),
        (float("nan"), float("inf")),
        (Path("a"), None),
    ]
    for one, other in pairs:
        assert of(one) == of(one)
        assert of(one) != of(other)
    assert of(object()) == of(object())


def test_a_position_is_compared_by_the_contents_of_the_rows():
    saved = Stream([[1, 2]], digests=["a"]).state()
    Stream([[1, 2]], digests=["a"]).check(saved)
    Stream([[1, 2]]).check(saved)
    with pytest.raises(DataChanged, match="the rows have other contents"):
        Stream([[1, 2]], digests=["b"]).restore(saved)
    flow = Flow("a", lambda skipped: iter([1, 2][skipped:]), lambda _, row: row, block=2, entropy=(1,), shuffle=False)
    with pytest.raises(DataChanged, match="the rows have other contents"):
        FlowStream([flow], digests=["b"]).restore(FlowStream([flow], digests=["a"]).state())


def test_the_digest_of_a_dataset_is_that_of_its_rows_in_their_order(tmp_path):
    rows = read(written(tmp_path, ROWS, "rows.jsonl"))
    whole = RowDigest()
    for index in range(len(rows)):
        whole.add(rows.rows[index])
    assert whole.hexdigest() == digest(tmp_path, ROWS)


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_the_text_of_a_prompt_file_counts(tmp_path, key):
    file = tmp_path / "prompt.txt"
    file.write_text("Answer briefly: {input}")
    before = digest(tmp_path, ROWS, **{key: str(file)})
    assert before == digest(tmp_path, ROWS, **{key: str(file)})
    file.write_text("Answer at length: {input}")
    assert digest(tmp_path, ROWS, **{key: str(file)}) != before != digest(tmp_path, ROWS)


def test_an_image_that_is_replaced_in_its_file_counts(tmp_path):
    rows = [{"prompt": "<image>What is it?", "response": "A square.", "images": ["one.png"]}]
    found = []
    for colour in ("red", "blue", "red"):
        Image.new("RGB", (28, 28), colour).save(tmp_path / "one.png")
        found.append(digest(tmp_path, rows, image_folder=str(tmp_path)))
    assert found[0] == found[2] != found[1]
