"""The section `data` of NeMo RL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind


@dataclass(frozen=True)
class Known:
    """A dataset that NeMo RL has a name for.

    Args:
        hub: Its name on the hub.
        settings: Further keys of the dataset here.
        split: Split that NeMo RL reads if none is given; empty for that of the purpose.
        by_split: Names on the hub by the split of NeMo RL, if each split is a dataset with the one split `train`.
        has_images: True if its rows have images.
    """

    hub: str
    settings: Mapping[str, Any]
    split: str = ""
    by_split: Mapping[str, str] = field(default_factory=dict)
    has_images: bool = False


_KNOWN: Mapping[str, Known] = {
    name.lower(): known
    for name, known in {
        "OpenMathInstruct-2": Known("nvidia/OpenMathInstruct-2", {}, "train_1M"),
        "DeepScaler": Known("agentica-org/DeepScaleR-Preview-Dataset", {}),
        "DAPOMath17K": Known("BytedTsinghua-SIA/DAPO-Math-17k", {}),
        "DAPOMathAIME2024": Known("BytedTsinghua-SIA/AIME-2024", {"processor": "dapo_math"}, "train"),
        "AIME2024": Known("HuggingFaceH4/aime_2024", {}),
        "AIME2025": Known("opencompass/AIME2025", {}),
        "gsm8k": Known("openai/gsm8k", {}),
        "squad": Known("rajpurkar/squad", {}),
        "HelpSteer3": Known("nvidia/HelpSteer3", {}),
        "tulu3_sft_mixture": Known("allenai/tulu-3-sft-mixture", {}),
        "Tulu3Preference": Known("allenai/llama-3.1-tulu-3-8b-preference-mixture", {}),
        "oasst": Known("OpenAssistant/oasst1", {}),
        "open_assistant": Known("OpenAssistant/oasst1", {}),
        "math500": Known("HuggingFaceH4/MATH-500", {}),
        "gpqa": Known("Idavidrein/gpqa", {}),
        "mmlu": Known("cais/mmlu", {}),
        "geometry3k": Known("hiyouga/geometry3k", {}, has_images=True),
        "clevr-cogent": Known(
            "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
            {"input_key": "problem", "output_key": "solution"},
            by_split={
                "train": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
                "trainA": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
                "trainB": "MMInstruction/Clevr_CoGenT_TrainB_70K_Complex",
                "valA": "MMInstruction/Clevr_CoGenT_ValA",
                "valB": "MMInstruction/Clevr_CoGenT_ValB",
            },
            has_images=True,
        ),
    }.items()
}
_VISUAL = ("clevr", "refcoco", "geo3k", "mmpr", "avqa", "daily-omni", "omni", "vlm", "image", "video")
_OWN_REWARDS = ("clevr-cogent", "math_multi_reward")
"""Environments of NeMo RL that are sums of small rewards, which the user writes as functions."""
_FROM_FILES = (
    "responsedataset",
    "preferencedataset",
    "binarypreferencedataset",
    "openai_format",
    "chatdataset",
    "prompt_response_dataset",
)
"""Names of NeMo RL for data of any file, whose columns are given."""

_TEXT_ONLY = ("arrow_text",)
_BUILT_IN_PROCESSORS = (
    "math_hf_data_processor",
    "math_data_processor",
    "sft_processor",
    "preference_preprocessor",
    "preference_processor",
    "multichoice_qa_processor",
    "helpsteer3_data_processor",
)
_COLUMNS = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
_PURPOSES = ("train", "validation")
_OLD = {
    "train_data_path": ("train", "data_path"),
    "val_data_path": ("validation", "data_path"),
    "train_split": ("train", "split"),
    "val_split": ("validation", "split"),
}
"""Keys of earlier releases, which had one dataset."""


def translate_data(config: Translation) -> None:
    """Answer the keys of `data`."""
    if not isinstance(config.values.get("data"), dict):
        return
    _in_sections(config)
    repeats: list[int] = []
    for purpose in _PURPOSES:
        given = config.get(f"data.{purpose}")
        if given is None:
            config.unneeded(f"data.{purpose}", "no such data")
            continue
        several = given if isinstance(given, list) else [given]
        made = [_dataset(config, purpose, each, repeats) for each in several if isinstance(each, dict)]
        config.put(f"data.{purpose}", made if isinstance(given, list) else made[0])
        if isinstance(given, list):
            config.follows([f"data.{purpose}"], f"data.{purpose}, dataset by dataset")
    _repeat(config, repeats)
    _defaults(config)
    _lengths(config)


def _in_sections(config: Translation) -> None:
    """Write the single dataset of earlier releases as sections."""
    data = config.values["data"]
    if isinstance(data.get("train"), dict | list):
        return
    made: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    for key, (purpose, name) in _OLD.items():
        if data.get(key) is not None:
            made[purpose][name] = data[key]
    name = data.get("dataset_name")
    if name is not None and "data_path" not in made["train"]:
        made["train"]["dataset_name"] = name
    for key in ("prompt_file", "system_prompt_file", "env_name", "processor", "input_key", "output_key", "subset"):
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
    """The dataset here; its keys are answered as those of the purpose."""
    at = f"data.{purpose}"
    made: dict[str, Any] = {}
    name, path = given.get("dataset_name"), given.get("data_path")
    lower = str(name or "").lower()
    if any(each in lower for each in _VISUAL) and lower not in _KNOWN:
        config.refuse(f"{at}.dataset_name" if config.has(f"{at}.dataset_name") else at, _visual())
    elif lower in _TEXT_ONLY:
        config.refuse(f"{at}.dataset_name", f"the dataset {name}")
        for key in config.keys(at):
            config.refuse(key, f"the dataset {name}")
    elif "gym" in lower:
        config.refuse(f"{at}.dataset_name", "NeMo Gym environments (env.nemo_gym)")
    elif path is not None:
        made["data_path"] = path
        _answer(config, f"{at}.data_path", Kind.SAME, f"{at}.data_path")
        config.unneeded(f"{at}.dataset_name", "the file is data_path")
    elif lower in _KNOWN:
        known = _KNOWN[lower]
        made = {"dataset_name": known.by_split.get(given.get("split", purpose), known.hub), **known.settings}
        if known.split and "split" not in given:
            made["split"] = known.split
        _answer(config, f"{at}.dataset_name", Kind.FOLLOWS, f"{at}.dataset_name: {known.hub}")
        _answer(config, f"{at}.output_key", Kind.NOT_NEEDED, "the columns of this dataset are known")
        _answer(config, f"{at}.input_key", Kind.NOT_NEEDED, "the columns of this dataset are known")
    elif "/" in lower:
        made["dataset_name"] = name
        _answer(config, f"{at}.dataset_name", Kind.SAME, f"{at}.dataset_name")
    else:
        config.refuse(f"{at}.dataset_name" if config.has(f"{at}.dataset_name") else at, f"the dataset {name}")
    known_columns = lower in _KNOWN and path is None
    for key, value in given.items():
        _setting(config, f"{at}.{key}", key, value, made, repeats, known_columns=known_columns)
    if known_columns and _KNOWN[lower].by_split:
        made["split"] = "train"  # each split of NeMo RL is a dataset of its own
    return made


def has_images(config: Translation) -> bool:
    """Return whether the rows of a dataset have images."""
    data = config.get("data") or {}
    named = [data.get("dataset_name"), *_names_in(data.get("train")), *_names_in(data.get("validation"))]
    return any(_KNOWN[name].has_images for each in named if (name := str(each).lower()) in _KNOWN)


def _names_in(datasets: Any) -> list[Any]:
    several = datasets if isinstance(datasets, list) else [datasets]
    return [each.get("dataset_name") for each in several if isinstance(each, dict)]


def _setting(
    config: Translation,
    at: str,
    key: str,
    value: Any,
    made: dict[str, Any],
    repeats: list[int],
    *,
    known_columns: bool,
) -> None:
    same = ("split", "subset", "split_validation_size", "prompt_file", "system_prompt_file", "input_key", "output_key")
    if key in ("dataset_name", "data_path"):
        return
    if value is None or (key == "split_validation_size" and not value):
        _answer(config, at, Kind.NOT_NEEDED, "unset")
    elif key == "repeat":
        repeats.append(value)
    elif key in ("input_key", "output_key") and known_columns:
        _answer(config, at, Kind.NOT_NEEDED, "the columns of this dataset are known")
    elif key == "split" and "data_path" in made and str(made["data_path"]).count("/") != 1:
        _answer(config, at, Kind.NOT_NEEDED, "a file has no splits")
    elif key in same:
        made[key] = value
        _answer(config, at, Kind.SAME, at)
    elif key == "seed":
        _answer(config, at, Kind.NOT_NEEDED, "held-out rows are random, but the same in every run")
    elif key == "env_name":
        _environment(config, at, value, made)
    elif key == "processor":
        _processor(config, at, value, made)
    elif key == "chat_key":
        made["input_key"] = value
        _answer(config, at, Kind.RENAMED, at.replace("chat_key", "input_key"))
    elif key in _COLUMNS:
        made.setdefault("columns", {})[_COLUMNS[key]] = value
        _answer(config, at, Kind.FOLLOWS, at.replace(key, "columns"))
    elif key == "download_dir":
        _answer(config, at, Kind.NOT_NEEDED, "datasets are in the Hugging Face cache")
    elif value in (False, [], {}):
        _answer(config, at, Kind.NOT_NEEDED, "off")
    else:
        config.refuse(at if config.has(at) else at.rpartition(".")[0], f"the setting {key} of a dataset")


def _answer(config: Translation, key: str, kind: Kind, text: str) -> None:
    """Answer a key of a dataset, which is not a key of its own in a list of datasets."""
    if config.has(key):
        config.answer(key, kind, text)


def _visual() -> str:
    return "image, video or audio models"


def _environment(config: Translation, at: str, value: str, made: dict[str, Any]) -> None:
    generates = config.algorithm in ("grpo", "ppo", "distillation", "evaluation")
    if not generates:
        _answer(config, at, Kind.NOT_NEEDED, f"{config.algorithm} scores nothing")
    elif value in _OWN_REWARDS:
        named = config.get(f"env.{value}.reward_functions") or []
        listed = ", ".join(f"{each.get('name')} (weight {each.get('weight', 1)})" for each in named)
        config.notes.append(
            f"{at}: write the rewards of {value}{f', {listed},' if listed else ''} as functions, and set "
            "FILE.py:FUNCTION, or env.NAME.rewards for several"
        )
        _answer(config, at, Kind.FOLLOWS, f"{at}, which the recipe leaves to you")
    elif any(each in value for each in _VISUAL):
        config.refuse(at if config.has(at) else "data.train", _visual())
    elif value in ("math", "dapo", "dapo_math", "geometry3k"):
        made["env_name"] = "math"
        _answer(config, at, Kind.SAME if value == "math" else Kind.FOLLOWS, at)
    elif value in ("code", "reward_model", "code_jaccard"):
        made["env_name"] = value
        _answer(config, at, Kind.SAME, at)
    else:
        config.refuse(at if config.has(at) else "data.train", f"the environment {value}")


def _processor(config: Translation, at: str, value: str, made: dict[str, Any]) -> None:
    if value in _BUILT_IN_PROCESSORS:
        _answer(config, at, Kind.NOT_NEEDED, "rows of known datasets and configured columns need none")
    elif value == "vlm_hf_data_processor" and has_images(config):
        _answer(config, at, Kind.NOT_NEEDED, "images of a row are found by images_key")
    elif value.startswith("vlm"):
        config.refuse(at if config.has(at) else "data.train", _visual())
    elif ":" in value:
        made["processor"] = value
        _answer(config, at, Kind.SAME, at)
    else:
        config.refuse(at if config.has(at) else "data.train", f"the processor {value}")


def _repeat(config: Translation, repeats: list[int]) -> None:
    """Have every validation prompt rolled out several times in place of repeating its row."""
    at = f"{config.algorithm}.val_num_generations_per_prompt"
    times = set(repeats)
    if not repeats or times == {1}:
        for purpose in _PURPOSES:
            _answer(config, f"data.{purpose}.repeat", Kind.NOT_NEEDED, "1")
        return
    if len(times) > 1 or config.has("data.train.repeat"):
        config.refuse("data.train.repeat" if config.has("data.train.repeat") else "data.validation", "rows repeated")
        return
    count = times.pop()
    config.put(at, count * config.get(at, 1))
    _answer(config, at, Kind.FOLLOWS, at)
    _answer(config, "data.validation.repeat", Kind.FOLLOWS, f"{at}: {count}")
    most = f"{config.algorithm}.max_val_samples"
    if config.get(most):
        config.put(most, max(1, config.get(most) // count))
        config.follows([most], f"{most}, which counts prompts, of {count} rollouts each")


def _defaults(config: Translation) -> None:
    given = config.get("data.default")
    made: dict[str, Any] = {}
    for key, value in (given or {}).items():
        at = f"data.default.{key}"
        if value is None:
            _answer(config, at, Kind.NOT_NEEDED, "unset")
        elif key in ("prompt_file", "system_prompt_file", "subset", "input_key", "output_key"):
            made[key] = value
            _answer(config, at, Kind.SAME, at)
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
        elif key == "dataset_name" and str(value).lower() in _FROM_FILES:
            _answer(config, at, Kind.NOT_NEEDED, "a file is named by data_path, and its columns by their keys")
        elif key in _COLUMNS:
            made.setdefault("columns", {})[_COLUMNS[key]] = value
            _answer(config, at, Kind.FOLLOWS, "data.default.columns")
    if made:
        config.put("data.default", made)
    for key in ("prompt_file", "system_prompt_file", "env_name", "processor", "dataset_name", "split", "input_key"):
        rule = config.table.rule(f"data.{key}")
        if rule is not None:
            _answer(config, f"data.{key}", rule.kind, rule.text)


def _lengths(config: Translation) -> None:
    total, limit = config.get("policy.max_total_sequence_length"), config.get("data.max_input_seq_length")
    if total and limit and limit >= total:
        config.unneeded("data.max_input_seq_length", "the default is policy.max_total_sequence_length")
    # NeMo RL cuts rows that are too long, or leaves them out of the loss; here they end the run unless they are skipped
    config.put("data.overlong", "skip")
    config.notes.append("data.overlong: skip leaves out rows that are too long, which NeMo RL masks or cuts")
