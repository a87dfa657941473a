"""Bookkeeping of low-rank adapters, whatever layers they sit on."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_core.model_config import LoraConfig

WEIGHT = ".weight"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""What follows the name of a layer in those of its adapter's factors: `[dim, inputs]` and `[outputs, dim]`, as in the
files of peft."""


def is_adapted(layer: str, config: LoraConfig) -> bool:
    """Whether a linear layer of this name gets an adapter."""
    is_target = config.match_all_linear or ends_with(layer, config.target_modules)
    return is_target and not ends_with(layer, config.exclude_modules)


def ends_with(layer: str, endings: Sequence[str]) -> bool:
    """Whether a layer's name is one of these, or ends with one after a dot."""
    return any(f".{layer}".endswith(f".{ending}") for ending in endings)


def initial_down(weight: str, shape: Sequence[int], seed: int) -> Tensor:
    """float32 `[dim, inputs]` that the adapter of a weight starts from, uniform as peft draws it and the same on any
    mesh; its other factor starts from zero.

    Args:
        weight: name of the weight, which seeds it.
    """
    generator = torch.Generator().manual_seed(seed + zlib.crc32(weight.encode()))
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


def nothing_adapted(config: LoraConfig, kind: str) -> ValueError:
    """The error for a config that leaves a model without adapters.

    Args:
        kind: of the model.
    """
    return ValueError(
        f"lora_cfg: target_modules {config.target_modules} without exclude_modules {config.exclude_modules} "
        f"match no linear layer of {kind}; name some, such as q_proj, or set match_all_linear=true"
    )
