"""Parameters and optimizer state as tensors of the whole model, whatever ranks hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor, nn

from rl_megatron.conversion.splits import Vocabulary
from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.sharded_optimizer import Shard, ShardedOptimizer
from rl_megatron.weights import Weights

MODEL = "model"
MAIN = "main"
"""The float32 weights that the optimizer steps, where the parameters are of another dtype."""
READ_BYTES = 2**30
"""About how much a rank reads at a time when it restores."""


class TrainingState:
    """What a model and its optimizer keep, by Megatron's parameter names over the whole model.

    Optimizer state lies in runs over the data-parallel ranks. To be saved, each parameter's is put together on one of
    them; to be restored, each rank reads it and keeps its run.

    Args:
        optimizer: None where the model does not train.
    """

    def __init__(self, weights: Weights, optimizer: ShardedOptimizer | None, mesh: Mesh) -> None:
        self._weights = weights
        self._optimizer = optimizer
        self._mesh = mesh
        self.dtypes: dict[str, str] = {}

    def tensors(self, *, copies: bool) -> dict[str, ShardedTensor]:
        """What this rank writes; collective. Also sets `dtypes`, those of the optimizer's state by its key.

        Args:
            copies: whether no tensor shares its memory with the model or the optimizer, so that both may change.
        """
        self.dtypes = self._state_dtypes()
        found = {}
        for entry, held in self._held:
            if self._weights.leads(entry):
                found.update(self._sharded(MODEL, entry, _host_copy(held) if copies else held.detach()))
        for entry, parameter in self._trained:
            for key, dtype in self.dtypes.items():
                whole = self._assembled(parameter, key, getattr(torch, dtype))
                if whole is not None and self._weights.leads(entry):
                    found.update(self._sharded(key, entry, whole))
        return found

    def scalars(self) -> dict[str, dict[str, Any]]:
        """State that is one number per parameter (a step count), by parameter; collective."""
        mine: dict[str, dict[str, Any]] = {}
        for entry, parameter in self._trained:
            for _, state in self._states(parameter):
                numbers = {key: value for key, value in state.items() if not _is_aligned(value)}
                mine[entry.stored] = {key: _number(value) for key, value in numbers.items()}
        everyone: list[dict[str, dict[str, Any]]] = [{}] * self._mesh.world_size
        dist.all_gather_object(everyone, mine, group=self._mesh.control)
        return {target: numbers for theirs in everyone for target, numbers in theirs.items()}

    @torch.no_grad()
    def restore(self, folder: str, dtypes: Mapping[str, str], scalars: Mapping[str, Mapping[str, Any]]) -> None:
        """Read parameters and optimizer state; collective.

        Args:
            dtypes: of the saved optimizer state by its key.
            scalars: as `scalars` returned.
        """
        for _, held, loaded in self._read(folder, MODEL, self._held):
            held.copy_(loaded)
        if self._optimizer is None:
            return
        self._optimizer.adopt()
        self._optimizer.inner.state.clear()
        for entry, parameter in self._trained:
            for inner, state in self._states(parameter):
                assert not state
                numbers = {key: _restored(value) for key, value in scalars.get(entry.stored, {}).items()}
                self._optimizer.inner.state[inner].update(numbers)
        for key, dtype in dtypes.items():
            wanted = [(entry, parameter.to(getattr(torch, dtype))) for entry, parameter in self._trained]
            parameters = dict(self._trained_by_target)
            for entry, _, loaded in self._read(folder, key, wanted):
                self._take(parameters[entry.target], key, loaded)

    def _take(self, parameter: nn.Parameter, key: str, whole: Tensor) -> None:
        """Keep this rank's run of a parameter's state."""
        assert self._optimizer is not None
        for shard, inner in self._runs(parameter):
            run = whole.reshape(-1)[shard.start : shard.stop].to(shard.main.device)
            if key == MAIN:
                shard.main.copy_(run)
            else:
                self._optimizer.inner.state[inner][key] = run.clone()

    def _read(
        self, folder: str, key: str, wanted: list[tuple[WeightMap, Tensor]]
    ) -> Iterator[tuple[WeightMap, Tensor, Tensor]]:
        """Read tensors in groups, all ranks as many groups; each entry, its tensor, and what the checkpoint has."""
        groups = _groups(wanted)
        count = torch.tensor(len(groups))
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._mesh.control)
        # a rank with nothing left to read still takes part
        groups += [groups[-1]] * (int(count) - len(groups))
        for group in groups:
            templates = {entry.target: torch.empty_like(tensor) for entry, tensor in group}
            requests: dict[str, ShardedTensor] = {}
            for entry, _ in group:
                requests.update(self._sharded(key, entry, templates[entry.target]))
            loaded = dist_checkpointing.load(requests, folder, validate_access_integrity=False)
            for entry, tensor in group:
                parts = entry.split.slices(templates[entry.target])
                for index, part in enumerate(parts):
                    part.copy_(loaded[_key(key, entry, index)])
                yield entry, tensor, templates[entry.target]

    def _sharded(self, key: str, entry: WeightMap, part: Tensor) -> dict[str, ShardedTensor]:
        """This rank's share of a tensor of a parameter's shape."""
        share, size = self._weights.share(entry)
        offsets = [] if entry.split.dim is None else [(entry.split.dim, share, size)]
        return {
            _key(key, entry, index): ShardedTensor.from_rank_offsets(
                _key(key, entry, index),
                piece.contiguous(),
                *offsets,
                allow_shape_mismatch=isinstance(entry.split, Vocabulary),
            )
            for index, piece in enumerate(entry.split.slices(part))
        }

    def _assembled(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor | None:
        """A parameter's state from the runs of all ranks of its group, on the first of them; collective there."""
        assert self._optimizer is not None
        group = self._optimizer.group_of(parameter)
        whole = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        for shard, inner in self._runs(parameter):
            run = shard.main if key == MAIN else self._optimizer.inner.state[inner].get(key)
            if run is not None:
                whole[shard.start : shard.stop] = run
        dist.reduce(whole, dist.get_global_rank(group, 0), group=group)
        return whole.view(parameter.shape).cpu() if group.rank() == 0 else None

    def _state_dtypes(self) -> dict[str, str]:
        """Keys of the optimizer's state that have an element per element of a parameter; collective."""
        mine: dict[str, str] = {}
        for _, parameter in self._trained:
            if parameter.dtype != torch.float32:
                mine[MAIN] = "float32"
            for _, state in self._states(parameter):
                aligned = {key: value for key, value in state.items() if _is_aligned(value)}
                mine |= {key: str(value.dtype).removeprefix("torch.") for key, value in aligned.items()}
        everyone: list[dict[str, str]] = [{}] * self._mesh.world_size
        dist.all_gather_object(everyone, mine, group=self._mesh.control)
        return {key: dtype for theirs in everyone for key, dtype in sorted(theirs.items())}

    def _runs(self, parameter: nn.Parameter) -> Iterator[tuple[Shard, nn.Parameter]]:
        assert self._optimizer is not None
        yield from self._optimizer.runs_of(parameter)

    def _states(self, parameter: nn.Parameter) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        assert self._optimizer is not None
        for _, inner in self._runs(parameter):
            yield inner, self._optimizer.inner.state[inner]

    @property
    def _held(self) -> list[tuple[WeightMap, Tensor]]:
        kept = self._weights.kept
        return [(entry, kept[entry.target]) for entry in self._weights.maps if entry.target in kept]

    @property
    def _trained(self) -> list[tuple[WeightMap, nn.Parameter]]:
        """Parameters with a gradient, in an order that all ranks of their groups share."""
        if self._optimizer is None:
            return []
        return [
            (entry, tensor) for entry, tensor in self._held if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]

    @property
    def _trained_by_target(self) -> list[tuple[str, nn.Parameter]]:
        return [(entry.target, parameter) for entry, parameter in self._trained]


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _key(key: str, entry: WeightMap, index: int) -> str:
    return f"{key}/{entry.stored}/{index}"


def _groups(wanted: list[tuple[WeightMap, Tensor]]) -> list[list[tuple[WeightMap, Tensor]]]:
    groups: list[list[tuple[WeightMap, Tensor]]] = [[]]
    size = 0
    for entry, tensor in wanted:
        if groups[-1] and size + tensor.nbytes > READ_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((entry, tensor))
        size += tensor.nbytes
    return groups


def _is_aligned(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _number(value: Any) -> Any:
    """A tensor of one number keeps its dtype."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _restored(value: Any) -> Any:
    """Every parameter its own tensor: one that is shared is stepped once per parameter."""
    return value.clone() if isinstance(value, Tensor) else value
