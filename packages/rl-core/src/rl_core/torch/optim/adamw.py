"""AdamW that keeps its averages in fewer bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rl_core.torch.optim.parameters import local_part, loss_of

AVERAGES = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"
"""End of the name of the scales that belong to an average."""

_SEED_STEP = 1_000_003
_DECADES = 7


class LeanAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) whose averages a subclass keeps in
    fewer bits.

    It computes in float32. What a step adds to an average is often less than few bits can add, so averages are rounded
    up or down at random, in proportion: right in the mean. The noise depends only on step and parameter, so ranks with
    the same part of a parameter keep the same averages, and a resumed run repeats itself bit for bit.

    Args:
        params: Parameters, or groups of them; DTensors too.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.

    Raises:
        ValueError: If one of these is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @abstractmethod
    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of an average of zeros, of a parameter that begins to train."""

    @abstractmethod
    def read(self, state: Mapping[str, Tensor], name: str) -> Tensor:
        """Return this rank's part of an average, float32, which may be changed."""

    @abstractmethod
    def keep(self, state: Mapping[str, Tensor], name: str, average: Tensor, generator: torch.Generator) -> None:
        """Round an average into its state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        parameters = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for index, (group, parameter) in enumerate(parameters):
            if parameter.grad is not None:
                self._update(parameter, group, index)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state in the dtypes that it was saved in, which torch would change to the parameters' dtypes."""
        saved = {number: dict(state) for number, state in state_dict["state"].items()}
        super().load_state_dict(dict(state_dict))
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in saved.get(number, {}).items():
                if torch.is_tensor(value):
                    self.state[parameter][name] = self.state[parameter][name].to(value.dtype)

    def _update(self, parameter: Tensor, group: Mapping[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in AVERAGES:
                state.update(self.zeros(name, parameter))
        state["step"] += 1
        step = int(state["step"].item())
        first, second = averages = [self.read(state, name) for name in AVERAGES]
        own, grad = local_part(parameter), local_part(parameter.grad).float()
        beta1, beta2 = group["betas"]
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        own.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(first, size, value=-group["lr"] / (1 - beta1**step))
        generator = torch.Generator(own.device).manual_seed(step * _SEED_STEP + index)
        for name, average in zip(AVERAGES, averages, strict=True):
            self.keep(state, name, average, generator)


class HalfStateAdamW(LeanAdamW):
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) that keeps its averages in bfloat16:
    4 bytes for each parameter instead of 8.

    It computes in float32 and rounds averages up or down at random, in proportion, so that they are right in the mean.

    Args:
        params: Parameters, or groups of them; DTensors too.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.

    Raises:
        ValueError: If one of these is out of range.
    """

    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16)}

    def read(self, state: Mapping[str, Tensor], name: str) -> Tensor:
        return local_part(state[name]).float()

    def keep(self, state: Mapping[str, Tensor], name: str, average: Tensor, generator: torch.Generator) -> None:
        # The noise is in the 16 bits that are cut off.
        noise = torch.randint(0, 1 << 16, average.shape, dtype=torch.int32, device=average.device, generator=generator)
        rounded = ((average.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
        local_part(state[name]).copy_(rounded.to(torch.bfloat16))


class EightBitAdamW(LeanAdamW):
    """AdamW with its averages in 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022): about
    2 bytes for each parameter instead of 8.

    A block of `block_size` numbers along the last dimension has a float32 scale, its largest magnitude, and 8 bits for
    each number: codes of seven decades below the scale, closer together in the upper ones. It computes in float32 and
    rounds averages up or down at random, in proportion, so that they are right in the mean, except that second moments
    are not rounded to 0, which would make steps large. Blocks do not depend on how a parameter is sharded.

    Args:
        params: Parameters, or groups of them; DTensors too.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
        block_size: Number of elements that share a scale.
        min_8bit_size: Parameters with fewer elements, and those whose last dimension is not a multiple of `block_size`,
            keep their averages in float32.

    Raises:
        ValueError: If one of these is out of range, or ranks split a block between them.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        block_size: int = 64,
        min_8bit_size: int = 4096,
    ) -> None:
        if block_size < 1 or min_8bit_size < 0:
            raise ValueError(
                f"block_size must be positive and min_8bit_size not negative, got {block_size} and {min_8bit_size}"
            )
        super().__init__(params, lr, betas, eps, weight_decay)
        self._block_size, self._min_size = block_size, min_8bit_size

    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        if parameter.numel() < self._min_size or not parameter.dim() or parameter.shape[-1] % self._block_size:
            return {name: torch.zeros_like(parameter, dtype=torch.float32)}
        *local, columns = local_part(parameter).shape
        if columns % self._block_size:
            raise ValueError(
                f"block_size is {self._block_size}, but a rank holds {columns} of {parameter.shape[-1]} columns of a "
                "parameter, which cuts a block. Set optimizer.kwargs.block_size to a divisor of both"
            )
        zero = int(codes(is_signed(name), torch.device("cpu")).abs().argmin())
        scales = torch.zeros(*local, columns // self._block_size, device=local_part(parameter).device)
        shape = (*parameter.shape[:-1], parameter.shape[-1] // self._block_size)
        return {
            name: torch.full_like(parameter, zero, dtype=torch.uint8),
            name + SCALE: sharded_like(parameter, scales, shape),
        }

    def read(self, state: Mapping[str, Tensor], name: str) -> Tensor:
        held = local_part(state[name])
        if name + SCALE not in state:
            return held
        values = codes(is_signed(name), held.device)[held.int()]
        return self._blocks(values).mul_(local_part(state[name + SCALE]).unsqueeze(-1)).flatten(-2)

    def keep(self, state: Mapping[str, Tensor], name: str, average: Tensor, generator: torch.Generator) -> None:
        if name + SCALE not in state:
            return
        table = codes(is_signed(name), average.device)
        blocks = self._blocks(average)
        scales = blocks.abs().amax(-1)
        # A block of zeros has the scale 0, and nothing to divide.
        values = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        lower = (torch.searchsorted(table, values, right=True, out_int32=True) - 1).clamp_(0, len(table) - 2)
        share = (values - table[lower]) / (table[lower + 1] - table[lower])
        noise = torch.rand(values.shape, device=values.device, generator=generator)
        chosen = lower + (noise < share)
        if not is_signed(name):
            chosen = torch.maximum(chosen, (values > 0).int())
        local_part(state[name]).copy_(chosen.flatten(-2))
        local_part(state[name + SCALE]).copy_(scales)

    def _blocks(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (values.shape[-1] // self._block_size, self._block_size))


def is_signed(name: str) -> bool:
    """Return whether an average has both signs."""
    return name == "exp_avg"


@cache
def codes(signed: bool, device: torch.device) -> Tensor:
    """Return the numbers that 8 bits stand for, in increasing order, from -1 or 0 to 1.

    Each of seven decades is divided evenly, with twice as many numbers as the decade below it.

    Args:
        signed: True for numbers of both signs.
        device: Device of the result.
    """
    positive = []
    for decade in range(_DECADES):
        count = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        positive.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - _DECADES + 1))
    found = torch.cat(positive)
    found /= found[-1].clone()
    negative = -found.flip(0) if signed else found[:0]
    return torch.cat([negative, found.new_zeros(1), found]).float().to(device)


def sharded_like(parameter: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of another shape whose parts are on the same ranks as a parameter's parts.

    Args:
        parameter: Parameter, or a DTensor.
        local: This rank's part.
        shape: Shape of the whole tensor, with as many dimensions.
    """
    if not isinstance(parameter, DTensor):
        return local
    strides = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    found = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
    # It moves the part to the device of the mesh, but parameters may be in host memory.
    return found.to(parameter.device)
