"""Experts split over ranks: each has some of them whole."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from rl_dtensor.parallel.collectives import exchange
from rl_dtensor.parallel.local_parameters import distribute, localize

NUM_ARGUMENTS = 3
"""Number of arguments of stacked experts: hidden states `[tokens, hidden]`, ids of the chosen experts and their weights
`[tokens, k]`."""

STACK_DIMS = 3
"""Dims of the stacked weights of experts: experts, and those of each weight."""

WHOLE_EXPERTS = "set dtensor_cfg.expert_parallel_size=1 and tensor_parallel_size=1"


def expert_modules(hf: PreTrainedModel) -> list[nn.Module]:
    """Modules of stacked experts, as `transformers` builds them."""
    return [
        module
        for name, module in hf.named_modules()
        if name.endswith(".experts") and any(part.dim() == STACK_DIMS for part in module.parameters(recurse=False))
    ]


def check_stacked(module: nn.Module, kind: str) -> None:
    """Refuse experts that cannot be split over ranks, which send tokens by what the router says of each.

    Args:
        module: Module with the experts of a layer.
        kind: Kind of the model, for messages.

    Raises:
        ValueError: If the experts are not called with what the router says, or not stacked by expert.
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
    module._is_expert_parallel = True  # an id of `num_experts` then stands for an expert elsewhere
    original = module.forward

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        local = ids - rank * own
        is_here = (local >= 0) & (local < own)
        out: Tensor = original(hidden, local.where(is_here, own), weights.where(is_here, 0.0))
        return out

    module.forward = forward


def dispatch_tokens(module: Any, group: dist.ProcessGroup) -> None:
    """Make stacked experts, split over ranks that see different tokens, send each token to the ranks of its experts.

    Tokens go out sorted by expert, one copy per choice, and their results come back to be weighted and summed.
    """
    size = dist.get_world_size(group)
    own = module.num_experts // size
    module.num_experts = own
    rank = dist.get_rank(group)
    original = module.forward

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        num_choices = ids.shape[1]
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        per_rank = torch.bincount(flat // own, minlength=size)
        arriving = torch.empty_like(per_rank)
        dist.all_to_all_single(arriving, per_rank, group=group)
        sent, received = per_rank.tolist(), arriving.tolist()
        tokens = exchange(hidden[order // num_choices], sent, received, group)
        chosen = exchange(flat[order], sent, received, group) - rank * own
        if not len(tokens):  # all parameters need a gradient, if only zeros: FSDP2 reduces them together
            tokens, chosen = torch.cat([tokens, tokens.new_zeros(1, hidden.shape[1])]), chosen.new_zeros(1)
        outputs = original(tokens, chosen[:, None], tokens.new_ones(len(tokens), 1))[: sum(received)]
        back = exchange(outputs, received, sent, group)
        unsorted = torch.empty_like(back).index_copy(0, order, back).view(*ids.shape, -1)
        return (unsorted * weights[..., None].to(unsorted.dtype)).sum(1)

    module.forward = forward


def split_experts(hf: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Split all stacked experts of a model on `meta` over the ranks of a mesh of one axis; these modules.

    A rank's experts see the tokens of all ranks, and their gradients are averaged by FSDP2 over fewer ranks than the
    rest's are: they are scaled down by the difference.

    Raises:
        ValueError: If a module's experts cannot be split.
    """
    modules = expert_modules(hf)
    for module in modules:
        check_stacked(module, hf.config.model_type)
        for name in list(module._parameters):
            distribute(module, name, mesh, Shard(0))
        dispatch_tokens(module, mesh.get_group())
        localize(module, dict.fromkeys(module._parameters, Shard(0)), grad_scale=1.0 / mesh.size())
    return modules
