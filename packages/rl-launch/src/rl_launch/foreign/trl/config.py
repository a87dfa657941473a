"""Configs of TRL: what is worked out from several fields. The others are in `tables/trl.yaml`."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rl_launch.foreign.schedules import count_rows, warmup_and_decay
from rl_launch.foreign.surrogate import put_surrogate
from rl_launch.foreign.translation import Translation
from rl_launch.foreign.trl.preferences import translate_preferences
from rl_launch.foreign.trl.script import HELD_OUT
from rl_launch.foreign_keys.table import Kind

_OF_GRPO = ("num_generations", "max_completion_length", "reward_funcs", "scale_rewards", "epsilon", "num_iterations")
_OF_DPO = (
    "precompute_ref_log_probs", "rpo_alpha", "max_prompt_length", "label_smoothing", "reference_free", "cpo_alpha",
    "simpo_gamma", "desirable_weight", "undesirable_weight",
)  # fmt: skip
_OF_REWARDS = ("center_rewards_coefficient",)
_OF_SFT = ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "max_seq_length")
_BY_FIELD = {"grpo": _OF_GRPO, "rm": _OF_REWARDS, "sft": _OF_SFT, "dpo": _OF_DPO}

_OPTIMIZERS = {
    "adamw_torch": "torch.optim.AdamW",
    "adamw_torch_fused": "torch.optim.AdamW",
    "adamw_hf": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
}
_DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_AGGREGATIONS = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "sequence-mean",
    "dr_grpo": "sequence-mean-token-sum",
    "cispo": "token-mean",
    "sapo": "sequence-mean",
    "vespo": "token-mean",
}
_SURROGATES = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo"}
_SETTINGS = {
    "sapo_temperature_pos": "tau_positive",
    "sapo_temperature_neg": "tau_negative",
    "vespo_k_pos": "k_positive",
    "vespo_lambda_pos": "lambda_positive",
    "vespo_k_neg": "k_negative",
    "vespo_lambda_neg": "lambda_negative",
}
"""Settings of surrogates by the fields of TRL."""
_CORRECTIONS = {
    "token_truncate": {"truncation": "tis", "level": "token"},
    "token_mask": {"truncation": "icepop", "level": "token"},
    "sequence_truncate": {"truncation": "tis", "level": "sequence"},
    "sequence_mask": {"truncation": "icepop", "level": "sequence"},
}
"""`loss_fn.importance` by `vllm_importance_sampling_mode`."""
_KTO_WEIGHTS = ("desirable_weight", "undesirable_weight")
_BEHAVIOUR = {
    "grpo": ("TRL draws prompts in another order for the same seed",),
    "sft": (
        "TRL draws rows in another order for the same seed",
        "TRL appends the end-of-sequence token to text and completions; here the end of a turn is trained",
    ),
    "dpo": (
        "TRL draws pairs in another order for the same seed; KTOTrainer reads rows in their order",
        "TRL turns dropout off (disable_dropout); here it is off unless the model's config has it",
    ),
    "rm": (
        "TRL draws pairs in another order for the same seed",
        "TRL turns dropout off (disable_dropout); here it is off unless the model's config has it",
    ),
}
"""Behaviour of TRL without a setting, which differs here or is easily missed."""
_TRACKERS = ("wandb", "mlflow", "tensorboard")
_FILES = (".csv", ".json", ".jsonl", ".parquet")
_UNKNOWN_LENGTH = 1000
"""Steps of a decay if neither the file nor the data say how many steps there are."""


def algorithm_of(values: dict[str, Any]) -> str:
    """The algorithm by fields that only one trainer has; empty if there are none."""
    return next((name for name, fields in _BY_FIELD.items() if any(field in values for field in fields)), "")


def translate(config: Translation, gpus: int | None, *, folder: Path, computed: Collection[str] = ()) -> None:
    """Answer the fields that need more than a table, then the others.

    Args:
        config: Translation that holds the fields and receives the answers.
        gpus: Number of GPUs; None if it is not known.
        folder: Folder of the file, which relative paths of data start from.
        computed: Fields that a script computes.
    """
    if config.algorithm == "dpo" and any(key in config.values for key in _KTO_WEIGHTS):
        config.values.setdefault("loss_type", "kto")
    if config.algorithm == "dpo" and "cpo_alpha" in config.values:
        config.values.setdefault("loss_type", "cpo")
    with_defaults(config, computed)
    config.put("algorithm", config.algorithm)
    config.put("cluster", {"device": "cuda", "gpus_per_node": gpus or 1})
    if gpus is None:
        config.notes.append(
            "cluster.gpus_per_node: 1, because the file does not contain it. Import with --gpus N for other values"
        )
    _model(config)
    _optimizer(config)
    _batches(config, gpus or 1)
    _data(config)
    _schedule(config, folder)
    {"grpo": _grpo, "dpo": translate_preferences, "sft": _sft, "rm": _rewards}[config.algorithm](config)
    config.behaviour += _BEHAVIOUR[config.algorithm]
    _saving(config)
    _pushing(config)
    config.finish()


def with_defaults(config: Translation, computed: Collection[str] = ()) -> None:
    """Fill in the defaults of TRL's trainer that matter and are not those here.

    Args:
        config: Translation that holds the fields.
        computed: Fields that a script sets to a value that is not known.
    """
    known = config.table.defaults.get(config.algorithm, {})
    given = {_destination(config, key) for key in config.values}
    missing = {
        key: value
        for key, value in known.items()
        if key not in config.values and (_destination(config, key) or key) not in given
    }
    if config.get("max_steps", -1) > 0:
        missing.pop("num_train_epochs", None)
    config.values.update(missing)
    for key, value in missing.items():
        rule = config.table.rule(key)
        if rule is not None and rule.kind is Kind.RENAMED:
            config.put(rule.answer(key, config.algorithm), value)
    for taken, text in (
        (missing.keys() - computed, f"defaults of {config.table.name} that the file leaves out, and that were taken"),
        (missing.keys() & computed, "values that the script computes, with the defaults in their place"),
    ):
        if listed := ", ".join(f"{key}={missing[key]}" for key in known if key in taken):
            config.notes.append(f"{text}: {listed}")


def _destination(config: Translation, key: str) -> str | None:
    """The key here that a field is renamed to; None if it has none of its own."""
    rule = config.table.rule(key)
    return rule.text if rule is not None and rule.kind is Kind.RENAMED else None


def _model(config: Translation) -> None:
    dtype = config.get("dtype", config.get("torch_dtype"))
    half = config.get("fp16") or dtype == "float16"
    if half:
        config.refuse("fp16" if config.get("fp16") else "dtype", "float16 training")
    full = dtype == "float32" and not config.get("bf16")
    config.put("policy.precision", "float32" if full else "bfloat16")
    config.follows(["bf16", "fp16", "dtype", "torch_dtype"], "policy.precision")
    attention = config.get("attn_implementation")
    if attention in ("sdpa", "eager", "flash_attention_2", "flash_attention_3"):
        config.put("policy.dtensor_cfg.attention_backend", attention)
    config.follows(["attn_implementation"], "policy.dtensor_cfg.attention_backend; kernels from the hub are not loaded")
    targets = config.get("lora_target_modules")
    if config.get("use_peft"):
        config.put("policy.lora_cfg", {"enabled": True, "dim": 16, "alpha": 32, "dropout": 0.05})
    if config.get("use_peft") and targets and targets not in ("all-linear", ["all-linear"]):
        config.put("policy.lora_cfg.match_all_linear", False)
        config.put("policy.lora_cfg.target_modules", targets if isinstance(targets, list) else [targets])
    config.follows(["lora_target_modules"], "policy.lora_cfg.target_modules")
    kwargs = config.get("chat_template_kwargs")
    if kwargs:
        config.put("policy.tokenizer.chat_template_kwargs", kwargs)
    for key in config.keys("chat_template_kwargs"):
        config.answer(key, Kind.RENAMED, "policy.tokenizer.chat_template_kwargs")
    if config.get("chat_template"):
        config.rename("chat_template", "policy.tokenizer.chat_template")
    if config.get("vision"):
        config.put("policy.vision", {"enabled": True, "tower": "trained", "projector": "trained"})
    config.follows(["vision"], "policy.vision, whose tower TRL trains too")


def _optimizer(config: Translation) -> None:
    name = str(config.get("optim", "adamw_torch"))
    kind = _OPTIMIZERS.get(name)
    if kind is None:
        config.refuse("optim", f"the optimizer {name}")
        kind = "torch.optim.AdamW"
    arguments: dict[str, Any] = {
        "lr": config.get("learning_rate"),
        "weight_decay": config.get("weight_decay", 0.0),
    }
    if kind == "torch.optim.AdamW":
        arguments["betas"] = [config.get("adam_beta1", 0.9), config.get("adam_beta2", 0.999)]
        arguments["eps"] = config.get("adam_epsilon", 1e-8)
    config.put("policy.optimizer", {"name": kind, "kwargs": arguments})
    if arguments["weight_decay"]:
        config.put("policy.optimizer.decay_norms_and_biases", False)
    keys = ("optim", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    config.follows(keys, "policy.optimizer")


def _batches(config: Translation, gpus: int) -> None:
    each = config.get("per_device_train_batch_size", 8)
    accumulated = config.get("gradient_accumulation_steps", 1)
    batch = each * accumulated * gpus
    pairs = 2 if config.algorithm in ("dpo", "rm") else 1
    config.put("policy.train_global_batch_size", batch)
    config.put("policy.train_micro_batch_size", each * pairs)
    config.put("policy.logprob_batch_size", config.get("per_device_eval_batch_size", each) * pairs)
    text = f"policy.train_global_batch_size: {batch} = {each} x {accumulated} x {gpus} GPUs"
    config.follows(["per_device_train_batch_size", "gradient_accumulation_steps"], text)
    config.follows(["per_device_eval_batch_size"], "policy.logprob_batch_size")
    if config.algorithm != "grpo":
        return
    group = config.get("num_generations", 8)
    per_step = config.get("steps_per_generation", accumulated)
    completions = config.get("generation_batch_size", each * gpus * per_step)
    if completions % group:
        config.refuse(
            "num_generations", f"groups of {group} that do not divide the {completions} completions of a step"
        )
        return
    config.put("grpo.num_prompts_per_step", completions // group)
    config.follows(
        ["steps_per_generation", "generation_batch_size"],
        f"grpo.num_prompts_per_step: {completions // group} = {completions} completions / {group}",
    )
    if completions < batch:
        config.put("policy.train_global_batch_size", completions)
        config.notes.append(
            f"policy.train_global_batch_size: {completions}, the completions of a generation; TRL accumulates over "
            f"{batch // completions} generations, so raise grpo.num_prompts_per_step to take larger steps"
        )


def _data(config: Translation) -> None:
    train = _datasets(config)
    config.put("data.train", train if len(train) > 1 else train[0])
    wants = config.get("eval_strategy", config.get("evaluation_strategy", "no"))
    loop = config.algorithm
    if validation := _validation(config, train) if wants != "no" else []:
        config.put("data.validation", validation if len(validation) > 1 else validation[0])
    if validation or (wants != "no" and config.get("eval_dataset") == HELD_OUT):
        if wants == "epoch":
            config.put(f"{loop}.val_at_end", True)
        config.put(f"{loop}.val_period", 0 if wants == "epoch" else _whole(config.get("eval_steps", 500)))
    else:
        config.put(f"{loop}.val_period", 0)
        config.unneeded("eval_steps", "there is nothing to validate on")
    orders = config.get("train_sampling_strategy") == "sequential" or (
        loop == "grpo" and config.get("shuffle_dataset") is False
    )
    if orders:
        config.put("data.shuffle", False)
    config.follows(["train_sampling_strategy", "shuffle_dataset"], "data.shuffle")
    keys = ["dataset_name", "dataset_config", "dataset_train_split", "dataset_streaming", "datasets", "train_dataset"]
    config.follows(keys, "data.train")
    config.follows(["dataset_test_split", "eval_dataset"], "data.validation")
    config.follows(["eval_strategy", "evaluation_strategy", "eval_steps"], f"{loop}.val_period")


def _datasets(config: Translation) -> list[dict[str, Any]]:
    """The datasets to train on."""
    if "train_dataset" in config.values:
        return [_columns(config, each) for each in config.get("train_dataset")]
    if mixture := config.get("datasets"):
        return [_of_mixture(config, each) for each in mixture if isinstance(each, dict)]
    name = config.get("dataset_name")
    if name is None:
        config.notes.append("data.train.dataset_name: the file does not contain a dataset. Set it in the recipe")
        return [{"dataset_name": "OWNER/DATASET"}]
    split = config.get("dataset_train_split")
    return [_named(config, name, split)]


def _named(config: Translation, name: str, split: str | None) -> dict[str, Any]:
    """A dataset of the hub or a file."""
    if str(name).startswith(("/", "./", "~")) or str(name).endswith(_FILES):
        return {"data_path": name}
    subset = config.get("dataset_config")
    streams = {"streaming": True} if config.get("dataset_streaming") else {}
    settings = {"dataset_name": name, "subset": subset, "split": split}
    return {key: value for key, value in settings.items() if value} | streams


def _of_mixture(config: Translation, given: dict[str, Any]) -> dict[str, Any]:
    """An entry of `datasets` of a YAML file."""
    made = {
        here: given[key]
        for key, here in (("path", "dataset_name"), ("name", "subset"), ("split", "split"))
        if given.get(key) is not None
    }
    if files := given.get("data_files"):
        made = {"data_path": files}
    for key in given.keys() - {"path", "name", "split", "data_files", "columns"}:
        if given[key] is not None:
            config.refuse("datasets", f"{key} of a dataset in a mixture")
    return made


def _validation(config: Translation, train: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The datasets to validate on; none if they are held out, or if there are none."""
    if "eval_dataset" in config.values:
        given = config.get("eval_dataset")
        return [_columns(config, each) for each in given] if isinstance(given, list) else []
    name = config.get("dataset_name")
    if name is None:
        return []
    found = _named(config, name, config.get("dataset_test_split", "test"))
    if "data_path" in found:
        config.notes.append("data.validation: a file has no splits. Set split_validation_size of data.train, or a file")
        return []
    return [found]


def _columns(config: Translation, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a dataset whose renamed columns are given by the keys of the algorithm."""
    columns = dict(settings.get("columns", {}))
    made = {key: value for key, value in settings.items() if key != "columns"}
    if config.algorithm in ("grpo", "sft"):
        for names, key in ((("messages", "prompt", "text"), "input_key"), (("completion", "answer"), "output_key")):
            for name in names:
                if name in columns:
                    made[key] = columns.pop(name)
    if columns and config.algorithm in ("grpo", "sft"):
        renamed = ", ".join(f"{old} to {new}" for new, old in columns.items())
        config.notes.append(f"data.train: the script renames the columns {renamed}; rewards get the names in the rows")
    elif columns:
        made["columns"] = columns
    return made


def _schedule(config: Translation, folder: Path) -> None:
    style = config.get("lr_scheduler_type", "linear")
    steps = config.get("max_steps", -1)
    if steps > 0:
        config.put(f"{config.algorithm}.max_num_steps", steps)
        config.put(f"{config.algorithm}.max_num_epochs", None)
        config.unneeded("num_train_epochs", "max_steps decides")
    config.follows(["max_steps"], f"{config.algorithm}.max_num_steps")
    decay = _DECAYS.get(style)
    least = 0.0
    given = config.get("lr_scheduler_kwargs") or {}
    if style == "cosine_with_min_lr":
        decay = "cosine"
        least = given.get("min_lr", given.get("min_lr_rate", 0.0) * config.get("learning_rate", 0.0))
    if decay is None:
        config.refuse("lr_scheduler_type", f"the learning-rate schedule {style}")
        return
    warmup, share = config.get("warmup_steps", 0), config.get("warmup_ratio", 0.0)
    if 0 < warmup < 1:
        warmup, share = 0, warmup
    counted = None if steps > 0 else _counted_steps(config, folder)
    length = steps if steps > 0 else counted or _UNKNOWN_LENGTH
    if not warmup and share:
        warmup = math.ceil(share * length)
    if steps <= 0 and (decay != "constant" or share):
        config.notes.append(
            f"policy.scheduler: {length} steps, counted from the rows of the data"
            if counted
            else f"policy.scheduler: its {length} steps are a guess, because the file counts epochs. "
            "Set the number of steps of your data"
        )
    rate = config.get("learning_rate")
    updates = 1
    if config.algorithm == "grpo":
        rows = config.written("grpo.num_prompts_per_step") or 1
        completions = rows * config.get("num_generations", 8)
        updates = max(1, completions // (config.written("policy.train_global_batch_size") or completions))
        updates *= config.get("num_iterations", 1)
        if steps > 0 and updates > 1:
            config.put("grpo.max_num_steps", max(1, steps // updates))
            config.notes.append(f"grpo.max_num_steps: {steps} optimizer steps are {steps // updates} steps here")
    schedule = warmup_and_decay(rate, warmup=int(warmup), decay=decay, end=length, last=length, end_rate=least)
    config.put("policy.scheduler", schedule)
    for name in ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"):
        for key in config.keys(name):
            config.follows([key], "policy.scheduler")


def _counted_steps(config: Translation, folder: Path) -> int | None:
    """The optimizer steps of all epochs, by the rows of local files; None if these cannot be counted."""
    if config.algorithm == "sft" and config.get("packing"):
        return None  # packing makes other rows
    rows = count_rows(config.written("data.train"), folder)
    if rows is None:
        return None
    batch = config.written("policy.train_global_batch_size")
    if config.algorithm == "grpo":
        prompts = config.written("grpo.num_prompts_per_step") or 1
        completions = prompts * config.get("num_generations", 8)
        updates = int(rows // prompts) * max(1, completions // batch) * config.get("num_iterations", 1)
    else:
        updates = math.ceil(rows / batch)
    return math.ceil(updates * config.get("num_train_epochs", 3)) or None


def _grpo(config: Translation) -> None:
    longest = config.get("max_completion_length", 256)
    prompt = config.get("max_prompt_length", 512)
    config.put("policy.max_total_sequence_length", longest + prompt)
    config.put("policy.generation.max_new_tokens", longest)
    config.put("data.max_input_seq_length", prompt)
    config.put("data.overlong", "skip")
    config.put("loss_fn.kl.weight", config.get("beta", 0.0))
    config.follows(["beta"], "loss_fn.kl.weight")
    _loss(config, longest)
    scale = config.get("scale_rewards", "group")
    if scale == "batch":
        config.put("grpo.adv_estimator", {"name": "grpo_batch_std"})
    else:
        config.put("grpo.normalize_rewards", scale in (True, "group"))
    config.follows(["scale_rewards"], "grpo.normalize_rewards")
    if config.get("sync_ref_model"):
        config.put("grpo.reference_sync_period", config.get("ref_model_sync_steps", 512))
        config.put("grpo.reference_mixup_alpha", config.get("ref_model_mixup_alpha", 0.6))
    config.follows(["sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"], "grpo.reference_sync_period")
    top_k = config.get("top_k", 0)
    if top_k and top_k > 0:
        config.put("policy.generation.top_k", top_k)
    config.follows(["top_k"], "policy.generation.top_k; 0 and -1 sample from all tokens")
    if config.get("vllm_mode") == "server":
        config.put("policy.generation.colocated.enabled", False)
        config.put("policy.generation.colocated.resources.gpus_per_node", 1)
        config.put("cluster.gpus_per_node", config.written("cluster.gpus_per_node") + 1)
        config.notes.append(
            "policy.generation.colocated.resources: one GPU generates; give it as many as your server has"
        )
    config.follows(["vllm_mode"], "policy.generation.colocated.enabled")
    if config.get("top_entropy_quantile") == 1:
        config.unneeded("top_entropy_quantile", "1 trains on all tokens")
    if "max_prompt_length" not in config.values:
        config.notes.append(
            f"data.max_input_seq_length: {prompt}, as TRL has no limit. Longer prompts are left out; set it to the "
            "longest prompt of your data"
        )
    config.notes.append(_reward_note(config.get("reward_funcs") or [], config.get("reward_weights")))
    config.follows(["reward_funcs", "reward_weights"], "data.train.env_name, which the recipe leaves to you")


def _reward_note(rewards: str | list[str], weights: list[float] | None) -> str:
    """Return how to name the reward functions of the file in the recipe."""
    named = [str(each) for each in (rewards if isinstance(rewards, list) else [rewards])]
    models = [each for each in named if "/" in each and ":" not in each]
    if models:
        return (
            f"data.train.env_name: a reward model, {', '.join(models)}, is an environment: env_name: reward_model and "
            "env.reward_model.model"
        )
    if len(named) == 1:
        return f"data.train.env_name: set {named[0] if ':' in named[0] else f'FILE.py:{named[0]}'}"
    several = ", ".join(each if ":" in each else f"FILE.py:{each}" for each in named) or "FILE.py:FUNCTION"
    return (
        f"data.train.env_name: the reward functions are not in the recipe. Set env.mine.rewards: [{several}], "
        f"env.mine.reward_weights: {weights or [1.0] * len(named)} and data.train.env_name: mine"
    )


def _loss(config: Translation, longest: int) -> None:
    kind, surrogate = config.get("loss_type", "dapo"), "clip"
    if config.get("importance_sampling_level", "token") == "sequence":
        surrogate = "gspo"
        config.put("loss_fn.aggregation", "sequence-mean")
        if kind not in ("grpo", "dapo", "bnpo"):
            config.refuse("loss_type", f"importance sampling by sequence with the loss {kind}")
        elif kind != "grpo":
            config.notes.append("loss_fn.aggregation: sequence-mean, as gspo has it here")
    elif kind in _AGGREGATIONS:
        surrogate, aggregation = _SURROGATES.get(kind, "clip"), _AGGREGATIONS[kind]
        divided = {"name": aggregation, "divisor": longest}
        config.put("loss_fn.aggregation", divided if kind == "dr_grpo" else aggregation)
    else:
        config.refuse("loss_type", f"the loss {kind} in GRPO")
    config.follows(["loss_type", "importance_sampling_level"], "loss_fn.aggregation and loss_fn.surrogate")
    low, high = config.get("epsilon", 0.2), config.get("epsilon_high", config.get("epsilon", 0.2))
    if surrogate == "cispo":
        # TRL bounds the ratio itself, by epsilon_high, and not from below
        low, high = 1.0, high - 1.0
        if high < 0:
            config.refuse("epsilon_high", "ratios bounded below 1 in the loss cispo (epsilon_high)")
            high = 4.0
    put_surrogate(
        config,
        surrogate,
        {"epsilon": "clip_low", "epsilon_high": "clip_high", "delta": "dual_clip", **_SETTINGS},
        clip_low=low,
        clip_high=high,
        dual_clip=config.get("delta"),
        **{setting: config.get(key) for key, setting in _SETTINGS.items()},
    )
    if config.get("beta") and config.get("use_bias_correction_kl", True):
        config.put("loss_fn.kl.unbiased", True)
    config.follows(["use_bias_correction_kl"], "loss_fn.kl.unbiased")
    _correction(config)
    if weight := config.get("entropy_coef", 0.0):
        config.put("loss_fn.entropy_bonus.weight", weight)
    config.follows(["entropy_coef"], "loss_fn.entropy_bonus.weight")
    if config.get("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        config.put("grpo.adv_estimator", {"name": "gdpo"})
    config.follows(["multi_objective_aggregation"], "grpo.adv_estimator: gdpo for normalize_then_sum")


def _correction(config: Translation) -> None:
    """The correction for the samples of vLLM, which TRL makes by default."""
    switch, mode = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
    bounds = [f"vllm_importance_sampling_{name}" for name in ("cap", "clip_max", "clip_min")]
    if config.get(switch, bool(config.get("use_vllm"))):
        # releases with a cap truncate the ratios of tokens
        kind = config.get(mode, "sequence_mask" if config.get(bounds[0]) is None else "token_truncate")
        if kind not in _CORRECTIONS:
            config.refuse(mode, f"the importance correction {kind}")
        high = config.get(bounds[0], config.get(bounds[1], 3.0))
        section = {**_CORRECTIONS.get(kind, {}), "high": high}
        if config.get(bounds[2]) is not None:
            section["low"] = config.get(bounds[2])
        config.put("loss_fn.importance", section)
    config.follows([switch, mode, *bounds], "loss_fn.importance, which is set if use_vllm is")


def _sft(config: Translation) -> None:
    config.put("policy.sequence_packing.enabled", bool(config.get("packing")))
    config.follows(["packing"], "policy.sequence_packing.enabled, in which rows do not attend to each other")
    for key in ("assistant_only_loss", "completion_only_loss"):
        if config.get(key) is False:
            config.refuse(key, "learning the prompt too (assistant_only_loss, completion_only_loss: false)")
        config.follows([key], "sft.learn; only the assistant's text is trained")
    if config.get("assistant_only_loss") is None and config.get("completion_only_loss") is None:
        config.notes.append(
            "sft.learn: only the assistant's text is trained; TRL learns whole conversations unless told otherwise"
        )
    config.put("data.overlong", "skip")
    config.notes.append("data.overlong: skip leaves out rows that TRL cuts at max_length")


def _rewards(config: Translation) -> None:
    config.put("data.overlong", "skip")


def _saving(config: Translation) -> None:
    strategy = config.get("save_strategy", "steps")
    steps = config.get("save_steps", 500)
    if strategy == "no":
        config.put("checkpointing.save_period", 0)
    elif strategy == "epoch":
        config.put("checkpointing.save_period", 0)
        config.notes.append("checkpointing.save_period: 0 saves at the end, as the steps of an epoch are not known")
    else:
        config.put("checkpointing.save_period", _whole(steps))
    config.follows(["save_strategy", "save_steps"], "checkpointing.save_period")
    best = config.get("metric_for_best_model")
    if config.get("load_best_model_at_end") or best:
        config.put("checkpointing.metric_name", "val:reward" if config.algorithm == "grpo" else "val:loss")
        if config.algorithm != "grpo":
            config.put("checkpointing.higher_is_better", False)
    config.follows(["load_best_model_at_end", "metric_for_best_model"], "checkpointing.metric_name")
    reported = config.get("report_to", [])
    several = [] if reported in ("none", "all") else reported if isinstance(reported, list) else [reported]
    for tracker in _TRACKERS:
        config.put(f"logger.{tracker}_enabled", tracker in several)
    other = [each for each in several if each not in (*_TRACKERS, "none")]
    config.follows(["report_to"], f"logger.*_enabled{f'; {other} is not offered' if other else ''}")
    project = config.get("wandb_project")
    if project:
        config.rename("wandb_project", "logger.wandb.project")


def _pushing(config: Translation) -> None:
    name = config.get("hub_model_id", config.get("push_to_hub_model_id"))
    if config.get("push_to_hub") and "/" in str(name):
        config.put("checkpointing.push_to", f"hf://{name}")
        if config.get("hub_strategy", "every_save") != "end":
            config.put("checkpointing.push_checkpoints", "every")
        if config.get("hub_private_repo") is False:
            config.put("checkpointing.push_private", False)
    elif config.get("push_to_hub"):
        config.notes.append("checkpointing.push_to: put hf://OWNER/NAME, as the file does not name the owner")
    config.follows(["push_to_hub", "hub_model_id", "push_to_hub_model_id"], "checkpointing.push_to")
    config.follows(["hub_strategy"], "checkpointing.push_checkpoints")
    config.follows(["hub_private_repo"], "checkpointing.push_private")


def _whole(steps: float) -> int:
    """A number of steps; a share of the run, whose length is not known here, is one step."""
    return int(steps) if steps >= 1 else 1
