"""Work inside a rank of a pool: steps of an optimizer on sharded parameters."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rl_core.model_config import OptimizerConfig
from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.optim.adamw import EightBitAdamW
from rl_core.torch.optim.optimizer import build_optimizer
from rl_core.torch.optim.parameters import local_part
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


MESHES = {
    "fsdp": (Shard(0), Shard(0)),
    "hsdp": (Replicate(), Shard(0)),
    "fsdp and rows over tp": (Shard(0), Shard(1)),
    "replicas over tp": (Shard(1), Replicate()),
}
"""Placements of a parameter over a mesh of 2 x 2 ranks."""


def eight_bit_differences(rank: Rank) -> dict[str, tuple[float, float]]:
    """Return for each of `MESHES` the largest difference of steps from float64 AdamW on the averages that were kept
    before the step, and the largest difference of the averages that are kept from those of float64, as a share of the
    scale of their block."""
    join_process_group(rank.rendezvous)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        return {name: _eight_bit_difference(mesh, placements) for name, placements in MESHES.items()}
    finally:
        dist.destroy_process_group()


def split_block(rank: Rank) -> str:
    """Return what an optimizer says of blocks that are longer than a rank's part of a row."""
    join_process_group(rank.rendezvous)
    try:
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 32), init_device_mesh("cpu", (2,)), [Shard(1)]))
        parameter.grad = torch.ones_like(parameter)
        EightBitAdamW([parameter], block_size=32, min_8bit_size=0).step()
        return ""
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def _eight_bit_difference(mesh: Any, placements: Sequence[Any]) -> tuple[float, float]:
    torch.manual_seed(0)
    start, lr, beta1, beta2, worst, rounding = torch.randn(7, 32), 0.01, 0.9, 0.99, 0.0, 0.0
    parameter = nn.Parameter(distribute_tensor(start, mesh, placements))
    config = {"lr": lr, "betas": (beta1, beta2), "weight_decay": 0.0, "block_size": 8, "min_8bit_size": 64}
    optimizer = EightBitAdamW([parameter], **config)
    for step in range(1, 6):
        grad = distribute_tensor(torch.randn(7, 32), mesh, placements)
        state, own = optimizer.state[parameter], local_part(grad).double()
        before = local_part(parameter).double()
        kept = [optimizer.read(state, name).double() if state else own * 0 for name in ("exp_avg", "exp_avg_sq")]
        parameter.grad = grad
        optimizer.step()
        first, second = beta1 * kept[0] + (1 - beta1) * own, beta2 * kept[1] + (1 - beta2) * own**2
        expected = before - lr * first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + 1e-8)
        if not own.numel():
            continue
        worst = max(worst, _largest(local_part(parameter) - expected))
        for name, average in (("exp_avg", first), ("exp_avg_sq", second)):
            blocks = (optimizer.read(state, name) - average).unflatten(-1, (-1, 8)).abs()
            rounding = max(rounding, (blocks.amax(-1) / local_part(state[name + "_scale"])).max().item())
    assert state["exp_avg_scale"].placements == parameter.placements
    assert state["exp_avg_scale"].shape == (7, 4)
    return worst, rounding


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
