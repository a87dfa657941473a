"""Parameters that are DTensors, and modules that compute on this rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from rl_dtensor.parallel.collectives import scale_grad

Parameters = Mapping[str, Tensor | None]
"""A module's own parameters by name."""


def localize(
    module: nn.Module, placements: Mapping[str, Placement], grad_scale: float = 1.0, reader: nn.Module | None = None
) -> None:
    """Make a module compute on the local parts of its own DTensor parameters.

    Args:
        module: Module with DTensor parameters, changed in place.
        placements: Parameter name to the placement of the gradient that its computation gives.
        grad_scale: Multiplies gradients.
        reader: The module around it that may read its parameters without calling it.
    """

    def local_parts(held: Parameters) -> Parameters:
        parts = {name: each for name, each in held.items() if each is not None}
        return {**held, **{name: to_local(each, placements[name], grad_scale) for name, each in parts.items()}}

    compute_on(module, local_parts, reader)


def compute_on(
    module: nn.Module, replaced: Callable[[Parameters], Parameters], reader: nn.Module | None = None
) -> None:
    """Make a module compute on other tensors in place of its own parameters.

    Args:
        module: Module whose parameters are replaced during the pass.
        replaced: Function from the parameters to these tensors; called in each forward pass.
        reader: The module in whose forward pass they are in their place; the module itself if None.
    """
    reader = reader or module
    original = reader.forward

    @wraps(original)  # The signature shows how experts are called.
    def forward(*args: Any, **kwargs: Any) -> Any:
        held = module.__dict__["_parameters"]
        module.__dict__["_parameters"] = replaced(held)
        try:
            return original(*args, **kwargs)
        finally:
            module.__dict__["_parameters"] = held

    reader.forward = forward


def to_local(parameter: Tensor, grad: Placement, grad_scale: float = 1.0) -> Tensor:
    """Return this rank's part of a parameter, with gradients."""
    part = parameter.to_local(grad_placements=[grad]) if isinstance(parameter, DTensor) else parameter
    return part if grad_scale == 1.0 else scale_grad(part, grad_scale)


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a parameter on `meta` by a DTensor."""
    parameter = module._parameters[name]
    assert parameter is not None
    split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
