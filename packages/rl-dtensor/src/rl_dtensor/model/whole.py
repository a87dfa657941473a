"""Whole models on `meta`: their layers, their shape, and whether files hold one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from rl_core.model import HEADLESS_ROLES, Role
from rl_core.torch.files.model_files import WeightFiles, read_hf_config
from rl_core.torch.training.flops import ModelShape, attention_shapes, setting
from rl_dtensor.config import AttentionBackend
from rl_dtensor.model.attention import ROWS, RowsUnknown, attention_for, rows_problem, tell_chunks
from rl_dtensor.model.layers.quantized_base import format_of
from rl_dtensor.model.layers.recurrent import run_rows_alone
from rl_dtensor.model.weights import SCORE, Catalog
from rl_dtensor.parallel.body import body_of, is_composite
from rl_dtensor.parallel.experts import expert_modules

LM_HEAD = "lm_head.weight"
LONGROPE, DYNAMIC = "longrope", "dynamic"


def model_on_meta(
    config: PreTrainedConfig,
    role: Role,
    backend: AttentionBackend,
    *,
    dtype: torch.dtype,
    is_packed: bool,
    is_split: bool,
    longest_row: int,
) -> PreTrainedModel:
    """Build a whole model without data.

    Args:
        config: Hugging Face config of the model.
        role: Purpose of the model.
        backend: Value of `dtensor_cfg.attention_backend`.
        dtype: Dtype of its parameters.
        is_packed: True if rows lie end to end.
        is_split: True if rows are split over ranks, by context or sequence parallelism.
        longest_row: Maximum number of tokens in a row.

    Raises:
        ValueError: If it is not a causal language model, or rows of it cannot be packed or split.
    """
    is_whole = config.get_text_config() is not config
    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_whole else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in classes:
        raise ValueError(f"{config.model_type} models are not causal language models")
    auto: Any = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
    if role in HEADLESS_ROLES:
        config.num_labels = 1
        auto = AutoModelForSequenceClassification

    def built(attention: str) -> PreTrainedModel:
        with torch.device("meta"):
            chosen = {"text_config": attention, "vision_config": "sdpa"} if is_whole else attention
            hf: PreTrainedModel = auto.from_config(config, dtype=dtype, attn_implementation=chosen)
        fix_frequencies(hf, longest_row)
        return hf

    family: Any = classes[type(config)]
    supports_sdpa = family._supports_sdpa
    choose = partial(attention_for, config, backend, packed=is_packed, split=is_split, supports_sdpa=supports_sdpa)
    attention = choose()
    if attention != ROWS:
        return built(attention)
    try:
        hf = built(ROWS)
        run_rows_alone(hf, decoder_layers(hf))
        tell_chunks(hf, decoder_layers(hf))
        if config.get_text_config().model_type == "llama4_text":
            # The module imports the code of that family, which other families do not need.
            from rl_dtensor.model.layers.llama4 import patch_llama4

            patch_llama4(hf)
    except RowsUnknown as error:
        problem = str(error)
    except KeyError as error:
        if error.args != (ROWS,):
            raise
        problem = "its code has its own table of attention implementations"
    else:
        problem = rows_problem(hf, backend)
        if not problem:
            return hf
    return built(choose(rows_problem=problem))


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers, which are gathered one at a time.

    These are the modules that the family declares, or else its largest list of modules of one kind.
    """
    part = body_of(hf) if is_composite(hf) else hf
    names = set(part._no_split_modules or ())
    layers = [module for module in part.modules() if type(module).__name__ in names]
    if not layers:
        lists = [module for module in part.modules() if isinstance(module, nn.ModuleList)]
        alike = [module for module in lists if len({type(layer) for layer in module}) == 1]
        layers = list(max(alike, key=lambda module: sum(part.numel() for part in module.parameters()), default=()))
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    layers = [layer for layer in layers if id(layer) not in inner]
    if not layers:
        raise ValueError(f"{type(hf).__name__} has no list of layers; it cannot be sharded layer by layer")
    return layers


def shape_of(hf: PreTrainedModel) -> ModelShape:
    """Return the shape of a model with its adapters, before anything is split; it may be on `meta`.

    A vision tower is left out, because its work does not follow from the tokens.
    """
    config = hf.config.get_text_config()
    stacked = {id(module) for module in expert_modules(hf)}
    matrices = trained = 0
    seen = [hf] if not is_composite(hf) else [body_of(hf), hf.get_output_embeddings()]
    for module in (module for part in seen for module in part.modules()):
        if isinstance(module, nn.Embedding):  # A table is looked up; a tied head multiplies with it under its own name.
            continue
        for parameter in module._parameters.values():
            if parameter is None or parameter.dim() < 2:
                continue
            entries = parameter.numel() if format_of(module) is None else module.in_features * module.out_features
            if id(module) in stacked:
                # Only the experts that a token is sent to compute, and biases are not multiplied with.
                num_experts = parameter.shape[0]
                num_chosen = int(setting(config, "num_experts_per_tok") or num_experts)
                entries = 0 if parameter.dim() < 3 else entries // num_experts * num_chosen
            matrices += entries
            trained += entries if parameter.requires_grad else 0
    return ModelShape(matrices, trained, attention_shapes(config))


def files_problem(folder: Path, overrides: Mapping[str, Any], *, is_whole: bool) -> str:
    """Return why a model cannot be trained from the files in a folder, whatever its head; empty if it can.

    Args:
        folder: Folder of the model.
        overrides: Fields of its Hugging Face config to replace.
        is_whole: True for a composite model that is not trained as its language model.
    """
    auto: Any = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
    try:
        config = read_hf_config(folder, overrides, is_whole=is_whole)
        if type(config) not in auto._model_mapping:
            return f"{config.model_type} models are not causal language models"
        with torch.device("meta"):
            hf = auto.from_config(config)
        catalog, files = Catalog.of(hf, lambda name: 0), WeightFiles.of(folder, is_whole=is_whole)
    except ValueError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # The code of a family may raise anything.
        return f"transformers cannot build the model of {folder}: {type(error).__name__}: {error}"
    heads = {LM_HEAD, *catalog.tied_in_files, *catalog.tied, SCORE}
    return catalog.problem(files, new=heads, foreign=heads)


def fix_frequencies(hf: PreTrainedModel, longest_row: int) -> None:
    """Choose the rotary frequencies of a whole run by its longest row.

    `transformers` chooses them by the longest row of each microbatch, so that a row would depend on its neighbours.
    LongRoPE takes its long factors if rows may be longer than the model's original length, as vLLM does. Dynamic
    scaling changes nothing up to the model's length, and longer rows are refused. Called on `meta`, and again once
    buffers have values.

    Args:
        hf: Model, whose rotary embeddings are changed in place.
        longest_row: Maximum number of tokens of a row.

    Raises:
        ValueError: For rows whose frequencies would depend on their length.
    """
    for module in hf.modules():
        rope_type: Any = vars(module).get("rope_type")
        if isinstance(rope_type, str):
            rope_type = {None: rope_type}
        # A model with several kinds of layers has a type for each of them.
        for layer_type, kind in rope_type.items() if isinstance(rope_type, Mapping) else ():
            if kind == LONGROPE:
                _fill_long(module, layer_type, longest_row)
            elif DYNAMIC not in str(kind):
                continue
            elif longest_row > cast("int", module.original_max_seq_len):
                raise ValueError(
                    f"rows of up to {longest_row} tokens each have their own frequencies with rope_type dynamic, "
                    f"beyond {module.original_max_seq_len} tokens; lower policy.max_total_sequence_length to that, or "
                    "set rope_parameters in hf_config_overrides to another type, such as yarn"
                )
            module.forward = _without_update(module)


def _fill_long(module: Any, layer_type: str | None, longest_row: int) -> None:
    """Put the long factors into the frequencies, if rows may be longer than the original length."""
    parameters, prefix = module.config.rope_parameters, ""
    if layer_type is not None:
        parameters, prefix = parameters[layer_type], f"{layer_type}_"
    original = parameters["original_max_position_embeddings"]
    held: Tensor = getattr(module, f"{prefix}inv_freq")
    if longest_row > original and not held.is_meta:
        fill = ROPE_INIT_FUNCTIONS[LONGROPE]
        held.copy_(fill(module.config, held.device, seq_len=original + 1, layer_type=layer_type)[0])


def _without_update(module: nn.Module) -> Any:
    """Return the forward pass of a rotary embedding without the decorator that changes its frequencies."""
    compute = inspect.unwrap(type(module).forward)

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> Any:
        return compute(module, *args, **kwargs)

    return forward
