"""Metrics of the loss that balances experts, which routers add on their own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from rl_core.metrics import Metric
from rl_megatron.model.routing import Routing

NAME = "load_balancing_loss"


def balance_metrics(
    routing: Routing, config: TransformerConfig, num_tokens: int, *, by_layer: bool
) -> dict[str, Metric]:
    """`load_balancing_loss`, the mean over layers and tokens, 1 if tokens are spread evenly, before its coefficient;
    collective. Empty if there is no such loss.

    Args:
        routing: Routers of this rank, with the losses of the pass.
        config: Megatron's config of the whole model.
        num_tokens: Number of tokens of this rank's shard.
        by_layer: True to add `load_balancing_loss_layer_<n>` for each layer with experts.
    """
    if config.moe_router_load_balancing_type == "none":
        return {}
    # a pipeline rank has only its own layers, and a rank that shares a row's tokens only its part
    values = torch.zeros(config.num_layers, device=torch.cuda.current_device())
    for router in routing.routers:
        if router.noted is not None:
            values[router.layer_number - 1] += router.noted
    dist.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(values, group=parallel_state.get_tensor_and_context_parallel_group())
    layers = _layers_with_experts(config)
    weight = float(num_tokens)
    found = {NAME: Metric(float(values[layers].mean()), weight, "mean")}
    if by_layer:
        found |= {f"{NAME}_layer_{number}": Metric(float(values[number]), weight, "mean") for number in layers}
    return found


def _layers_with_experts(config: TransformerConfig) -> list[int]:
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        return list(range(0, config.num_layers, pattern))
    return [number for number, has_experts in enumerate(pattern) if has_experts]
