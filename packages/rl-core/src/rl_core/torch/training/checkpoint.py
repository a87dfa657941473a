"""Checkpoints of one rank that resume on any number of ranks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rl_core.model import SavedFile
from rl_core.torch.collective_errors import on_rank0
from rl_core.torch.training.backend import RankMesh, RankState
from rl_core.torch.training.background_save import BackgroundSave
from rl_core.torch.training.checkpoint_files import SHARDS, write_checkpoint
from rl_core.torch.training.hyperparameters import Hyperparameters
from rl_core.torch.training.reference import Reference
from rl_core.torch.training.save_plan import KeptSavePlanner

TRAINER = "trainer.pt"

REFERENCE = "reference"
"""Folder of a model's checkpoint with the weights of its reference, if they are not the initial ones."""


class Checkpoint:
    """Training state of one rank: parameters, optimizer, schedule and random generators.

    Under a path: `shards/` (parameters and optimizer state by name, torch's distributed checkpoint format),
    `trainer.pt` (`Hyperparameters`, and what the backend says of its state), `rng_<rank>.pt` (generators, and what
    layers keep) and, if the reference has moved, `reference/shards/` (its weights). Each rank writes what it holds,
    tensor by tensor. On the layout that it was saved on, a run resumes bit for bit; one with other hyperparameters than
    those of the checkpoint continues with its own. A model with adapters saves only the adapters, not the weights
    that they sit on.

    Args:
        optimizer: None if the model does not train.
        seed: Seed of the generators of a run that resumes on another layout.
        reference: None if the model keeps none.
    """

    def __init__(
        self,
        state: RankState,
        optimizer: Optimizer | None,
        schedule: LRScheduler | None,
        mesh: RankMesh,
        seed: int,
        reference: Reference | None = None,
    ) -> None:
        self._state = state
        self._hyperparameters = None if optimizer is None else Hyperparameters(optimizer, schedule)
        self._mesh = mesh
        self._seed = seed
        self._reference = reference
        self._background = BackgroundSave()
        self._planners: dict[str, KeptSavePlanner] = {}

    def save(self, path: Path, *, wait: bool = True) -> None:
        """Write under `path`, or copy what is to be written aside and write it in the background; collective.

        Raises:
            RLError: If a rank's files cannot be written, also those of an earlier save.
        """
        self.finish_save()
        aside = self._reference_weights()
        folders = [path / SHARDS] if aside is None else [path / SHARDS, path / REFERENCE / SHARDS]
        on_rank0(self._mesh.control, lambda: _make(folders))
        tensors = self._state.tensors(copies=not wait)
        own = {"generators": self._mesh.rng_state(), "layers": self._state.layers()}
        files = {f"rng_{self._mesh.rank}.pt": _as_bytes(own)}
        trainer = self._trainer()
        if self._mesh.rank == 0:
            files[TRAINER] = _as_bytes(trainer)
        group = self._background.group  # ranks wait in it for the slowest one's disk
        plan, plan_aside = self._planner(SHARDS), self._planner(REFERENCE)

        def write() -> tuple[SavedFile, ...]:
            written = write_checkpoint(path, tensors, files, group=group, planner=plan)
            if aside is None:
                return written
            beside = write_checkpoint(path / REFERENCE, aside, {}, group=group, planner=plan_aside)
            return (*written, *(replace(file, path=f"{REFERENCE}/{file.path}") for file in beside))

        self._background.begin(path, write, wait=wait)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """The files that this rank wrote for the last save; None while they are being written. Without `wait` it takes
        part in no collective.

        Raises:
            RLError: If a rank's files could not be written, once.
        """
        return self._background.finish(wait=wait)

    def close(self) -> None:
        """Wait for what is being written."""
        self._background.close()
        for planner in self._planners.values():
            planner.forget()

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; collective.

        Raises:
            ValueError: If there is no checkpoint at `path`, or it has the initial reference and the model another.
            RLError: If a save that was under way has failed.
        """
        self.finish_save()
        if not (path / TRAINER).is_file():
            raise ValueError(f"there is no checkpoint of a model at {path}: {TRAINER} is missing")
        has_reference = (path / REFERENCE).is_dir()
        if self._reference is not None and self._reference.has_moved and not has_reference:
            raise ValueError(
                f"the checkpoint at {path} was saved before the reference was first updated, and this model has "
                "updated it since: load it into a model that has just been built"
            )
        trainer = torch.load(path / TRAINER, weights_only=True)
        self._state.restore(path, trainer["state"])
        if self._hyperparameters is not None:
            self._hyperparameters.restore(trainer)
        if self._reference is not None and has_reference:
            with self._reference.restoring():
                self._state.restore_weights(path / REFERENCE)
        self._restore_own(path, trainer["layout"])

    def _planner(self, folder: str) -> KeptSavePlanner:
        """The planner of all saves into a folder of this name."""
        if folder not in self._planners:
            self._planners[folder] = self._state.save_planner()
        return self._planners[folder]

    def _reference_weights(self) -> dict[str, Any] | None:
        """Copies of the weights of the reference; None if they are the initial ones, which are at `model_name`."""
        if self._reference is None or not self._reference.has_moved:
            return None
        with self._reference.in_place():
            return self._state.weights()

    def _trainer(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"param_groups": [], "schedule": None}
        own = nothing if self._hyperparameters is None else self._hyperparameters.state()
        return {"layout": dict(self._mesh.layout), "state": self._state.description(), **own}

    def _restore_own(self, path: Path, layout: Mapping[str, int]) -> None:
        """Each rank's own generators and its layers' state. On another layout neither exists: fresh generators are
        seeded, and layers begin anew."""
        if layout != dict(self._mesh.layout):
            self._mesh.seed(self._seed)
            return
        own = torch.load(path / f"rng_{self._mesh.rank}.pt", weights_only=True)
        self._state.restore_layers(own["layers"])
        self._mesh.set_rng_state(own["generators"])


def _make(folders: Iterable[Path]) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)


def _as_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
