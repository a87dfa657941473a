"""Checkpoints that resume on any layout of ranks, through Megatron's distributed checkpointing."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.optim.lr_scheduler import LRScheduler

from rl_core.torch.background_save import BackgroundSave, unwritten_is_told
from rl_core.torch.teamwork import lead, together
from rl_megatron.model import ReadingModel
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
    it resumes bit for bit. Of a model with adapters it has those alone, not the weights that they sit on.

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
        self._state = TrainingState(weights, optimizer, mesh)
        self._optimizer = optimizer
        self._schedule = schedule
        self._mesh = mesh
        self._seed = seed
        self._background = BackgroundSave()

    def save(self, path: Path, *, wait: bool = True) -> None:
        """Write under `path`, or copy what is to be written aside and write it in the background; collective.

        Raises:
            RLError: where a rank cannot write, also what an earlier save put off.
        """
        self.finish_save()
        lead(self._mesh.control, lambda: (path / SHARDS).mkdir(parents=True, exist_ok=True))
        tensors = self._state.tensors(copies=not wait)
        files = {f"rng_{self._mesh.rank}.pt": _as_bytes(random_state())}
        trainer = _as_bytes(self._trainer(self._state.scalars()))
        if self._mesh.rank == 0:
            files[TRAINER] = trainer
        if wait:
            self._write_shards(tensors, path, self._mesh.control, lambda write: write())
            with unwritten_is_told(path):
                together(self._mesh.control, lambda: _write_files(path, files))
            return
        put_off: list[Callable[[], None]] = []
        self._write_shards(tensors, path, self._background.group, put_off.append)
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._background.begin(thread.submit(_write_all, put_off[0], path, files), path)
        thread.shutdown(wait=False)

    def finish_save(self, *, wait: bool = True) -> bool:
        """Whether nothing is being written any more; without `wait` no collective.

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
            ValueError: where there is no checkpoint at `path`.
            RLError: where a save that was under way has failed.
        """
        self.finish_save()
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

    def _write_shards(
        self,
        tensors: Any,
        path: Path,
        group: dist.ProcessGroup,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        dist_checkpointing.save(tensors, str(path / SHARDS), PlainSaveStrategy(group, run))

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


def _write_all(write_shards: Callable[[], None], path: Path, files: Mapping[str, bytes]) -> None:
    write_shards()
    _write_files(path, files)


def _write_files(path: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (path / name).write_bytes(content)


def _as_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
