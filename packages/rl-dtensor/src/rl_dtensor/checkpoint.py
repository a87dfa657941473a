"""Sharded checkpoints that resume on any number of ranks."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rl_core.model import SavedFile
from rl_core.torch.collective_errors import on_rank0
from rl_core.torch.training.background_save import BackgroundSave
from rl_core.torch.training.checkpoint_files import SHARDS, read_tensors, write_checkpoint
from rl_dtensor.model import ShardedModel
from rl_dtensor.optimizer import WAYS_TO_STEP
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import Mesh

TRAINER = "trainer.pt"
MODEL_PREFIX = "model/"
OPTIMIZER_PREFIX = "optimizer/"


class Checkpoint:
    """Training state of one rank: parameters that train, optimizer, schedule and random generators.

    Under a path: `shards/` (parameters and optimizer state by name, torch's distributed checkpoint format),
    `trainer.pt` (hyperparameters and schedule) and `rng_<rank>.pt`. Each rank writes the shards that it holds, tensor
    by tensor. On the mesh that it was saved on, it resumes bit for bit.
    """

    def __init__(
        self, model: ShardedModel, optimizer: Optimizer | None, schedule: LRScheduler | None, mesh: Mesh, seed: int
    ) -> None:
        self._weights = model.state()
        self._optimizer = optimizer
        self._schedule = schedule
        self._mesh = mesh
        self._seed = seed
        self._background = BackgroundSave()

    def save(self, path: Path, *, wait: bool = True) -> None:
        """Write under `path`, or copy what is to be written aside and write it in the background; collective.

        Raises:
            RLError: if a rank's files cannot be written, also those of an earlier save.
        """
        self.finish_save()
        on_rank0(self._mesh.control, lambda: (path / SHARDS).mkdir(parents=True, exist_ok=True))
        tensors = self._model_state() | self._optimizer_state()
        if not wait:
            tensors = _host_copies(tensors)
        files = {f"rng_{self._mesh.rank}.pt": _as_bytes(self._mesh.kind.rng_state())}
        if self._mesh.rank == 0:
            files[TRAINER] = _as_bytes(self._trainer())
        group = self._background.group  # ranks wait in it for the slowest one's disk
        self._background.begin(path, lambda: write_checkpoint(path, tensors, files, group=group), wait=wait)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """The files that this rank wrote for the last save; None while they are being written.

        Raises:
            RLError: if a rank's files could not be written, once.
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
        saved = {} if self._optimizer is None else self._saved_optimizer_state(path / SHARDS)
        state = self._model_state() | saved
        read_tensors(path, state, group=self._mesh.control)
        trainer = torch.load(path / TRAINER)
        if self._optimizer is not None:
            self._restore_optimizer({key: state[key] for key in saved}, trainer["param_groups"])
        if self._schedule is not None:
            self._schedule.load_state_dict(trainer["schedule"])
        self._restore_rng(path, trainer["mesh"])

    def _model_state(self) -> dict[str, Tensor]:
        return {MODEL_PREFIX + name: tensor.detach() for name, tensor in self._weights.items()}

    def _optimizer_state(self) -> dict[str, Any]:
        if self._optimizer is None:
            return {}
        return {
            f"{OPTIMIZER_PREFIX}{name}/{key}": value
            for name, parameter in self._weights.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _saved_optimizer_state(self, shards: Path) -> dict[str, Any]:
        """Empty tensors for exactly the state that was saved: an optimizer that has not stepped has none."""
        metadata = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
        state: dict[str, Any] = {}
        for key, saved in metadata.items():
            if not key.startswith(OPTIMIZER_PREFIX):
                continue
            parameter = self._weights.get(key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")[0])
            if parameter is None:  # of another pipeline rank
                continue
            if not isinstance(saved, TensorStorageMetadata):
                state[key] = None
            elif isinstance(parameter, DTensor) and saved.size == parameter.shape:
                state[key] = torch.zeros_like(parameter, dtype=saved.properties.dtype)
            else:
                device = local(parameter).device if self._counts_on_device() else torch.device("cpu")
                state[key] = torch.zeros(saved.size, dtype=saved.properties.dtype, device=device)
        return state

    def _counts_on_device(self) -> bool:
        """Whether the optimizer wants its step counts where the parameters are."""
        assert self._optimizer is not None
        settings = self._optimizer.defaults
        return bool(settings.get("fused") or settings.get("capturable"))

    def _restore_optimizer(self, flat: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        assert self._optimizer is not None
        self._optimizer.state.clear()
        for key, value in flat.items():
            name, _, state_key = key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            self._optimizer.state[self._weights[name]][state_key] = value
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in WAYS_TO_STEP})

    def _trainer(self) -> dict[str, Any]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {
            "mesh": asdict(self._mesh.sizes),
            "param_groups": [
                {key: value for key, value in group.items() if key not in {"params", *WAYS_TO_STEP}} for group in groups
            ],
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }

    def _restore_rng(self, path: Path, saved_mesh: dict[str, int]) -> None:
        """Each rank's own generator; on another mesh there is no such thing, and fresh ones are seeded."""
        if saved_mesh != asdict(self._mesh.sizes):
            torch.manual_seed(self._seed + self._mesh.on("dp"))
            return
        self._mesh.kind.set_rng_state(torch.load(path / f"rng_{self._mesh.rank}.pt"))


def _host_copies(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same in host memory, so that training may go on; of a sharded tensor this rank's shard."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    try:
        copies = stager.stage(tensors)
        assert isinstance(copies, dict)
        return copies
    finally:
        stager.close()


def _as_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
