"""Parameters and optimizer state of a rank, by their place in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from rl_core.devices import Device
from rl_core.model import AdapterSettings, ModelPart
from rl_core.torch.optim.adamw import sharded_like
from rl_core.torch.optim.optimizer import counts_on_device
from rl_core.torch.residency import Residency
from rl_core.torch.training.backend import RankAdapters
from rl_core.torch.training.checkpoint_files import SHARDS, KeptSavePlanner, read_tensors
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import DTensorMesh

MODEL_PREFIX = "model/"
OPTIMIZER_PREFIX = "optimizer/"


class Sharded(Protocol):
    """Parameters that FSDP shards: a `ShardedModel`, or a draft head."""

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of this rank."""

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters of this rank that train."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name."""

    def reshard_all(self) -> None:
        """Free every gathered parameter."""


class DTensorState:
    """The `rl_core.torch.training.backend.RankState` of a sharded model or draft head: the tensors of its `state` and
    the optimizer's state, as DTensors if they are sharded.

    Args:
        optimizer: None if the model does not train.
        adapters: Several adapters of the model, whose settings belong to a checkpoint; None without several.
    """

    save_planner = KeptSavePlanner  # It is torch's own, which takes DTensors.

    def __init__(
        self, model: Sharded, optimizer: Optimizer | None, mesh: DTensorMesh, adapters: RankAdapters | None = None
    ) -> None:
        self._model, self._adapters = model, adapters
        self._weights = model.state()
        self._optimizer = optimizer
        self._mesh = mesh

    def tensors(self, *, copies: bool) -> dict[str, Any]:
        """Return parameters and optimizer state by name; copies are in host memory."""
        tensors = self._model_state()
        states = {} if self._optimizer is None else self._optimizer.state
        for name, parameter in self._weights.items():
            state = states.get(parameter, {})
            tensors |= {f"{OPTIMIZER_PREFIX}{name}/{key}": value for key, value in state.items()}
        return _host_copies(tensors) if copies else tensors

    def description(self) -> dict[str, Any]:
        """Return the settings of several adapters; the shards describe themselves."""
        if self._adapters is None:
            return {}
        return {"adapters": {place: asdict(each) for place, each in self._adapters.settings.items()}}

    def restore(self, path: Path, description: Mapping[str, Any]) -> None:
        """Read parameters and optimizer state into place; collective."""
        self._model.reshard_all()
        optimizer = self._optimizer
        saved = {} if optimizer is None else self._saved_optimizer_state(path / SHARDS, optimizer)
        state = self._model_state() | saved
        read_tensors(path, state, group=self._mesh.control)
        if optimizer is not None:
            optimizer.state.clear()
            for key in saved:
                name, _, state_key = key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
                optimizer.state[self._weights[name]][state_key] = state[key]
        if self._adapters is not None:
            settings = description.get("adapters", {})
            self._adapters.describe({place: AdapterSettings.of(each) for place, each in settings.items()})

    def weights(self) -> dict[str, Any]:
        """Return the tensors of the model's `state` by name, in host memory."""
        return _host_copies(self._model_state())

    def restore_weights(self, path: Path) -> None:
        """Read them into place; collective."""
        self._model.reshard_all()
        read_tensors(path, self._model_state(), group=self._mesh.control)

    def layers(self) -> dict[str, Any]:
        """Return nothing: layers keep nothing except parameters and buffers."""
        return {}

    def restore_layers(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def _model_state(self) -> dict[str, Any]:
        return {MODEL_PREFIX + name: tensor.detach() for name, tensor in self._weights.items()}

    def _saved_optimizer_state(self, shards: Path, optimizer: Optimizer) -> dict[str, Any]:
        """Return empty tensors for exactly the saved state: an optimizer that has not stepped has none."""
        metadata = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
        of_state = {key: saved for key, saved in metadata.items() if key.startswith(OPTIMIZER_PREFIX)}
        return saved_state(
            of_state, lambda key: self._weights.get(key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")[0]), optimizer
        )


def saved_state(
    metadata: Mapping[str, Any], parameter_of: Callable[[str], Tensor | None], optimizer: Optimizer
) -> dict[str, Any]:
    """Return empty tensors for the saved state of an optimizer.

    Args:
        metadata: Metadata of the saved tensors of the state, by name.
        parameter_of: Function from such a name to the parameter of this rank; None if another pipeline rank holds it.
        optimizer: Optimizer of the parameters.
    """
    state: dict[str, Any] = {}
    for key, saved in metadata.items():
        parameter = parameter_of(key)
        if parameter is None:
            continue
        if not isinstance(saved, TensorStorageMetadata):
            state[key] = None
        elif parameter.dim() and saved.size == parameter.shape:
            state[key] = torch.zeros_like(parameter, dtype=saved.properties.dtype)
        elif len(saved.size) == parameter.dim() > 0:
            # Scales of the blocks of a parameter are where their blocks are.
            held = local(parameter)
            extents = zip(held.shape, parameter.shape, saved.size, strict=True)
            part = torch.zeros([own * size // whole for own, whole, size in extents], device=held.device)
            state[key] = sharded_like(parameter, part.to(saved.properties.dtype), saved.size)
        else:
            device = local(parameter).device if counts_on_device(optimizer) else torch.device("cpu")
            state[key] = torch.zeros(saved.size, dtype=saved.properties.dtype, device=device)
    return state


def _host_copies(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return copies in host memory, so that training may continue; of a sharded tensor this rank's shard."""
    stager = DefaultStager(StagingOptions(False, False, False, False))  # Plain copies, made before the call returns.
    try:
        copies = stager.stage(tensors)
        assert isinstance(copies, dict)
        return copies
    finally:
        stager.close()


class DTensorResidency(Residency):
    """Residency of a sharded model: its parameters, and the state of its optimizer.

    Args:
        model: The model.
        optimizer: Its optimizer; None if it does not train.
        device: Device that it leaves.
        head: Draft head that leaves with it, and its optimizer; None without one.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: Optimizer | None,
        device: Device,
        head: tuple[Sharded, Optimizer] | None = None,
    ) -> None:
        super().__init__(device)
        self._models: list[Sharded] = [model]
        self._optimizers = [] if optimizer is None else [optimizer]
        if head is not None:
            self._models.append(head[0])
            self._optimizers.append(head[1])

    def kept(self, part: ModelPart) -> list[Tensor]:
        if part == "parameters":
            for model in self._models:
                model.reshard_all()
            return [local(parameter) for model in self._models for parameter in model.parameters()]
        return [
            local(value)
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
