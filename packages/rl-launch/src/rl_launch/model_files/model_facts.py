"""Checks whether a run can train or serve a model, by its config and the headers of its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_algos import hub
from rl_core.config import Problem
from rl_core.errors import ConfigError
from rl_core.facts.hf_config import custom_code, num_positions, other_task, unread_quantisation
from rl_core.facts.model_code import code_digest, code_files, code_problem
from rl_core.model_config import ModelConfig, local_hf_config, local_whole_config
from rl_launch.model_files.weight_files import shapes_in

_QUANTISED_PARTS = {
    "qweight": "gptq or awq",
    "qzeros": "gptq or awq",
    "weight_packed": "compressed-tensors",
    "quant_state": "bitsandbytes",
}
"""Part of the name of a quantised tensor, and the library that writes it."""


def model_problems(
    key: str,
    model: ModelConfig,
    *,
    longest_row: int,
    has_scalar_head: bool,
    length_key: str = "policy.max_total_sequence_length",
    needs_scalar_head: bool = False,
    is_trained_from: bool = True,
) -> Iterator[Problem]:
    """Yield the reasons why a model cannot be used, from its config and headers in a folder or in the hub's cache. A
    model that has to be downloaded is not checked.

    Args:
        key: Key of the model's section.
        model: Section of the model.
        longest_row: Maximum number of tokens in a row.
        has_scalar_head: True if the run reads one number per token, as from a reward model.
        length_key: Key that sets `longest_row`.
        needs_scalar_head: True if the files must have the head for it, because it does not train.
        is_trained_from: True if a training backend reads the model. A generator can read model types and quantised
            files that no training backend can read.
    """
    folder, fields = _folder(model.model_name), hf_fields(model)
    if not fields:
        return
    name = f"{key}.model_name"
    # a composite model states both for all its parts
    whole: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads((Path(folder).expanduser() / "config.json").read_text(encoding="utf-8"))
        whole = found if isinstance(found, dict) else {}
    whole |= fields
    if task := other_task(whole, has_scalar_head=has_scalar_head):
        reason = f"is a {task}, but this run needs a causal language model (...ForCausalLM)"
        yield Problem(name, reason, got=model.model_name, remedy="Use the model that it was made from, or another one")
    if not whole.get("model_type"):
        remedy = "Save the model again with `save_pretrained`"
        yield Problem(name, "its config.json has no model_type", got=model.model_name, remedy=remedy)
    elif is_trained_from and (problem := _unreadable(key, model, whole, folder)):
        yield problem
    limit = num_positions(fields)
    if limit is not None and longest_row > limit:
        remedy = (
            f"Lower it, or extend the positions in {key}.hf_config_overrides, for example with "
            f"{{max_position_embeddings: {longest_row}}} or {{rope_parameters: {{rope_type: yarn, factor: 4.0, "
            f"original_max_position_embeddings: {limit}}}}}"
        )
        reason = f"exceeds the {limit} positions of {model.model_name}"
        yield Problem(length_key, reason, got=longest_row, remedy=remedy)
    shapes = shapes_in(Path(folder).expanduser()) if has_scalar_head else {}
    shape = shapes.get("score.weight")
    if shapes and shape is None and needs_scalar_head:
        reason = "is not a reward model: its files have no score.weight"
        remedy = "Train one with algorithm: rm, and name the folder `hf` of a checkpoint"
        yield Problem(name, reason, got=model.model_name, remedy=remedy)
    if shape is not None and shape[0] != 1:
        reason = f"its head (score.weight) has {shape[0]} labels, but a reward or value is one number"
        remedy = "Choose a model with one label, or a model without a head, to which a new head is added"
        yield Problem(name, reason, got=model.model_name, remedy=remedy)


def _unreadable(key: str, model: ModelConfig, fields: Mapping[str, Any], folder: str) -> Problem | None:
    """Return the reason why a training backend cannot read a model; None if it can."""
    name, place = f"{key}.model_name", Path(folder).expanduser()
    parts = {part for tensor in shapes_in(place) for part in tensor.split(".")}
    written_by = (writer for part, writer in _QUANTISED_PARTS.items() if part in parts)
    if method := unread_quantisation(fields) or next(written_by, ""):
        remedy = "Use the model that it was quantised from, or dequantise it"
        return Problem(
            name, f"is quantised with {method}, so it cannot be trained", got=model.model_name, remedy=remedy
        )
    model_type, trusted = fields["model_type"], model.trust_remote_code
    if _is_known(str(model_type)):
        if trusted is None:
            return None
        reason = f"has no effect, because transformers has the type {model_type!r}, whose own classes are used"
        return Problem(f"{key}.trust_remote_code", reason, remedy="Remove this key")
    if trusted is not None:
        if problem := code_problem(place, fields, trusted):
            return Problem(f"{key}.trust_remote_code", problem, got=trusted, remedy="Read the code before you trust it")
        return None
    reason = f"has the model type {model_type!r}, which transformers {version('transformers')} does not have"
    remedy = "Choose a model of a type that transformers has"
    if written := custom_code(fields):
        reason = f"{reason}, and its own code ({written}) is not run"
        files = ", ".join(code_files(place))
        remedy = f"{remedy}. Or read its code ({files}), and set {key}.trust_remote_code={code_digest(place)} to run it"
    return Problem(name, reason, got=model.model_name, remedy=remedy)


def hf_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of the language model's config, with overrides, from a folder or the hub's cache; empty if it
    is not on this machine."""
    return local_hf_config(model.model_copy(update={"model_name": _folder(model.model_name)}))


def whole_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of the whole config of a model, without overrides, from a folder or the hub's cache; empty if
    it is not on this machine."""
    return local_whole_config(model.model_copy(update={"model_name": _folder(model.model_name)}))


def longest_of(name: str) -> int | None:
    """Return the maximum number of tokens in a row for a model on this machine; None if it is not on this machine or
    has no limit."""
    return num_positions(hf_fields(ModelConfig(model_name=name)))


def check_tokenizer(tokenizer: Any, model: ModelConfig) -> None:
    """Refuse a tokenizer with ids outside the embedding of a model on this machine.

    Raises:
        ConfigError: If an id is too large; contains both numbers.
    """
    rows = hf_fields(model).get("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=0)
    if isinstance(rows, int) and largest >= rows:
        raise ConfigError(
            f"policy.model_name: the tokenizer has ids up to {largest}, but the embedding of {model.model_name} has "
            f"only {rows} rows (vocab_size). Resize the embedding and save the model, or set policy.tokenizer.name to "
            "the tokenizer of the model"
        )


def _folder(name: str) -> str:
    """Return the folder of a model: the local folder, or the folder of its download."""
    if Path(name).expanduser().is_dir():
        return name
    found = hub.downloaded("model", name)
    return name if found is None else str(found)


def _is_known(model_type: str) -> bool:
    """Return whether `transformers` has a model type."""
    found = find_spec("transformers")
    if found and any(
        (Path(place) / "models" / model_type).is_dir() for place in found.submodule_search_locations or ()
    ):
        return True
    # takes more than a second to import, and only a few types have a folder with another name
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES
