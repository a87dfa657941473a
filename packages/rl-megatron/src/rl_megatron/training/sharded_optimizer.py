"""Gradient buffers, and a torch optimizer whose state is spread over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_core.torch.optim.parameters import OptimizedParameter
from rl_megatron.config import DistributedDataParallelConfig as ReductionConfig
from rl_megatron.model.model import ReadingModel


def wrap_chunks(model: ReadingModel, reduction: ReductionConfig) -> list[DistributedDataParallel]:
    """Wrap each chunk with a gradient buffer; its parameters move into a buffer too, and keep their identity.

    Gradients are summed and scattered: each rank of the data- and context-parallel group is left with the whole of its
    share.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=reduction.grad_reduce_in_fp32,
        overlap_grad_reduce=reduction.overlap_grad_reduce,
        use_distributed_optimizer=True,
    )
    chunks = [
        DistributedDataParallel(model.config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]
    if reduction.overlap_grad_reduce:
        # The gradients of all microbatches except the last are only added up.
        each = [chunk.no_sync for chunk in chunks]
        model.config.no_sync_func = each if len(each) > 1 else each[0]
    return chunks


def square_sum(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, float32 `[]`.

    On GPUs a few kernels take all tensors. On the CPU, norms of torch add up many squares in a row, which loses more
    digits than a sum does.

    Args:
        tensors: Tensors, of any shapes.
        device: Their device, also if there are none.
    """
    if not tensors:
        return torch.zeros((), device=device)
    if device.type == "cuda":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).square().sum()
    return torch.stack([tensor.float().square().sum() for tensor in tensors]).sum()


class ParameterShard(NamedTuple):
    """The run of a parameter's elements that this rank steps.

    Args:
        parameter: Parameter of the model.
        start: Start of the run in the flattened parameter.
        stop: End of the run.
        main: Float32 `[stop - start]`, which the optimizer steps; the parameter's own memory if that is float32.
        grad: `[stop - start]`, summed over the ranks; float32, or the parameter's dtype if they are reduced in that.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    main: Tensor
    grad: Tensor


class MegatronOptimizer:
    """Steps the runs of Megatron's gradient buffers that belong to this rank, then gathers the parameters.

    Megatron's own distributed optimizer does the same only for Adam, and its checkpoints lose the step count of
    torch's Adam; this one takes any optimizer that treats elements one by one.

    Args:
        chunks: Chunks wrapped by `wrap_chunks`, so that gradients are reduced and scattered.
        build: Function from parameters and their descriptions to a torch optimizer.
        is_counted: Function that returns whether a parameter's elements on this rank count in the norm of all
            gradients.
        described: Descriptions of the parameters of the model.

    Attributes:
        groups: The ranks that share the state of each parameter.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        build: Callable[[list[nn.Parameter], Mapping[nn.Parameter, OptimizedParameter]], Optimizer],
        is_counted: Callable[[nn.Parameter], bool],
        described: Mapping[nn.Parameter, OptimizedParameter],
    ) -> None:
        self._chunks = chunks
        self._buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._is_counted = is_counted
        self.shards = list(self._shards())
        # An optimizer needs a parameter, and a rank may hold nothing but a buffer's padding.
        self.parameters = [nn.Parameter(shard.main) for shard in self.shards]
        self._runs: dict[nn.Parameter, list[tuple[ParameterShard, nn.Parameter]]] = {}
        for shard, main in zip(self.shards, self.parameters, strict=True):
            self._runs.setdefault(shard.parameter, []).append((shard, main))
        mains = {}
        for shard, main in zip(self.shards, self.parameters, strict=True):
            found = described[shard.parameter]
            pieces = None if found.pieces is None else partial(cast("Any", found.pieces), start=shard.start)
            mains[main] = found._replace(pieces=pieces)
        self.inner = build(self.parameters or [nn.Parameter(torch.zeros(0))], mains)
        self.groups: dict[nn.Parameter, dist.ProcessGroup] = {
            parameter: buffer.data_parallel_group for buffer in self._buffers for parameter in buffer.params
        }

    def runs_of(self, parameter: nn.Parameter) -> list[tuple[ParameterShard, nn.Parameter]]:
        """Return this rank's runs of a parameter, none or one, with the parameter of the inner optimizer for each."""
        return self._runs.get(parameter, [])

    def zero_grad(self) -> None:
        """Empty the gradient buffers."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def grad_norm(self) -> float:
        """Return the norm of all gradients of the model; collective over all ranks."""
        device = self.shards[0].grad.device if self.shards else torch.device(torch.cuda.current_device())
        total = square_sum([shard.grad for shard in self.shards if self._is_counted(shard.parameter)], device)
        dist.all_reduce(total)
        return float(total.sqrt().item())

    def scale_grads(self, factor: float) -> None:
        """Multiply this rank's runs of the gradient."""
        if self.shards:
            torch._foreach_mul_([shard.grad for shard in self.shards], factor)

    def take_grads(self) -> list[Tensor]:
        """Return a copy of this rank's runs of the gradient, and empty the buffers."""
        taken = [shard.grad.clone() for shard in self.shards]
        self.zero_grad()
        return taken

    def add_grads(self, taken: list[Tensor]) -> None:
        """Add runs that were taken."""
        if self.shards:
            torch._foreach_add_([shard.grad for shard in self.shards], taken)

    @torch.no_grad()
    def step(self) -> None:
        """Step this rank's runs, then make all parameters whole again; collective."""
        for shard, parameter in zip(self.shards, self.parameters, strict=True):
            parameter.grad = shard.grad.to(parameter.dtype)
        self.inner.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Write this rank's runs into the parameters and gather the other ranks' runs; collective."""
        self._copy(from_main=True)
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take this rank's runs from the parameters, as after loading weights."""
        self._copy(from_main=False)

    def _copy(self, *, from_main: bool) -> None:
        """Copy this rank's runs from the tensors that the optimizer steps to the parameters, or back."""
        runs = [(shard.parameter.detach().view(-1)[shard.start : shard.stop], shard.main) for shard in self.shards]
        apart = [(own, main) for own, main in runs if own.data_ptr() != main.data_ptr()]
        if apart:
            owns, mains = zip(*apart, strict=True)
            torch._foreach_copy_(*((owns, mains) if from_main else (mains, owns)))

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors that the optimizer keeps in addition to the parameters."""
        states = [value for state in self.inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        copies = [shard.main for shard in self.shards if shard.parameter.dtype != torch.float32]
        return [*states, *copies]

    def grad_buffers(self) -> list[Tensor]:
        """Return the gradient buffers, whose contents matter only within a step."""
        return [buffer.grad_data for buffer in self._buffers]

    def _shards(self) -> Iterator[ParameterShard]:
        for buffer in self._buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // group.size()
                begin = bucket.offset + group.rank() * size
                for parameter in bucket.params_list:
                    # The run is the part of the parameter between two places of the buffer, if there is one.
                    first, last, _ = buffer.param_index_map[parameter]
                    low, high = max(first, begin), min(last, begin + size)
                    if low < high:
                        own = parameter.detach().view(-1)[low - first : high - first]
                        main = own if own.dtype == torch.float32 else own.float()
                        yield ParameterShard(parameter, low - first, high - first, main, buffer.grad_data[low:high])
