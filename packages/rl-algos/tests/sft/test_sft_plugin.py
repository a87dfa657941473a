import pytest

from rl_algos.sft.algorithm import SFT
from rl_algos.sft.plugin import PLUGIN
from rl_core.algorithm import implementation_of
from rl_core.config import assemble, load, resolve
from rl_core.model_config import ModelConfig
from rl_core.plugins import ALGORITHMS, plugin

ROOT = assemble("Root", {**PLUGIN.sections, "policy": ModelConfig})
TRAIN = "data.train={dataset_name: arithmetic}"


def config(tmp_path, *overrides):
    path = tmp_path / "a.yaml"
    path.write_text("policy: {model_name: tiny}\n")
    return resolve(load(str(path), list(overrides), search=[]), ROOT).config


def problems(config):
    return {problem.key: problem for check in PLUGIN.checks for problem in check(config)}


def test_the_entry_point_leads_to_the_loop():
    assert plugin(ALGORITHMS, "sft") is PLUGIN
    assert isinstance(implementation_of(PLUGIN), SFT)


def test_a_plain_config_is_fine(tmp_path):
    plain = config(tmp_path, TRAIN)
    assert problems(plain) == {}
    spec = PLUGIN.models(plain)["policy"].spec
    assert spec.trains
    assert not spec.keeps_reference


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("sft.val_period=5", "sft.val_period"),
        ("sft.val_at_end=true", "sft.val_at_end"),
        ("sft.val_batches=2", "sft.val_batches"),
        ("data.default.env_name=math", "data.default.env_name"),
        ("data.train.env_name=math", "data.train.env_name"),
        ("data.validation=[{data_path: a, env_name: math}]", "data.validation[0].env_name"),
        ("data.max_input_seq_length=4096", "data.max_input_seq_length"),
        ("sft.mix_by=tokens", "sft.mix_by"),
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path, override, key):
    assert list(problems(config(tmp_path, TRAIN, override))) == [key]


def test_validation_settings_are_fine_with_validation_data(tmp_path):
    with_data = config(tmp_path, TRAIN, "data.validation={dataset_name: arithmetic}", "sft.val_period=5")
    assert problems(with_data) == {}


def test_each_of_several_validation_datasets_has_its_metric(tmp_path):
    several = config(tmp_path, TRAIN, "data.validation=[{data_path: a.jsonl}, {data_path: b.jsonl}]")
    assert PLUGIN.validation_metrics(several) == [
        "val/loss",
        "val/num_tokens",
        "val/a.jsonl/loss",
        "val/a.jsonl/num_tokens",
        "val/b.jsonl/loss",
        "val/b.jsonl/num_tokens",
    ]


def test_epochs_are_one_unless_something_is_said(tmp_path):
    assert config(tmp_path, TRAIN).sft.num_epochs == 1
    assert config(tmp_path, TRAIN, "sft.max_num_steps=5").sft.num_epochs is None
    assert config(tmp_path, TRAIN, "sft.max_num_steps=5", "sft.max_num_epochs=2").sft.num_epochs == 2
