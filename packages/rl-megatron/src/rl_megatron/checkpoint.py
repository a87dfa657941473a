"""Checkpoints that resume on any layout of ranks, in the format of torch's distributed checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from rl_core.model import SavedFile
from rl_core.torch.collective_errors import on_rank0
from rl_core.torch.training.background_save import BackgroundSave
from rl_core.torch.training.checkpoint_files import SHARDS, write_checkpoint
from rl_megatron.extra_state import extra_state, restore_extra_state
from rl_megatron.model import ReadingModel
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.pieces import PiecesSavePlanner
from rl_megatron.random import random_state, restore_random_state, seed_all
from rl_megatron.sharded_optimizer import ShardedOptimizer
from rl_megatron.state import TrainingState
from rl_megatron.weights import Weights

TRAINER = "trainer.pt"
LAYERS = "layers"


class Checkpoint:
    """Training state of one rank: parameters, optimizer, schedule and random generators.

    Under a path: `shards/` (parameters and optimizer state by Megatron's name, torch's distributed checkpoint format),
    `trainer.pt` (hyperparameters, step counts and schedule) and `rng_<rank>.pt` (generators, and the history of 8-bit
    recipes). Each rank writes the elements that it steps, tensor by tensor. On the layout it was saved on it resumes
    bit for bit. A model with adapters saves those alone, not the weights that they sit on.

    What is written in the background is a copy in host memory.
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
        self._model = model
        self._state = TrainingState(weights, optimizer, mesh)
        self._optimizer = optimizer
        self._schedule = schedule
        self._mesh = mesh
        self._seed = seed
        self._background = BackgroundSave()

    def save(self, path: Path, *, wait: bool = True) -> None:
        """Write under `path`, or copy what is to be written aside and write it in the background; collective.

        Raises:
            RLError: if a rank cannot write, also what an earlier save put off.
        """
        self.finish_save()
        on_rank0(self._mesh.control, lambda: (path / SHARDS).mkdir(parents=True, exist_ok=True))
        tensors: dict[str, Any] = dict(self._state.tensors(copies=not wait))
        files = {f"rng_{self._mesh.rank}.pt": _as_bytes({**random_state(), LAYERS: extra_state(self._model)})}
        trainer = self._trainer(self._state.scalars())
        if self._mesh.rank == 0:
            files[TRAINER] = _as_bytes(trainer)
        group = self._background.group  # ranks wait in it for the slowest one's disk
        self._background.begin(
            path,
            lambda: write_checkpoint(path, tensors, files, group=group, planner=PiecesSavePlanner()),
            wait=wait,
        )

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """The files that this rank wrote for the last save; None while they are being written. Without `wait` no
        collective.

        Raises:
            RLError: what went wrong in the background, once.
        """
        return self._background.finish(wait=wait)

    def close(self) -> None:
        """Wait for what is being written."""
        self._background.close()

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; collective.

        Raises:
            ValueError: if there is no checkpoint at `path`.
            RLError: if a save that was under way has failed.
        """
        self.finish_save()
        if not (path / TRAINER).is_file():
            raise ValueError(f"no checkpoint of a model at {path}: {TRAINER} is missing")
        trainer = torch.load(path / TRAINER, weights_only=True)
        self._state.restore(path, trainer["dtypes"], trainer["scalars"])
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
        """Each rank's own generators and its layers' extra state. On another layout neither exists: fresh generators
        are seeded, and 8-bit recipes begin a new history."""
        if dict(layout) != self._layout:
            seed_all(self._seed)
            return
        state = torch.load(path / f"rng_{self._mesh.rank}.pt", weights_only=True)
        restore_extra_state(self._model, state.pop(LAYERS))
        restore_random_state(state)


def _as_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
