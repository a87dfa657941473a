"""Rows of a dataset that `where` selects, or that are held out to validate on."""

import json

import pytest

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_core.config import ProblemError
from rl_core.errors import DataError


def data(path, num=100, **keys):
    path.write_text("".join(json.dumps({"messages": f"{index}?"}) + "\n" for index in range(num)))
    return {"train": {"data_path": str(path), **keys}}


def numbers(config, purpose):
    return [
        [int(row_id.rpartition(":")[2]) for row_id in dataset.examples] for dataset in load_datasets(config, purpose)
    ]


@pytest.mark.parametrize(("size", "count"), [(0.1, 10), (7, 7), (0.001, 1), (1, 1)])
def test_rows_are_either_trained_on_or_validated_on(tmp_path, size, count):
    config = DataConfig.model_validate(data(tmp_path / "a.jsonl", split_validation_size=size))
    [train], [held_out] = numbers(config, "train"), numbers(config, "validation")
    assert len(held_out) == count
    assert sorted(train + held_out) == list(range(100))
    assert numbers(config, "validation") == [held_out]


def test_held_out_rows_join_the_validation_data(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"messages": "b"}\n')
    held_out = data(tmp_path / "a.jsonl", split_validation_size=5)
    config = DataConfig.model_validate({**held_out, "validation": {"data_path": str(tmp_path / "b.jsonl")}})
    datasets = load_datasets(config, "validation")
    assert [(each.name, len(each.examples)) for each in datasets] == [("b.jsonl", 1), ("a.jsonl", 5)]
    row_id, example = next(iter(datasets[1].examples.items()))
    number = int(row_id.rpartition(":")[2])
    assert example.messages[0]["content"] == f"{number}?"
    assert datasets[1].place(row_id) == f"{tmp_path / 'a.jsonl'}, line {number + 1}"


def test_an_installed_dataset_holds_rows_of_its_training_split_out():
    config = DataConfig.model_validate(
        {"train": {"dataset_name": "arithmetic", "settings": {"max_operand": 9}, "split_validation_size": 0.2}}
    )
    whole = DataConfig.model_validate({"train": {"dataset_name": "arithmetic", "settings": {"max_operand": 9}}})
    [train], [held_out], [rows] = (numbers(config, "train"), numbers(config, "validation"), numbers(whole, "train"))
    assert sorted(train + held_out) == rows


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"train": {"data_path": "a", "split_validation_size": 2.5}}, r"train\.split_validation_size: got 2\.5"),
        (
            {"train": {"data_path": "a"}, "validation": [{"data_path": "a", "split_validation_size": 2}]},
            r"validation\[0\]\.split_validation_size: got 2\.0: .*data\.train",
        ),
    ],
)
def test_a_size_that_means_nothing_is_refused(keys, says):
    with pytest.raises((ProblemError, ValueError), match=says):
        DataConfig.model_validate(keys)


def test_a_size_that_leaves_nothing_to_train_on_is_refused(tmp_path):
    config = DataConfig.model_validate(data(tmp_path / "a.jsonl", num=3, split_validation_size=3))
    with pytest.raises(DataError, match="holds 3 of 3 rows out of training"):
        load_datasets(config, "train")


def test_a_size_of_0_holds_out_no_rows():
    (dataset,) = DataConfig.model_validate(
        {"train": {"data_path": "a.jsonl", "split_validation_size": 0}}
    ).train_datasets
    assert dataset.split_validation_size is None


def levels(tmp_path, where, **keys):
    path = tmp_path / "a.jsonl"
    rows = ({"messages": f"{index}?", "level": index % 3, "about": {"name": "xy"[index % 2]}} for index in range(12))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig.model_validate({"train": {"data_path": str(path), "where": where, **keys}})


@pytest.mark.parametrize(
    ("where", "selected"),
    [
        ({"level": 2}, [2, 5, 8, 11]),
        ({"level": "2"}, [2, 5, 8, 11]),
        ({"level": [0, 2], "about.name": "x"}, [0, 2, 6, 8]),
    ],
)
def test_where_selects_rows_by_their_values(tmp_path, where, selected):
    assert numbers(levels(tmp_path, where), "train") == [selected]
    held_out = levels(tmp_path, where, split_validation_size=2)
    [train], [validation] = numbers(held_out, "train"), numbers(held_out, "validation")
    assert len(validation) == 2
    assert sorted(train + validation) == selected


def test_where_reports_a_line_that_cannot_be_read(tmp_path):
    config = levels(tmp_path, {"level": 2})
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 13"):
        load_datasets(config, "train")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ({"level": 7}, r"no row of .* has the values of `where`, .*There, level is 0, 1, 2"),
        ({"levels": 1}, r"line 1: `where`: no column 'levels'; did you mean level"),
    ],
)
def test_where_that_selects_nothing_is_refused(tmp_path, where, says):
    with pytest.raises(DataError, match=says):
        load_datasets(levels(tmp_path, where), "train")


def test_where_needs_all_rows():
    with pytest.raises(ValueError, match=r"train\.where: got .* needs all rows"):
        DataConfig.model_validate({"train": {"dataset_name": "o/n", "where": {"a": 1}, "streaming": True}})
