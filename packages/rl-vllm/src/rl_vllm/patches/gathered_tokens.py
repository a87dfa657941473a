"""The exchange of tokens between data-parallel engines that share the experts of a mixture, on CPU.

- Fault: layers of experts gather the tokens of all engines and add their results up, in numbers that differ by engine.
  On CPU vLLM chooses this exchange (`AgRsAll2AllManager`), but its communicator has neither of the two operations.
- vLLM 0.32.0, `vllm/distributed/device_communicators/cpu_communicator.py` (`CpuCommunicator`).
- Upstream: https://github.com/vllm-project/vllm/issues/57837 (open) asks for expert parallelism on CPU.
- Delete when `tests/patches/test_gathered_tokens.py::test_vllms_communicator_on_cpu_gathers_no_uneven_tokens` fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def exchange_tokens_on_cpu() -> None:
    """Let engines on CPU gather and add up rows, also if their numbers of rows differ."""
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: CpuCommunicator, input_: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor | list[Tensor]:
    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [len(input_)] * self.world_size
    # gloo gathers tensors of one shape only.
    own = input_.new_zeros((max(sizes), *input_.shape[1:]))
    own[: len(input_)] = input_
    gathered = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(gathered, own, group=self.device_group)
    return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(self: CpuCommunicator, input_: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(list(sizes))[self.rank_in_group].clone()
