"""Parameters and optimizer state as rectangles of tensors of the whole model, whatever ranks hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_core.torch.optim.optimizer import counts_on_device
from rl_core.torch.training.checkpoint_files import read_tensors
from rl_megatron.conversion.splits import Vocabulary
from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.model.model import ReadingModel
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.training.extra_state import extra_state, restore_extra_state
from rl_megatron.training.pieces import Pieces, PiecesLoadPlanner, PiecesSavePlanner, rectangles
from rl_megatron.training.sharded_optimizer import Shard, ShardedOptimizer
from rl_megatron.training.weights import Weights

MODEL = "model"
MAIN = "main"
"""The float32 weights that the optimizer steps, if the parameters have another dtype."""


class TrainingState:
    """Parameters and optimizer state of one rank, by Megatron's parameter names over the whole model.

    Of a parameter that trains, and of its optimizer state, each data-parallel rank writes the run of elements that it
    steps, so that no rank ever holds another's. What is restored is read straight into the memory that it stays in.

    Args:
        optimizer: None if the model does not train.
    """

    def __init__(self, model: ReadingModel, weights: Weights, optimizer: ShardedOptimizer | None, mesh: Mesh) -> None:
        self._model = model
        self._weights = weights
        self._optimizer = optimizer
        self._mesh = mesh
        self._dtypes: dict[str, str] = {}

    def tensors(self, *, copies: bool) -> dict[str, Pieces]:
        """Tensors that this rank writes; collective.

        Args:
            copies: True if no tensor shares its memory with the model or the optimizer, so that both may change.
        """
        self._dtypes = self._state_dtypes()
        return self._tensors(self._dtypes, copies=copies)

    def weights(self) -> dict[str, Pieces]:
        """The parameters and buffers among `tensors`, as copies in host memory."""
        return self._tensors({}, copies=True)

    def _tensors(self, of_optimizer: Mapping[str, str], *, copies: bool) -> dict[str, Pieces]:
        """Weights, and the optimizer's state of these keys and dtypes."""
        found: dict[str, Pieces] = {}
        trained = dict(self._trained_by_target)
        for entry, held in self._held:
            if entry.target not in trained and self._weights.leads(entry):
                self._add(found, MODEL, entry, held.shape, 0, _flat(held, copied=copies))
        for entry, parameter in self._trained:
            if not self._writes(entry, parameter):
                continue
            for shard, inner in self._runs(parameter):
                held = parameter.detach().view(-1)[shard.start : shard.stop]
                self._add(found, MODEL, entry, parameter.shape, shard.start, _flat(held, copied=copies))
                for key, dtype in of_optimizer.items():
                    run = self._run(shard, inner, key, getattr(torch, dtype))
                    self._add(found, key, entry, parameter.shape, shard.start, _flat(run, copied=copies))
        return found

    def description(self) -> dict[str, Any]:
        """dtypes of the optimizer's state by its key, and state that is one number per parameter (a step count), by
        parameter; collective, after `tensors`."""
        mine: dict[str, dict[str, Any]] = {}
        for entry, parameter in self._trained:
            for _, state in self._states(parameter):
                numbers = {key: value for key, value in state.items() if not _is_aligned(value)}
                mine[entry.stored] = {key: _number(value) for key, value in numbers.items()}
        everyone: list[dict[str, dict[str, Any]]] = [{}] * self._mesh.world_size
        dist.all_gather_object(everyone, mine, group=self._mesh.control)
        scalars = {target: numbers for theirs in everyone for target, numbers in theirs.items()}
        return {"dtypes": self._dtypes, "scalars": scalars}

    def layers(self) -> dict[str, Any]:
        """The history of 8-bit recipes."""
        return extra_state(self._model)

    def restore_layers(self, state: Mapping[str, Any]) -> None:
        """Go on with the history of 8-bit recipes, which another layout begins anew."""
        restore_extra_state(self._model, state)

    def save_planner(self) -> PiecesSavePlanner:
        """Writes rectangles of tensors."""
        return PiecesSavePlanner()

    @torch.no_grad()
    def restore(self, path: Path, description: Mapping[str, Any]) -> None:
        """Read parameters and optimizer state; collective.

        Args:
            path: Path of the model's checkpoint.
            description: As `description` returned.
        """
        self.restore_weights(path)
        if self._optimizer is None:
            return
        self._optimizer.adopt()
        self._optimizer.inner.state.clear()
        wanted: dict[str, Pieces] = {}
        counts = counts_on_device(self._optimizer.inner)
        for entry, parameter in self._trained:
            for shard, inner in self._runs(parameter):
                device = shard.main.device if counts else torch.device("cpu")
                state = {
                    key: _restored(value, device) for key, value in description["scalars"].get(entry.stored, {}).items()
                }
                self._optimizer.inner.state[inner] = state
                for key, dtype in description["dtypes"].items():
                    run = shard.main
                    if key != MAIN:
                        run = state[key] = torch.zeros_like(shard.main, dtype=getattr(torch, dtype))
                    self._add(wanted, key, entry, parameter.shape, shard.start, run.detach())
        self._read(path, wanted)

    @torch.no_grad()
    def restore_weights(self, path: Path) -> None:
        """Read parameters and buffers into place; collective."""
        wanted: dict[str, Pieces] = {}
        for entry, held in self._held:
            self._add(wanted, MODEL, entry, held.shape, 0, held.detach().view(-1))
        self._read(path, wanted)

    def _read(self, path: Path, wanted: dict[str, Pieces]) -> None:
        read_tensors(path, wanted, group=self._mesh.control, planner=PiecesLoadPlanner())

    def _add(
        self, found: dict[str, Pieces], key: str, entry: WeightMap, shape: torch.Size, start: int, run: Tensor
    ) -> None:
        """Add what a run of a parameter's elements is of the tensors that it is kept as.

        Args:
            found: Pieces by the name of the tensor; the run's pieces are added.
            key: Prefix of the names: `MODEL`, `MAIN` or a key of the optimizer's state.
            entry: Weight map of the parameter.
            shape: Shape of the parameter on this rank.
            start: Start of the run, in the flattened parameter.
            run: `[elements]`.
        """
        for part in self._parts(entry, shape):
            first, last = max(start, part.start), min(start + len(run), part.start + prod(part.shape))
            for offsets, sizes in rectangles(first - part.start, last - part.start, part.shape):
                begin = first - start
                first += prod(sizes)
                name = f"{key}/{entry.stored}/{part.index}"
                place = [base + offset for base, offset in zip(part.offsets, offsets, strict=True)]
                found.setdefault(name, Pieces(part.size)).add(place, run[begin : first - start].view(sizes))

    def _parts(self, entry: WeightMap, shape: torch.Size) -> Iterator[Part]:
        """The tensors that a parameter of this shape is kept as, one after the other in its memory."""
        share, num_shares = self._weights.share(entry)
        dim = entry.split.dim
        for index, piece in enumerate(entry.split.slices(torch.empty(shape, device="meta"))):
            assert piece.is_contiguous()
            local, size, offsets = list(piece.shape), list(piece.shape), [0] * piece.dim()
            if dim is not None:
                size[dim] *= num_shares
                offsets[dim] = share * local[dim]
            if isinstance(entry.split, Vocabulary):
                # the rows that pad it to a multiple of the ranks are not kept
                size[0] = entry.split.num_rows
                local[0] = max(0, min(local[0], size[0] - offsets[0]))
            yield Part(index, int(piece.storage_offset()), tuple(local), tuple(size), tuple(offsets))

    def _writes(self, entry: WeightMap, parameter: nn.Parameter) -> bool:
        """Return whether this rank's group is the first of those that hold the same share of a parameter."""
        assert self._optimizer is not None
        if entry.copy_of is not None:
            return False
        return self._weights.leader(entry) in dist.get_process_group_ranks(self._optimizer.group_of(parameter))

    def _run(self, shard: Shard, inner: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
        assert self._optimizer is not None
        if key == MAIN:
            return shard.main
        run = self._optimizer.inner.state[inner].get(key)
        return torch.zeros_like(shard.main, dtype=dtype) if run is None else run

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


@dataclass(frozen=True)
class Part:
    """The place of a tensor of the whole model in a parameter of this rank.

    Args:
        index: Among the tensors that the parameter is kept as.
        start: Start of its elements in the flattened parameter.
        shape: Shape of what this rank has of it.
        size: Size of the whole tensor.
        offsets: Offsets of what this rank has, in the whole tensor.
    """

    index: int
    start: int
    shape: tuple[int, ...]
    size: tuple[int, ...]
    offsets: tuple[int, ...]


def _flat(tensor: Tensor, *, copied: bool) -> Tensor:
    flat = tensor.detach().view(-1)
    return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat) if copied else flat


def _is_aligned(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _number(value: Any) -> Any:
    """A tensor of one number keeps its dtype."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _restored(value: Any, device: torch.device) -> Any:
    """Every parameter its own tensor on the optimizer's device: a shared one would be stepped once per parameter."""
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
