"""Calls of TRL, transformers, datasets and peft that are known, and what each becomes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rl_launch.foreign.translation import Fate
from rl_launch.foreign.trl.reading import Call, Reading
from rl_launch.foreign.trl.values import Data, Thing, is_constant, plain, role_of, touched, unknown

ALGORITHMS = {"GRPO": "grpo", "SFT": "sft", "DPO": "dpo", "KTO": "dpo", "ORPO": "dpo", "CPO": "dpo", "Reward": "rm"}
"""Algorithms by the first part of the names of TRL's trainers and of their classes of arguments."""

OTHERS = {
    "AsyncGRPO": "write a recipe of algorithm grpo with grpo.async_grpo.enabled=true",
    "BCO": "its loss is not offered. KTO learns from the same rows: dpo.loss=kto",
    "Distillation": "write a recipe of algorithm distillation",
    "GKD": "write a recipe of algorithm distillation",
    "IterativeSFT": "write a recipe of algorithm sft",
    "MiniLLM": "write a recipe of algorithm distillation",
    "NashMD": "its loss is not offered",
    "OnlineDPO": "its loss is not offered. grpo learns from a reward model: env.reward_model",
    "PPO": "write a recipe of algorithm ppo",
    "PPOv2": "write a recipe of algorithm ppo",
    "PRM": "its model is not offered",
    "RLOO": "write a recipe of algorithm grpo with grpo.adv_estimator=rloo",
    "RLOOv2": "write a recipe of algorithm grpo with grpo.adv_estimator=rloo",
    "XPO": "its loss is not offered",
}
"""Trainers of TRL that are not imported, and what to do."""

_FILE_FORMATS = ("arrow", "csv", "json", "pandas", "parquet", "text")
_READ_FORMATS = ("csv", "json", "parquet", "arrow")
_LOCAL = ("/", "./", "../", "~")
_ADAPTERS = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "exclude_modules": "lora_exclude_modules",
    **{name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
}
"""Arguments of peft's `LoraConfig` by the names of TRL's command line."""
_PLAIN_ADAPTERS: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True,),
    "loftq_config": ({},),
}
"""Arguments of adapters, with the values that have no effect, in addition to None and False."""
_UNUSED_ADAPTERS = (
    "base_model_name_or_path", "max_seq_length", "random_state", "task_type", "use_gradient_checkpointing"
)  # fmt: skip
_LOADING = (
    "cache_dir", "device_map", "fast_inference", "force_download", "gpu_memory_utilization", "local_files_only",
    "low_cpu_mem_usage", "max_memory", "offload_folder", "padding_side", "token", "trust_remote_code", "use_auth_token",
    "num_labels", "use_cache", "use_fast", "use_safetensors", "add_bos_token", "add_eos_token",
)  # fmt: skip
"""Arguments of `from_pretrained` that do not change which model is trained."""
_TAKEN = (
    "pretrained_model_name_or_path",
    "model_name",
    "torch_dtype",
    "dtype",
    "attn_implementation",
    "max_seq_length",
)
_QUANTIZED = ("quantization_config", "load_in_4bit", "load_in_8bit")
_VISION = ("ImageTextToText", "Vision2Seq", "ForConditionalGeneration", "FastVisionModel", "AutoModelForMultimodalLM")
_OF_MODELS = ("Model", "ForCausalLM", "ForSequenceClassification", "Generation")
_TRAINER_ARGUMENTS: Mapping[str, str] = {
    "GRPO": "model reward_funcs args train_dataset eval_dataset processing_class",
    "DPO": "model ref_model args data_collator train_dataset eval_dataset processing_class",
    "KTO": "model ref_model args train_dataset eval_dataset processing_class",
}
"""Positional arguments of trainers."""
_OTHER_ARGUMENTS = "model args data_collator train_dataset eval_dataset processing_class"
_SCRIPT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ScriptArguments": {
        "dataset_config": None,
        "dataset_train_split": "train",
        "dataset_test_split": "test",
        "dataset_streaming": False,
    },
    "ModelConfig": {"use_peft": False, "load_in_4bit": False, "load_in_8bit": False, "model_revision": "main"},
}
"""Defaults of TRL's classes of script arguments."""

_FEWER = "rows that are chosen by the script. Write the rows you want into a file, and set data_path"
_QUANTIZATION = "4-bit or 8-bit weights during training"
_VOCABULARY = "a changed vocabulary ({}). Save the model, and train that"
_UNREAD = "arguments in ** that are not read"
_LOOKS = ("__len__", "to_pandas", "iter", "unique", "to_list", "to_json", "save_to_disk", "to_parquet", "push_to_hub")
_COLUMNS_ONLY = (
    "cast", "cast_column", "remove_columns", "select_columns", "with_format", "set_format", "to_iterable_dataset"
)  # fmt: skip
_UNREAD_DATA = Thing("", touches=frozenset({"data"}))

Rows = tuple[tuple[str, Fate, str], ...]


def _by_table(reading: Reading, rows: Rows, name: str) -> bool:
    """Say what the first row with a name has; return False if there is none. `*` stands for all other names."""
    for names, fate, text in rows:
        if name in names.split() or names == "*":
            reading.say(fate, text.format(name))
            return True
    return False


# Datasets


def _load_dataset(reading: Reading, call: Call) -> Any:
    call = call.named("path", "name", "data_dir", "data_files", "split")
    given = call.given
    if call.extra or not is_constant({key: given.get(key) for key in ("path", "name", "data_files", "split")}):
        reading.say(Fate.CHECK, "the dataset is computed by the script. Set data.train in the recipe")
        return unknown(*call.values, _UNREAD_DATA)
    path, split, files = str(given.get("path")), given.get("split"), given.get("data_files")
    for key in ("data_dir", "revision"):
        if given.get(key) is not None:
            reading.say(Fate.CHECK, f"{key} of the dataset is not converted", line=call.line(key))
    if path in _FILE_FORMATS and files is not None:
        if path not in _READ_FORMATS:
            text = f"files of the format {path} are not read here. Convert them to JSON Lines or Parquet"
            reading.say(Fate.CHECK, text)
        by_split = files if isinstance(files, dict) else {"train": files}
        sources = {name: _of_files(plain(each)) for name, each in by_split.items()}
    else:
        if files is not None:
            text = "data_files of a dataset of the hub are not converted"
            reading.say(Fate.CHECK, text, line=call.line("data_files"))
        is_local = path.startswith(_LOCAL)
        settings: dict[str, Any] = {"data_path" if is_local else "dataset_name": path}
        if given.get("name") is not None:
            settings["subset"] = plain(given["name"])
        if given.get("streaming") is True and not is_local:
            settings["streaming"] = True
        sources = {"": Data((settings,))}
    found = Thing("splits", path, parts=dict(sources))
    reading.say(Fate.CONVERTED, "data.train or data.validation, where it is used")
    if isinstance(split, list):
        return [_split(reading, found, each) for each in split]
    return found if split is None else _split(reading, found, plain(split))


def _of_files(files: Any) -> Data:
    return Data(tuple({"data_path": each} for each in (files if isinstance(files, list) else [files])))


def _split(reading: Reading, owner: Thing, name: Any) -> Any:
    """Return a split of a dataset that has several."""
    if not isinstance(name, str):
        return unknown(owner, name)
    base = name.partition("[")[0]
    if name in owner.parts:
        return owner.parts[name]
    if base in owner.parts:
        reading.say(Fate.CHECK, f"the part {name} of a file. Write these rows into a file of their own")
        return owner.parts[base]
    if "" in owner.parts:
        return owner.parts[""].with_settings(split=name)
    reading.say(Fate.CHECK, f"the split {name} is not known")
    return unknown(owner)


def _of_splits(reading: Reading, owner: Thing, call: Call) -> Any:
    if call.name in ("get", "__getitem__"):
        return _split(reading, owner, call.first)
    if call.name in ("keys", "values", "items", *_LOOKS):
        return unknown(owner)
    made = {name: _of_data(reading, data, call) for name, data in owner.parts.items() if isinstance(data, Data)}
    if len(made) < len(owner.parts) or any(not isinstance(each, Data) for each in made.values()):
        return next(iter(made.values()), unknown(owner))
    return Thing("splits", owner.name, parts=made)


def _of_data(reading: Reading, data: Data, call: Call) -> Any:
    name = call.name
    if name in _CHANGES:
        return _CHANGES[name](reading, data, call)
    if name in ("flatten_indices", "shuffle", "sort"):
        reading.say(Fate.CONVERTED, "data.shuffle, which draws another order")
        return replace(data, keeps_order=False)
    if name in [
        "cast",
        "cast_column",
        "remove_columns",
        "select_columns",
        "with_format",
        "set_format",
        "to_iterable_dataset",
    ]:
        reading.say(Fate.UNRELATED, "columns that are not used do not change the training")
        return data
    if name == "map":
        function = next((each.name for each in call.values if isinstance(each, Thing)), "") or "a function"
        where = "processor: FILE.py:FUNCTION of the dataset converts rows"
        reading.say(Fate.CHECK, f"rows are changed by {function}, which is not converted; {where}")
        return data
    if name in ("filter", "shard", "class_encode_column", "repeat"):
        return _fewer(reading, data)
    if name not in _LOOKS:
        reading.say(Fate.CHECK, f"{name} of a dataset is not read")
    return unknown(data)


def _fewer(reading: Reading, data: Data) -> Data:
    reading.say(Fate.CHECK, _FEWER)
    return replace(data, keeps_order=False)


def _train_test_split(reading: Reading, data: Data, call: Call) -> Any:
    call = call.named("test_size", "train_size")
    size, rest = call.given.get("test_size"), call.given.get("train_size")
    if isinstance(rest, int | float) and size is None:
        size = round(1 - rest, 9) if rest < 1 else None
    if size is None and rest is None:
        size = 0.25
    if not isinstance(size, int | float) or data.held_out is not None:
        reading.say(Fate.CHECK, "the size of the split is computed. Set split_validation_size of data.train")
        size = 0.1 if data.held_out is None else data.held_out
    if isinstance(size, float) and size > 1:
        size = round(size)
    reading.say(Fate.CONVERTED, f"data.train.split_validation_size: {size}, which chooses other rows than TRL")
    whole = replace(data, held_out=size, keeps_order=False)
    return Thing("splits", "train_test_split", parts={"train": whole, "test": replace(whole, is_held_out=True)})


def _sliced(reading: Reading, data: Data, call: Call) -> Any:
    rows = next(iter(call.values), None)
    start, stop = 0, None
    only = data.settings[0] if len(data.settings) == 1 else {}
    split = only.get("split", "")
    # a slice of rows is a slice of the split only as long as the rows are those of the split, in their order
    is_slice = data.keeps_order and data.held_out is None and "dataset_name" in only and split and "[" not in split
    if call.name == "select" and isinstance(rows, range) and rows.step == 1:
        start, stop = rows.start, rows.stop
    elif call.name != "select" and isinstance(rows, int):
        start, stop = (0, rows) if call.name == "take" else (rows, None)
    else:
        is_slice = False
    if not is_slice:
        return _fewer(reading, data)
    split = f"{split}[{start or ''}:{'' if stop is None else stop}]"
    reading.say(Fate.CONVERTED, f"split: {split}")
    return data.with_settings(split=split)


def _renamed(reading: Reading, data: Data, call: Call) -> Any:
    pairs = call.first if call.name == "rename_columns" else None
    if pairs is None:
        named = call.named("original_column_name", "new_column_name").given
        pairs = {named.get("original_column_name"): named.get("new_column_name")}
    if not isinstance(pairs, dict) or not is_constant(pairs) or len(data.settings) != 1:
        reading.say(Fate.CHECK, "columns are renamed. Set input_key, output_key or columns of the dataset")
        return data
    columns = {**data.settings[0].get("columns", {}), **{new: old for old, new in pairs.items()}}
    reading.say(Fate.CONVERTED, "input_key, output_key or columns of the dataset")
    return data.with_settings(columns=columns)


_CHANGES = {
    "train_test_split": _train_test_split,
    **dict.fromkeys(("select", "take", "skip"), _sliced),
    **dict.fromkeys(("rename_column", "rename_columns"), _renamed),
}


def _concatenated(reading: Reading, call: Call) -> Any:
    several = call.first if call.positional else call.given.get("dsets", call.given.get("datasets"))
    if not isinstance(several, list) or not all(isinstance(each, Data) for each in several):
        return unknown(several, _UNREAD_DATA)
    if any(each.held_out is not None for each in several):
        reading.say(Fate.CHECK, "a mixture of datasets that are split. Set data.train in the recipe")
        return several[0]
    settings = [dict(each) for data in several for each in data.settings]
    if call.name == "interleave_datasets":
        shares = call.given.get("probabilities") or [1.0] * len(settings)
        if isinstance(shares, list) and is_constant(shares) and len(shares) == len(settings):
            settings = [{**each, "weight": share} for each, share in zip(settings, shares, strict=True)]
        else:
            reading.say(Fate.CHECK, "the shares of the datasets are computed. Set weight of each in data.train")
    reading.say(Fate.CONVERTED, "data.train, a list of datasets")
    return Data(tuple(settings), keeps_order=False)


def _in_memory(reading: Reading, call: Call) -> Any:
    """Return rows that the script makes, or reads with a function of `datasets`."""
    paths = call.first if call.positional else call.given.get("path_or_paths")
    if call.name in ("from_json", "from_csv", "from_parquet", "load_from_disk") and is_constant(paths) and paths:
        reading.say(Fate.CONVERTED, "data_path of the dataset")
        found = _of_files(paths)
        return Thing("splits", str(paths), parts={"": found}) if call.name == "load_from_disk" else found
    text = "rows that the script makes. Write them into a JSON Lines file, or pass the Dataset to rl_launch.train"
    reading.say(Fate.CHECK, text)
    return Data(({"dataset_name": "OWNER/DATASET"},), keeps_order=False)


def _dataset_dict(reading: Reading, call: Call) -> Any:
    given = call.first if call.positional else call.given
    if not isinstance(given, dict) or not all(isinstance(each, Data) for each in given.values()):
        return unknown(given)
    reading.say(Fate.CONVERTED, "data.train or data.validation, where it is used")
    return Thing("splits", "DatasetDict", parts=dict(given))


def _get_dataset(reading: Reading, call: Call) -> Any:
    reading.say(Fate.CHECK, "the mixture in `datasets` of the arguments. Set data.train in the recipe")
    return replace(_UNREAD_DATA, lines=(call.node.lineno,))


# Models, tokenizers and adapters


def _from_pretrained(reading: Reading, call: Call) -> Any:
    owner = reading.dotted(call.node.func).rpartition(".from_pretrained")[0].rpartition(".")[2]
    if owner in ("PeftModel", "PeftModelForCausalLM"):
        return _peft_model(reading, call)
    is_tokenizer = "Tokenizer" in owner or "Processor" in owner
    if not is_tokenizer and not any(word in owner for word in _OF_MODELS):
        return unknown(*call.values, name=owner)
    call = call.named("pretrained_model_name_or_path")
    name = call.given.get("pretrained_model_name_or_path")
    if is_tokenizer:
        reading.say(Fate.CONVERTED, "policy.tokenizer")
        _loading(reading, call, _TAKEN[:1], ())
        return Thing("tokenizer", owner, parts={"name": name})
    name = call.given.get("pretrained_model_name_or_path", call.given.get("model_name"))
    parts: dict[str, Any] = {"name": name, "is_visual": any(word in owner for word in _VISION)}
    for key, field in (("torch_dtype", "dtype"), ("dtype", "dtype"), ("attn_implementation", "attn_implementation")):
        if call.given.get(key) is not None:
            parts[field] = call.given[key]
    reading.say(Fate.CONVERTED, "policy.model_name, where it is trained")
    _loading(reading, call, _TAKEN, _QUANTIZED)
    model = Thing("model", owner, parts=parts)
    return [model, Thing("tokenizer", owner, parts={"name": name})] if owner.startswith("Fast") else model


def _loading(reading: Reading, call: Call, taken: tuple[str, ...], quantized: tuple[str, ...]) -> None:
    """Account for the further arguments of `from_pretrained`."""
    for key, value in call.given.items():
        is_unset = value is None or value is False or (key == "revision" and value == "main")
        if key in taken or key in _LOADING or is_unset:
            continue
        if key in quantized:
            reading.say(Fate.REFUSED, _QUANTIZATION, line=call.line(key))
        else:
            text = f"{key} of from_pretrained is not converted{reading.computed(value)}"
            reading.say(Fate.CHECK, text, line=call.line(key))
    if call.extra:
        reading.say(Fate.CHECK, _UNREAD)


def _peft_model(reading: Reading, call: Call) -> Any:
    call = call.named("model", "model_id")
    model, adapter = call.given.get("model"), call.given.get("model_id")
    if call.given.get("is_trainable") is True and is_constant(adapter) and isinstance(model, Thing):
        reading.say(Fate.CONVERTED, "policy.lora_cfg.adapter")
        return replace(model, parts={**model.parts, "adapter": adapter})
    reading.say(Fate.REFUSED, "a model with adapters that are not trained. Merge them, and set policy.model_name")
    return model


def _lora(reading: Reading, call: Call) -> Any:
    parts: dict[str, Any] = {}
    for key, value in call.named("task_type").given.items():
        if key in _ADAPTERS:
            parts[_ADAPTERS[key]] = value
        elif value not in (None, False, *_PLAIN_ADAPTERS.get(key, ())) and key not in _UNUSED_ADAPTERS:
            reading.say(Fate.REFUSED, f"the setting {key} of adapters", line=call.line(key))
    if call.extra:
        reading.say(Fate.CHECK, _UNREAD)
    reading.say(Fate.CONVERTED, "policy.lora_cfg")
    return Thing("adapters", "LoraConfig", parts=parts)


def _get_peft_model(reading: Reading, call: Call) -> Any:
    call = call.named("model", "peft_config")
    model = call.given.pop("model", None)
    adapters = call.given.pop("peft_config", None) or _lora(reading, replace(call, positional=[]))
    reading.say(Fate.CONVERTED, "policy.lora_cfg")
    if not isinstance(model, Thing):
        return unknown(model, adapters)
    return replace(model, parts={**model.parts, "adapters": adapters})


def _quantized(reading: Reading, call: Call) -> Any:
    reading.say(Fate.REFUSED, _QUANTIZATION)
    return Thing("quantization", call.name)


def _prepared(reading: Reading, call: Call) -> Any:
    reading.say(Fate.UNRELATED, "gradients are configured automatically")
    return call.first if call.positional else unknown()


def _of_model_config(reading: Reading, call: Call) -> Any:
    """Call one of TRL's helpers that read the arguments of the model."""
    flags = call.first.parts if isinstance(call.first, Thing) else {}
    if call.name == "get_peft_config":
        given = {key: flags[key] for key in flags if key.startswith(("lora_", "use_"))}
        reading.say(Fate.CONVERTED, "policy.lora_cfg")
        return Thing("adapters", call.name, parts=given) if flags.get("use_peft") else None
    if flags.get("load_in_4bit") or flags.get("load_in_8bit"):
        return _quantized(reading, call)
    reading.say(Fate.UNRELATED, "no weights are quantised")
    return None


def _vocabulary(reading: Reading, call: Call) -> Any:
    text = f"a changed vocabulary or chat template ({call.name}). Save the model, and train that"
    reading.say(Fate.REFUSED, text)
    return list(call.positional) if call.name == "setup_chat_format" else unknown(*call.positional)


_AUTOMATIC = "to cuda train eval compile enable_input_require_grads gradient_checkpointing_disable"
_MODEL_READS = (
    "print_trainable_parameters num_parameters parameters named_parameters modules named_modules children "
    "get_input_embeddings get_output_embeddings state_dict generate for_training save_pretrained push_to_hub "
    "get_memory_footprint get_nb_trainable_parameters"
)
_MODEL_METHODS: Rows = (
    ("gradient_checkpointing_enable", Fate.CONVERTED, "policy.dtensor_cfg.recompute"),
    ("resize_token_embeddings add_tokens add_special_tokens", Fate.REFUSED, _VOCABULARY),
    (_AUTOMATIC, Fate.UNRELATED, "devices and gradients are configured automatically"),
    (_MODEL_READS, Fate.UNRELATED, "it reads the model"),
    ("*", Fate.CHECK, "{} of the model is not read"),
)


def _of_model(reading: Reading, model: Thing, call: Call) -> Any:
    name = call.name
    if name == "requires_grad_":
        if (call.first if call.positional else True) is not True:
            reading.say(Fate.REFUSED, "training only some of the parameters (requires_grad)")
        return model
    _by_table(reading, _MODEL_METHODS, name)
    if name == "gradient_checkpointing_enable":
        model.parts["gradient_checkpointing"] = True
    if name in _AUTOMATIC.split():
        return model
    if name in _MODEL_READS.split():
        return unknown(model)
    return None if any(name in names.split() for names, _, _ in _MODEL_METHODS) else replace(model)


def _of_tokenizer(reading: Reading, tokenizer: Thing, call: Call) -> Any:
    first = next(iter(call.values), None)
    if call.name in ("add_tokens", "add_special_tokens"):
        if isinstance(first, dict) and set(first) <= {"pad_token"}:
            reading.say(Fate.CHECK, "a padding token. It is not trained, but it must not enlarge the vocabulary")
        else:
            reading.say(Fate.REFUSED, _VOCABULARY.format(call.name))
        return unknown()
    if call.name in ("save_pretrained", "push_to_hub"):
        reading.say(Fate.UNRELATED, "every checkpoint contains the tokenizer")
    return unknown(*call.values)


# Attributes


def _set_tokenizer(reading: Reading, tokenizer: Thing, name: str, value: Any) -> None:
    if name == "chat_template" and isinstance(value, str):
        tokenizer.parts["chat_template"] = value
        reading.say(Fate.CONVERTED, "policy.tokenizer.chat_template")
    elif name == "chat_template":
        where = reading.computed(value)
        reading.say(Fate.CHECK, f"the script computes the chat template{where}. Set policy.tokenizer.chat_template")
    elif name in ("pad_token", "pad_token_id", "padding_side", "truncation_side", "model_max_length"):
        reading.say(Fate.UNRELATED, "rows are not padded with tokens of the vocabulary")
    else:
        reading.say(Fate.CHECK, f"{name} of the tokenizer is not converted")


def _set_adapters(reading: Reading, adapters: Thing, name: str, value: Any) -> None:
    if name in _ADAPTERS:
        adapters.parts[_ADAPTERS[name]] = value
        reading.say(Fate.CONVERTED, "policy.lora_cfg")
    else:
        reading.say(Fate.CHECK, f"{name} of the adapters is not converted")


def _set_model(reading: Reading, model: Thing, name: str, value: Any) -> None:
    if name in ("use_cache", "pad_token_id", "pretraining_tp") or model.name.endswith("generation_config"):
        reading.say(Fate.UNRELATED, "it does not change the training")
    elif model.name.endswith("config"):
        reading.say(Fate.CHECK, f"{name} of the model's config. Set policy.hf_config_overrides if it matters")
    else:
        reading.say(Fate.CHECK, f"changes {name} of the model")


def _set_trainer(reading: Reading, trainer: Thing, name: str, value: Any) -> None:
    if name in ("train_dataset", "eval_dataset"):
        trainer.parts[name] = value
        reading.say(Fate.CONVERTED, f"data.{'train' if name == 'train_dataset' else 'validation'}")
    else:
        reading.say(Fate.REFUSED, f"changes of the trainer (trainer.{name})")


def _set_config(reading: Reading, config: Thing, name: str, value: Any) -> None:
    config.parts[name] = value
    reading.say(Fate.CONVERTED, name)


# Arguments and trainers


def stem_of(name: str) -> str:
    """Return the first part of the name of a trainer or of its class of arguments."""
    return name.removesuffix("Config").removesuffix("Trainer")


def _config(reading: Reading, call: Call) -> Any:
    config = Thing("config", call.name, parts=dict(call.named("output_dir").given), node=call.node)
    if call.extra:
        reading.say(Fate.CHECK, f"{_UNREAD}. Set their keys in the recipe")
    reading.say(Fate.CONVERTED, "the arguments of the trainer")
    reading.configs.append(config)
    return config


def _trainer(reading: Reading, call: Call) -> Any:
    call = call.named(*_TRAINER_ARGUMENTS.get(stem_of(call.name), _OTHER_ARGUMENTS).split())
    parts = dict(call.given)
    if "tokenizer" in parts:
        parts.setdefault("processing_class", parts.pop("tokenizer"))
    trainer = Thing("trainer", call.name, parts=parts, node=call)
    if call.extra:
        reading.say(Fate.CHECK, _UNREAD)
    reading.say(Fate.CONVERTED, "the trainer")
    reading.trainers.append(trainer)
    return trainer


def _other_trainer(reading: Reading, call: Call) -> Any:
    reading.others[call.name] = call.node.lineno
    return Thing("", call.name, touches=touched(*call.values))


_TRAINER_METHODS: Rows = (
    ("push_to_hub", Fate.UNRELATED, "checkpointing.push_to pushes checkpoints"),
    ("get_train_dataloader get_eval_dataloader num_examples", Fate.UNRELATED, "it reports or saves"),
    ("*", Fate.CHECK, "{} is not read"),
)
_REPORTS = ("save", "log", "evaluate", "predict", "create_model_card", "is_", "print", "end")
"""Beginnings of the names of a trainer's methods that report or save."""


def _of_trainer(reading: Reading, trainer: Thing, call: Call) -> Any:
    name = call.name
    if name == "train" and reading.is_trained:
        reading.is_trained = False
        reading.say(Fate.REFUSED, "training more than once in a script")
    elif name == "train" and isinstance(next(iter(call.named("resume_from_checkpoint").given.values()), None), str):
        text = "a checkpoint of TRL is not resumed. Set policy.model_name to its folder for its weights"
        reading.say(Fate.CHECK, text)
    elif name == "train":
        reading.say(Fate.CONVERTED, "rl train, which resumes a run that was interrupted")
    elif name.endswith("_callback"):
        shown = ast.unparse(call.node.args[0]) if call.node.args else name
        reading.say(Fate.CHECK, f"{shown} is not converted; see `callbacks` for your own")
    elif name.startswith(_REPORTS):
        reading.say(Fate.UNRELATED, "it reports or saves")
    else:
        _by_table(reading, _TRAINER_METHODS, name)
    reading.is_trained = reading.is_trained or name == "train"
    return unknown()


def _of_config(reading: Reading, config: Thing, call: Call) -> Any:
    if call.name.startswith(("to_", "get_")):
        return unknown()
    reading.say(Fate.CHECK, f"{call.name} of the arguments is not read")
    return unknown(config)


def _setattr(reading: Reading, call: Call) -> Any:
    if len(call.positional) == 3 and isinstance(call.positional[1], str):
        reading.set_attribute(*call.positional)
    else:
        reading.say(Fate.CHECK, "sets an attribute whose name is computed")
    return None


def _replaced(reading: Reading, call: Call) -> Any:
    """Call `dataclasses.replace` or `copy.deepcopy`."""
    first = call.first
    if role_of(first) not in ("config", "options", "model"):
        return unknown(*call.values)
    found = replace(first, parts={**first.parts, **call.given})
    if first.role == "config":
        reading.configs = [each for each in reading.configs if each is not first] + [found]
    reading.say(Fate.CONVERTED, "a copy with other values")
    return found


def _partial(reading: Reading, call: Call) -> Any:
    if not isinstance(call.first, Thing):
        return unknown(*call.values)
    reading.say(Fate.UNRELATED, "it is read where it is called")
    bound = replace(call, positional=call.positional[1:])
    return Thing("partial", call.first.name, parts={"function": call.first, "call": bound})


def _seed(reading: Reading, call: Call) -> Any:
    reading.say(Fate.UNRELATED, "the seed of a run is the seed of its algorithm, such as grpo.seed")
    return None


# Command lines


def _parser(reading: Reading, call: Call) -> Any:
    classes = call.first if call.positional else call.given.get("dataclass_types", [])
    several = list(classes) if isinstance(classes, list | tuple) else [classes]
    reading.say(Fate.UNRELATED, "the parser of the command line")
    return Thing("parser", call.name, parts={"classes": several, "options": {}})


def _of_parser(reading: Reading, parser: Thing, call: Call) -> Any:
    name, given = call.name, call.given
    if name == "add_argument":
        named = [each for each in call.positional if isinstance(each, str)]
        long = [each for each in named if each.startswith("--")] or named or [""]
        option = str(given.get("dest") or long[0]).lstrip("-").replace("-", "_")
        default = False if given.get("action") == "store_true" else None
        parser.parts["options"][option] = given.get("default", default)
        reading.say(Fate.UNRELATED, "an option of the command line, which is read where it is used")
        return None
    if not name.startswith("parse"):
        reading.say(Fate.UNRELATED, "it prepares the parser")
        return parser if name in ("add_argument_group", "add_mutually_exclusive_group") else None
    if reading.flags is None:
        text = "arguments of the command line. Import the command that starts the script (a .sh file), or the YAML file"
        reading.say(Fate.REFUSED, f"{text} that it reads")
    else:
        reading.say(Fate.CONVERTED, "the arguments of the command")
    flags = dict(reading.flags or {})
    if parser.name == "ArgumentParser":
        found = Thing("options", "args", parts={**parser.parts["options"], **flags})
        return [found, unknown()] if name == "parse_known_args" else found
    classes = parser.parts["classes"]
    own = {name for each in classes if role_of(each) == "class" for name in each.parts}
    return [_parsed(reading, each, flags, own, call) for each in classes]


def _parsed(reading: Reading, kind: Any, flags: dict[str, Any], own: set[str], call: Call) -> Any:
    """Return the object that a parser makes of one of its classes; flags of the script's own classes are not TRL's."""
    if not isinstance(kind, Thing):
        return unknown()
    base = kind.last_name
    if stem_of(base) in ALGORITHMS or base == "TrainingArguments":
        defaults = {key: value for key, value in kind.parts.items() if is_constant(value)}
        given = {key: value for key, value in flags.items() if key not in own or key in kind.parts}
        config = Thing("config", base, parts={**defaults, **given}, node=call.node)
        reading.configs.append(config)
        return config
    known = next((defaults for name, defaults in _SCRIPT_DEFAULTS.items() if base.endswith(name)), {})
    return Thing("options", base, parts={**known, **kind.parts, **flags})


_BY_FUNCTION: Mapping[Callable[[Reading, Call], Any], str] = {
    _config: " ".join(["TrainingArguments", *(f"{stem}Config" for stem in ALGORITHMS)]),
    _trainer: " ".join(f"{stem}Trainer" for stem in ALGORITHMS),
    _other_trainer: " ".join(f"{stem}{suffix}" for stem in OTHERS for suffix in ("Config", "Trainer")),
    _load_dataset: "load_dataset",
    _in_memory: "load_from_disk from_list from_dict from_pandas from_generator from_csv from_json from_parquet "
    "from_text",
    _concatenated: "concatenate_datasets interleave_datasets",
    _dataset_dict: "DatasetDict",
    _get_dataset: "get_dataset",
    _from_pretrained: "from_pretrained",
    _lora: "LoraConfig",
    _get_peft_model: "get_peft_model",
    _of_model_config: "get_peft_config get_quantization_config get_kbit_device_map",
    _quantized: "BitsAndBytesConfig",
    _prepared: "prepare_model_for_kbit_training",
    _vocabulary: "setup_chat_format clone_chat_template get_chat_template",
    _seed: "set_seed manual_seed manual_seed_all seed",
    _setattr: "setattr",
    _partial: "partial",
    _replaced: "replace deepcopy",
    _parser: "TrlParser HfArgumentParser ArgumentParser",
}
CALLS = {name: function for function, names in _BY_FUNCTION.items() for name in names.split()}
"""Functions for calls of functions and classes that are known, by name."""

METHODS: Mapping[str, Callable[[Reading, Any, Call], Any]] = {
    "data": _of_data,
    "splits": _of_splits,
    "model": _of_model,
    "tokenizer": _of_tokenizer,
    "trainer": _of_trainer,
    "config": _of_config,
    "parser": _of_parser,
}
"""Functions for methods, by the role of their object."""

SETTERS: Mapping[str, Callable[[Reading, Any, str, Any], None]] = {
    "adapters": _set_adapters,
    "tokenizer": _set_tokenizer,
    "model": _set_model,
    "trainer": _set_trainer,
    "config": _set_config,
}
"""Functions for assignments to attributes, by the role of the object."""
