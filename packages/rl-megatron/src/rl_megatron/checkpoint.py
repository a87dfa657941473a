"""Checkpoints that resume on any layout of ranks, through Megatron's distributed checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.optim.lr_scheduler import LRScheduler

from rl_megatron.model import ReadingModel
from rl_megatron.parallel.lead import lead
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.random import random_state, restore_random_state, seed_all
from rl_megatron.save_strategy import PlainSaveStrategy
from rl_megatron.sharded_optimizer import ShardedOptimizer
from rl_megatron.state import TrainingState
from rl_megatron.weights import Weights

SHARDS = "shards"
TRAINER = "trainer.pt"


class Checkpoint:
    """What a training run needs to go on: parameters, optimizer, schedule and the RNG of every rank.

    Under a path: `shards/` (parameters and optimizer state by Megatron's name, Megatron's distributed checkpoint
    format), `trainer.pt` (hyperparameters, step counts and schedule) and `rng_<rank>.pt`. On the layout it was saved on
    it resumes bit for bit.
    """

    def __init__(
        self,
        model: ReadingModel,
        weights: Weights,
        optimizer: ShardedOptimizer | None,
        schedule: LRScheduler | None,
        mesh: Mesh,
        seed: int,
    ) -> None:
        self._state = TrainingState(weights, optimizer, mesh)
        self._optimizer = optimizer
        self._schedule = schedule
        self._mesh = mesh
        self._seed = seed

    def save(self, path: Path) -> None:
        """Write under `path`; collective."""
        lead(self._mesh, lambda: (path / SHARDS).mkdir(parents=True, exist_ok=True))
        tensors = self._state.tensors()
        dist_checkpointing.save(tensors, str(path / SHARDS), PlainSaveStrategy(self._mesh.control))
        scalars = self._state.scalars()
        torch.save(random_state(), path / f"rng_{self._mesh.rank}.pt")
        lead(self._mesh, lambda: torch.save(self._trainer(scalars), path / TRAINER))

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; collective.

        Raises:
            ValueError: where there is no checkpoint at `path`.
        """
        if not (path / TRAINER).is_file():
            raise ValueError(f"no checkpoint of a model at {path}: {TRAINER} is missing")
        trainer = torch.load(path / TRAINER, weights_only=True)
        self._state.restore(str(path / SHARDS), trainer["dtypes"], trainer["scalars"])
        if self._optimizer is not None:
            for group, saved in zip(self._optimizer.inner.param_groups, trainer["param_groups"], strict=True):
                group.update(saved)
        if self._schedule is not None:
            self._schedule.load_state_dict(trainer["schedule"])
        self._restore_random_state(path, trainer["layout"])

    def _trainer(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        groups = [] if self._optimizer is None else self._optimizer.inner.param_groups
        return {
            "layout": self._layout,
            "dtypes": self._state.dtypes,
            "scalars": dict(scalars),
            "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }

    @property
    def _layout(self) -> dict[str, int]:
        return {"world": dist.get_world_size(), **self._mesh.coordinates.size}

    def _restore_random_state(self, path: Path, layout: Mapping[str, int]) -> None:
        """Each rank's own generators; on another layout there is no such thing, and fresh ones are seeded."""
        if dict(layout) != self._layout:
            seed_all(self._seed)
            return
        restore_random_state(torch.load(path / f"rng_{self._mesh.rank}.pt", weights_only=True))
