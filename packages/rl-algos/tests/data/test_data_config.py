import pytest
from problem_fields import MENTIONS, assert_fields

from rl_algos.data.config import DataConfig
from rl_core.config import assemble, load, resolve
from rl_core.errors import ConfigProblems

ROOT = assemble("Root", {"data": DataConfig})


def resolved(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return resolve(load(str(path), [], search=[]), ROOT).config.data


def test_one_dataset_or_a_list_of_them(tmp_path):
    one = resolved(tmp_path, "data: {train: {dataset_name: arithmetic, settings: {max_operand: 9}}}")
    assert [dataset.source for dataset in one.train_datasets] == ["arithmetic"]
    assert one.train_datasets[0].settings == {"max_operand": 9}
    assert one.validation_datasets == []
    two = resolved(tmp_path, "data: {train: [{data_path: a.jsonl, weight: 2}, {data_path: b.jsonl, weight: 1.5}]}")
    assert [dataset.source for dataset in two.train_datasets] == ["a.jsonl", "b.jsonl"]


def test_defaults_fill_what_a_dataset_does_not_state(tmp_path):
    data = resolved(
        tmp_path,
        "data: {train: [{data_path: a.jsonl}, {data_path: b.jsonl, input_key: text, processor: null}], "
        "default: {input_key: question, env_name: math, processor: squad}}",
    )
    first, second = data.train_datasets
    assert (first.input_key, first.env_name, first.processor) == ("question", "math", "squad")
    assert (second.input_key, second.env_name, second.processor) == ("text", "math", None)


@pytest.mark.parametrize(
    ("text", "key", "fields"),
    [
        ("{train: {split: train}}", "data.train", {MENTIONS: ["neither", "`dataset_name`", "`data_path`"]}),
        ("{train: [{dataset_name: a, data_path: b}]}", "data.train[0]", {MENTIONS: ["both"]}),
        ("{train: {data_path: a.jsonl}, validation: [{}]}", "data.validation[0]", {MENTIONS: ["neither"]}),
        ("{train: [{data_path: a, weight: 1}, {data_path: b}]}", "data.train", {MENTIONS: ["`weight`", "train[1]"]}),
        (
            "{train: [{data_path: a, weight: [{step: 9, weight: 1},{step: 9, weight: 2}]}, {data_path: b, weight: 1}]}",
            "data.train[0].weight",
            {"got": [9, 9], MENTIONS: ["increasing steps"]},
        ),
        ("{train: [{data_path: a, weight: []}, {data_path: b, weight: 1}]}", "data.train[0].weight", {"got": []}),
        ("{train: [{data_path: a, weight: [{step: 1, weight: 1}]}]}", "data.train[0].weight", {MENTIONS: ["several"]}),
        (
            (
                "{train: [{data_path: a, weight: [{step: 4, weight: 1}, {step: 8, weight: 0}]}, "
                "{data_path: b, weight: [{step: 1, weight: 1}, {step: 6, weight: 0}, {step: 9, weight: 0}]}]}"
            ),
            "data.train",
            {MENTIONS: ["all weights are 0 at step 8"]},
        ),
        ("{train: {data_path: a.jsonl, subset: main}}", "data.train.subset", {"got": "main", MENTIONS: ["a.jsonl"]}),
        ("{train: {data_path: a.jsonl, setings: {}}}", "data.train.setings", {MENTIONS: ["settings"]}),
    ],
)
def test_a_wrong_config_is_refused_with_its_key(tmp_path, text, key, fields):
    with pytest.raises(ConfigProblems) as refused:
        resolved(tmp_path, f"data: {text}")
    (problem,) = refused.value.problems
    assert_fields(problem, key, fields)
