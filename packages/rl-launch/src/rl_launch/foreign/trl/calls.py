"""Calls of TRL, transformers, datasets and peft that are known. Most are rows of `scripts.yaml`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from rl_launch.foreign.translation import Fate
from rl_launch.foreign.trl.reading import Call, ScriptReading
from rl_launch.foreign.trl.values import SCRIPTS, Data, Thing, is_constant, plain, role_of, touched, unknown

_FILE_FORMATS = ("arrow", "csv", "json", "pandas", "parquet", "text")
_READ_FORMATS = ("csv", "json", "parquet", "arrow")
_LOCAL = ("/", "./", "../", "~")
_DATASETS = ("train_dataset", "eval_dataset")
QUANTIZED = "4-bit or 8-bit weights of a script. Set policy.lora_cfg.base_quantization (nf4 or int8)"
_UNREAD = "arguments in ** that are not read"
_UNREAD_DATA = Thing("", touches=frozenset({"data"}))


def stem_of(name: str) -> str:
    """Return the first part of the name of a trainer or of its class of arguments."""
    return name.removesuffix("Config").removesuffix("Trainer")


def _row(section: str, role: str, name: str) -> list[Any]:
    """Return the first row of a table whose key has a name, or a beginning of it with `*`."""
    rows = SCRIPTS[section][role].items()
    words = ((word, row) for names, row in rows for word in names.split())
    found: list[Any] = next(row for word, row in words if fnmatchcase(name, word))
    return found


def _answered(reading: ScriptReading, row: list[Any], owner: Any, call: Call) -> Any:
    """Say what a row has about a call, and return its result."""
    fate, text, result = row
    if fate is not None:
        function = next((each.name for each in call.values if isinstance(each, Thing)), "") or "a function"
        first = ast.unparse(call.node.args[0]) if call.node.args else call.name
        reading.say(Fate[fate.upper()], text.format(name=call.name, function=function, first=first))
    match result:
        case "owner":
            return owner
        case "first":
            return call.first if call.positional else unknown()
        case "all":
            return list(call.positional)
        case "given":
            return unknown(*call.values)
        case "unknown":
            return unknown(owner)
        case "new":
            return unknown()
        case "copy":
            return replace(owner)
        case "reordered":
            return replace(owner, keeps_order=False)
        case "quantization":
            return Thing("quantization", call.name)
        case "data":
            return replace(_UNREAD_DATA, lines=(call.node.lineno,))
    return None


def _by_table(reading: ScriptReading, owner: Any, call: Call) -> Any:
    """Call a method that needs no more than its row."""
    return _answered(reading, _row("methods", role_of(owner), call.name), owner, call)


# Datasets


def _load_dataset(reading: ScriptReading, call: Call) -> Any:
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


def _split(reading: ScriptReading, owner: Thing, name: Any) -> Any:
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


def _of_splits(reading: ScriptReading, owner: Thing, call: Call) -> Any:
    if call.name in ("get", "__getitem__"):
        return _split(reading, owner, call.first)
    if call.name in ("keys", "values", "items", *SCRIPTS["looks"].split()):
        return unknown(owner)
    change = _CHANGES.get(call.name, _by_table)
    made = {name: change(reading, data, call) for name, data in owner.parts.items() if isinstance(data, Data)}
    if len(made) < len(owner.parts) or any(not isinstance(each, Data) for each in made.values()):
        return next(iter(made.values()), unknown(owner))
    return Thing("splits", owner.name, parts=made)


def _train_test_split(reading: ScriptReading, data: Data, call: Call) -> Any:
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


def _sliced(reading: ScriptReading, data: Data, call: Call) -> Any:
    rows = next(iter(call.values), None)
    start, stop = 0, None
    only = data.settings[0] if len(data.settings) == 1 else {}
    split = only.get("split", "")
    # A slice of rows is a slice of the split as long as the rows are the rows of the split, in their order.
    is_slice = data.keeps_order and data.held_out is None and "dataset_name" in only and split and "[" not in split
    if call.name == "select" and isinstance(rows, range) and rows.step == 1:
        start, stop = rows.start, rows.stop
    elif call.name != "select" and isinstance(rows, int):
        start, stop = (0, rows) if call.name == "take" else (rows, None)
    else:
        is_slice = False
    if not is_slice:
        return _by_table(reading, data, replace(call, name="filter"))
    split = f"{split}[{start or ''}:{'' if stop is None else stop}]"
    reading.say(Fate.CONVERTED, f"split: {split}")
    return data.with_settings(split=split)


def _renamed(reading: ScriptReading, data: Data, call: Call) -> Any:
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


def _concatenated(reading: ScriptReading, call: Call) -> Any:
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


def _in_memory(reading: ScriptReading, call: Call) -> Any:
    """Return rows that the script makes, or reads with a function of `datasets`."""
    paths = call.first if call.positional else call.given.get("path_or_paths")
    if call.name in ("from_json", "from_csv", "from_parquet", "load_from_disk") and is_constant(paths) and paths:
        reading.say(Fate.CONVERTED, "data_path of the dataset")
        found = _of_files(paths)
        return Thing("splits", str(paths), parts={"": found}) if call.name == "load_from_disk" else found
    text = "rows that the script makes. Write them into a JSON Lines file, or pass the Dataset to rl_launch.train"
    reading.say(Fate.CHECK, text)
    return Data(({"dataset_name": "OWNER/DATASET"},), keeps_order=False)


def _dataset_dict(reading: ScriptReading, call: Call) -> Any:
    given = call.first if call.positional else call.given
    if not isinstance(given, dict) or not all(isinstance(each, Data) for each in given.values()):
        return unknown(given)
    reading.say(Fate.CONVERTED, "data.train or data.validation, where it is used")
    return Thing("splits", "DatasetDict", parts=dict(given))


# Models, tokenizers and adapters


def _from_pretrained(reading: ScriptReading, call: Call) -> Any:
    owner = reading.dotted(call.node.func).rpartition(".from_pretrained")[0].rpartition(".")[2]
    if owner in ("PeftModel", "PeftModelForCausalLM"):
        return _peft_model(reading, call)
    is_tokenizer = "Tokenizer" in owner or "Processor" in owner
    if not is_tokenizer and not any(word in owner for word in SCRIPTS["models"].split()):
        return unknown(*call.values, name=owner)
    call = call.named("pretrained_model_name_or_path")
    name = call.given.get("pretrained_model_name_or_path")
    if is_tokenizer:
        reading.say(Fate.CONVERTED, "policy.tokenizer")
        _loading(reading, call, "", "")
        return Thing("tokenizer", owner, parts={"name": name})
    name = call.given.get("pretrained_model_name_or_path", call.given.get("model_name"))
    parts: dict[str, Any] = {"name": name, "is_visual": any(word in owner for word in SCRIPTS["vision models"].split())}
    for key, field in (("torch_dtype", "dtype"), ("dtype", "dtype"), ("attn_implementation", "attn_implementation")):
        if call.given.get(key) is not None:
            parts[field] = call.given[key]
    reading.say(Fate.CONVERTED, "policy.model_name, where it is trained")
    _loading(reading, call, SCRIPTS["loading of models"], SCRIPTS["quantized"])
    model = Thing("model", owner, parts=parts)
    return [model, Thing("tokenizer", owner, parts={"name": name})] if owner.startswith("Fast") else model


def _loading(reading: ScriptReading, call: Call, taken: str, quantized: str) -> None:
    """Account for the further arguments of `from_pretrained`."""
    for key, value in call.given.items():
        is_unset = value is None or value is False or (key == "revision" and value == "main")
        if is_unset or key in f"{SCRIPTS['loading']} {taken}".split():
            continue
        if key in quantized.split():
            reading.say(Fate.REFUSED, QUANTIZED, line=call.line(key))
        else:
            text = f"{key} of from_pretrained is not converted{reading.computed(value)}"
            reading.say(Fate.CHECK, text, line=call.line(key))
    if call.extra:
        reading.say(Fate.CHECK, _UNREAD)


def _peft_model(reading: ScriptReading, call: Call) -> Any:
    call = call.named("model", "model_id")
    model, adapter = call.given.get("model"), call.given.get("model_id")
    if call.given.get("is_trainable") is True and is_constant(adapter) and isinstance(model, Thing):
        reading.say(Fate.CONVERTED, "policy.lora_cfg.adapter")
        return replace(model, parts={**model.parts, "adapter": adapter})
    reading.say(Fate.REFUSED, "a model with adapters that are not trained. Merge them, and set policy.model_name")
    return model


def _lora(reading: ScriptReading, call: Call) -> Any:
    parts: dict[str, Any] = {}
    for key, value in call.named("task_type").given.items():
        harmless = (None, False, *SCRIPTS["plain adapters"].get(key, ()))
        if key in SCRIPTS["adapters"]:
            parts[SCRIPTS["adapters"][key]] = value
        elif value not in harmless and key not in SCRIPTS["unused adapters"].split():
            reading.say(Fate.REFUSED, f"the setting {key} of adapters", line=call.line(key))
    if call.extra:
        reading.say(Fate.CHECK, _UNREAD)
    reading.say(Fate.CONVERTED, "policy.lora_cfg")
    return Thing("adapters", "LoraConfig", parts=parts)


def _get_peft_model(reading: ScriptReading, call: Call) -> Any:
    call = call.named("model", "peft_config")
    model = call.given.pop("model", None)
    adapters = call.given.pop("peft_config", None) or _lora(reading, replace(call, positional=[]))
    reading.say(Fate.CONVERTED, "policy.lora_cfg")
    if not isinstance(model, Thing):
        return unknown(model, adapters)
    return replace(model, parts={**model.parts, "adapters": adapters})


def _of_model_config(reading: ScriptReading, call: Call) -> Any:
    """Call one of TRL's helpers that read the arguments of the model."""
    flags = call.first.parts if isinstance(call.first, Thing) else {}
    if call.name == "get_peft_config":
        given = {key: flags[key] for key in flags if key.startswith(("lora_", "use_"))}
        reading.say(Fate.CONVERTED, "policy.lora_cfg")
        return Thing("adapters", call.name, parts=given) if flags.get("use_peft") else None
    if flags.get("load_in_4bit") or flags.get("load_in_8bit"):
        reading.say(Fate.REFUSED, QUANTIZED)
        return Thing("quantization", call.name)
    reading.say(Fate.UNRELATED, "no weights are quantised")
    return None


def _of_model(reading: ScriptReading, model: Thing, call: Call) -> Any:
    if call.name == "requires_grad_":
        if (call.first if call.positional else True) is not True:
            reading.say(Fate.REFUSED, "training only some of the parameters (requires_grad)")
        return model
    if call.name == "gradient_checkpointing_enable":
        model.parts["gradient_checkpointing"] = True
    return _by_table(reading, model, call)


def _of_tokenizer(reading: ScriptReading, tokenizer: Thing, call: Call) -> Any:
    first = next(iter(call.values), None)
    if call.name.startswith("add_") and isinstance(first, dict) and set(first) <= {"pad_token"}:
        reading.say(Fate.CHECK, "a padding token. It is not trained, but it must not enlarge the vocabulary")
        return unknown()
    return _by_table(reading, tokenizer, call)


# Attributes


def set_known(reading: ScriptReading, owner: Thing, name: str, value: Any) -> None:
    """Assign an attribute of a value that training depends on."""
    role, adapters = owner.role, SCRIPTS["adapters"]
    is_template = role == "tokenizer" and name == "chat_template" and isinstance(value, str)
    if is_template or (role == "adapters" and name in adapters):
        owner.parts[adapters[name] if role == "adapters" else name] = value
        reading.say(Fate.CONVERTED, "policy.lora_cfg" if role == "adapters" else "policy.tokenizer.chat_template")
    elif role == "model" and owner.name.endswith("generation_config"):
        reading.say(Fate.UNRELATED, "it does not change the training")
    elif (
        role == "model"
        and owner.name.endswith("config")
        and name not in ("use_cache", "pad_token_id", "pretraining_tp")
    ):
        reading.say(Fate.CHECK, f"{name} of the model's config. Set policy.hf_config_overrides if it matters")
    else:
        fate, text = _row("attributes", role, name)
        if role == "config" or name in _DATASETS:
            owner.parts[name] = value
        where = reading.computed(value) if "{computed}" in text else ""
        reading.say(Fate[fate.upper()], text.format(name=name, computed=where))


# Arguments and trainers


def _config(reading: ScriptReading, call: Call) -> Any:
    config = Thing("config", call.name, parts=dict(call.named("output_dir").given), node=call.node)
    if call.extra:
        reading.say(Fate.CHECK, f"{_UNREAD}. Set their keys in the recipe")
    reading.say(Fate.CONVERTED, "the arguments of the trainer")
    reading.configs.append(config)
    return config


def _trainer(reading: ScriptReading, call: Call) -> Any:
    call = call.named(*SCRIPTS["trainer arguments"][stem_of(call.name)].split())
    parts = dict(call.given)
    if "tokenizer" in parts:
        parts.setdefault("processing_class", parts.pop("tokenizer"))
    trainer = Thing("trainer", call.name, parts=parts, node=call)
    if call.extra:
        reading.say(Fate.CHECK, _UNREAD)
    reading.say(Fate.CONVERTED, "the trainer")
    reading.trainers.append(trainer)
    return trainer


def _other_trainer(reading: ScriptReading, call: Call) -> Any:
    reading.others[call.name] = call.node.lineno
    return Thing("", call.name, touches=touched(*call.values))


def _of_trainer(reading: ScriptReading, trainer: Thing, call: Call) -> Any:
    if call.name != "train":
        return _by_table(reading, trainer, call)
    if reading.is_trained:
        reading.is_trained = False
        reading.say(Fate.REFUSED, "training more than once in a script")
    elif isinstance(call.named("resume_from_checkpoint").given.get("resume_from_checkpoint"), str):
        text = "a checkpoint of TRL is not resumed. Set policy.model_name to its folder for its weights"
        reading.say(Fate.CHECK, text)
    else:
        reading.say(Fate.CONVERTED, "rl train, which resumes a run that was interrupted")
    reading.is_trained = True
    return unknown()


def _setattr(reading: ScriptReading, call: Call) -> Any:
    if len(call.positional) == 3 and isinstance(call.positional[1], str):
        reading.set_attribute(*call.positional)
    else:
        reading.say(Fate.CHECK, "sets an attribute whose name is computed")
    return None


def _replaced(reading: ScriptReading, call: Call) -> Any:
    """Call `dataclasses.replace` or `copy.deepcopy`."""
    first = call.first
    if role_of(first) not in ("config", "options", "model"):
        return unknown(*call.values)
    found = replace(first, parts={**first.parts, **call.given})
    if first.role == "config":
        reading.configs = [each for each in reading.configs if each is not first] + [found]
    reading.say(Fate.CONVERTED, "a copy with other values")
    return found


def _partial(reading: ScriptReading, call: Call) -> Any:
    if not isinstance(call.first, Thing):
        return unknown(*call.values)
    reading.say(Fate.UNRELATED, "it is read where it is called")
    bound = replace(call, positional=call.positional[1:])
    return Thing("partial", call.first.name, parts={"function": call.first, "call": bound})


def _function(reading: ScriptReading, call: Call) -> Any:
    """Call a function that needs no more than its row."""
    row = next(row for names, row in SCRIPTS["functions"].items() if call.name in names.split())
    return _answered(reading, row, None, call)


# Command lines


def _parser(reading: ScriptReading, call: Call) -> Any:
    classes = call.first if call.positional else call.given.get("dataclass_types", [])
    several = list(classes) if isinstance(classes, list | tuple) else [classes]
    reading.say(Fate.UNRELATED, "the parser of the command line")
    return Thing("parser", call.name, parts={"classes": several, "options": {}})


def _of_parser(reading: ScriptReading, parser: Thing, call: Call) -> Any:
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
        return _by_table(reading, parser, call)
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


def _parsed(reading: ScriptReading, kind: Any, flags: dict[str, Any], own: set[str], call: Call) -> Any:
    """Return the object that a parser makes of one of its classes; flags of the script's own classes are not TRL's."""
    if not isinstance(kind, Thing):
        return unknown()
    base = kind.last_name
    if stem_of(base) in SCRIPTS["algorithms"] or base == "TrainingArguments":
        defaults = {key: value for key, value in kind.parts.items() if is_constant(value)}
        given = {key: value for key, value in flags.items() if key not in own or key in kind.parts}
        config = Thing("config", base, parts={**defaults, **given}, node=call.node)
        reading.configs.append(config)
        return config
    known: dict[str, Any] = next(
        (defaults for name, defaults in SCRIPTS["script arguments"].items() if base.endswith(name)), {}
    )
    return Thing("options", base, parts={**known, **kind.parts, **flags})


_BY_FUNCTION: Mapping[Callable[[ScriptReading, Call], Any], str] = {
    _config: " ".join(["TrainingArguments", *(f"{stem}Config" for stem in SCRIPTS["algorithms"])]),
    _trainer: " ".join(f"{stem}Trainer" for stem in SCRIPTS["algorithms"]),
    _other_trainer: " ".join(f"{stem}Config {stem}Trainer" for stem in SCRIPTS["others"]),
    _load_dataset: "load_dataset",
    _in_memory: "load_from_disk from_list from_dict from_pandas from_generator from_csv from_json from_parquet "
    "from_text",
    _concatenated: "concatenate_datasets interleave_datasets",
    _dataset_dict: "DatasetDict",
    _from_pretrained: "from_pretrained",
    _lora: "LoraConfig",
    _get_peft_model: "get_peft_model",
    _of_model_config: "get_peft_config get_quantization_config get_kbit_device_map",
    _setattr: "setattr",
    _partial: "partial",
    _replaced: "replace deepcopy",
    _parser: "TrlParser HfArgumentParser ArgumentParser",
    _function: " ".join(SCRIPTS["functions"]),
}
CALLS = {name: function for function, names in _BY_FUNCTION.items() for name in names.split()}
"""Functions for calls of functions and classes that are known, by name."""

METHODS: Mapping[str, Callable[[ScriptReading, Any, Call], Any]] = {
    "data": lambda reading, data, call: _CHANGES.get(call.name, _by_table)(reading, data, call),
    "splits": _of_splits,
    "model": _of_model,
    "tokenizer": _of_tokenizer,
    "trainer": _of_trainer,
    "config": _by_table,
    "parser": _of_parser,
}
"""Functions for methods, by the role of their object."""
