"""Parameters and optimizer state as rectangles of tensors of the whole model, whatever ranks hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from rl_megatron.parallel.mesh import MegatronMesh
from rl_megatron.training.pieces import Pieces, PiecesLoadPlanner, PiecesSavePlanner, rectangles
from rl_megatron.training.sharded_optimizer import MegatronOptimizer, ParameterShard
from rl_megatron.training.weights import MegatronWeights

MODEL = "model"
MAIN = "main"
"""The float32 weights that the optimizer steps, if the parameters have another dtype."""


class MegatronState:
    """Parameters and optimizer state of one rank, by Megatron's parameter names over the whole model.

    Each data-parallel rank writes the run of elements that it steps, of a parameter that trains and of its optimizer
    state, so that no rank ever holds another's. Restored tensors are read straight into the memory that they stay in.

    Args:
        optimizer: None if the model does not train.
    """

    def __init__(
        self, model: ReadingModel, weights: MegatronWeights, optimizer: MegatronOptimizer | None, mesh: MegatronMesh
    ) -> None:
        self._model, self._weights, self._optimizer = model, weights, optimizer
        self._mesh = mesh
        self._dtypes: dict[str, str] = {}

    save_planner = PiecesSavePlanner

    def tensors(self, *, copies: bool) -> dict[str, Pieces]:
        """Return the tensors that this rank writes; collective.

        Args:
            copies: True if no tensor shares its memory with the model or the optimizer, so that both may change.
        """
        # The dtypes of the optimizer's state that has an element per element of a parameter, by its key.
        mine: dict[str, str] = {}
        for _, parameter in self._trained:
            if parameter.dtype != torch.float32:
                mine[MAIN] = "float32"
            for _, _, state in self._runs(parameter):
                aligned = {key: value for key, value in state.items() if _is_aligned(value)}
                mine |= {key: str(value.dtype).removeprefix("torch.") for key, value in aligned.items()}
        everyone: list[dict[str, str]] = [{}] * self._mesh.world_size
        dist.all_gather_object(everyone, mine, group=self._mesh.control)
        self._dtypes = {key: dtype for theirs in everyone for key, dtype in sorted(theirs.items())}
        return self._tensors(self._dtypes, copies=copies)

    def weights(self) -> dict[str, Pieces]:
        """Return the parameters and buffers among `tensors`, as copies in host memory."""
        return self._tensors({}, copies=True)

    def _tensors(self, of_optimizer: Mapping[str, str], *, copies: bool) -> dict[str, Pieces]:
        """Return weights, and the optimizer's state of these keys and dtypes."""
        found: dict[str, Pieces] = {}

        def flat(tensor: Tensor) -> Tensor:
            run = tensor.detach().view(-1)
            return torch.empty(run.shape, dtype=run.dtype).copy_(run) if copies else run

        trained = {entry.target for entry, _ in self._trained}
        for entry, held in self._held:
            if entry.target not in trained and self._weights.leads(entry):
                self._add(found, MODEL, entry, held.shape, 0, flat(held))
        for entry, parameter in self._trained:
            assert self._optimizer is not None
            # The first of the groups that hold the same share of a parameter writes it.
            group = self._optimizer.groups[parameter]
            if entry.copy_of is not None or self._weights.leader(entry) not in dist.get_process_group_ranks(group):
                continue
            for shard, inner, _ in self._runs(parameter):
                held = parameter.detach().view(-1)[shard.start : shard.stop]
                self._add(found, MODEL, entry, parameter.shape, shard.start, flat(held))
                for key, dtype in of_optimizer.items():
                    state = self._optimizer.inner.state[inner]
                    run = shard.main if key == MAIN else state.get(key)
                    if run is None and state:
                        continue  # Another optimizer, of embeddings or norms, has this key.
                    if run is None:
                        run = torch.zeros_like(shard.main, dtype=getattr(torch, dtype))
                    self._add(found, key, entry, parameter.shape, shard.start, flat(run))
        return found

    def description(self) -> dict[str, Any]:
        """Return the dtypes of the optimizer's state by its key, the keys of each parameter, and state that is one
        number per parameter (a step count), by parameter; collective, after `tensors`."""
        mine: dict[str, dict[str, Any]] = {}
        for entry, parameter in self._trained:
            for _, _, state in self._runs(parameter):
                # A tensor of one number keeps its dtype.
                mine[entry.stored] = {
                    key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                    for key, value in state.items()
                    if not _is_aligned(value)
                }
        everyone: list[dict[str, dict[str, Any]]] = [{}] * self._mesh.world_size
        dist.all_gather_object(everyone, mine, group=self._mesh.control)
        scalars = {target: numbers for theirs in everyone for target, numbers in theirs.items()}
        # Parameters of one optimizer may have different keys, such as matrices of Muon and norms of AdamW.
        mine_aligned = {
            entry.stored: [key for key, value in state.items() if _is_aligned(value)]
            for entry, parameter in self._trained
            for _, _, state in self._runs(parameter)
        }
        every_aligned: list[dict[str, list[str]]] = [{}] * self._mesh.world_size
        dist.all_gather_object(every_aligned, mine_aligned, group=self._mesh.control)
        aligned = {target: keys for theirs in every_aligned for target, keys in theirs.items()}
        return {"dtypes": self._dtypes, "scalars": scalars, "aligned": aligned}

    def layers(self) -> dict[str, Any]:
        """Return the state that layers keep in addition to their parameters, the scaling history of Transformer
        Engine's 8-bit recipes, by chunk and module."""
        found = {}
        for name, module in self._keepers():
            state = module.get_extra_state()
            # Layers that have nothing to keep return None, or a tensor without elements.
            if state is not None:
                assert isinstance(state, Tensor), f"{name} keeps its state as {type(state).__name__}, not as a tensor"
                if state.numel():
                    found[name] = state.detach().cpu()
        return found

    def restore_layers(self, state: Mapping[str, Any]) -> None:
        """Continue with the history of 8-bit recipes, which another layout begins anew."""
        for name, module in self._keepers():
            if name in state:
                module.set_extra_state(state[name])

    def _keepers(self) -> Iterator[tuple[str, nn.Module]]:
        for number, chunk in enumerate(self._model.chunks):
            for name, module in chunk.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    yield f"{number}/{name}", module

    @torch.no_grad()
    def restore(self, path: Path, description: Mapping[str, Any]) -> None:
        """Read parameters and optimizer state; collective.

        Args:
            path: Path of the model's checkpoint.
            description: Result of `description`.
        """
        self.restore_weights(path)
        if self._optimizer is None:
            return
        self._optimizer.adopt()
        self._optimizer.inner.state.clear()
        wanted: dict[str, Pieces] = {}
        counts = counts_on_device(self._optimizer.inner)
        for entry, parameter in self._trained:
            for shard, inner in self._optimizer.runs_of(parameter):
                device = shard.main.device if counts else torch.device("cpu")
                numbers = description["scalars"].get(entry.stored, {})
                state = {key: _restored(value, device) for key, value in numbers.items()}
                self._optimizer.inner.state[inner] = state
                keys = description.get("aligned", {}).get(entry.stored, description["dtypes"])
                for key, dtype in description["dtypes"].items():
                    run = shard.main
                    if key != MAIN and key not in keys:
                        continue
                    if key != MAIN:
                        run = state[key] = torch.zeros_like(shard.main, dtype=getattr(torch, dtype))
                    self._add(wanted, key, entry, parameter.shape, shard.start, run.detach())
        read_tensors(path, wanted, group=self._mesh.control, planner=PiecesLoadPlanner())

    @torch.no_grad()
    def restore_weights(self, path: Path) -> None:
        """Read parameters and buffers into place; collective."""
        wanted: dict[str, Pieces] = {}
        for entry, held in self._held:
            self._add(wanted, MODEL, entry, held.shape, 0, held.detach().view(-1))
        read_tensors(path, wanted, group=self._mesh.control, planner=PiecesLoadPlanner())

    def _add(
        self, found: dict[str, Pieces], key: str, entry: WeightMap, shape: torch.Size, start: int, run: Tensor
    ) -> None:
        """Add the pieces that a run of a parameter's elements is of the tensors that the parameter is kept as.

        Args:
            found: Pieces by the name of the tensor; the run's pieces are added.
            key: Prefix of the names: `MODEL`, `MAIN` or a key of the optimizer's state.
            entry: Weight map of the parameter.
            shape: Shape of the parameter on this rank.
            start: Start of the run, in the flattened parameter.
            run: `[elements]`.
        """
        share, num_shares = self._weights.share(entry)
        dim = entry.split.dim
        # The tensors that the parameter is kept as are one after the other in its memory.
        for index, piece in enumerate(entry.split.slices(torch.empty(shape, device="meta"))):
            assert piece.is_contiguous()
            local, size, offsets = list(piece.shape), list(piece.shape), [0] * piece.dim()
            if dim is not None:
                size[dim] *= num_shares
                offsets[dim] = share * local[dim]
            if isinstance(entry.split, Vocabulary):
                # The rows that pad it to a multiple of the ranks are not kept.
                size[0] = entry.split.num_rows
                local[0] = max(0, min(local[0], size[0] - offsets[0]))
            begin = int(piece.storage_offset())
            first, last = max(start, begin), min(start + len(run), begin + prod(local))
            for within, sizes in rectangles(first - begin, last - begin, local):
                element = first - start
                first += prod(sizes)
                place = [base + offset for base, offset in zip(offsets, within, strict=True)]
                pieces = found.setdefault(f"{key}/{entry.stored}/{index}", Pieces(size))
                pieces.add(place, run[element : first - start].view(sizes))

    def _runs(self, parameter: nn.Parameter) -> Iterator[tuple[ParameterShard, nn.Parameter, dict[str, Any]]]:
        """Yield this rank's runs of a parameter with the inner optimizer's parameter and state."""
        assert self._optimizer is not None
        for shard, inner in self._optimizer.runs_of(parameter):
            yield shard, inner, self._optimizer.inner.state[inner]

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


def _is_aligned(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _restored(value: Any, device: torch.device) -> Any:
    """Copy a value to the optimizer's device: a tensor shared by parameters would be stepped once per parameter."""
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
