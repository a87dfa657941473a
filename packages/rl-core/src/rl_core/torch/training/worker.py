"""What every rank of a model does alike, whatever it computes with."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rl_core.batch import Batch
from rl_core.devices import Device
from rl_core.mesh import Coordinates
from rl_core.model import Loss, ModelSpec, Part, Read, SavedFile
from rl_core.model_config import ModelConfig
from rl_core.torch.collective_errors import on_rank0
from rl_core.torch.files.model_files import model_folder
from rl_core.torch.heads.reads import check_reads
from rl_core.torch.residency.module_residency import Residency
from rl_core.torch.training.checkpoint_files import exported_files, verify_files
from rl_core.torch.training.reference import Reference
from rl_core.torch.transport import interrupt
from rl_core.weights import Transport


class RankMesh(Protocol):
    """The ranks of a model, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Of this process, among all ranks."""
        ...

    @property
    def kind(self) -> Device:
        """The device of this rank."""
        ...

    @property
    def device(self) -> torch.device:
        """The same, as torch names it."""
        ...

    @property
    def control(self) -> dist.ProcessGroup:
        """All ranks, on gloo: scalars that decide what every rank does next."""
        ...

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place on the mesh."""
        ...


class Checkpoint(Protocol):
    """What a rank saves and restores of a run."""

    def save(self, path: Path, *, wait: bool = True) -> None:
        """Write under `path`; collective."""
        ...

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """The files that this rank wrote for the last save; None while they are being written."""
        ...

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; collective."""
        ...

    def close(self) -> None:
        """Wait for what is being written."""
        ...


class RankWorker(ABC):
    """The part of a `rl_core.model.ModelWorker` that is the same on every backend.

    A backend's worker sets what is declared here when it is built.
    """

    _config: ModelConfig
    _spec: ModelSpec
    _mesh: RankMesh
    _reference: Reference | None
    _residency: Residency
    _checkpoint: Checkpoint

    @abstractmethod
    def _read(self, batch: Batch, reads: Sequence[Read], temperature: float) -> Batch | None:
        """Results for this rank's shard, with the weights that are in place."""

    @abstractmethod
    def _load(self, path: Path) -> None:
        """Restore what `save` wrote; collective."""

    @abstractmethod
    def _export(self, path: Path) -> None:
        """Write Hugging Face files; collective."""

    def coordinates(self) -> Coordinates:
        """This rank's place on the mesh."""
        return self._mesh.coordinates

    def infer(
        self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0
    ) -> Batch | None:
        """Results for this rank's shard, on ranks that lead it.

        Raises:
            ValueError: for a read that the role's head cannot answer, or a reference that was not kept.
        """
        check_reads(self._spec.role, reads)
        self._residency.require("parameters")
        if not reference:
            return self._read(batch, reads, temperature)
        if self._reference is None:
            raise ValueError("this model keeps no reference; build it with ModelSpec(keeps_reference=True)")
        with self._reference.in_place():
            return self._read(batch, reads, temperature)

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write parameters, optimizer, schedule and RNG under `path`; the reference is not written. Without `wait` they
        are copied to host memory, which must have room for them, and written in the background."""
        self._residency.require("parameters", "optimizer")
        self._checkpoint.save(Path(path), wait=wait)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """The files that this rank wrote for the last save; None while they are being written."""
        return self._checkpoint.finish_save(wait=wait)

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """Restore what `save` wrote, on any number of ranks and any mesh.

        Raises:
            CheckpointDamaged: on every rank, naming the first of the files that is missing or differs.
        """
        self._residency.require("parameters", "optimizer")
        verify_files(Path(path), files, self._mesh.control)
        self._load(Path(path))

    def export(self, path: str) -> tuple[SavedFile, ...]:
        """Write Hugging Face files; weights in the dtype that the source has on disk, float32 where `precision` is."""
        self._residency.require("parameters")
        self._export(Path(path))
        return exported_files(Path(path), self._mesh.control)

    def offload(self, parts: Sequence[Part] = ("parameters", "optimizer")) -> None:
        """Move these parts to host memory; on `cpu` they are there already, and only later use is refused."""
        self._residency.offload(parts)

    def onload(self, parts: Sequence[Part] = ("parameters", "optimizer")) -> None:
        """Bring these parts back to the device."""
        self._residency.onload(parts)

    def interrupt(self, transport: Transport, reason: str) -> None:
        """End this process's `send` over a transport soon, as nobody will receive it; called by another thread."""
        interrupt(transport, reason)

    def health(self) -> Mapping[str, Any]:
        """Rank, process id, and bytes in use: of the process on `cpu`, of torch's allocator on `cuda`."""
        return {"rank": self._mesh.rank, "pid": os.getpid(), "memory_bytes": self._mesh.kind.memory_bytes()}

    def _require_for(self, loss: Loss, *, trains: bool) -> None:
        """Refuse a loss that this model cannot compute, or not now.

        Raises:
            ValueError: for a read that the role's head cannot answer, or a step of a model without an optimizer.
            RuntimeError: naming parts that are offloaded.
        """
        check_reads(self._spec.role, loss.reads)
        self._residency.require(*(("parameters", "optimizer") if trains else ("parameters",)))
        if trains and not self._spec.trains:
            raise ValueError("this model does not train; build it with ModelSpec(trains=True)")

    def _fetch(self, name: str) -> Path:
        """A folder or hub name as a folder; one rank downloads, the others find it in the cache."""
        folders: list[Path] = []
        on_rank0(self._mesh.control, lambda: folders.append(model_folder(name)))
        return folders[0] if folders else model_folder(name)
