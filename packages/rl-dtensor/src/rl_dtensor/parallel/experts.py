"""Experts split over ranks: each has some of them whole."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from rl_dtensor.parallel.collectives import distribute, gather, localize, split

NUM_ARGUMENTS = 3
"""Number of arguments of stacked experts: hidden states `[tokens, hidden]`, ids of the chosen experts and their weights
`[tokens, k]`."""

STACK_DIMS = 3
"""Dims of the stacked weights of experts: experts, and the dims of each weight."""

WHOLE_EXPERTS = "set dtensor_cfg.expert_parallel_size=1 and tensor_parallel_size=1"


def expert_modules(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of stacked experts, as `transformers` builds them."""
    return [
        module
        for name, module in hf.named_modules()
        if name.endswith(".experts") and any(part.dim() == STACK_DIMS for part in module.parameters(recurse=False))
    ]


def check_stacked(module: nn.Module, kind: str) -> None:
    """Refuse experts that cannot be split over ranks, which send each token by the choices of the router.

    Args:
        module: Module with the experts of a layer.
        kind: Kind of the model, for messages.

    Raises:
        ValueError: If the experts are not called with the choices of the router, or not stacked by expert.
    """
    if not takes_choices(module):
        called = ", ".join(_arguments(module))
        raise ValueError(
            f"experts of {kind} models are called only with {called} instead of hidden states, ids of experts and "
            f"weights, so they cannot be split over ranks; {WHOLE_EXPERTS}"
        )
    counts = {parameter.shape[0] for parameter in module._parameters.values() if parameter is not None}
    if counts != {module.num_experts}:
        raise ValueError(f"parameters of the experts of {kind} models are not stacked by expert; {WHOLE_EXPERTS}")


def takes_choices(module: nn.Module) -> bool:
    """Return whether stacked experts are called with hidden states, ids of experts and their weights."""
    return len(_arguments(module)) == NUM_ARGUMENTS


def _arguments(module: nn.Module) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    return [argument.name for argument in parameters if argument.kind is argument.POSITIONAL_OR_KEYWORD]


def mask_foreign_experts(module: Any, rank: int, size: int) -> None:
    """Make stacked experts, split over the ranks that see the same tokens, add up only this rank's."""
    own = module.num_experts // size
    module.num_experts = own
    module._is_expert_parallel = True  # An id of `num_experts` then means an expert elsewhere.
    original = module.forward

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        local = ids - rank * own
        is_here = (local >= 0) & (local < own)
        return cast("Tensor", original(hidden, local.where(is_here, own), weights.where(is_here, 0.0)))

    module.forward = forward


def split_experts(
    hf: PreTrainedModel, mesh: DeviceMesh, *, grad_scale: float, sharing: dist.ProcessGroup | None
) -> list[nn.Module]:
    """Split all stacked experts of a model on `meta` over the ranks of a mesh of one axis; return these modules.

    Args:
        hf: Model whose experts compute on the tokens of a dispatcher, changed in place.
        mesh: Mesh of the ranks that share the experts of each layer.
        grad_scale: Multiplies the gradients of experts. A rank's experts see the tokens of all these ranks, and FSDP2
            averages their gradients over fewer ranks than other gradients.
        sharing: Ranks that have the same tokens, and each dispatch a part; None if all have different tokens.
    """
    modules = expert_modules(hf)
    for module in modules:
        for name in list(module._parameters):
            distribute(module, name, mesh, Shard(0))
        stack: Any = module
        stack.num_experts //= mesh.size()
        if sharing is not None:
            _share_tokens(stack, sharing)
        localize(module, dict.fromkeys(module._parameters, Shard(0)), grad_scale=grad_scale)
    return modules


def _share_tokens(module: Any, group: dist.ProcessGroup) -> None:
    """Make each rank of a group that has the same tokens compute a part of them."""
    original = module.forward
    size = dist.get_world_size(group)

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        num_tokens = len(hidden)
        # Zeros after the tokens give every rank as many.
        missing = -num_tokens % size
        padded = [F.pad(part, (0, 0, 0, missing)) if missing else part for part in (hidden, ids, weights)]
        parts = [split(part, 0, group) for part in padded]
        return gather(original(*parts), 0, group, sums_grad=False)[:num_tokens]

    module.forward = forward
