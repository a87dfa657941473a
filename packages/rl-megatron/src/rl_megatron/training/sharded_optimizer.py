"""A torch optimizer whose state is spread over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from torch import Tensor, nn
from torch.optim import Optimizer


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


@dataclass(frozen=True)
class Shard:
    """The run of a parameter's elements that this rank steps.

    Args:
        parameter: Parameter of the model.
        start, stop: bounds of the run in the flattened parameter.
        main: Float32 `[stop - start]`, which the optimizer steps; the parameter's own memory if that is float32.
        grad: `[stop - start]`, summed over the ranks; float32, or the parameter's dtype if they are reduced in that.
        group: The ranks that hold the other runs.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    main: Tensor
    grad: Tensor
    group: dist.ProcessGroup


class ShardedOptimizer:
    """Steps the runs of Megatron's gradient buffers that belong to this rank, then gathers the parameters.

    Megatron's own distributed optimizer does the same only for Adam, and its checkpoints lose the step count of
    torch's Adam; this one takes any optimizer that treats elements one by one.

    Args:
        chunks: Wrapped with `use_distributed_optimizer`, so that gradients are reduced and scattered.
        build: Function from parameters, and those of them that are norms and biases, to a torch optimizer.
        is_counted: True if a parameter's elements on this rank count in the norm of all gradients.
        norms_and_biases: Parameters of the model that the optimizer may leave without weight decay.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        build: Callable[[list[nn.Parameter], Set[nn.Parameter]], Optimizer],
        is_counted: Callable[[nn.Parameter], bool],
        norms_and_biases: Set[nn.Parameter],
    ) -> None:
        self._chunks = chunks
        self._is_counted = is_counted
        self.shards = list(_shards(chunks))
        # an optimizer needs a parameter, and a rank may hold nothing but a buffer's padding
        mains = [nn.Parameter(shard.main) for shard in self.shards]
        undecayed = {
            main for main, shard in zip(mains, self.shards, strict=True) if shard.parameter in norms_and_biases
        }
        self.inner = build(mains or [nn.Parameter(torch.zeros(0))], undecayed)
        self.parameters = mains
        self._runs: dict[nn.Parameter, list[tuple[Shard, nn.Parameter]]] = {}
        for shard, inner in zip(self.shards, self.parameters, strict=True):
            self._runs.setdefault(shard.parameter, []).append((shard, inner))
        self._groups = {
            parameter: buffer.data_parallel_group
            for chunk in chunks
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
            for parameter in buffer.params
        }

    def group_of(self, parameter: nn.Parameter) -> dist.ProcessGroup:
        """The ranks over which a parameter's state is spread."""
        return self._groups[parameter]

    def runs_of(self, parameter: nn.Parameter) -> Iterator[tuple[Shard, nn.Parameter]]:
        """This rank's runs of a parameter, none or one, with what the inner optimizer knows it by."""
        yield from self._runs.get(parameter, [])

    def zero_grad(self) -> None:
        """Empty the gradient buffers."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def grad_norm(self) -> float:
        """The norm of all gradients of the model; collective over all ranks."""
        device = self.shards[0].grad.device if self.shards else torch.device(torch.cuda.current_device())
        total = square_sum([shard.grad for shard in self.shards if self._is_counted(shard.parameter)], device)
        dist.all_reduce(total)
        return float(total.sqrt().item())

    def scale_grads(self, factor: float) -> None:
        """Multiply this rank's runs of the gradient."""
        if self.shards:
            torch._foreach_mul_([shard.grad for shard in self.shards], factor)

    @torch.no_grad()
    def step(self) -> None:
        """One step of this rank's runs, then all parameters whole again; collective."""
        for shard, parameter in zip(self.shards, self.parameters, strict=True):
            parameter.grad = shard.grad.to(parameter.dtype)
        self.inner.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Write this rank's runs into the parameters and gather those of the others; collective."""
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
        """Tensors that the optimizer keeps in addition to the parameters."""
        states = [value for state in self.inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        copies = [shard.main for shard in self.shards if shard.parameter.dtype != torch.float32]
        return [*states, *copies]

    def grad_buffers(self) -> list[Tensor]:
        """The gradient buffers, whose contents matter only within a step."""
        return [
            buffer.grad_data for chunk in self._chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        ]


def _shards(chunks: list[DistributedDataParallel]) -> Iterable[Shard]:
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // group.size()
                begin = bucket.offset + group.rank() * size
                for parameter in bucket.params_list:
                    yield from _shard(buffer, parameter, begin, begin + size, group)


def _shard(buffer: object, parameter: nn.Parameter, begin: int, end: int, group: dist.ProcessGroup) -> Iterable[Shard]:
    """The run of a parameter between two places of a buffer, if there is one."""
    assert isinstance(buffer, _ParamAndGradBuffer)
    first, last, _ = buffer.param_index_map[parameter]
    low, high = max(first, begin), min(last, end)
    if low >= high:
        return
    own = parameter.detach().view(-1)[low - first : high - first]
    main = own if own.dtype == torch.float32 else own.float()
    yield Shard(parameter, low - first, high - first, main, buffer.grad_data[low:high], group)
