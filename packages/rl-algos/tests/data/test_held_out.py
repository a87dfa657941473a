"""Rows of a training dataset that are held out to validate on."""

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
