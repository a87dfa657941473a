"""Configs of TRL become recipes that this project's own checks accept."""

import json
from operator import attrgetter

import pytest
from foreign_files import TRL_GRPO, written

from rl_core.errors import ConfigError
from rl_launch.foreign.importing import import_config
from rl_launch.run_config.reading import read_plan


def config_of(found):
    assert found.features == {}
    return read_plan(found.recipe).config


def test_trl_grpo(tmp_path):
    found = import_config(written(tmp_path, TRL_GRPO), "trl", gpus=2)
    config = config_of(found)
    assert config.algorithm == "grpo"
    # 8 x 2 x 2 completions of an update, as many of a generation
    assert (config.policy.train_global_batch_size, config.grpo.num_prompts_per_step) == (32, 8)
    assert config.loss_fn.kl.weight == 0.04
    assert config.loss_fn.aggregation.name == "token-mean"
    assert config.policy.max_total_sequence_length == 256
    (warmup,) = config.policy.scheduler
    assert warmup.kwargs["total_iters"] == 5
    assert config.policy.optimizer.kwargs["weight_decay"] == 0.0  # TRL's default
    assert {each.key for each in found.answers} == set(TRL_GRPO)
    assert "data.train.env_name: set FILE.py:accuracy" in found.notes


def test_trl_takes_json_and_its_own_defaults(tmp_path):
    fields = {"model_name_or_path": "x/y", "dataset_name": "a/b", "packing": True, "use_peft": True}
    config = config_of(import_config(written(tmp_path, json.dumps(fields), "sft.json"), "trl"))
    assert config.algorithm == "sft"
    assert config.policy.optimizer.kwargs["lr"] == 2e-5
    assert config.policy.max_total_sequence_length == 1024
    assert (config.policy.lora_cfg.dim, config.policy.lora_cfg.dropout) == (16, 0.05)


PAIRS = {"model_name_or_path": "x/y", "dataset_name": "a/b", "beta": 0.2}


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({}, {"loss.name": "dpo", "reference_policy_kl_penalty": 0.2}),
        ({"label_smoothing": 0.1}, {"loss.name": "dpo", "loss.label_smoothing": 0.1}),
        ({"loss_type": "sigmoid_norm"}, {"loss.name": "dpo", "preference_average_log_probs": True}),
        ({"loss_type": "hinge"}, {"loss.name": "hinge", "preference_average_log_probs": False}),
        ({"loss_type": "ipo"}, {"loss.name": "ipo", "preference_average_log_probs": True}),
        # TRL smooths by 0 unless it is told otherwise, and robust-dpo here by 0.1
        ({"loss_type": "robust"}, {"loss.name": "robust-dpo", "loss.label_smoothing": 0.0}),
        ({"loss_type": "robust", "label_smoothing": 0.3}, {"loss.label_smoothing": 0.3}),
        ({"loss_type": ["ipo"], "loss_weights": [0.5]}, {"loss.name": "ipo", "preference_loss_weight": 0.5}),
        (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.3]},
            {"preference_loss_weight": 0.8, "sft_loss_weight": 0.3, "sft_average_log_probs": True},
        ),
        ({"loss_type": ["sft", "hinge"]}, {"loss.name": "hinge", "sft_loss_weight": 1.0}),
        ({"rpo_alpha": 0.5}, {"loss.name": "dpo", "sft_loss_weight": 0.5, "sft_average_log_probs": True}),
        ({"reference_free": True}, {"loss.name": "cpo", "loss.beta": 0.2, "sft_loss_weight": 0.0}),
        # TRL calls the weight of the log odds beta; their scale is 1
        ({"loss_type": "orpo"}, {"loss.name": "orpo", "preference_loss_weight": 0.2, "loss.beta": 1.0}),
        (
            {"loss_type": "cpo"},
            {"loss.name": "cpo", "loss.beta": 0.2, "sft_loss_weight": 1.0, "sft_average_log_probs": True},
        ),
        ({"loss_type": "cpo", "cpo_alpha": 0.4}, {"loss.name": "cpo", "sft_loss_weight": 0.4}),
        (
            {"loss_type": "simpo", "simpo_gamma": 1.5, "cpo_alpha": 0.0},
            {"loss.name": "simpo", "loss.beta": 0.2, "loss.gamma": 1.5, "sft_loss_weight": 0.0},
        ),
        ({"loss_type": "simpo"}, {"loss.gamma": 0.5, "sft_loss_weight": 1.0}),
        (
            {"desirable_weight": 1.33},
            {"loss.name": "kto", "loss.desirable_weight": 1.33, "loss.undesirable_weight": 1.0},
        ),
        ({"loss_type": "kto"}, {"loss.name": "kto", "reference_policy_kl_penalty": 0.2}),
        ({"loss_type": "exo_pair"}, {"loss.name": "exo", "loss.label_smoothing": 0.001}),
        ({"loss_type": "nca_pair"}, {"loss.name": "nca"}),
        ({"loss_type": "bco_pair"}, {"loss.name": "bco"}),
        ({"loss_type": "sppo_hard"}, {"loss.name": "sppo"}),
        ({"loss_type": "aot", "label_smoothing": 0.2}, {"loss.name": "aot", "loss.label_smoothing": 0.2}),
        ({"loss_type": "aot_unpaired"}, {"loss.name": "aot-unpaired", "loss.label_smoothing": 0.0}),
        ({"loss_type": "apo_zero"}, {"loss.name": "apo-zero"}),
        ({"loss_type": "apo_down"}, {"loss.name": "apo-down"}),
        ({"loss_type": "apo_zero_unpaired"}, {"loss.name": "kto", "loss.reference_point": "zero"}),
        ({"loss_type": "discopop", "discopop_tau": 0.2}, {"loss.name": "discopop", "loss.tau": 0.2}),
        ({"f_divergence_type": "js_divergence"}, {"f_divergence": "js_divergence"}),
        (
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
            {"f_divergence": "alpha_divergence", "f_divergence_alpha": 0.3},
        ),
        ({"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 1.0}, {"f_divergence": "reverse_kl"}),
        ({"use_weighting": True}, {"weigh_by_policy": True}),
        ({"ld_alpha": 0.5}, {"ld_alpha": 0.5}),
        (
            {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
            {"preference_loss_weight": 0.8, "added_losses.bco.weight": 0.2, "sft_loss_weight": 1.0},
        ),
        (
            {"loss_type": ["sigmoid", "ipo"]},
            {"loss.name": "dpo", "added_losses.ipo.weight": 1.0, "added_losses.ipo.average_log_probs": True},
        ),
    ],
)
def test_preference_losses_of_trl(tmp_path, fields, keys):
    found = import_config(written(tmp_path, {**PAIRS, **fields}), "trl", algorithm="dpo")
    config = config_of(found).dpo
    assert {key: attrgetter(key)(config) for key in keys} == keys
    assert {each.key for each in found.answers} == {*PAIRS, *fields}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_type": "kto_pair"}, "the preference loss kto_pair: kto_pair is not offered; allowed: sigmoid, "),
        ({"loss_type": ["sigmoid", "simpo"]}, "the preference loss sigmoid + simpo: simpo cannot be mixed"),
        ({"loss_type": ["ipo", "hinge", "hinge"]}, "the preference loss ipo + hinge + hinge: hinge is added twice"),
        ({"loss_type": "sft"}, "the preference loss sft: a loss of pairs is needed"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label smoothing in the loss ipo"),
        ({"loss_type": "simpo", "label_smoothing": 0.1}, "label smoothing in the loss simpo"),
        ({"loss_type": "hinge", "reference_free": True}, "the loss hinge without a reference"),
        ({"loss_type": ["sigmoid", "sft"], "use_weighting": True}, "a likelihood that is weighted by pairs"),
        ({"sync_ref_model": True}, "a reference that follows the policy"),
        ({"loss_type": "simpo", "alpha": 0.3}, "rewards of AlphaPO"),
    ],
)  # fmt: skip
def test_preference_losses_that_are_not_offered_are_refused_by_name(tmp_path, fields, words):
    found = import_config(written(tmp_path, {**PAIRS, **fields}), "trl", algorithm="dpo")
    assert any(feature.startswith(words) for feature in found.features)


ONLINE = {"model_name_or_path": "x/y", "dataset_name": "a/b", "max_new_tokens": 48, "max_steps": 20}


def test_online_dpo_of_trl(tmp_path):
    fields = {**ONLINE, "beta": [0.2], "loss_type": "ipo", "reward_model_path": "x/reward", "reward_weights": None}
    found = import_config(written(tmp_path, json.dumps(fields), "online.json"), "trl", gpus=2)
    config = config_of(found)
    assert (config.algorithm, config.online_dpo.loss.name) == ("online_dpo", "ipo")
    # TRL compares sums of logprobs, and two completions of each prompt
    assert not config.online_dpo.preference_average_log_probs
    assert (config.online_dpo.num_generations_per_prompt, config.online_dpo.pairing) == (2, "best-worst")
    assert config.online_dpo.reference_policy_kl_penalty == 0.2
    assert (config.online_dpo.num_prompts_per_step, config.policy.train_global_batch_size) == (16, 16)
    assert config.online_dpo.max_num_steps == 20
    assert config.policy.optimizer.kwargs["lr"] == 5e-7
    generation = config.policy.generation
    assert (generation.max_new_tokens, generation.temperature) == (48, 0.9)
    assert (config.policy.max_total_sequence_length, config.data.max_input_seq_length) == (512, 464)
    assert {each.key for each in found.answers} == set(fields)
    assert any("x/reward, is an environment" in note for note in found.notes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beta": [0.1, 0.05]}, "a penalty that changes by epoch"),
        ({"loss_type": "hinge"}, "the loss hinge in online DPO"),
        ({"missing_eos_penalty": 1.0}, "a penalty for completions without an end"),
        ({"max_length": 48}, "rows of 48 tokens without room for prompts"),
    ],
)
def test_what_online_dpo_of_trl_has_alone_is_refused_by_name(tmp_path, fields, words):
    found = import_config(written(tmp_path, json.dumps({**ONLINE, **fields}), "online.json"), "trl")
    ((feature, keys),) = found.features.items()
    assert words in feature
    assert set(keys) <= set(fields)


def test_trl_pushes(tmp_path):
    fields = {"model_name_or_path": "x/y", "dataset_name": "a/b", "push_to_hub": True, "hub_private_repo": False}
    named = {**fields, "hub_model_id": "me/model"}
    checkpointing = config_of(import_config(written(tmp_path, named), "trl", algorithm="sft")).checkpointing
    assert (checkpointing.push_to, checkpointing.push_checkpoints) == ("hf://me/model", "every")
    assert not checkpointing.push_private
    found = import_config(written(tmp_path, fields), "trl", algorithm="sft")
    assert config_of(found).checkpointing.push_to is None
    assert any("put hf://OWNER/NAME" in note for note in found.notes)


SCRIPTS = {
    "grpo": {
        "learning_rate": 1e-6,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.03,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": 1024,
        "max_steps": 500,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "bf16": True,
        "gradient_checkpointing": True,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "log_completions": True,
        "save_steps": 100,
        "report_to": "wandb",
    },
    "sft": {
        "learning_rate": 2e-5,
        "num_train_epochs": 1,
        "packing": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "eos_token": "<|im_end|>",
        "eval_strategy": "steps",
        "eval_steps": 100,
        "assistant_only_loss": True,
        "use_peft": True,
        "lora_r": 32,
        "lora_alpha": 16,
    },
    "dpo": {
        "learning_rate": 5e-7,
        "per_device_train_batch_size": 2,
        "max_steps": 1000,
        "gradient_accumulation_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 50,
        "no_remove_unused_columns": True,
    },
    "rm": {
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "learning_rate": 1e-5,
        "max_length": 2048,
        "center_rewards_coefficient": 0.01,
    },
    "kto": {
        "per_device_train_batch_size": 16,
        "num_train_epochs": 1,
        "learning_rate": 5e-7,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "logging_first_step": True,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
    },
}
"""Arguments with which TRL's documentation calls its trainers."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_arguments_of_trls_scripts_come_over(name, tmp_path):
    fields = {"model_name_or_path": "x/y", "dataset_name": "a/b", "output_dir": "out", **SCRIPTS[name]}
    algorithm = "dpo" if name == "kto" else name
    found = import_config(written(tmp_path, fields), "trl", algorithm=algorithm, gpus=8)
    config = config_of(found)
    assert {each.key for each in found.answers} >= set(fields)
    policy, arguments = config.policy, SCRIPTS[name]
    assert policy.optimizer.kwargs["lr"] == arguments["learning_rate"]
    each = arguments["per_device_train_batch_size"] * arguments.get("gradient_accumulation_steps", 1)
    assert policy.train_global_batch_size == each * 8
    if algorithm == "dpo":
        assert config.dpo.loss.name == name


@pytest.mark.parametrize(
    ("optim", "name", "notes"),
    [
        ("adamw_torch_fused", "torch.optim.AdamW", 0),
        ("paged_adamw_32bit", "torch.optim.AdamW", 1),
        *((optim, "rl_core.torch.EightBitAdamW", 0) for optim in ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit")),
        ("paged_adamw_8bit", "rl_core.torch.EightBitAdamW", 1),
    ],
)
def test_optimizers_come_over_by_name_with_their_averages(optim, name, notes, tmp_path):
    found = import_config(written(tmp_path, {**TRL_GRPO, "optim": optim, "adam_beta2": 0.95}), "trl", gpus=2)
    chosen = config_of(found).policy.optimizer
    assert (chosen.name, chosen.kwargs["betas"]) == (name, [0.9, 0.95])
    assert sum("stays on the GPU" in note for note in found.notes) == notes


def test_an_optimizer_that_no_backend_has_is_refused_with_the_reason(tmp_path):
    found = import_config(written(tmp_path, {**TRL_GRPO, "optim": "adafactor"}), "trl", gpus=2)
    (feature,) = [feature for feature, keys in found.features.items() if keys == ["optim"]]
    assert "adafactor" in feature
    assert "whole parameters" in feature


def test_an_algorithm_that_the_file_does_not_say_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="--algorithm"):
        import_config(written(tmp_path, {"learning_rate": 1e-5}), "trl")


def test_unknown_fields_of_trl_are_refused(tmp_path):
    found = import_config(written(tmp_path, {**TRL_GRPO, "brand_new": 1, "repetition_penalty": 1.2}), "trl")
    assert found.features == {
        "TRL keys that are not known here": ["brand_new"],
        "sampling penalties (repetition_penalty)": ["repetition_penalty"],
    }


def test_passes_over_the_same_rollouts(tmp_path):
    once = config_of(import_config(written(tmp_path, TRL_GRPO), "trl", gpus=2))
    twice = config_of(import_config(written(tmp_path, {**TRL_GRPO, "num_iterations": 2}), "trl", gpus=2))
    assert (once.grpo.num_iterations, twice.grpo.num_iterations) == (1, 2)
    # TRL counts optimizer steps
    assert twice.grpo.max_num_steps == once.grpo.max_num_steps // 2


@pytest.mark.parametrize("system", ["verl", "openrlhf", "prime-rl"])
def test_systems_whose_keys_are_only_explained(tmp_path, system):
    with pytest.raises(ConfigError, match="`rl config explain KEY` answers a key of"):
        import_config(written(tmp_path, TRL_GRPO), system)


def test_a_system_that_is_not_known_is_answered_with_those_that_are(tmp_path):
    with pytest.raises(ConfigError, match="did you mean nemo-rl"):
        import_config(written(tmp_path, TRL_GRPO), "nemorl")


@pytest.mark.parametrize(
    ("fields", "surrogate", "aggregation"),
    [
        ({"delta": 3.0}, {"name": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, ("token-mean", 1.0)),
        (
            {"loss_type": "dr_grpo", "epsilon_high": 0.28},
            {"name": "clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
            ("sequence-mean-token-sum", 128.0),
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            # TRL bounds the ratio itself, and only from above
            {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0},
            ("token-mean", 1.0),
        ),
        (
            {"loss_type": "sapo", "epsilon_high": 0.28},
            {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
            ("sequence-mean", 1.0),
        ),
    ],
)
def test_trl_losses(tmp_path, fields, surrogate, aggregation):
    values = {**TRL_GRPO, **fields, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_cap": 3.0}
    loss = config_of(import_config(written(tmp_path, values), "trl", gpus=2)).loss_fn
    assert loss.surrogate.model_dump() == surrogate
    assert (loss.aggregation.name, loss.aggregation.divisor) == aggregation
    assert (loss.importance.high, loss.importance.truncation, loss.importance.level) == (3.0, "tis", "token")


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("$HOME/data/t.parquet", "~/data/t.parquet"),
        ("${HOME}/data/t.parquet", "~/data/t.parquet"),
        ("$DATA/t.parquet", "/data/t.parquet"),
        ("${SCRATCH}/t.parquet", "${oc.env:SCRATCH}/t.parquet"),
        ("${SCRATCH:-/tmp}/t.parquet", "/tmp/t.parquet"),
    ],
)
def test_variables_of_the_shell_are_expanded(tmp_path, path, data):
    script = f"export DATA=/data\ntrl sft --model_name_or_path x/y --dataset_name {path} --max_steps 3"
    found = import_config(written(tmp_path, script, "run.sh"), "trl")
    assert found.recipe["data"]["train"]["data_path"] == data


def test_variables_in_quotes_are_expanded(tmp_path):
    script = 'B="$HOME/b c.parquet"  # don\'t\ntrl sft --model_name_or_path x/y --dataset_name "$B" --max_steps 3'
    found = import_config(written(tmp_path, script, "run.sh"), "trl")
    assert found.recipe["data"]["train"]["data_path"] == "~/b c.parquet"
