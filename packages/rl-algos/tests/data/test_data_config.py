import pytest

from rl_algos.data.config import DataConfig
from rl_core.config import assemble, load, resolve
from rl_core.errors import ConfigError

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
    ("text", "key", "message"),
    [
        ("{train: {split: train}}", "data.train", "got neither of `dataset_name` and `data_path`"),
        ("{train: [{dataset_name: a, data_path: b}]}", r"data.train\[0\]", "got both"),
        ("{train: {data_path: a.jsonl}, validation: [{}]}", r"data.validation\[0\]", "got neither"),
        ("{train: []}", "data.train", "got an empty list; name a dataset"),
        ("{train: [{data_path: a, weight: 1}, {data_path: b}]}", "data.train", r"not for train\[1\]"),
        ("{train: {data_path: a.jsonl, subset: main}}", "data.train.subset", "'a.jsonl' is a path"),
        ("{train: {data_path: a.jsonl, setings: {}}}", "data.train.setings", "settings"),
    ],
)
def test_a_wrong_config_is_refused_with_its_key(tmp_path, text, key, message):
    with pytest.raises(ConfigError, match=f"(?s){key}.*{message}"):
        resolved(tmp_path, f"data: {text}")
