"""Configs of TRL, verl, OpenRLHF and prime-rl become recipes that this project's own checks accept."""

import json

import pytest
from foreign_files import OPENRLHF, PRIME_RL, TRL_GRPO, VERL, written

from rl_core.errors import ConfigError
from rl_launch.foreign.importing import import_config
from rl_launch.foreign_keys.table import Kind
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
    assert any("reward functions (accuracy)" in note for note in found.notes)


def test_trl_takes_json_and_its_own_defaults(tmp_path):
    fields = {"model_name_or_path": "x/y", "dataset_name": "a/b", "packing": True, "use_peft": True}
    config = config_of(import_config(written(tmp_path, json.dumps(fields), "sft.json"), "trl"))
    assert config.algorithm == "sft"
    assert config.policy.optimizer.kwargs["lr"] == 2e-5
    assert config.policy.max_total_sequence_length == 1024
    assert (config.policy.lora_cfg.dim, config.policy.lora_cfg.dropout) == (16, 0.05)


def test_trl_dpo_losses(tmp_path):
    fields = {"model_name_or_path": "x/y", "dataset_name": "a/b", "loss_type": "robust", "label_smoothing": 0.1}
    config = config_of(import_config(written(tmp_path, fields), "trl", algorithm="dpo"))
    assert config.dpo.loss.name == "robust-dpo"
    found = import_config(written(tmp_path, {**fields, "loss_type": "sppo_hard"}), "trl", algorithm="dpo")
    assert list(found.features) == ["the preference loss sppo_hard"]


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


def test_weights_of_responses_are_refused(tmp_path):
    fields = {"model_name_or_path": "x/y", "dataset_name": "a/b", "desirable_weight": 1.33}
    found = import_config(written(tmp_path, fields), "trl", algorithm="dpo")
    assert list(found.features) == ["weights of desirable and undesirable responses in KTO"]


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
    size = "actor_rollout_ref.actor.ppo_mini_batch_size=16"
    verl = VERL.replace(size, f"{size} actor_rollout_ref.actor.ppo_epochs=3")
    assert config_of(import_config(written(tmp_path, verl, "run.sh"), "verl")).grpo.num_iterations == 3


def test_verl_scripts(tmp_path):
    found = import_config(written(tmp_path, VERL, "run.sh"), "verl")
    config = config_of(found)
    assert config.policy.model_name == "Qwen/Qwen3-8B"
    assert config.policy.train_global_batch_size == 80  # 16 prompts of 5 rollouts
    assert config.loss_fn.aggregation.name == "sequence-mean"
    assert (config.loss_fn.kl.weight, config.loss_fn.kl.estimator) == (0.002, "k3")
    assert config.loss_fn.surrogate.dual_clip == 3.0  # verl's default
    assert config.checkpointing.save_period == 0
    assert config.logger.wandb_enabled
    kinds = {each.key: each.kind for each in found.answers}
    assert kinds["actor_rollout_ref.model.use_remove_padding"] is Kind.NOT_NEEDED


def test_verl_yaml_with_a_critic(tmp_path):
    values = {
        "actor_rollout_ref": {"model": {"path": "x/y"}, "actor": {"clip_ratio": 0.3, "ppo_epochs": 2}},
        "critic": {"model": {"path": "x/c"}, "optim": {"lr": 1e-5}},
        "algorithm": {"adv_estimator": "gae", "lam": 0.9},
        "data": {"train_files": "/data/t.parquet"},
        "trainer": {"total_epochs": 2, "n_gpus_per_node": 8},
    }
    config = config_of(import_config(written(tmp_path, values), "verl"))
    assert config.algorithm == "ppo"
    assert config.value.model_name == "x/c"
    assert (config.ppo.gae_lambda, config.ppo.num_ppo_epochs, config.loss_fn.surrogate.clip_high) == (0.9, 2, 0.3)
    assert config.loss_fn.kl.weight == 0


def test_verl_yaml_relies_on_verls_own_config(tmp_path):
    values = {
        "hydra": {"searchpath": ["file://verl/trainer/config"]},
        "defaults": ["ppo_megatron_trainer", "_self_"],
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"model": {"path": "x/y"}, "rollout": {"n": 4}},
        "data": {"train_files": "/data/t.parquet"},
    }
    assert config_of(import_config(written(tmp_path, values), "verl")).policy.megatron_cfg.enabled
    values["actor_rollout_ref"]["model"]["enable_gradient_checkpointing"] = True
    assert config_of(import_config(written(tmp_path, values), "verl")).policy.megatron_cfg.recompute == "full"
    with pytest.raises(ConfigError, match="--cfg job"):
        import_config(written(tmp_path, {**values, "defaults": [{"actor": "dp_actor"}]}), "verl")


def test_openrlhf_scripts(tmp_path):
    found = import_config(written(tmp_path, OPENRLHF, "run.sh"), "openrlhf")
    config = config_of(found)
    assert config.algorithm == "ppo"
    assert config.value.model_name == "my/reward-model"
    assert config.env.reward_model.model == "my/reward-model"
    assert config.ppo.num_prompts_per_step == 1024
    assert config.loss_fn.kl.in_reward
    assert config.policy.dtensor_cfg.recompute == "full"
    assert "address" not in {each.key for each in found.answers}  # a flag of Ray


def test_openrlhf_flags_as_yaml(tmp_path):
    flags = {"pretrain": "x/y", "dataset": "a/b", "max_len": 512, "learning_rate": 1e-5, "unheard-of": 3}
    found = import_config(written(tmp_path, flags), "openrlhf")
    assert found.features == {"OpenRLHF keys that are not known here": ["unheard_of"]}


def test_prime_rl_toml(tmp_path):
    found = import_config(written(tmp_path, PRIME_RL, "rl.toml"), "prime-rl")
    config = config_of(found)
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (16, 8)
    assert config.grpo.async_grpo.enabled
    assert config.cluster.gpus_per_node == 3
    assert config.policy.generation.colocated.resources.gpus_per_node == 1
    assert config.policy.optimizer.kwargs["lr"] == 3e-6
    assert any("reverse-text" in note for note in found.notes)


def test_a_system_that_is_not_known_is_answered_with_those_that_are(tmp_path):
    with pytest.raises(ConfigError, match="did you mean nemo-rl"):
        import_config(written(tmp_path, TRL_GRPO), "nemorl")


def test_settings_of_a_clip_that_a_surrogate_does_not_have_are_not_needed(tmp_path):
    mode = "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov actor_rollout_ref.actor.clip_ratio_high=0.3"
    found = import_config(
        written(tmp_path, VERL.replace("    data.train", f"    {mode} data.train", 1), "run.sh"), "verl"
    )
    assert config_of(found).loss_fn.surrogate.model_dump() == {"name": "kl-cov", "share": 2e-3, "weight": 1.0}
    kinds = {each.key: each.kind for each in found.answers}
    assert kinds["actor_rollout_ref.actor.clip_ratio_high"] is Kind.NOT_NEEDED


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
            {"name": "cispo", "clip_low": 0.2, "clip_high": 5.0},
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
    assert loss.importance.high == 3.0
