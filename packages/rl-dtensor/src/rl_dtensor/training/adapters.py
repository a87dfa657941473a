"""Several adapters of a sharded model, each with its optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_core.model import AdapterSettings
from rl_core.model_config import LoraConfig
from rl_core.torch.training.checkpoint_files import SHARDS, read_tensors
from rl_core.torch.training.lora import LORA_A, LORA_B, WEIGHT, initial_down, is_of_part
from rl_dtensor.model.layers.lora import set_factors, set_scale
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.mesh import DTensorMesh
from rl_dtensor.training.state import saved_state

STATE = "/"
"""Between the name of a factor and that of a tensor of its optimizer state."""


class DTensorAdapters:
    """The `rl_core.torch.training.backend.RankAdapters` of a sharded model.

    An adapter of a smaller rank, or on fewer layers, has zeros in the rest of both factors, whose gradients are zero.

    Args:
        model: The model.
        optimizer: Its optimizer; None if it does not train.
        config: Settings of the adapters.
        mesh: Mesh of the model.

    Attributes:
        count: Number of places.
        max_rank: Largest rank of an adapter.
        settings: Settings of the adapters that were made or restored, by their places.
    """

    def __init__(self, model: ShardedModel, optimizer: Optimizer | None, config: LoraConfig, mesh: DTensorMesh) -> None:
        self.count, self.max_rank = config.max_adapters, config.dim
        self.settings: dict[int, AdapterSettings] = {}
        self._model, self._optimizer, self._config, self._mesh = model, optimizer, config, mesh

    def describe(self, settings: Mapping[int, AdapterSettings]) -> None:
        """Give the adapters these settings, without a change of their factors."""
        for place in range(self.count):
            self._describe(place, settings.get(place))

    def make(self, place: int, settings: AdapterSettings) -> None:
        """Put a new adapter into a place."""
        self._model.reshard_all()
        for weight, adapter in self._model.weights.adapters_at(place).items():
            down, up = torch.zeros(adapter.down.shape), torch.zeros(adapter.up.shape)
            if is_of_part(weight, settings.parts):
                rank = settings.rank
                down[:rank] = initial_down(weight, (rank, *adapter.down.shape[1:]), settings.seed)
            set_factors(adapter, down, up)
        self._describe(place, settings)
        self._forget_state(place)

    def tensors(self, place: int) -> dict[str, Any]:
        """Return this rank's part of the factors and the optimizer state of an adapter."""
        self._model.reshard_all()
        states = {} if self._optimizer is None else self._optimizer.state
        found: dict[str, Any] = {}
        for name, parameter in self._named(place).items():
            found[name] = parameter.detach()
            found |= {f"{name}{STATE}{key}": value for key, value in states.get(parameter, {}).items()}
        return found

    def restore(self, place: int, path: Path, settings: AdapterSettings | None, *, with_optimizer: bool) -> None:
        """Read an adapter into a place."""
        self._model.reshard_all()
        named = self._named(place)
        state: dict[str, Any] = {name: parameter.detach() for name, parameter in named.items()}
        saved = {}
        if with_optimizer and self._optimizer is not None:
            stored = dcp.FileSystemReader(path / SHARDS).read_metadata().state_dict_metadata
            of_state = {key: each for key, each in stored.items() if STATE in key}
            saved = saved_state(of_state, lambda key: named.get(key.rpartition(STATE)[0]), self._optimizer)
        read_tensors(path, state | saved, group=self._mesh.control)
        self._describe(place, settings)
        self._forget_state(place)
        for key, value in saved.items():
            name, _, state_key = key.rpartition(STATE)
            assert self._optimizer is not None
            self._optimizer.state[named[name]][state_key] = value

    def factors(self, place: int) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the whole factors of an adapter."""
        self._model.reshard_all()
        return self._model.weights.adapters(place=place)

    def merging(self, place: int) -> AbstractContextManager[None]:
        """Return a context in which the weights that leave the model have this adapter merged in."""
        self._model.reshard_all()
        return self._model.weights.merging(place, self._scale(place))

    @contextmanager
    def stepping(self, place: int) -> Iterator[None]:
        """Enter a context in which the optimizer has only the parameters of this adapter."""
        assert self._optimizer is not None, "a model that trains"
        groups, own = self._optimizer.param_groups, set(self._named(place).values())
        held = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in own]
        try:
            yield
        finally:
            for group, parameters in zip(groups, held, strict=True):
                group["params"] = parameters

    def _named(self, place: int) -> dict[str, nn.Parameter]:
        """Return the factors of an adapter by name."""
        found: dict[str, nn.Parameter] = {}
        for weight, adapter in self._model.weights.adapters_at(place).items():
            layer = weight.removesuffix(WEIGHT)
            for suffix, factor in ((LORA_A, adapter.down), (LORA_B, adapter.up)):
                assert isinstance(factor, nn.Parameter)
                found[layer + suffix] = factor
        return found

    def _describe(self, place: int, settings: AdapterSettings | None) -> None:
        self.settings.pop(place, None)
        if settings is not None:
            self.settings[place] = settings
        for chunk in self._model.chunks:
            set_scale(chunk.hf, place, self._scale(place))

    def _scale(self, place: int) -> float:
        settings = self.settings.get(place)
        return self._config.scale if settings is None else settings.alpha / settings.rank

    def _forget_state(self, place: int) -> None:
        if self._optimizer is not None:
            for parameter in self._named(place).values():
                self._optimizer.state.pop(parameter, None)
