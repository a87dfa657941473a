"""Configs of TRL: the fields that are computed from several. The others are in `foreign_keys/tables/trl.yaml`."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rl_launch.foreign.schedules import count_rows, warmup_and_decay
from rl_launch.foreign.translation import Translation, put_surrogate
from rl_launch.foreign.trl.preferences import translate_preferences
from rl_launch.foreign.trl.script import HELD_OUT
from rl_launch.foreign_keys.table import ALGORITHM, Kind, table

_ADAMW = "torch.optim.AdamW"
_TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio", "swanlab", "clearml")
_FILES = (".csv", ".json", ".jsonl", ".parquet")
_UNKNOWN_LENGTH = 1000
"""Steps of a decay if neither the file nor the data say how many steps there are."""


def algorithm_of(values: dict[str, Any]) -> str:
    """Return the algorithm by fields that only one trainer has; empty if there are none."""
    fields = table("trl").tables["fields"].items()
    return next((name for name, names in fields if any(each in values for each in names.split())), "")


def translate(config: Translation, gpus: int | None, *, folder: Path, computed: Collection[str] = ()) -> None:
    """Answer the fields that need more than a table, then the others.

    Args:
        config: Translation that holds the fields and receives the answers.
        gpus: Number of GPUs; None if it is not known.
        folder: Folder of the file, which relative paths of data start from.
        computed: Fields that a script computes.
    """
    if config.algorithm == "dpo" and {"desirable_weight", "undesirable_weight"} & config.values.keys():
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
    name = str(config.get("optim", "adamw_torch"))
    kind = config.table.tables["optimizers"].get(name)
    if kind is None:
        reason = config.table.tables["unavailable optimizers"].get(name)
        config.refuse("optim", f"the optimizer {name}" + (f", {reason}" if reason else ""))
        kind = _ADAMW
    if name.startswith("paged_"):
        config.notes.append("policy.optimizer: its state stays on the GPU; policy.dtensor_cfg.cpu_offload moves it")
    decay = config.get("weight_decay", 0.0)
    arguments: dict[str, Any] = {"lr": config.get("learning_rate"), "weight_decay": decay}
    if kind in (_ADAMW, "rl_core.torch.EightBitAdamW"):
        arguments["betas"] = [config.get("adam_beta1", 0.9), config.get("adam_beta2", 0.999)]
        arguments["eps"] = config.get("adam_epsilon", 1e-8)
    config.put("policy.optimizer", {"name": kind, "kwargs": arguments})
    if decay:
        config.put("policy.optimizer.decay_norms_and_biases", False)
    _batches(config, gpus or 1)
    _data(config)
    _schedule(config, folder)
    own = {"grpo": _grpo, "online_dpo": _online_dpo, "dpo": translate_preferences, "sft": _sft, "rm": lambda _: None}
    own[config.algorithm](config)
    config.put("data.overlong", "skip")
    config.behaviour += config.table.tables["behaviour"][config.algorithm]
    _saving(config)
    config.finish()


def with_defaults(config: Translation, computed: Collection[str] = ()) -> None:
    """Fill in the defaults of TRL's trainer that matter and are not the defaults here.

    Args:
        config: Translation that holds the fields.
        computed: Fields that a script sets to a value that is not known.
    """

    def destination(key: str) -> str | None:
        rule = config.table.rule(key)
        return rule.text if rule is not None and rule.kind is Kind.RENAMED else None

    known = config.table.defaults.get(config.algorithm, {})
    given = {destination(key) for key in config.values}
    missing = {
        key: value
        for key, value in known.items()
        if key not in config.values and (destination(key) or key) not in given
    }
    if config.get("max_steps", -1) > 0:
        missing.pop("num_train_epochs", None)
    config.values.update(missing)
    for key, value in missing.items():
        if here := destination(key):
            config.put(here.replace(ALGORITHM, config.algorithm), value)
    for taken, text in (
        (missing.keys() - computed, f"defaults of {config.table.name} that the file leaves out, and that were taken"),
        (missing.keys() & computed, "values that the script computes, with the defaults in their place"),
    ):
        if listed := ", ".join(f"{key}={missing[key]}" for key in known if key in taken):
            config.notes.append(f"{text}: {listed}")


def _model(config: Translation) -> None:
    dtype = config.get("dtype", config.get("torch_dtype"))
    is_half = config.get("fp16") or (dtype == "float16" and not config.get("bf16"))
    full = dtype == "float32" and not config.get("bf16")
    config.put("policy.precision", "float16" if is_half else "float32" if full else "bfloat16")
    attention = config.get("attn_implementation")
    if attention in ("sdpa", "eager", "flash_attention_2", "flash_attention_3"):
        config.put("policy.dtensor_cfg.attention_backend", attention)
    targets = config.get("lora_target_modules")
    if config.get("use_peft"):
        config.put("policy.lora_cfg", {"enabled": True, "dim": 16, "alpha": 32, "dropout": 0.05})
        if targets and targets not in ("all-linear", ["all-linear"]):
            config.put("policy.lora_cfg.match_all_linear", False)
            config.put("policy.lora_cfg.target_modules", targets if isinstance(targets, list) else [targets])
        _adapter_variants(config)
    if kwargs := config.get("chat_template_kwargs"):
        config.put("policy.tokenizer.chat_template_kwargs", kwargs)
    config.answer("chat_template_kwargs", Kind.RENAMED, "policy.tokenizer.chat_template_kwargs")
    if config.get("chat_template"):
        config.rename("chat_template", "policy.tokenizer.chat_template")
    if config.get("vision"):  # TRL trains the tower too
        config.put("policy.vision", {"enabled": True, "tower": "trained", "projector": "trained"})


def _adapter_variants(config: Translation) -> None:
    """Set what adapters start from, and how the weights under them are stored."""
    start = config.get("init_lora_weights", True)
    if start == "pissa":
        config.compute("init_lora_weights", "policy.lora_cfg.init", "pissa")
    elif start is not True:
        config.refuse("init_lora_weights", f"adapters that start otherwise (init_lora_weights={start})")
    else:
        config.unneeded("init_lora_weights", "adapters start as in peft")
    for key, name in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if config.get(key):
            config.compute(key, "policy.lora_cfg.base_quantization", name)
        else:
            config.unneeded(key, "weights are not quantised")
    if config.get("load_in_4bit") and (kind := config.get("bnb_4bit_quant_type", "nf4")) != "nf4":
        config.refuse("bnb_4bit_quant_type", f"4-bit weights other than nf4 (bnb_4bit_quant_type={kind})")


def _batches(config: Translation, gpus: int) -> None:
    each = config.get("per_device_train_batch_size", 8)
    accumulated = config.get("gradient_accumulation_steps", 1)
    batch = each * accumulated * gpus
    pairs = 2 if config.algorithm in ("dpo", "online_dpo", "rm") else 1
    config.put("policy.train_global_batch_size", batch)
    config.put("policy.train_micro_batch_size", each * pairs)
    config.put("policy.logprob_batch_size", config.get("per_device_eval_batch_size", each) * pairs)
    text = f"policy.train_global_batch_size: {batch} = {each} x {accumulated} x {gpus} GPUs"
    config.follows(["per_device_train_batch_size", "gradient_accumulation_steps"], text)
    if config.algorithm == "online_dpo":
        config.put("online_dpo.num_prompts_per_step", batch)
    if config.algorithm != "grpo":
        return
    group = config.get("num_generations", 8)
    per_step = config.get("steps_per_generation", accumulated)
    completions = config.get("generation_batch_size", each * gpus * per_step)
    if completions % group:
        text = f"groups of {group} that do not divide the {completions} completions of a step"
        config.refuse("num_generations", text)
        return
    config.put("grpo.num_prompts_per_step", completions // group)
    text = f"grpo.num_prompts_per_step: {completions // group} = {completions} completions / {group}"
    config.follows(["steps_per_generation", "generation_batch_size"], text)
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
    if validation := _validation(config) if wants != "no" else []:
        config.put("data.validation", validation if len(validation) > 1 else validation[0])
    if validation or (wants != "no" and config.get("eval_dataset") == HELD_OUT):
        if wants == "epoch":
            config.put(f"{loop}.val_at_end", True)
        config.put(f"{loop}.val_period", 0 if wants == "epoch" else _whole(config.get("eval_steps", 500)))
    else:
        config.put(f"{loop}.val_period", 0)
        config.unneeded("eval_steps", "there is nothing to validate on")
    config.follows(["dataset_config"], "data.train.subset")
    is_in_order = loop == "grpo" and config.get("shuffle_dataset") is False
    if is_in_order or config.get("train_sampling_strategy") == "sequential":
        config.put("data.shuffle", False)


def _datasets(config: Translation) -> list[dict[str, Any]]:
    """Return the datasets to train on."""
    if "train_dataset" in config.values:
        return [_columns(config, each) for each in config.get("train_dataset")]
    names = {"path": "dataset_name", "name": "subset", "split": "split"}
    found: list[dict[str, Any]] = []
    for given in filter(lambda each: isinstance(each, dict), config.get("datasets") or ()):
        for key in given.keys() - {*names, "data_files", "columns"}:
            if given[key] is not None:
                config.refuse("datasets", f"{key} of a dataset in a mixture")
        named = {here: given[key] for key, here in names.items() if given.get(key) is not None}
        found.append({"data_path": given["data_files"]} if given.get("data_files") else named)
    if config.get("datasets"):
        return found
    if config.get("dataset_name") is None:
        config.notes.append("data.train.dataset_name: the file does not contain a dataset. Set it in the recipe")
        return [{"dataset_name": "OWNER/DATASET"}]
    return [_named(config, config.get("dataset_train_split"))]


def _named(config: Translation, split: str | None) -> dict[str, Any]:
    """Return the dataset of the hub or the file in `dataset_name`."""
    name = config.get("dataset_name")
    if str(name).startswith(("/", "./", "~")) or str(name).endswith(_FILES):
        return {"data_path": name}
    streams = True if config.get("dataset_streaming") else None
    settings = {"dataset_name": name, "subset": config.get("dataset_config"), "split": split, "streaming": streams}
    return {key: value for key, value in settings.items() if value}


def _validation(config: Translation) -> list[dict[str, Any]]:
    """Return the datasets to validate on; none if they are held out, or if there are none."""
    if "eval_dataset" in config.values:
        given = config.get("eval_dataset")
        return [_columns(config, each) for each in given] if isinstance(given, list) else []
    if config.get("dataset_name") is None:
        return []
    found = _named(config, config.get("dataset_test_split", "test"))
    if "data_path" in found:
        config.notes.append("data.validation: a file has no splits. Set split_validation_size of data.train, or a file")
        return []
    return [found]


def _columns(config: Translation, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a dataset whose renamed columns are given by the keys of the algorithm."""
    columns = dict(settings.get("columns", {}))
    made = {key: value for key, value in settings.items() if key != "columns"}
    has_keys = config.algorithm in ("grpo", "online_dpo", "sft")
    for names, key in ((("messages", "prompt", "text"), "input_key"), (("completion", "answer"), "output_key")):
        for name in names if has_keys else ():
            if name in columns:
                made[key] = columns.pop(name)
    if columns and has_keys:
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
    decay = config.table.tables["decays"].get(style)
    least = 0.0
    given = config.get("lr_scheduler_kwargs") or {}
    if style == "cosine_with_min_lr":
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
    config.compute("lr_scheduler_kwargs", "policy.scheduler", schedule)


def _counted_steps(config: Translation, folder: Path) -> int | None:
    """Return the optimizer steps of all epochs, by the rows of local files; None if these cannot be counted."""
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
    config.put("loss_fn.kl.weight", config.get("beta", 0.0))
    _loss(config, longest)
    _correction(config)
    if config.get("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        config.put("grpo.adv_estimator", {"name": "gdpo"})
    scale = config.get("scale_rewards", "group")
    if scale == "batch":
        config.put("grpo.adv_estimator", {"name": "grpo_batch_std"})
    else:
        config.put("grpo.normalize_rewards", scale in (True, "group"))
    if config.get("sync_ref_model"):
        config.put("grpo.reference_sync_period", config.get("ref_model_sync_steps", 512))
        config.put("grpo.reference_mixup_alpha", config.get("ref_model_mixup_alpha", 0.6))
    _sampling(config)
    if config.get("top_entropy_quantile") == 1:
        config.unneeded("top_entropy_quantile", "1 trains on all tokens")
    if "max_prompt_length" not in config.values:
        config.notes.append(
            f"data.max_input_seq_length: {prompt}, as TRL has no limit. Longer prompts are left out; set it to the "
            "longest prompt of your data"
        )
    config.notes.append(_reward_note(config.get("reward_funcs") or [], config.get("reward_weights")))


def _sampling(config: Translation) -> None:
    """Set what a generator does beside the lengths of completions."""
    if (top_k := config.get("top_k")) and top_k > 0:  # 0 and -1 sample from all tokens
        config.put("policy.generation.top_k", top_k)
    if config.get("vllm_mode") == "server":
        config.put("policy.generation.colocated.enabled", False)
        config.put("policy.generation.colocated.resources.gpus_per_node", 1)
        config.put("cluster.gpus_per_node", config.written("cluster.gpus_per_node") + 1)
        config.notes.append(
            "policy.generation.colocated.resources: one GPU generates; give it as many as your server has"
        )


def _online_dpo(config: Translation) -> None:
    """Answer the fields of OnlineDPOConfig, whose trainer compares two completions of each prompt."""
    config.put("online_dpo.num_generations_per_prompt", 2)
    longest, new = config.get("max_length", 512), config.get("max_new_tokens", 64)
    if longest > new:
        config.put("data.max_input_seq_length", longest - new)
    else:
        config.refuse("max_length", f"rows of {longest} tokens without room for prompts (max_new_tokens={new})")
    kind = config.get("loss_type", "sigmoid")
    name = config.table.tables["online preferences"].get(kind)
    if name is None:
        config.refuse("loss_type", f"the loss {kind} in online DPO")
    config.compute("loss_type", "online_dpo.loss", {"name": name or "dpo"})
    betas = config.get("beta", 0.1)
    if isinstance(betas, list) and len(betas) != 1:
        config.refuse("beta", f"a penalty that changes by epoch (beta={betas})")
        betas = betas[:1] or [0.1]
    beta = betas[0] if isinstance(betas, list) else betas
    config.compute("beta", "online_dpo.reference_policy_kl_penalty", beta)
    if config.get("missing_eos_penalty"):
        remedy = "Subtract it in a reward function, or set online_dpo.reward_shaping"
        what = "a penalty for completions without an end (missing_eos_penalty)"
        config.refuse("missing_eos_penalty", f"{what}. {remedy}")
    _sampling(config)
    model = config.get("reward_model_path")
    rewards = [model] if model else config.get("reward_funcs") or []
    config.notes.append(_reward_note(rewards, config.get("reward_weights")))


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
    elif kind in config.table.tables["losses"]:
        surrogate, aggregation = config.table.tables["losses"][kind]
        divided = {"name": aggregation, "divisor": longest}
        config.put("loss_fn.aggregation", divided if kind == "dr_grpo" else aggregation)
    else:
        config.refuse("loss_type", f"the loss {kind} in GRPO")
    low, high = config.get("epsilon", 0.2), config.get("epsilon_high", config.get("epsilon", 0.2))
    if surrogate == "cispo":
        # TRL bounds the ratio itself, by epsilon_high, and not from below
        low, high = 1.0, high - 1.0
        if high < 0:
            config.refuse("epsilon_high", "ratios bounded below 1 in the loss cispo (epsilon_high)")
            high = 4.0
    names = config.table.tables["surrogates"]
    settings = {setting: config.get(key) for key, setting in names.items()}
    keys = {"epsilon": "clip_low", "epsilon_high": "clip_high", "delta": "dual_clip", **names}
    clips = {"clip_low": low, "clip_high": high, "dual_clip": config.get("delta")}
    put_surrogate(config, surrogate, keys, **clips, **settings)
    if config.get("beta") and config.get("use_bias_correction_kl", True):
        config.put("loss_fn.kl.unbiased", True)
    if weight := config.get("entropy_coef", 0.0):
        config.put("loss_fn.entropy_bonus.weight", weight)


def _correction(config: Translation) -> None:
    """Set the correction for the samples of vLLM, which TRL makes by default."""
    prefix = "vllm_importance_sampling"
    if not config.get(f"{prefix}_correction", bool(config.get("use_vllm"))):
        return
    # releases with a cap truncate the ratios of tokens
    cap, low = config.get(f"{prefix}_cap"), config.get(f"{prefix}_clip_min")
    kind = config.get(f"{prefix}_mode", "sequence_mask" if cap is None else "token_truncate")
    section = dict(config.table.tables["corrections"].get(kind, {}))
    if not section:
        config.refuse(f"{prefix}_mode", f"the importance correction {kind}")
    section["high"] = config.get(f"{prefix}_clip_max", 3.0) if cap is None else cap
    config.put("loss_fn.importance", section if low is None else {**section, "low": low})


def _sft(config: Translation) -> None:
    config.put("policy.sequence_packing.enabled", bool(config.get("packing")))
    switches = ("assistant_only_loss", "completion_only_loss")
    for key in switches:
        if config.get(key) is False:
            config.refuse(key, "learning the prompt too (assistant_only_loss, completion_only_loss: false)")
    if all(config.get(key) is None for key in switches):
        config.notes.append(
            "sft.learn: only the assistant's text is trained; TRL learns whole conversations unless told otherwise"
        )
    config.notes.append("data.overlong: skip leaves out rows that TRL cuts at max_length")


def _saving(config: Translation) -> None:
    strategy = config.get("save_strategy", "steps")
    is_at_end = strategy in ("no", "epoch")
    config.put("checkpointing.save_period", 0 if is_at_end else _whole(config.get("save_steps", 500)))
    if strategy == "epoch":
        config.notes.append("checkpointing.save_period: 0 saves at the end, as the steps of an epoch are not known")
    if config.get("load_best_model_at_end") or config.get("metric_for_best_model"):
        has_rewards = config.algorithm in ("grpo", "online_dpo")
        config.put("checkpointing.metric_name", "val:reward" if has_rewards else "val:loss")
        if not has_rewards:
            config.put("checkpointing.higher_is_better", False)
    reported = config.get("report_to", [])
    several = [] if reported in ("none", "all") else reported if isinstance(reported, list) else [reported]
    for tracker in _TRACKERS:
        config.put(f"logger.{tracker}_enabled", tracker in several)
    other = [each for each in several if each not in (*_TRACKERS, "none")]
    config.follows(["report_to"], f"logger.*_enabled{f'; {other} is not offered' if other else ''}")
    if config.get("wandb_project"):
        config.rename("wandb_project", "logger.wandb.project")
    name = config.get("hub_model_id", config.get("push_to_hub_model_id"))
    if config.get("push_to_hub") and "/" in str(name):
        config.put("checkpointing.push_to", f"hf://{name}")
        if config.get("hub_strategy", "every_save") != "end":
            config.put("checkpointing.push_checkpoints", "every")
        if config.get("hub_private_repo") is False:
            config.put("checkpointing.push_private", False)
    elif config.get("push_to_hub"):
        config.notes.append("checkpointing.push_to: put hf://OWNER/NAME, as the file does not name the owner")


def _whole(steps: float) -> int:
    """Return a number of steps; a share of the run, whose length is not known here, is one step."""
    return int(steps) if steps >= 1 else 1
