"""Checkpoints of one rank that resume on any number of ranks."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rl_core.model import SavedFile
from rl_core.torch.optim.optimizer import WAYS_TO_STEP
from rl_core.torch.process_group import on_rank0
from rl_core.torch.residency import Reference
from rl_core.torch.training.backend import RankMesh, RankState
from rl_core.torch.training.checkpoint_files import SHARDS, BackgroundSave, KeptSavePlanner, write_checkpoint
from rl_core.torch.training.step import LossScale

TRAINER = "trainer.pt"

REFERENCE = "reference"
"""Folder of a model's checkpoint with the weights of its reference, if they are not the initial ones."""


class Checkpoint:
    """Training state of one rank: parameters, optimizer, schedule and random generators.

    Under a path: `shards/` (parameters and optimizer state by name, torch's distributed checkpoint format),
    `trainer.pt` (`Hyperparameters`, and the backend's description of its state), `rng_<rank>.pt` (generators, and state
    of layers) and, if the reference has moved, `reference/shards/` (its weights). Each rank writes what it holds,
    tensor by tensor. On the layout that it was saved on, a run resumes bit for bit; one with other hyperparameters than
    the checkpoint continues with its own. A model with adapters saves only the adapters, not the weights under them.

    Args:
        optimizer: None if the model does not train.
        seed: Seed of the generators of a run that resumes on another layout.
        reference: None if the model keeps none.
        loss_scale: Factor of the loss in float16; None in other precisions.

    Attributes:
        finish_save: Ends the last save, as `BackgroundSave.finish` does.
    """

    def __init__(
        self,
        state: RankState,
        optimizer: Optimizer | None,
        schedule: LRScheduler | None,
        mesh: RankMesh,
        seed: int,
        reference: Reference | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._state, self._loss_scale = state, loss_scale
        self._hyperparameters = None if optimizer is None else Hyperparameters(optimizer, schedule)
        self._mesh = mesh
        self._seed = seed
        self._reference = reference
        self._background = BackgroundSave()
        self.finish_save = self._background.finish
        self._planners: dict[str, KeptSavePlanner] = {}

    def save(self, path: Path, *, wait: bool = True) -> None:
        """Write under `path`, or copy what is to be written aside and write it in the background; collective.

        Raises:
            RLError: If a rank's files cannot be written, also in an earlier save.
        """
        self.finish_save()
        aside = None  # An initial reference is not saved: its weights are at `model_name`.
        if self._reference is not None and self._reference.has_moved:
            with self._reference.in_place():
                aside = self._state.weights()
        folders = [path / SHARDS] if aside is None else [path / SHARDS, path / REFERENCE / SHARDS]

        def make_folders() -> None:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)

        on_rank0(self._mesh.control, make_folders)
        tensors = self._state.tensors(copies=not wait)
        own = {"generators": self._mesh.rng_state(), "layers": self._state.layers()}
        files = {f"rng_{self._mesh.rank}.pt": _as_bytes(own)}
        settings: dict[str, Any] = {"param_groups": [], "schedule": None}
        if self._hyperparameters is not None:
            settings = self._hyperparameters.state()
        if self._loss_scale is not None:
            settings["loss_scale"] = self._loss_scale.state()
        trainer = {"layout": dict(self._mesh.layout), "state": self._state.description(), **settings}
        if self._mesh.rank == 0:
            files[TRAINER] = _as_bytes(trainer)
        group = self._background.group  # Ranks wait in it for the slowest one's disk.
        for folder in (SHARDS, REFERENCE):
            if folder not in self._planners:
                self._planners[folder] = self._state.save_planner()
        plan, plan_aside = self._planners[SHARDS], self._planners[REFERENCE]

        def write() -> tuple[SavedFile, ...]:
            written = write_checkpoint(path, tensors, files, group=group, planner=plan)
            if aside is None:
                return written
            beside = write_checkpoint(path / REFERENCE, aside, {}, group=group, planner=plan_aside)
            return (*written, *(replace(file, path=f"{REFERENCE}/{file.path}") for file in beside))

        self._background.begin(path, write, wait=wait)

    def close(self) -> None:
        """Wait for the unfinished save."""
        self._background.close()
        for planner in self._planners.values():
            planner.forget()

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; collective.

        On another layout than the checkpoint's, neither generators nor the state of layers exist: fresh generators are
        seeded, and layers begin anew.

        Raises:
            ValueError: If there is no checkpoint at `path`, or it has the initial reference and the model another.
            RLError: If an unfinished save has failed.
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
        if self._loss_scale is not None and "loss_scale" in trainer:  # Else the precision was another one.
            self._loss_scale.restore(trainer["loss_scale"])
        if self._reference is not None and has_reference:
            with self._reference.in_place():
                self._state.restore_weights(path / REFERENCE)
            self._reference.has_moved = True
        if trainer["layout"] != dict(self._mesh.layout):
            self._mesh.seed(self._seed)
            return
        own = torch.load(path / f"rng_{self._mesh.rank}.pt", weights_only=True)
        self._state.restore_layers(own["layers"])
        self._mesh.set_rng_state(own["generators"])


def _as_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


class Hyperparameters:
    """The settings of an optimizer's parameter groups, and the position of its schedule.

    A run with the settings of the checkpoint continues exactly as it was. A run with others, such as a branch with a
    lower learning rate, takes its own, and its schedule is brought to the step that the checkpoint was saved at.

    Args:
        optimizer: Just built, before its first step.
        schedule: Just built over it; None for constant settings.
    """

    def __init__(self, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._beginning = copy.deepcopy(self._now())
        self._num_steps = 0

        def count(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
            self._num_steps += 1

        optimizer.register_step_post_hook(count)

    def state(self) -> dict[str, Any]:
        """Return the present settings, the settings of the beginning, which follow from the config, and steps made."""
        return {**self._now(), "beginning": self._beginning, "num_steps": self._num_steps}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `state` returned. State without `beginning` is taken as it is."""
        schedule = saved["schedule"] or {}
        self._num_steps = saved.get("num_steps", schedule.get("last_epoch", 0))
        is_same = saved.get("beginning", self._beginning) == self._beginning
        settings = saved if is_same else copy.deepcopy(self._beginning)
        for group, of_group in zip(self._optimizer.param_groups, settings["param_groups"], strict=True):
            group.update({name: value for name, value in of_group.items() if name not in WAYS_TO_STEP})
        if self._schedule is None:
            return
        self._schedule.load_state_dict(settings["schedule"])
        if is_same:
            return
        with warnings.catch_warnings():
            # torch warns of a schedule that steps before its optimizer does.
            warnings.simplefilter("ignore")
            for _ in range(schedule.get("last_epoch", self._num_steps)):
                self._schedule.step()

    def _now(self) -> dict[str, Any]:
        left_out = {"params", *WAYS_TO_STEP}
        return {
            "param_groups": [
                {name: value for name, value in group.items() if name not in left_out}
                for group in self._optimizer.param_groups
            ],
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }
