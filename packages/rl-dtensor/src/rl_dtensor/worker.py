"""One rank of a model on DTensor and FSDP2."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_core.batch import TOKENS, Batch
from rl_core.mesh import Coordinates
from rl_core.metrics import Metric
from rl_core.microbatch import Batching
from rl_core.model import Loss, ModelSpec, Part, Read, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.torch.export import export_dtype
from rl_core.torch.flops import peak_flops, speed_metrics
from rl_core.torch.model_files import model_folder
from rl_core.torch.optimizer import build_schedule
from rl_core.torch.reads import check_reads
from rl_core.torch.teamwork import lead
from rl_core.weights import Digests, Manifest, Transport
from rl_dtensor.checkpoint import Checkpoint
from rl_dtensor.config import DTensorConfig
from rl_dtensor.export import export_model
from rl_dtensor.model import build_model
from rl_dtensor.optimizer import build_sharded_optimizer
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.publishing import manifest_of, send_weights
from rl_dtensor.reference import Reference
from rl_dtensor.residency import Residency
from rl_dtensor.step import run_evaluation, run_reads, run_train_step


class DTensorWorker:
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
        self._reference = Reference(self._model) if spec.keeps_reference else None
        self._optimizer = build_sharded_optimizer(config.optimizer, self._model.trained()) if spec.trains else None
        self._schedule = None if self._optimizer is None else build_schedule(config.scheduler, self._optimizer)
        self._peak = self._peak_of_shard(config.precision)
        self._residency = Residency(self._model, self._optimizer, self._mesh.device)
        self._checkpoint = Checkpoint(self._model, self._optimizer, self._schedule, self._mesh, spec.seed)

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

    def evaluate(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """This rank's part of the loss's metrics."""
        check_reads(self._spec.role, loss.reads)
        self._residency.require("parameters")
        return run_evaluation(self._model, batch, loss, batching=self._training, mesh=self._mesh)

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """One optimizer and schedule step on all ranks' shards; this rank's part of the metrics, among them `flops`,
        `flops_per_second` and, on GPUs whose peak is known, in half precision, `mfu`."""
        start = time.perf_counter()
        check_reads(self._spec.role, loss.reads)
        self._residency.require("parameters", "optimizer")
        if self._optimizer is None:
            raise ValueError("this model does not train; build it with ModelSpec(trains=True)")
        metrics = run_train_step(
            self._model,
            batch,
            loss,
            optimizer=self._optimizer,
            schedule=self._schedule,
            max_grad_norm=self._config.max_grad_norm,
            batching=self._training,
            mesh=self._mesh,
        )
        if not self._mesh.coordinates.leads:
            return metrics
        flops = self._model.shape.training_flops(batch.ragged(TOKENS).lengths)
        return {**metrics, **speed_metrics(flops, time.perf_counter() - start, self._peak)}

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write parameters, optimizer, schedule and RNG under `path`; the reference is not written. Without `wait` they
        are copied to host memory, which must have room for them, and written in the background."""
        self._residency.require("parameters", "optimizer")
        self._checkpoint.save(Path(path), wait=wait)

    def finish_save(self, *, wait: bool = True) -> bool:
        """Whether nothing is being written any more."""
        return self._checkpoint.finish_save(wait=wait)

    def load(self, path: str) -> None:
        """Restore what `save` wrote, on any mesh."""
        self._residency.require("parameters", "optimizer")
        self._model.reshard_all()
        self._checkpoint.load(Path(path))

    def export(self, path: str) -> None:
        """Write Hugging Face files; weights in the dtype that the source has on disk, float32 where `precision` is."""
        self._residency.require("parameters")
        dtype = export_dtype(self._folder, self._config.precision)
        export_model(
            self._model,
            Path(path),
            source=self._folder,
            tokenizer=self._tokenizer,
            settings=self._config.tokenizer,
            dtype=dtype,
            mesh=self._mesh,
        )

    def offload(self, parts: Sequence[Part] = ("parameters", "optimizer")) -> None:
        """Move these parts to host memory; on `cpu` they are there already, and only later use is refused."""
        self._residency.offload(parts)

    def onload(self, parts: Sequence[Part] = ("parameters", "optimizer")) -> None:
        """Bring these parts back to the device."""
        self._residency.onload(parts)

    def manifest(self, version: int) -> Manifest:
        """All weights in the compute dtype, by Hugging Face name."""
        return manifest_of(self._model.weights, version, self._config.precision)

    def send(self, manifest: Manifest, transport: Transport) -> Digests:
        """Gather the weights bucket by bucket and send them, from rank 0 or from every rank."""
        self._residency.require("parameters")
        return send_weights(self._model.weights, manifest, transport, self._config.precision, self._mesh)

    def health(self) -> Mapping[str, Any]:
        """Rank, process id, and bytes in use: of the process on `cpu`, of torch's allocator on `cuda`."""
        if self._mesh.device.type == "cuda":
            used = torch.cuda.memory_allocated(self._mesh.device)
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            used = pages * os.sysconf("SC_PAGE_SIZE")
        return {"rank": self._mesh.rank, "pid": os.getpid(), "memory_bytes": used}

    def close(self) -> None:
        """Leave the process group and free the device, once what is being written has been."""
        self._checkpoint.close()
        self._mesh.leave()
        del self._model, self._optimizer, self._schedule, self._reference, self._residency, self._checkpoint
        gc.collect()  # modules that compute on local parameters refer to themselves, and hold the groups' sockets
        if self._mesh.device.type == "cuda":
            torch.cuda.empty_cache()

    def _peak_of_shard(self, precision: str) -> float | None:
        """Operations per second of the ranks that share a data-parallel shard, where known."""
        if self._mesh.device.type != "cuda" or precision != "bfloat16":
            return None
        peak = peak_flops(torch.cuda.get_device_name(self._mesh.device))
        return None if peak is None else peak * self._mesh.world_size / self._mesh.sizes.dp

    def _read(self, batch: Batch, reads: Sequence[Read], temperature: float) -> Batch | None:
        return run_reads(self._model, batch, reads, temperature=temperature, batching=self._reading, mesh=self._mesh)

    def _fetch(self, name: str) -> Path:
        """A folder or hub name as a folder; one rank downloads, the others find it in the cache."""
        folders: list[Path] = []
        lead(self._mesh.control, lambda: folders.append(model_folder(name)))
        return folders[0] if folders else model_folder(name)
