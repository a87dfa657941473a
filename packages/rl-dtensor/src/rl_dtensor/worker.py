"""One rank of a model on DTensor and FSDP2."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rl_core.batch import TOKENS, Batch
from rl_core.metrics import Metric
from rl_core.microbatch import Batching
from rl_core.model import Loss, ModelSpec, Read, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.torch.optim.optimizer import build_schedule
from rl_core.torch.training.export import export_dtype
from rl_core.torch.training.flops import peak_flops, speed_metrics
from rl_core.torch.training.publishing import manifest_of, send_weights
from rl_core.torch.training.reference import Reference
from rl_core.torch.training.skipped_steps import SkippedSteps
from rl_core.torch.training.worker import RankWorker
from rl_core.weights import Digests, Manifest, Transport
from rl_dtensor.checkpoint import Checkpoint
from rl_dtensor.config import DTensorConfig
from rl_dtensor.export import export_model
from rl_dtensor.model import build_model
from rl_dtensor.optimizer import build_sharded_optimizer
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.residency import ModelResidency
from rl_dtensor.step import run_evaluation, run_reads, run_train_step


class DTensorWorker(RankWorker):
    """A `ModelWorker` whose layers are split over tensor-, context-, pipeline- and expert-parallel ranks, and whose
    parameters are sharded by FSDP2 over all ranks that are left.

    The constructor joins the process group, builds the model on `meta`, splits and shards it and loads this rank's
    slices of the Hugging Face files.

    Args:
        config: the model; master weights are float32 where it trains.
        backend: this backend's settings.
        spec: what the model is for. The reference are the weights at `config.model_name`, also after a `load`.
        rendezvous: how to find the other ranks.

    Raises:
        ValueError: where files, config, role and settings do not fit together.
    """

    _mesh: Mesh

    def __init__(self, config: ModelConfig, backend: DTensorConfig, spec: ModelSpec, rendezvous: Rendezvous) -> None:
        self._config = config
        self._spec = spec
        self._training = Batching.of(config, training=True)
        self._reading = Batching.of(config, training=False)
        self._mesh = Mesh.join(rendezvous, backend)
        try:
            self._build(config, backend, spec)
        except BaseException:
            dist.destroy_process_group()
            raise

    def _build(self, config: ModelConfig, backend: DTensorConfig, spec: ModelSpec) -> None:
        torch.manual_seed(spec.seed + self._mesh.on("dp"))
        self._folder = self._fetch(config.model_name)
        self._tokenizer = self._folder if config.tokenizer.name is None else self._fetch(config.tokenizer.name)
        self._model = build_model(
            config, backend, spec, folder=self._folder, is_packed=self._training.packed, mesh=self._mesh
        )
        self._reference = Reference(self._model.trained_parts) if spec.keeps_reference else None
        self._optimizer = build_sharded_optimizer(config.optimizer, self._model.trained()) if spec.trains else None
        self._schedule = None if self._optimizer is None else build_schedule(config.scheduler, self._optimizer)
        self._skipped = SkippedSteps(config.max_skipped_steps)
        self._peak = self._peak_of_shard(config.precision)
        self._residency = ModelResidency(self._model, self._optimizer, self._mesh.kind)
        self._checkpoint = Checkpoint(self._model, self._optimizer, self._schedule, self._mesh, spec.seed)

    def evaluate(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """This rank's part of the loss's metrics."""
        self._require_for(loss, trains=False)
        return run_evaluation(self._model, batch, loss, batching=self._training, mesh=self._mesh)

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """One optimizer and schedule step on all ranks' shards; this rank's part of the metrics, among them `flops`,
        `flops_per_second` and, on GPUs whose peak is known, in half precision, `mfu`."""
        start = time.perf_counter()
        self._require_for(loss, trains=True)
        assert self._optimizer is not None
        metrics = run_train_step(
            self._model,
            batch,
            loss,
            optimizer=self._optimizer,
            schedule=self._schedule,
            max_grad_norm=self._config.max_grad_norm,
            skipped=self._skipped,
            batching=self._training,
            mesh=self._mesh,
        )
        if not self._mesh.coordinates.leads:
            return metrics
        flops = self._model.shape.training_flops(batch.ragged(TOKENS).lengths)
        return {**metrics, **speed_metrics(flops, time.perf_counter() - start, self._peak)}

    def _load(self, path: Path) -> None:
        self._model.reshard_all()
        self._checkpoint.load(path)

    def _export(self, path: Path) -> None:
        dtype = export_dtype(self._folder, self._config.precision)
        export_model(
            self._model,
            path,
            source=self._folder,
            tokenizer=self._tokenizer,
            settings=self._config.tokenizer,
            dtype=dtype,
            mesh=self._mesh,
        )

    def manifest(self, version: int) -> Manifest:
        """All weights in the compute dtype, by Hugging Face name."""
        return manifest_of(self._model.weights, version, self._config.precision)

    def send(self, manifest: Manifest, transport: Transport) -> Digests:
        """Gather the weights bucket by bucket and send them, from rank 0 or from every rank."""
        self._residency.require("parameters")
        return send_weights(self._model.weights.stream(self._config.precision), manifest, transport, self._mesh)

    def close(self) -> None:
        """Leave the process group and free the device, once what is being written has been."""
        self._checkpoint.close()
        self._mesh.leave()
        del self._model, self._optimizer, self._schedule, self._reference, self._residency, self._checkpoint
        gc.collect()  # modules that compute on local parameters refer to themselves, and hold the groups' sockets
        self._mesh.kind.release_memory()

    def _peak_of_shard(self, precision: str) -> float | None:
        """Operations per second of the ranks that share a data-parallel shard, where known."""
        if precision != "bfloat16":
            return None
        peak = peak_flops(self._mesh.kind.chip)
        return None if peak is None else peak * self._mesh.world_size / self._mesh.sizes.dp

    def _read(self, batch: Batch, reads: Sequence[Read], temperature: float) -> Batch | None:
        return run_reads(self._model, batch, reads, temperature=temperature, batching=self._reading, mesh=self._mesh)
