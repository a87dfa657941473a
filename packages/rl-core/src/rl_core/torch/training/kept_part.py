"""What is saved, and leaves the device, in the same way whatever trains: a model, or a draft head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_core.mesh import Coordinates
from rl_core.model import Part, SavedFile
from rl_core.torch.residency.module_residency import Residency
from rl_core.torch.training.backend import RankMesh
from rl_core.torch.training.checkpoint import Checkpoint
from rl_core.torch.training.checkpoint_files import verify_files


class KeptPart:
    """Methods of a `rl_core.ModelWorker` on a checkpoint and a residency, which the subclass sets."""

    _mesh: RankMesh
    _residency: Residency
    _checkpoint: Checkpoint

    def coordinates(self) -> Coordinates:
        """This rank's place on the mesh."""
        return self._mesh.coordinates

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write parameters, optimizer, schedule and RNG under `path`, and the reference if it has been updated. Without
        `wait` they are copied to host memory, which must have room for them, and written in the background; the
        reference is copied either way."""
        self._residency.require("parameters", "optimizer")
        self._checkpoint.save(Path(path), wait=wait)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """The files that this rank wrote for the last save; None while they are being written."""
        return self._checkpoint.finish_save(wait=wait)

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """Restore what `save` wrote, on any number of ranks and any mesh.

        Raises:
            CheckpointDamaged: On every rank, naming the first of the files that is missing or differs.
        """
        self._residency.require("parameters", "optimizer")
        verify_files(Path(path), files, self._mesh.control)
        self._checkpoint.load(Path(path))

    def offload(self, parts: Sequence[Part] = ("parameters", "optimizer")) -> None:
        """Move these parts to host memory; on `cpu` they are there already, and only later use is refused."""
        self._residency.offload(parts)

    def onload(self, parts: Sequence[Part] = ("parameters", "optimizer")) -> None:
        """Bring these parts back to the device."""
        self._residency.onload(parts)
