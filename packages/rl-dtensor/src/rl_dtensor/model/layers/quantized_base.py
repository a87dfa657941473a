"""Linear layers under adapters whose frozen weights are stored in 4 or 8 bits (QLoRA, arXiv:2305.14314).

A weight is one parameter of bytes, so that FSDP and tensor parallelism split, gather and offload it like any other.
Each row is stored block by block: the codes of 64 inputs, followed by the largest absolute value of the block as
float32. A part of the columns is therefore complete as long as it ends between two blocks. The layer computes with the
dequantised weight, which exists only while the layer computes, in the forward pass and again in the backward pass.

The numbers of `nf4` are those of bitsandbytes 0.50 for blocks of 64, without a second quantisation of the largest
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.model_config import BaseQuantization
from rl_dtensor.parallel.experts import expert_modules
from rl_dtensor.parallel.fsdp import local, local_slices, whole

BASE = ".base_layer"
"""Part of the name of a layer under an adapter, which its name in the files does not have."""

BLOCK = 64
"""Number of inputs that share a largest absolute value."""

SCALE_BYTES = torch.float32.itemsize

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 quantiles of a normal distribution that codes of 4 bits stand for (arXiv:2305.14314, appendix E)."""


@dataclass(frozen=True)
class PackedFormat:
    """Form of the rows of a matrix as bytes.

    Args:
        bits: Number of bits of a code: 4 for `nf4`, 8 for `int8`.
    """

    bits: int

    @classmethod
    def of(cls, name: BaseQuantization) -> PackedFormat:
        """Return the format of a name."""
        return cls({"nf4": 4, "int8": 8}[name])

    @property
    def block_bytes(self) -> int:
        """Number of bytes of a block."""
        return BLOCK * self.bits // 8 + SCALE_BYTES

    def num_bytes(self, inputs: int) -> int:
        """Return the number of bytes of a row."""
        return inputs // BLOCK * self.block_bytes

    def num_inputs(self, num_bytes: int) -> int:
        """Return the number of inputs of a row with this number of bytes."""
        return num_bytes // self.block_bytes * BLOCK

    def pack(self, weight: Tensor) -> Tensor:
        """Return uint8 `[rows, num_bytes(inputs)]`.

        Args:
            weight: `[rows, inputs]`, in any floating dtype.
        """
        blocks = weight.float().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        scaled = torch.where(largest > 0, blocks / largest, 0.0)
        if self.bits == 4:
            values = torch.tensor(NF4, device=weight.device)
            codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2).to(torch.uint8)
            codes = codes[..., ::2] << 4 | codes[..., 1::2]
        else:
            codes = (scaled * 127).round().to(torch.int8).view(torch.uint8)
        return torch.cat([codes, largest.contiguous().view(torch.uint8)], -1).flatten(1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `[rows, inputs]`, computed in float32 and rounded to a dtype.

        Args:
            packed: uint8 `[rows, num_bytes(inputs)]`.
            dtype: Dtype of the result.
        """
        blocks = packed.unflatten(-1, (-1, self.block_bytes))
        codes, largest = blocks.split([self.block_bytes - SCALE_BYTES, SCALE_BYTES], -1)
        if self.bits == 4:
            values = torch.tensor(NF4, device=packed.device)
            scaled = values[torch.stack([codes >> 4, codes & 15], -1).flatten(-2).int()]
        else:
            scaled = codes.contiguous().view(torch.int8).float() / 127
        return (scaled * largest.contiguous().view(torch.float32)).to(dtype).flatten(-2)


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen, packed weight.

    Args:
        source: Layer that it replaces, on `meta`.
        fmt: Format of the weight.
    """

    def __init__(self, source: nn.Linear, fmt: PackedFormat) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.format = source.in_features, source.out_features, fmt
        shape = (source.out_features, fmt.num_bytes(source.in_features))
        packed = torch.empty(shape, dtype=torch.uint8, device=source.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer with the dequantised weight, in the dtype of the inputs."""
        out = cast("Tensor", _Product.apply(x, self.weight, self.format))
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """Product with a packed weight, which is dequantised again in the backward pass instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, fmt: PackedFormat) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.fmt = fmt
        return F.linear(x, fmt.unpack(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return grad @ ctx.fmt.unpack(packed, grad.dtype), None, None


def quantize_base(hf: PreTrainedModel, layers: Sequence[nn.Module], name: BaseQuantization) -> None:
    """Make the linear layers of the repeated layers store their weights in a format.

    Args:
        hf: Model with adapters on `meta`, changed in place.
        layers: Its repeated layers.
        name: Name of the format.

    Raises:
        ValueError: If a layer's inputs are not whole blocks, or the model has stacked experts.
    """
    key = "lora_cfg.base_quantization"
    if expert_modules(hf):
        raise ValueError(
            f"{key}: {hf.config.model_type} models have stacked experts, which would stay in policy.precision and are "
            "most of the model; remove this key"
        )
    inside = {id(module) for layer in layers for module in layer.modules()}
    for path, module in list(hf.named_modules()):
        if id(module) in inside and type(module).forward is nn.Linear.forward and ".lora_" not in path:
            linear = cast("nn.Linear", module)
            if linear.in_features % BLOCK:
                raise ValueError(
                    f"{key}: {path.replace(BASE, '')} has {linear.in_features} inputs, and {name} quantises blocks of "
                    f"{BLOCK}; remove this key"
                )
            hf.set_submodule(path, QuantizedLinear(linear, PackedFormat.of(name)))


def check_blocks(hf: PreTrainedModel) -> None:
    """Refuse a split of a model over tensor-parallel ranks that cuts blocks.

    Raises:
        ValueError: Naming the layer.
    """
    for path, module in quantized_layers(hf):
        if local(module.weight).shape[-1] % module.format.block_bytes:
            raise ValueError(
                f"tensor_parallel_size: the ranks' parts of the {module.in_features} inputs of "
                f"{path.replace(BASE, '')} are not whole blocks of {BLOCK} (lora_cfg.base_quantization); use fewer "
                "ranks"
            )


def quantized_layers(hf: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the layers with packed weights by name."""
    for path, module in hf.named_modules():
        if isinstance(module, QuantizedLinear):
            yield path, module


def format_of(layer: nn.Module) -> PackedFormat | None:
    """Return the format of a layer's weight; None if it is not packed."""
    return layer.format if isinstance(layer, QuantizedLinear) else None


def logical_slices(weight: Tensor, fmt: PackedFormat | None) -> tuple[slice, ...]:
    """Return the slices of a whole weight that this rank holds, which may be packed."""
    if fmt is None:
        return local_slices(weight)
    rows, columns = local_slices(weight)
    return rows, slice(fmt.num_inputs(columns.start), fmt.num_inputs(columns.stop))


def local_values(weight: Tensor, fmt: PackedFormat | None, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of a weight, which may be packed, in a dtype."""
    return local(weight).to(dtype) if fmt is None else fmt.unpack(local(weight), dtype)


def whole_values(weight: Tensor, fmt: PackedFormat | None, dtype: torch.dtype) -> Tensor:
    """Return a whole weight, which may be packed, in a dtype; collective over the ranks that share it."""
    return whole(weight, dtype) if fmt is None else fmt.unpack(whole(weight, torch.uint8), dtype)
