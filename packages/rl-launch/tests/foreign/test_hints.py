"""An unknown key of another system is explained, and all problems are reported together."""

import pytest
from foreign_files import NEMO_RL, changed, written

from rl_core.errors import ConfigError, ConfigProblems
from rl_launch.run_config.reading import read_plan

SFT = {
    "algorithm": "sft",
    "policy": {"model_name": "x/y"},
    "sft": {"max_num_steps": 10},
    "data": {"train": {"dataset_name": "a/b"}},
}


def problems(values):
    with pytest.raises(ConfigProblems) as refused:
        read_plan(values)
    return {problem.key: problem for problem in refused.value.problems}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("grpo__val_batch_size", 64, "batch"),
        ("policy__offload_optimizer_for_logprob", False, "NeMo RL"),
        ("checkpointing__checkpoint_dir", "x", " run_dir"),
        ("checkpointing__save_optimizer", True, "NeMo RL"),
        ("logger__num_val_samples_to_print", 3, "rl show"),
        ("policy__megatron_cfg__converter_type", "X", "NeMo RL"),
        ("data__train__seed", 3, "NeMo RL"),
        ("policy__draft", {"enabled": True, "loss_weight": 0.1}, "EAGLE"),
        ("policy__draft", {"enabled": False, "loss_weight": 0.1}, " is off"),
        ("policy__megatron_cfg__optimizer", {"lr": 1e-6}, " policy.optimizer"),
        ("learning_rate", 1e-5, "TRL key. Write policy.optimizer.kwargs.lr"),
        ("grpo__num_train_epochs", 1, "TRL key. Write grpo.max_num_epochs"),
        ("grpo__num_promts_per_step", 1, "grpo.num_prompts_per_step?"),
    ],
)
def test_a_foreign_key_is_answered_with_its_destination(key, value, words):
    values = {
        "algorithm": "grpo",
        "policy": {"model_name": "x/y"},
        "data": {"train": {"dataset_name": "a/b", "env_name": "math"}},
    }
    assert words in problems(changed(values, **{key: value}))[key.replace("__", ".")].message


def test_a_missing_algorithm_hides_no_other_problem():
    found = problems(changed({key: value for key, value in SFT.items() if key != "algorithm"}, policy__prescision="x"))
    assert "sft" in found["algorithm"].allowed
    assert "algorithm: sft" in found["algorithm"].remedy
    assert "policy.precision?" in found["policy.prescision"].remedy


def test_unknown_keys_hide_no_contradiction():
    found = problems(changed(SFT, policy__brand_new=1, sft__val_at_start=True))
    assert set(found) == {"policy.brand_new", "sft.val_at_start"}
    assert "data.validation" in found["sft.val_at_start"].message


def test_a_contradiction_that_a_typo_makes_is_not_reported():
    found = problems(changed(SFT, sft__val_at_start=True, data__validaton={"dataset_name": "a/b"}))
    assert set(found) == {"data.validaton"}
    assert "data.validation?" in found["data.validaton"].remedy


def test_a_wrong_value_leaves_contradictions_for_later():
    # what the config means is not known, so that nothing can be said about what follows from it
    assert set(problems(changed(SFT, policy__precision="half", sft__val_at_start=True))) == {"policy.precision"}


def test_a_file_of_another_system_is_answered_with_the_command(tmp_path):
    path = written(tmp_path, NEMO_RL)
    with pytest.raises(ConfigError) as refused:
        read_plan(path)
    lines = str(refused.value).splitlines()
    assert "problems in" in lines[0]
    assert any("algorithm" in line and "must be set" in line for line in lines)
    assert f"rl config import {path} --from nemo-rl" in lines[-1]
