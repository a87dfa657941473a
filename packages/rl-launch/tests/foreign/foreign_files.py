"""Small configs of other systems, written for these tests."""

import json
from pathlib import Path

import yaml

NEMO_RL = {
    "grpo": {
        "num_prompts_per_step": 32,
        "num_generations_per_prompt": 8,
        "max_num_steps": 100,
        "max_num_epochs": 1,
        "normalize_rewards": True,
        "use_leave_one_out_baseline": True,
        "val_period": 10,
        "val_batch_size": 64,
        "max_val_samples": 64,
        "adv_estimator": {
            "name": "grpo",
            "normalize_rewards": "${grpo.normalize_rewards}",
            "use_leave_one_out_baseline": "${grpo.use_leave_one_out_baseline}",
        },
        "async_grpo": {"enabled": False, "max_trajectory_age_steps": 1},
        "seed": 7,
    },
    "loss_fn": {
        "reference_policy_kl_penalty": 0.0,
        "use_on_policy_kl_approximation": False,
        "truncated_importance_sampling_type": None,
        "force_on_policy_ratio": False,
    },
    "checkpointing": {
        "enabled": True,
        "checkpoint_dir": "results/here",
        "metric_name": "val_reward",
        "save_consolidated": False,
    },
    "policy": {
        "model_name": "Qwen/Qwen2.5-0.5B",
        "tokenizer": {"name": "${policy.model_name}", "chat_template_kwargs": None},
        "train_global_batch_size": 64,
        "train_micro_batch_size": 2,
        "logprob_batch_size": "${policy.train_micro_batch_size}",
        "generation_batch_size": 32,
        "max_total_sequence_length": 1024,
        "precision": "bfloat16",
        "max_grad_norm": 1.0,
        "make_sequence_length_divisible_by": "${policy.dtensor_cfg.tensor_parallel_size}",
        "dtensor_cfg": {"_v2": True, "enabled": True, "tensor_parallel_size": 1},
        "megatron_cfg": {"enabled": False, "tensor_model_parallel_size": 4, "env_vars": None},
        "sequence_packing": {
            "enabled": True,
            "train_mb_tokens": "${mul:${policy.max_total_sequence_length}, 4}",
            "algorithm": "modified_first_fit_decreasing",
        },
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 3.0e-7, "weight_decay": 0.1}},
        "scheduler": [
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 10}}
        ],
        "generation": {
            "backend": "vllm",
            "max_new_tokens": "${policy.max_total_sequence_length}",
            "temperature": 0.8,
            "stop_strings": None,
            "vllm_cfg": {
                "async_engine": False,
                "precision": "${policy.precision}",
                "max_model_len": "${policy.max_total_sequence_length}",
                "expert_parallel_size": 1,
            },
            "vllm_kwargs": {"max_num_seqs": 64},
            "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
        },
    },
    "data": {
        "max_input_seq_length": 512,
        "shuffle": True,
        "train": {"dataset_name": "OpenMathInstruct-2", "split_validation_size": 0.05, "seed": "${grpo.seed}"},
        "validation": None,
        "default": {"prompt_file": "prompts/cot.txt", "processor": "math_hf_data_processor", "env_name": "math"},
    },
    "env": {"math": {"num_workers": 4, "math_verify_impl": "hf_math_verify"}},
    "logger": {"wandb_enabled": False, "wandb": {"project": "p", "name": "n"}, "monitor_gpus": True},
    "cluster": {"gpus_per_node": 8, "num_nodes": 1, "segment_size": None},
}

TRL_GRPO = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "dataset_name": "open-r1/OpenR1-Math-220k",
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 128,
    "max_prompt_length": 128,
    "max_steps": 50,
    "beta": 0.04,
    "learning_rate": 2.0e-6,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "reward_funcs": ["accuracy"],
    "log_completions": True,
}


def changed(base, **values):
    """A copy of nested values with others at dotted keys, whose dots are written `__`."""
    copy = json.loads(json.dumps(base))
    for key, value in values.items():
        *sections, last = key.split("__")
        at = copy
        for name in sections:
            at = at.setdefault(name, {})
        at[last] = value
    return copy


def written(folder: Path, values, name="theirs.yaml") -> Path:
    """The path of a file with these values or this text."""
    path = folder / name
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path
