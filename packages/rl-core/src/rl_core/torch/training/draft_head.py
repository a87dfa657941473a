"""One rank of a draft head, which trains in the processes of the model that it drafts for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Batching
from rl_core.metrics import Metric
from rl_core.model import Loss, SavedFile
from rl_core.model_config import DraftHeadConfig, ModelConfig
from rl_core.torch.collective_errors import on_rank0
from rl_core.torch.files.model_files import CONFIG
from rl_core.torch.residency.module_residency import Residency
from rl_core.torch.training.backend import HeadParts, RankMesh
from rl_core.torch.training.checkpoint import Checkpoint
from rl_core.torch.training.checkpoint_files import exported_files
from rl_core.torch.training.export import export_dtype, export_weights
from rl_core.torch.training.kept_part import KeptPart
from rl_core.torch.training.publishing import manifest_of, send_weights, stream_of
from rl_core.torch.training.skipped_steps import SkippedSteps
from rl_core.torch.training.step import run_train_step
from rl_core.torch.transport import SendingEnd
from rl_core.weights import Manifest, Transport, WeightForm

DRAFT_LOSSES = "draft_losses"


class DraftHead(KeptPart):
    """The part of a `TrainingWorker` that trains, saves and sends its draft head.

    It has the methods of a `rl_core.ModelWorker` that a model which only trains needs, so that
    `rl_core.ray.model.RemoteModel.part` calls it as one.

    Args:
        model: Settings of the model that it drafts for, with those of the head.
        parts: The head as the backend built it.
        mesh: Ranks of both.
        residency: Residency of both.
        batching: Microbatches of a step.
        seed: Seed of the generators of a run that resumes on another layout.
    """

    def __init__(
        self,
        model: ModelConfig,
        parts: HeadParts,
        mesh: RankMesh,
        residency: Residency,
        *,
        batching: Batching,
        seed: int,
    ) -> None:
        assert model.draft_head is not None, "a backend builds a head only if the config has one"
        self._config: DraftHeadConfig = model.draft_head
        self._precision = model.precision
        self._parts = parts
        self._mesh = mesh
        self._residency = residency
        self._batching = batching
        self._skipped = SkippedSteps(model.max_skipped_steps)
        self._sending = SendingEnd(mesh.kind)
        self._checkpoint = Checkpoint(parts.state, parts.optimizer.inner, None, mesh, seed)

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """One optimizer step of the head on all ranks' shards, from a pass of the model as it is; this rank's part of
        the metrics.

        Raises:
            ValueError: If the loss reads anything other than `draft_losses`.
        """
        unknown = sorted({read.name for read in loss.reads} - {DRAFT_LOSSES})
        if unknown:
            raise ValueError(f"a draft head cannot read {', '.join(unknown)}; it has {DRAFT_LOSSES}")
        self._residency.require("parameters", "optimizer")
        return run_train_step(
            self._parts.model,
            self._parts.optimizer,
            batch,
            loss,
            schedule=None,
            max_grad_norm=self._config.max_grad_norm,
            skipped=self._skipped,
            batching=self._batching,
            mesh=self._mesh,
        )

    def export(self, path: str) -> tuple[SavedFile, ...]:
        """Write the head's config and weights in the format of the files that it was loaded from."""
        self._residency.require("parameters")
        folder, dtype = Path(path), export_dtype(self._parts.folder, self._precision)
        on_rank0(self._mesh.control, lambda: self._write_config(folder, dtype))
        export_weights(self._parts.exported, folder, dtype=dtype, precision=self._precision, mesh=self._mesh)
        return exported_files(folder, self._mesh.control)

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """Write nothing: a head has no adapters."""
        return ()

    def manifest(self, version: int, form: WeightForm = "merged") -> Manifest | None:
        """The head's tensors in the compute dtype, by the names of its files; on rank 0, which speaks for all."""
        manifest = manifest_of(self._parts.weights, version, self._precision, form)
        return manifest if self._mesh.rank == 0 else None

    def send(self, manifest: Manifest, transport: Transport) -> Sequence[str]:
        """Bring the weights together and send them, from rank 0 or from every rank."""
        self._residency.require("parameters")
        stream = stream_of(self._parts.weights, manifest, transport, self._precision)
        return send_weights(self._sending, stream, manifest, transport, self._mesh)

    def close(self) -> None:
        """End the connection to receivers, and wait for what is being written."""
        self._checkpoint.close()
        self._sending.close()

    def _write_config(self, folder: Path, dtype: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((self._parts.folder / CONFIG).read_text(encoding="utf-8"))
        name = "torch_dtype" if "torch_dtype" in config else "dtype"
        (folder / CONFIG).write_text(json.dumps({**config, name: dtype}, indent=2), encoding="utf-8")
