"""Work inside a rank of a pool: steps of an optimizer on sharded parameters."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rl_core.model_config import OptimizerConfig
from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.optim.optimizer import build_optimizer
from rl_core.torch.process_group import join_process_group
from rl_dtensor.training.step import build_sharded_optimizer

SHAPES = ((5, 4), (3,), (1,))
"""Shapes of parameters, of which ranks have uneven parts or none."""
NUM_STEPS = 3


def differences(rank: Rank, configs: Sequence[OptimizerConfig]) -> list[float]:
    """Return the largest difference between steps on sharded parameters and float64 steps on whole ones, for each
    config."""
    join_process_group(rank.rendezvous)
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return [_difference(config, mesh) for config in configs]
    finally:
        dist.destroy_process_group()


def _difference(config: OptimizerConfig, mesh: Any) -> float:
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in SHAPES]
    grads = [[torch.randn(shape) for shape in SHAPES] for _ in range(NUM_STEPS)]
    shards = [nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])) for start in starts]
    wholes = [nn.Parameter(start.double()) for start in starts]
    _step(build_sharded_optimizer(config, [shards]), shards, grads, mesh)
    kwargs = {name: value for name, value in config.kwargs.items() if name not in ("fused", "foreach")}
    _step(build_optimizer(config.model_copy(update={"kwargs": kwargs}), wholes), wholes, grads, None)
    found = [shard.detach().full_tensor() for shard in shards]
    assert max(_largest(whole - start) for whole, start in zip(wholes, starts, strict=True)) > 1e-3
    return max(_largest(one - whole) for one, whole in zip(found, wholes, strict=True))


def _step(optimizer: Any, parameters: Sequence[nn.Parameter], grads: Sequence[Sequence[Tensor]], mesh: Any) -> None:
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=True):
            is_sharded = isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(grad, mesh, [Shard(0)]) if is_sharded else grad.to(parameter.dtype)
        optimizer.step()


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item()
