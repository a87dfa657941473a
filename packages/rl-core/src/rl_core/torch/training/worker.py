"""One rank of a model, and of the draft head that trains with it, on whatever backend builds its parts."""

from __future__ import annotations

import gc
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.microbatch import Batching
from rl_core.facts.model_code import code_files
from rl_core.facts.vllm_readings import write_serving_note
from rl_core.metrics import Metric
from rl_core.model import HEADLESS_ROLES, Coordinates, Loss, ModelPart, ModelSpec, Read, SavedFile, StepSettings
from rl_core.model_config import ModelConfig
from rl_core.torch.files.model_code import run_model_code
from rl_core.torch.files.model_files import CONFIG, WeightFiles, copy_side_files, copy_tokenizer, fetched_folder
from rl_core.torch.heads.reads import check_reads
from rl_core.torch.optim.optimizer import build_schedule
from rl_core.torch.process_group import on_rank0
from rl_core.torch.residency import Reference, Residency
from rl_core.torch.training.adapters import WorkerAdapters
from rl_core.torch.training.backend import HeadParts, RankMesh, RankWeights, TrainingParts
from rl_core.torch.training.checkpoint import Checkpoint
from rl_core.torch.training.checkpoint_files import exported_files, verify_files
from rl_core.torch.training.export import complete_generation_config, export_dtype, export_weights, write_hf_config
from rl_core.torch.training.flops import peak_flops, speed_metrics
from rl_core.torch.training.lora import check_base
from rl_core.torch.training.memory import PhasePeaks, planned_step
from rl_core.torch.training.peft_form import AdapterExport
from rl_core.torch.training.publishing import manifest_of, send_weights
from rl_core.torch.training.step import LossScale, SkippedSteps, TrainingSteps, run_evaluation, run_reads
from rl_core.torch.transport import SendingEnd, interrupt
from rl_core.weights import Manifest, Transport, WeightForm

CLOSE_TIMEOUT = timedelta(seconds=30)
DRAFT_LOSSES = "draft_losses"
SCORE = "score.weight"
"""Name of the head of reward models and critics in files."""


class _WorkerPart:
    """Methods of a `rl_core.ModelWorker` that a model and its draft head have alike: saves, moves and transfers."""

    _mesh: RankMesh
    _residency: Residency
    _checkpoint: Checkpoint
    _weights: RankWeights
    _precision: str
    _sending: SendingEnd
    _steps: TrainingSteps | None
    _peaks: PhasePeaks

    def coordinates(self) -> Coordinates:
        """Return this rank's place on the mesh."""
        return self._mesh.coordinates

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write parameters, optimizer, schedule and RNG under `path`, and the reference if it has been updated.

        Without `wait` they are copied to host memory, which must have room for them, and written in the background; the
        reference is copied either way.
        """
        self._residency.require("parameters", "optimizer")
        with self._peaks.of("save"):
            self._checkpoint.save(Path(path), wait=wait)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """Return the files that this rank wrote for the last save; None while they are being written."""
        return self._checkpoint.finish_save(wait=wait)

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """Restore what `save` wrote, on any number of ranks and any mesh.

        Raises:
            CheckpointDamaged: On every rank, naming the first of the files that is missing or differs.
        """
        if self._steps is not None:
            self._steps.discard()
        self._residency.require("parameters", "optimizer")
        verify_files(Path(path), files, self._mesh.control)
        self._checkpoint.load(Path(path))

    def offload(self, parts: Sequence[ModelPart] = ("parameters", "optimizer")) -> None:
        """Move these parts to host memory; on `cpu` they are there already, and only later use is refused.

        Raises:
            ValueError: If there is a gradient that has been neither applied nor discarded.
        """
        if self._steps is not None and self._steps.is_pending:
            raise ValueError("the model has a gradient and cannot leave its device; call apply or discard first")
        self._residency.offload(parts)

    def onload(self, parts: Sequence[ModelPart] = ("parameters", "optimizer")) -> None:
        """Bring these parts back to the device."""
        self._residency.onload(parts)

    def manifest(self, version: int, form: WeightForm = "merged") -> Manifest | None:
        """Return all weights in the compute dtype, by name in the files; on rank 0, which speaks for all.

        Raises:
            ValueError: For another form than `merged` if the model has no adapters.
        """
        manifest = manifest_of(self._weights, version, self._precision, form)
        return manifest if self._mesh.rank == 0 else None

    def send(self, manifest: Manifest, transport: Transport) -> Sequence[str]:
        """Bring the weights together bucket by bucket and send them, from rank 0 or from every rank."""
        self._residency.require("parameters")
        with self._peaks.of("weight_sync"):
            return send_weights(self._sending, self._weights, manifest, transport, self._precision, self._mesh)

    def _training_steps(self) -> TrainingSteps:
        if self._steps is None:
            raise ValueError("this model does not train; build it with ModelSpec(trains=True)")
        return self._steps

    def close(self) -> None:
        """Wait for the unfinished save, and end the connection to receivers."""
        self._checkpoint.close()
        self._sending.close()


class TrainingWorker(_WorkerPart):
    """An `rl_core.ModelWorker` on the parts that a backend builds (`rl_core.torch.TrainingParts`).

    Args:
        config: The model.
        spec: Its purpose. The reference are the weights at `config.model_name`, also after a `load`, unless it has been
            updated.
        mesh: Joined; it is left if building fails, and by `close`.
        build: Function from the folder of the model's files to its parts; collective.
        row_multiple: Each packed row fills a multiple of this number, if the model pads packed microbatches to their
            token budget; None if it does not.

    Attributes:
        draft_head: Draft head that trains with the model; None without one.

    Raises:
        ValueError: If files, config, role and settings do not fit together.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: ModelSpec,
        mesh: RankMesh,
        build: Callable[[Path], TrainingParts],
        *,
        row_multiple: int | None = None,
    ) -> None:
        self._config, self._spec, self._mesh, self._precision = config, spec, mesh, config.precision
        self._sending, self._peaks = SendingEnd(mesh.kind), PhasePeaks(mesh.kind)
        try:
            self._build(build, row_multiple)
        except BaseException:
            mesh.leave()
            raise

    def _build(self, build: Callable[[Path], TrainingParts], row_multiple: int | None) -> None:
        config, spec, mesh = self._config, self._spec, self._mesh
        self._training = Batching.of(config, training=True, row_multiple=row_multiple)
        self._reading = Batching.of(config, training=False, row_multiple=row_multiple)
        mesh.seed(spec.seed)
        control, tokenizer = mesh.control, config.tokenizer.name
        self._folder = fetched_folder(config.model_name, control)
        self._tokenizer = self._folder if tokenizer is None else fetched_folder(tokenizer, control)
        if config.trust_remote_code is not None:
            run_model_code(self._folder, config.trust_remote_code)
        on_rank0(control, lambda: check_base(config, self._folder))
        parts = build(self._folder)
        if spec.role == "reward_model" and not spec.trains:
            on_rank0(control, self._check_scores)
        self._model, self._weights, self._optimizer = parts.model, parts.weights, parts.optimizer
        self._residency, self._plan_step = parts.residency, parts.plan_step
        self._adapters = AdapterExport(
            parts.weights, config=config, role=spec.role, folder=self._folder, mesh=mesh, initial=parts.initial
        )
        if spec.trains and config.lora_cfg.enabled:
            self._adapters.check()
        self._reference = Reference(self._model.trained_parts) if spec.keeps_reference else None
        inner = None if self._optimizer is None else self._optimizer.inner
        self._schedule = None if inner is None else build_schedule(config.scheduler, inner)
        # Operations per second of the ranks that share a data-parallel shard; None if they are not known.
        peak = None if config.precision == "float32" else peak_flops(mesh.kind.chip)
        self._loss_scale = LossScale() if spec.trains and config.precision == "float16" else None
        self._peak = None if peak is None else peak * mesh.world_size / mesh.coordinates.along("dp")
        self._checkpoint = Checkpoint(
            parts.state, inner, self._schedule, mesh, spec.seed, self._reference, self._loss_scale
        )
        self.draft_head = None
        if parts.draft_head is not None:
            self.draft_head = DraftHead(
                config,
                parts.draft_head,
                mesh,
                parts.residency,
                batching=self._training,
                seed=spec.seed,
                peaks=self._peaks,
            )
        self._training, self._reading = (
            replace(batching, shares_prefixes=parts.shares_prefixes) for batching in (self._training, self._reading)
        )
        self._steps = None
        if spec.trains:
            assert self._optimizer is not None, "a backend builds the optimizer of a model that trains"
            self._steps = TrainingSteps(
                self._model,
                self._optimizer,
                schedule=self._schedule,
                max_grad_norm=config.max_grad_norm,
                skipped=SkippedSteps(config.max_skipped_steps, config.skipped_grad_norm),
                batching=self._training,
                mesh=mesh,
                loss_scale=self._loss_scale,
                adapters=parts.adapters,
            )
        self._several = None
        if parts.adapters is not None:
            self._several = WorkerAdapters(
                parts.adapters, self._steps, self._adapters, self.export, parts.residency, mesh
            )

    @property
    def adapters(self) -> WorkerAdapters:
        """The adapters of a model that has several.

        Raises:
            ValueError: If it has not.
        """
        if self._several is None:
            raise ValueError("the model has no adapters that step apart; set lora_cfg.max_adapters")
        return self._several

    def infer(
        self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0
    ) -> Batch | None:
        """Return results for this rank's shard, on ranks that lead it.

        Raises:
            ValueError: For a read that the role's head cannot answer, or a reference that was not kept.
        """
        check_reads(self._spec.role, reads)
        self._residency.require("parameters")
        with self._peaks.of("logprobs"), self._kept_reference().in_place() if reference else nullcontext():
            return run_reads(
                self._model, batch, reads, temperature=temperature, batching=self._reading, mesh=self._mesh
            )

    def update_reference(self, share: float = 1.0) -> None:
        """Move the reference towards the model's weights by this share of the difference.

        Raises:
            ValueError: For a share outside (0, 1], or a reference that was not kept.
        """
        if not 0 < share <= 1:
            raise ValueError(f"the update share of the reference must be in (0, 1], got {share}")
        self._residency.require("parameters")
        self._kept_reference().update(share)

    def evaluate(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """Return this rank's part of the loss's metrics."""
        check_reads(self._spec.role, loss.reads)
        self._residency.require("parameters")
        return run_evaluation(self._model, batch, loss, batching=self._training, mesh=self._mesh)

    def accumulate(self, batch: Batch, loss: Loss) -> tuple[Mapping[str, Metric], Batch | None]:
        """Add the gradient of all ranks' shards to the gradient so far, and return this rank's part of the metrics and,
        on ranks that lead their shard, the columns of the loss's reads.

        Raises:
            ValueError, RuntimeError: As `train_step`.
        """
        with self._step(loss) as steps:
            return steps.accumulate(batch, loss)

    def apply(self, settings: StepSettings | None = None, *, adapter: int | None = None) -> Mapping[str, Metric]:
        """Make one optimizer and schedule step with the gradient so far, of one adapter if it is given, and return this
        rank's part of the metrics.

        Raises:
            ValueError: If there is no gradient, or a setting that the optimizer does not have.
            RuntimeError: Naming parts that are offloaded.
        """
        self._residency.require("parameters", "optimizer")
        with self._peaks.of("training"):
            return self._training_steps().apply(settings or StepSettings(), self._known(adapter))

    def discard(self, *, adapter: int | None = None) -> None:
        """Begin a new gradient, of one adapter if it is given; the one so far, if any, is not stepped."""
        self._training_steps().discard(self._known(adapter))

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """Make one optimizer and schedule step on all ranks' shards, and return this rank's part of the metrics.

        A model that knows its shape also reports `flops`, `flops_per_second` and, on GPUs whose peak is known, in half
        precision, `mfu`.

        Raises:
            ValueError: For a read that the role's head cannot answer, or a model without an optimizer.
            RuntimeError: Naming parts that are offloaded.
        """
        start = time.perf_counter()
        with self._step(loss) as steps:
            metrics = steps.step(batch, loss)
        if self._model.shape is None or not self._mesh.coordinates.leads:
            return metrics
        flops = self._model.shape.training_flops(batch.ragged(TOKENS).lengths)
        return {**metrics, **speed_metrics(flops, time.perf_counter() - start, self._peak)}

    def export(self, path: str, dtype: str | None = None) -> tuple[SavedFile, ...]:
        """Write config, generation config, tokenizer files and weights that `transformers` loads.

        Weights have the dtype that is given, or the dtype that the source has on disk, float32 if `precision` is.
        """
        self._residency.require("parameters")
        folder, written = Path(path), dtype or export_dtype(self._folder, self._precision)
        on_rank0(self._mesh.control, lambda: self._write_side_files(folder, written))
        export_weights(self._weights, folder, dtype=written, precision=self._precision, mesh=self._mesh)
        return exported_files(folder, self._mesh.control)

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """Write the adapters as `peft` loads them, and the tokenizer's files.

        If the model has no adapters, nothing is written, not even the folder.
        """
        if not self._config.lora_cfg.enabled:
            return ()
        self._residency.require("parameters")
        folder, settings = Path(path), self._config.tokenizer
        self._adapters.write(folder)
        on_rank0(self._mesh.control, lambda: copy_tokenizer(folder, tokenizer=self._tokenizer, settings=settings))
        return exported_files(folder, self._mesh.control)

    interrupt = staticmethod(interrupt)
    """Ends this process's `send` over a transport soon, as nobody will receive it; called by another thread."""

    def health(self) -> Mapping[str, Any]:
        """Return rank, process id, bytes in use (of the process on `cpu`, of torch's allocator on `cuda`), and the
        largest number of bytes of each phase since the last call, see `rl_core.torch.training.memory.PhasePeaks`."""
        return {
            "rank": self._mesh.rank,
            "pid": os.getpid(),
            "memory_bytes": self._mesh.kind.memory_bytes(),
            "peak_bytes": self._peaks.take(),
        }

    def close(self) -> None:
        """Leave the process groups and free the device, once the unfinished save has ended.

        It waits a while for the others: leaving while another still talks aborts its process.
        """
        super().close()
        if self.draft_head is not None:
            self.draft_head.close()
        try:
            dist.monitored_barrier(group=self._mesh.control, timeout=CLOSE_TIMEOUT)
        finally:
            self._mesh.leave()
        self._model.close()
        del self._model, self._weights, self._adapters, self._optimizer, self._schedule, self._steps
        del self._reference, self._residency, self._checkpoint, self._plan_step, self.draft_head, self._several
        # Modules and wrappers form cycles, which keep memory and the sockets of groups until they are collected.
        gc.collect()
        self._mesh.kind.release_memory()

    @contextmanager
    def _step(self, loss: Loss) -> Iterator[TrainingSteps]:
        """Enter a context of a backward pass. The first one plans memory, because all that shares the devices has been
        started and has left them again by then."""
        check_reads(self._spec.role, loss.reads)
        self._residency.require("parameters", "optimizer")
        steps = self._training_steps()
        plan, self._plan_step = self._plan_step, None
        with (
            self._peaks.of("training"),
            nullcontext() if plan is None else planned_step(plan, self._mesh.kind, self._mesh.control),
        ):
            yield steps

    def _known(self, adapter: int | None) -> int | None:
        """Return the place of an adapter, if the model has several.

        Raises:
            ValueError: If it has not.
        """
        if adapter is not None:
            _ = self.adapters  # refuses a model that has one
        return adapter

    def _check_scores(self) -> None:
        """Raise a `ValueError` if the files of a model that only scores have no head, whose scores would be random."""
        if SCORE not in WeightFiles.of(self._folder).names:
            raise ValueError(
                f"model_name: {self._config.model_name!r} is not a reward model, because its files have no {SCORE}. "
                "Train one with algorithm: rm, and name the folder `hf` of a checkpoint"
            )

    def _kept_reference(self) -> Reference:
        if self._reference is None:
            raise ValueError("this model keeps no reference; build it with ModelSpec(keeps_reference=True)")
        return self._reference

    def _write_side_files(self, path: Path, dtype: str) -> None:
        """Write the files of an export other than its weights."""
        has_code = self._config.trust_remote_code is not None
        write_hf_config(
            self._model, path, role=self._spec.role, dtype=dtype, tokenizer=self._tokenizer, keeps_code=has_code
        )
        for name in code_files(self._folder) if has_code else ():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._folder / name, path / name)
        copy_side_files(
            path,
            source=self._folder,
            tokenizer=self._tokenizer,
            settings=self._config.tokenizer,
            is_whole=self._config.vision.enabled,
        )
        if self._spec.role not in HEADLESS_ROLES:
            fields = {**self._model.hf_config.get_text_config().to_dict(), "dtype": dtype}
            complete_generation_config(path)
            write_serving_note(path, fields, self._config.max_total_sequence_length)


class DraftHead(_WorkerPart):
    """The part of a `TrainingWorker` that trains, saves and sends its draft head.

    It has the methods of a `rl_core.ModelWorker` that a model which only trains needs, so that
    `rl_core.ray.model.RemoteModel.part` calls it as one.

    Args:
        model: Settings of the model that it drafts for, with its own.
        parts: The head as the backend built it.
        mesh: Ranks of both.
        residency: Residency of both.
        batching: Microbatches of a step.
        seed: Seed of the generators of a run that resumes on another layout.
        peaks: Peaks of the rank.
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
        peaks: PhasePeaks,
    ) -> None:
        assert model.draft_head is not None, "a backend builds a head only if the config has one"
        self._mesh, self._residency, self._peaks = mesh, residency, peaks
        self._parts, self._weights, self._precision = parts, parts.weights, model.precision
        self._steps = TrainingSteps(
            parts.model,
            parts.optimizer,
            schedule=None,
            max_grad_norm=model.draft_head.max_grad_norm,
            skipped=SkippedSteps(model.max_skipped_steps),
            batching=batching,
            mesh=mesh,
        )
        self._sending = SendingEnd(mesh.kind)
        self._checkpoint = Checkpoint(parts.state, parts.optimizer.inner, None, mesh, seed)

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """Make one optimizer step of the head on all ranks' shards, from a pass of the model as it is.

        Returns:
            This rank's part of the metrics.

        Raises:
            ValueError: If the loss reads anything other than `draft_losses`.
        """
        unknown = sorted({read.name for read in loss.reads} - {DRAFT_LOSSES})
        if unknown:
            raise ValueError(f"a draft head cannot read {', '.join(unknown)}; it has {DRAFT_LOSSES}")
        self._residency.require("parameters", "optimizer")
        with self._peaks.of("drafter_training"):
            return self._training_steps().step(batch, loss)

    def export(self, path: str) -> tuple[SavedFile, ...]:
        """Write the head's config and weights in the format of the files that it was loaded from."""
        self._residency.require("parameters")
        folder, dtype = Path(path), export_dtype(self._parts.folder, self._precision)

        def write_config() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            config = json.loads((self._parts.folder / CONFIG).read_text(encoding="utf-8"))
            name = "torch_dtype" if "torch_dtype" in config else "dtype"
            (folder / CONFIG).write_text(json.dumps({**config, name: dtype}, indent=2), encoding="utf-8")

        on_rank0(self._mesh.control, write_config)
        export_weights(self._parts.exported, folder, dtype=dtype, precision=self._precision, mesh=self._mesh)
        return exported_files(folder, self._mesh.control)

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """Write nothing: a head has no adapters."""
        return ()
