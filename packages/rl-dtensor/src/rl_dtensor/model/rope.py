"""Rotary frequencies that do not depend on which rows share a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE, DYNAMIC = "longrope", "dynamic"


def fix_frequencies(hf: PreTrainedModel, longest_row: int) -> None:
    """Choose the frequencies of a whole run by its longest row; `transformers` chooses them by the longest row of each
    microbatch, so that a row would depend on its neighbours.

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
        for kind, prefix, layer_type in _kinds(module):
            if kind == LONGROPE:
                _fill_long(module, prefix, layer_type, longest_row)
            elif longest_row > cast("int", module.original_max_seq_len):
                raise ValueError(
                    f"rows of up to {longest_row} tokens each have their own frequencies with rope_type dynamic, "
                    f"beyond {module.original_max_seq_len} tokens; lower policy.max_total_sequence_length to that, or "
                    "set rope_parameters in hf_config_overrides to another type, such as yarn"
                )
            module.forward = _fixed(module)


def _kinds(module: nn.Module) -> Iterator[tuple[str, str, str | None]]:
    """The types of a rotary embedding that depend on the batch, with the prefix of their buffers and the kind of layer;
    a model with several kinds of layers has one for each."""
    rope_type: Any = vars(module).get("rope_type")
    if isinstance(rope_type, str):
        rope_type = {None: rope_type}
    for layer_type, kind in rope_type.items() if isinstance(rope_type, Mapping) else ():
        name = LONGROPE if kind == LONGROPE else DYNAMIC if DYNAMIC in str(kind) else ""
        if name:
            yield name, "" if layer_type is None else f"{layer_type}_", layer_type


def _fill_long(module: Any, prefix: str, layer_type: str | None, longest_row: int) -> None:
    """Put the long factors into the frequencies, if rows may be longer than the original length."""
    parameters = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
    original = parameters["original_max_position_embeddings"]
    held: Tensor = getattr(module, f"{prefix}inv_freq")
    if longest_row <= original or held.is_meta:
        return
    frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](
        module.config, held.device, seq_len=original + 1, layer_type=layer_type
    )
    held.copy_(frequencies)


def _fixed(module: nn.Module) -> Any:
    """The forward pass of a rotary embedding without the part that changes its frequencies."""
    compute = inspect.unwrap(type(module).forward)

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> Any:
        return compute(module, *args, **kwargs)

    return forward
