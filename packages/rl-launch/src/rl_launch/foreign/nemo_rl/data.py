"""The section `data` of NeMo RL."""

from __future__ import annotations

from typing import Any

from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

ROLLOUTS = ("grpo", "ppo", "distillation")
"""Algorithms that train on their own rollouts."""

_VISUAL = "image, video or audio models"
_COLUMNS = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
_PURPOSES = ("train", "validation")
_OLD = {
    "train_data_path": ("train", "data_path"),
    "val_data_path": ("validation", "data_path"),
    "train_split": ("train", "split"),
    "val_split": ("validation", "split"),
}
"""Keys of earlier releases, which had one dataset."""
_SHARED = ("prompt_file", "system_prompt_file", "env_name", "processor", "input_key", "output_key", "subset")
_KNOWN_COLUMNS = "the columns of this dataset are known"


def translate_data(config: Translation) -> None:
    """Answer the keys of `data`."""
    if not isinstance(config.values.get("data"), dict):
        return
    if not isinstance(config.values["data"].get("train"), dict | list):
        _in_sections(config.values["data"])
    repeats: list[int] = []
    for purpose in _PURPOSES:
        given = config.get(f"data.{purpose}")
        if given is None:
            config.unneeded(f"data.{purpose}", "no such data")
            continue
        made = [_dataset(config, purpose, each, repeats) for each in datasets_in(given)]
        config.put(f"data.{purpose}", made if isinstance(given, list) else made[0])
        if isinstance(given, list):
            config.follows([f"data.{purpose}"], f"data.{purpose}, dataset by dataset")
    _repeat(config, repeats)
    _defaults(config)
    total, limit = config.get("policy.max_total_sequence_length"), config.get("data.max_input_seq_length")
    if total and limit and limit >= total:
        config.unneeded("data.max_input_seq_length", "the default is policy.max_total_sequence_length")
    # NeMo RL cuts rows that are too long, or leaves them out of the loss. Here they end the run if not skipped.
    config.put("data.overlong", "skip")
    config.notes.append("data.overlong: skip leaves out rows that are too long, which NeMo RL masks or cuts")


def datasets_in(value: Any) -> list[dict[str, Any]]:
    """Return the datasets of a purpose, which has one or a list of them."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]


def has_images(config: Translation) -> bool:
    """Return whether the rows of a dataset have images."""
    data = config.get("data") or {}
    datasets = [data, *datasets_in(data.get("train")), *datasets_in(data.get("validation"))]
    known = config.table.tables["datasets"]
    return any(known.get(str(each.get("dataset_name")).lower(), {}).get("has_images") for each in datasets)


def _in_sections(data: dict[str, Any]) -> None:
    """Write the single dataset of earlier releases as sections."""
    made: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    for key, (purpose, name) in _OLD.items():
        if data.get(key) is not None:
            made[purpose][name] = data[key]
    if data.get("dataset_name") is not None and "data_path" not in made["train"]:
        made["train"]["dataset_name"] = data["dataset_name"]
    for key in _SHARED:
        if data.get(key) is not None:
            data.setdefault("default", {})[key] = data[key]
    for key in _COLUMNS:
        for purpose in _PURPOSES:
            if data.get(key) is not None and made[purpose]:
                made[purpose][key] = data[key]
    if data.get("split") is not None:
        made["train"]["split"] = data["split"]
    paths = data.get("val_data_paths")
    if isinstance(paths, dict):
        data["validation"] = [{"data_path": path} for path in paths.values()]
    elif made["validation"]:
        data["validation"] = made["validation"]
    if made["train"]:
        data["train"] = made["train"]


def _dataset(config: Translation, purpose: str, given: dict[str, Any], repeats: list[int]) -> dict[str, Any]:
    """Return the dataset here; its keys are answered as keys of the purpose."""
    at = f"data.{purpose}"
    name_at = f"{at}.dataset_name"
    made: dict[str, Any] = {}
    name, path = given.get("dataset_name"), given.get("data_path")
    lower = str(name or "").lower()
    known = config.table.tables["datasets"].get(lower)
    if known is None and any(each in lower for each in config.table.tables["visual"].split()):
        _refuse(config, name_at, at, _VISUAL)
    elif lower == "arrow_text":
        config.refuse(at, f"the dataset {name}")
    elif "gym" in lower:
        config.refuse(name_at, "NeMo Gym environments (env.nemo_gym)")
    elif path is not None:
        made["data_path"] = path
        config.answer(f"{at}.data_path", Kind.SAME, f"{at}.data_path")
        config.unneeded(name_at, "the file is data_path")
    elif known is not None:
        made["dataset_name"] = known.get("by_split", {}).get(given.get("split", purpose), known["hub"])
        made |= known.get("settings", {})
        if "split" in known and "split" not in given:
            made["split"] = known["split"]
        config.answer(name_at, Kind.FOLLOWS, f"{name_at}: {known['hub']}")
        for key in ("output_key", "input_key"):
            config.unneeded(f"{at}.{key}", _KNOWN_COLUMNS)
    elif "/" in lower:
        made["dataset_name"] = name
        config.answer(name_at, Kind.SAME, name_at)
    else:
        _refuse(config, name_at, at, f"the dataset {name}")
    is_known = known is not None and path is None
    for key, value in given.items():
        if key == "repeat" and value is not None:
            repeats.append(value)
        elif key not in ("dataset_name", "data_path"):
            _setting(config, f"{at}.{key}", key, value, made, known_columns=is_known)
    if is_known and known.get("by_split"):
        made["split"] = "train"  # each split of NeMo RL is a dataset of its own
    return made


def _setting(config: Translation, at: str, key: str, value: Any, made: dict[str, Any], *, known_columns: bool) -> None:
    same = ("split", "subset", "split_validation_size", "prompt_file", "system_prompt_file", "input_key", "output_key")
    reasons = {
        "seed": "held-out rows are random, but the same in every run",
        "download_dir": "datasets are in the Hugging Face cache",
    }
    if value is None or (key == "split_validation_size" and not value):
        config.unneeded(at, "unset")
    elif key in ("input_key", "output_key") and known_columns:
        config.unneeded(at, _KNOWN_COLUMNS)
    elif key == "split" and "data_path" in made and str(made["data_path"]).count("/") != 1:
        config.unneeded(at, "a file has no splits")
    elif key in same:
        made[key] = value
        config.answer(at, Kind.SAME, at)
    elif key in reasons:
        config.unneeded(at, reasons[key])
    elif key == "env_name":
        _environment(config, at, value, made)
    elif key == "processor":
        _processor(config, at, value, made)
    elif key == "chat_key":
        made["input_key"] = value
        config.answer(at, Kind.RENAMED, at.replace("chat_key", "input_key"))
    elif key in _COLUMNS:
        made.setdefault("columns", {})[_COLUMNS[key]] = value
        config.answer(at, Kind.FOLLOWS, at.replace(key, "columns"))
    elif value in (False, [], {}):
        config.unneeded(at, "off")
    else:
        _refuse(config, at, at.rpartition(".")[0], f"the setting {key} of a dataset")


def _refuse(config: Translation, key: str, section: str, feature: str) -> None:
    """Refuse a key of a dataset, or the section if the key was not given as one."""
    config.refuse(key if config.has(key) else section, feature)


def _environment(config: Translation, at: str, value: str, made: dict[str, Any]) -> None:
    known = config.table.tables["environments"]
    if config.algorithm not in (*ROLLOUTS, "evaluation"):
        config.unneeded(at, f"{config.algorithm} scores nothing")
    elif value in config.table.tables["own rewards"].split():
        named = config.get(f"env.{value}.reward_functions") or []
        listed = ", ".join(f"{each.get('name')} (weight {each.get('weight', 1)})" for each in named)
        config.notes.append(
            f"{at}: write the rewards of {value}{f', {listed},' if listed else ''} as functions, and set "
            "FILE.py:FUNCTION, or env.NAME.rewards for several"
        )
        config.answer(at, Kind.FOLLOWS, f"{at}, which the recipe leaves to you")
    elif any(each in value for each in config.table.tables["visual"].split()):
        _refuse(config, at, "data.train", _VISUAL)
    elif value in known:
        made["env_name"] = known[value]
        config.answer(at, Kind.SAME if value == known[value] else Kind.FOLLOWS, at)
    else:
        _refuse(config, at, "data.train", f"the environment {value}")


def _processor(config: Translation, at: str, value: str, made: dict[str, Any]) -> None:
    if value in config.table.tables["processors"].split():
        config.unneeded(at, "rows of known datasets and configured columns need none")
    elif value == "vlm_hf_data_processor" and has_images(config):
        config.unneeded(at, "images of a row are found by images_key")
    elif value.startswith("vlm"):
        _refuse(config, at, "data.train", _VISUAL)
    elif ":" in value:
        made["processor"] = value
        config.answer(at, Kind.SAME, at)
    else:
        _refuse(config, at, "data.train", f"the processor {value}")


def _repeat(config: Translation, repeats: list[int]) -> None:
    """Roll out every validation prompt several times in place of repeating its row."""
    at, times = f"{config.algorithm}.val_num_generations_per_prompt", set(repeats)
    if not repeats or times == {1}:
        for purpose in _PURPOSES:
            config.unneeded(f"data.{purpose}.repeat", "1")
        return
    if len(times) > 1 or config.has("data.train.repeat"):
        _refuse(config, "data.train.repeat", "data.validation", "rows repeated")
        return
    count = times.pop()
    config.put(at, count * config.get(at, 1))
    config.answer(at, Kind.FOLLOWS, at)
    config.answer("data.validation.repeat", Kind.FOLLOWS, f"{at}: {count}")
    limit = f"{config.algorithm}.max_val_samples"
    if config.get(limit):
        config.put(limit, max(1, config.get(limit) // count))
        config.follows([limit], f"{limit}, which counts prompts, of {count} rollouts each")


def _defaults(config: Translation) -> None:
    made: dict[str, Any] = {}
    for key, value in (config.get("data.default") or {}).items():
        at = f"data.default.{key}"
        if value is None:
            config.unneeded(at, "unset")
        elif key in ("prompt_file", "system_prompt_file", "subset", "input_key", "output_key"):
            made[key] = value
            config.answer(at, Kind.SAME, at)
            if key == "prompt_file":
                config.notes.append(
                    f"{at}: copy {value} beside the recipe, write {{input}} in it for {{}}, and correct its path"
                )
            elif key == "system_prompt_file":
                config.notes.append(f"{at}: copy {value} next to the recipe, and correct its path")
        elif key == "env_name":
            _environment(config, at, value, made)
        elif key == "processor":
            _processor(config, at, value, made)
        elif key == "dataset_name" and str(value).lower() in config.table.tables["from files"].split():
            config.unneeded(at, "a file is named by data_path, and its columns by their keys")
        elif key in _COLUMNS:
            made.setdefault("columns", {})[_COLUMNS[key]] = value
            config.answer(at, Kind.FOLLOWS, "data.default.columns")
    if made:
        config.put("data.default", made)
    for key in ("prompt_file", "system_prompt_file", "env_name", "processor", "dataset_name", "split", "input_key"):
        rule = config.table.rule(f"data.{key}")
        if rule is not None:
            config.answer(f"data.{key}", rule.kind, rule.text)
