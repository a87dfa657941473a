"""Models that a run cannot train or serve, known from their config and the headers of their files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_algos import hub
from rl_core.config import Problem
from rl_core.errors import ConfigError
from rl_core.hf_config import custom_code, num_positions, other_task, unread_quantisation
from rl_core.model_config import ModelConfig, local_hf_config
from rl_launch.model_files.weight_files import Header

_QUANTISED_PARTS = {
    "qweight": "gptq or awq",
    "qzeros": "gptq or awq",
    "weight_packed": "compressed-tensors",
    "quant_state": "bitsandbytes",
}
"""Parts of the names of quantised tensors, and who writes them."""


def model_problems(
    key: str, model: ModelConfig, *, longest_row: int, has_scalar_head: bool, is_trained_from: bool = True
) -> Iterator[Problem]:
    """Find what rules a model out by its config and headers, in a folder or among the hub's downloads. Nothing is known
    of a model that has to be downloaded.

    Args:
        key: Key of the model's section.
        longest_row: Maximum number of tokens of a row.
        has_scalar_head: Whether the run reads one number for each token, as those of a reward model.
        is_trained_from: Whether a training backend reads it. A generator alone may read types and quantised files that
            no backend does.
    """
    folder = _folder(model.model_name)
    fields = local_hf_config(model.model_copy(update={"model_name": folder}))
    if not fields:
        return
    name = f"{key}.model_name"
    # a composite model states both for all its parts
    whole = {**_whole_config(folder), **fields}
    if problem := _other_task(model.model_name, whole, has_scalar_head):
        yield Problem(name, problem)
    if not whole.get("model_type"):
        yield Problem(name, _without_type(model.model_name))
    elif is_trained_from and (problem := _unreadable(model.model_name, whole, folder)):
        yield Problem(name, problem)
    limit = num_positions(fields)
    if limit is not None and longest_row > limit:
        yield Problem(
            "policy.max_total_sequence_length",
            f"got {longest_row}, but {model.model_name} has positions for {limit} tokens; lower it, or extend the "
            f"positions in {key}.hf_config_overrides, such as {{max_position_embeddings: {longest_row}}} or "
            "{rope_parameters: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: "
            f"{limit}}}}}",
        )
    if has_scalar_head:
        yield from _head_problems(name, model.model_name, folder)


def _unreadable(name: str, fields: Mapping[str, Any], folder: str) -> str:
    """Why a training backend cannot read a model; empty if it can."""
    if method := unread_quantisation(fields) or _quantised_by(folder):
        return (
            f"{name!r} is quantised by {method}, which cannot be trained from; name the model that it was quantised "
            "from, or dequantise it"
        )
    return _unknown_type(name, fields)


def _unknown_type(name: str, fields: Mapping[str, Any]) -> str:
    """What is wrong with the type that a config states; empty if `transformers` has it."""
    model_type = fields["model_type"]
    if _is_known(str(model_type)):
        return ""
    if written := custom_code(fields):
        return (
            f"{name!r} needs code of its own ({written}), and code from a model's folder is not run; transformers does "
            f"not have the type {model_type!r}: choose a model of a type that it has"
        )
    return (
        f"{name!r} is of the type {model_type!r}, which transformers {version('transformers')} does not have; choose a "
        "model of a type that it has"
    )


def _without_type(name: str) -> str:
    return f"the config.json of {name!r} has no model_type; save the model again with `save_pretrained`"


def _other_task(name: str, fields: Mapping[str, Any], has_scalar_head: bool) -> str:
    found = other_task(fields, has_scalar_head=has_scalar_head)
    return found and (
        f"{name!r} is a {found}, and this run needs a causal language model (...ForCausalLM); name the model that it "
        "was made from, or another one"
    )


def _head_problems(key: str, name: str, folder: str) -> Iterator[Problem]:
    shape = _shapes(folder).get("score.weight")
    if shape is not None and shape[0] != 1:
        yield Problem(
            key,
            f"the head of {name!r} (score.weight) has {shape[0]} labels, and a reward or value is one number; choose a "
            "model with one label, or one without a head, which gets a new one",
        )


def longest_of(name: str) -> int | None:
    """Return the number of tokens of the longest row that a model on this machine has positions for; None if it is not
    here or sets no limit."""
    return num_positions(local_hf_config(ModelConfig(model_name=_folder(name))))


def check_tokenizer(tokenizer: Any, model: ModelConfig) -> None:
    """Refuse a tokenizer with ids that the embedding of a model on this machine has no rows for.

    Raises:
        ConfigError: naming both numbers.
    """
    rows = local_hf_config(model.model_copy(update={"model_name": _folder(model.model_name)})).get("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=0)
    if isinstance(rows, int) and largest >= rows:
        raise ConfigError(
            f"policy.model_name: the tokenizer has ids up to {largest}, and the embedding of {model.model_name} has "
            f"{rows} rows (vocab_size); resize the embedding and save the model, or name the tokenizer that belongs to "
            "it in policy.tokenizer.name"
        )


def _folder(name: str) -> str:
    """The folder of a model: its own, or that of its download."""
    if Path(name).expanduser().is_dir():
        return name
    found = hub.downloaded("model", name)
    return name if found is None else str(found)


def _whole_config(name: str) -> dict[str, Any]:
    try:
        fields = json.loads((Path(name).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _is_known(model_type: str) -> bool:
    """Whether `transformers` has a type of models."""
    found = find_spec("transformers")
    if found and any(
        (Path(place) / "models" / model_type).is_dir() for place in found.submodule_search_locations or ()
    ):
        return True
    # takes more than a second to import, and only few types have a folder of another name
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _quantised_by(name: str) -> str:
    parts = {part for tensor in _shapes(name) for part in tensor.split(".")}
    return next((writer for part, writer in _QUANTISED_PARTS.items() if part in parts), "")


def _shapes(name: str) -> Mapping[str, tuple[int, ...]]:
    """Shapes of all tensors in a local folder; empty if a header cannot be read."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(name).expanduser().glob("*.safetensors")):
        try:
            found.update(Header.read(file).shapes)
        except ValueError:
            return {}
    return found
