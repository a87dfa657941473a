"""AdamW with half the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

AVERAGES = ("exp_avg", "exp_avg_sq")

_SEED_STEP = 1_000_003


class HalfStateAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) that keeps its averages in bfloat16:
    4 bytes for each parameter instead of 8.

    It computes in float32. What a step adds to an average is often less than bfloat16 can add (a thousandth of the
    second moment, which is resolved to a two-hundredth), so averages are rounded up or down at random, in proportion:
    right in the mean. The noise depends only on step and parameter, so ranks with the same part of a parameter keep
    the same averages, and a resumed run repeats itself bit for bit.

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

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for index, (group, parameter) in enumerate(parameters):
            if parameter.grad is not None:
                self._update(parameter, group, index)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state and keep the averages in bfloat16, which torch would widen to the dtype of the parameters."""
        super().load_state_dict(dict(state_dict))
        for state in self.state.values():
            for name in AVERAGES:
                state[name] = state[name].to(torch.bfloat16)

    def _update(self, parameter: Tensor, group: Mapping[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in AVERAGES:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        step = int(state["step"].item())
        averages = [_own(state[name]) for name in AVERAGES]
        first, second = (average.float() for average in averages)
        own, grad = _own(parameter), _own(parameter.grad).float()
        beta1, beta2 = group["betas"]
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        own.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(first, size, value=-group["lr"] / (1 - beta1**step))
        generator = torch.Generator(own.device).manual_seed(step * _SEED_STEP + index)
        for kept, average in zip(averages, (first, second), strict=True):
            kept.copy_(_rounded(average, generator))


def _own(tensor: Any) -> Tensor:
    """Return the part of a tensor that this rank holds, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, up or down with a chance in proportion to nearness: noise in the 16 bits that go."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    return ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)
