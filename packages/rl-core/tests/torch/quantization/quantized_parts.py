"""What files of 4-bit weights hold, read back, and the errors that rounding explains."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_core.torch.quantization.formats import MIN_INTEGER, Int4Weight, MXFP4Weight


def read_parts(tensors: Mapping[str, Tensor]) -> Int4Weight | MXFP4Weight:
    """Return the inverse of `tensors` of a quantised weight."""
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    if "weight_shape" not in tensors:
        return MXFP4Weight(torch.stack((packed & 0xF, packed >> 4), 2).flatten(1), scales)
    shifts = torch.arange(8, dtype=torch.int32) * 4
    return Int4Weight((((packed[..., None] >> shifts) & 0xF).flatten(1) + MIN_INTEGER).to(torch.int8), scales)


def half_steps(weight: Int4Weight | MXFP4Weight) -> Tensor:
    """Return the largest error of each value, float64 `[outputs, inputs]`.

    It is half the step to the next value of larger magnitude, times the scale. The steps of integers are 1, and a
    little more covers the rounding of scales: at 7.5 scales, a scale that was rounded down by a half bit leaves the
    largest value beyond the last half step. The step after 6 of MXFP4 is 2.
    """
    if isinstance(weight, Int4Weight):
        slack = 7.5 * torch.finfo(weight.scales.dtype).eps
        return (weight.scales.double() * (0.5 + slack)).repeat_interleave(
            weight.values.shape[1] // weight.scales.shape[1], 1
        )
    steps = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    scales = torch.exp2(weight.exponents.double() - 127).repeat_interleave(32, 1)
    return steps[(weight.codes % 8).int()] / 2 * scales
