"""One rank of a model on Megatron Core."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_core.batch import Batch
from rl_core.mesh import Coordinates
from rl_core.metrics import Metric
from rl_core.microbatch import Batching
from rl_core.model import Loss, ModelSpec, Part, Read, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.torch.model_files import WeightFiles, model_folder
from rl_core.torch.optimizer import build_optimizer, build_schedule
from rl_core.torch.reads import check_reads
from rl_core.weights import Digests, Manifest, Transport
from rl_megatron import cpu_shim
from rl_megatron.config import MegatronConfig


class MegatronWorker:
    """A `ModelWorker` whose layers are spread over tensor-, pipeline-, context- and expert-parallel ranks by Megatron
    Core, and whose optimizer state is spread over the data-parallel ones.

    The constructor joins the process groups, builds this rank's part of the model and loads its slices of the Hugging
    Face files. One process holds one worker at a time: Megatron keeps its groups per process.

    Args:
        config: the model; the optimizer steps float32 copies whatever the compute dtype.
        backend: this backend's settings.
        spec: what the model is for. The reference are the weights at `config.model_name`, also after a `load`.
        rendezvous: how to find the other ranks.

    Raises:
        ValueError: where files, config, role and settings do not fit together.
    """

    def __init__(self, config: ModelConfig, backend: MegatronConfig, spec: ModelSpec, rendezvous: Rendezvous) -> None:
        if rendezvous.device == "cpu":
            cpu_shim.install()
        from rl_megatron.parallel.mesh import Mesh, leave_groups

        self._config = config
        self._spec = spec
        self._reports_layers = backend.moe_per_layer_logging
        self._training = Batching.of(config, training=True)
        self._reading = Batching.of(config, training=False)
        self._mesh = Mesh.join(rendezvous, backend)
        try:
            self._build(config, backend, spec)
        except BaseException:
            leave_groups()
            raise

    def _build(self, config: ModelConfig, backend: MegatronConfig, spec: ModelSpec) -> None:
        from rl_megatron.checkpoint import Checkpoint
        from rl_megatron.lora import add_adapters
        from rl_megatron.model import build_model
        from rl_megatron.random import seed_all
        from rl_megatron.reference import Reference
        from rl_megatron.residency import Residency
        from rl_megatron.sharded_optimizer import ShardedOptimizer
        from rl_megatron.weights import Weights
        from rl_megatron.wrapping import wrap_chunks

        seed_all(spec.seed)
        self._folder = self._fetch(config.model_name)
        self._tokenizer = self._folder if config.tokenizer.name is None else self._fetch(config.tokenizer.name)
        self._model = build_model(
            config, backend, spec, folder=self._folder, is_packed=self._training.packed, mesh=self._mesh
        )
        if config.lora_cfg.enabled:
            add_adapters(self._model, config.lora_cfg)
        self._weights = Weights(self._model, self._mesh)
        self._weights.load(WeightFiles.of(self._folder), seed=spec.seed)
        self._chunks = wrap_chunks(self._model, backend.distributed_data_parallel_config) if spec.trains else []
        self._reference = Reference(self._weights) if spec.keeps_reference else None
        self._optimizer, self._schedule = None, None
        if spec.trains:
            self._optimizer = ShardedOptimizer(
                self._chunks,
                lambda parameters: build_optimizer(config.optimizer, parameters),
                self._weights.is_counted,
            )
            self._schedule = build_schedule(config.scheduler, self._optimizer.inner)
        self._residency = Residency(self._model, self._optimizer, self._mesh.device)
        self._checkpoint = Checkpoint(
            self._model, self._weights, self._optimizer, self._schedule, self._mesh, spec.seed
        )

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
        from rl_megatron.step import run_evaluation

        check_reads(self._spec.role, loss.reads)
        self._residency.require("parameters")
        return run_evaluation(self._model, batch, loss, batching=self._training, mesh=self._mesh)

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """One optimizer and schedule step on all ranks' shards; this rank's part of the metrics."""
        from rl_megatron.step import run_train_step

        check_reads(self._spec.role, loss.reads)
        self._residency.require("parameters", "optimizer")
        if self._optimizer is None:
            raise ValueError("this model does not train; build it with ModelSpec(trains=True)")
        return run_train_step(
            self._model,
            self._chunks,
            batch,
            loss,
            optimizer=self._optimizer,
            schedule=self._schedule,
            max_grad_norm=self._config.max_grad_norm,
            batching=self._training,
            mesh=self._mesh,
            reports_layers=self._reports_layers,
        )

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write parameters, optimizer, schedule and RNG under `path`; the reference is not written. Without `wait` they
        are copied to host memory, which must have room for them, and written in the background."""
        self._residency.require("parameters", "optimizer")
        self._checkpoint.save(Path(path), wait=wait)

    def finish_save(self, *, wait: bool = True) -> bool:
        """Whether nothing is being written any more."""
        return self._checkpoint.finish_save(wait=wait)

    def load(self, path: str) -> None:
        """Restore what `save` wrote, on any number of ranks and any layout."""
        self._residency.require("parameters", "optimizer")
        self._checkpoint.load(Path(path))

    def export(self, path: str) -> None:
        """Write Hugging Face files; weights in the dtype that the source has on disk, float32 where `precision` is."""
        from rl_core.torch.export import export_dtype
        from rl_megatron.export import export_model

        self._residency.require("parameters")
        dtype = export_dtype(self._folder, self._config.precision)
        export_model(
            self._model,
            self._weights,
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
        from rl_megatron.publishing import manifest_of

        return manifest_of(self._weights, version, self._config.precision)

    def send(self, manifest: Manifest, transport: Transport) -> Digests:
        """Bring the weights to rank 0 and send them from there."""
        from rl_megatron.publishing import send_weights

        self._residency.require("parameters")
        return send_weights(self._weights, manifest, transport, self._config.precision, self._mesh)

    def health(self) -> Mapping[str, Any]:
        """Rank, process id, and bytes in use: of the process on `cpu`, of torch's allocator on `cuda`."""
        if self._mesh.device.type == "cuda":
            used = torch.cuda.memory_allocated(self._mesh.device)
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            used = pages * os.sysconf("SC_PAGE_SIZE")
        return {"rank": self._mesh.rank, "pid": os.getpid(), "memory_bytes": used}

    def close(self) -> None:
        """Leave the process groups and free the device, once what is being written has been."""
        from rl_megatron.model import forget_embeddings, forget_tokens

        self._checkpoint.close()
        self._mesh.leave()
        forget_tokens(self._chunks)
        del self._model, self._weights, self._chunks, self._optimizer, self._schedule
        del self._reference, self._residency, self._checkpoint
        forget_embeddings()
        # Megatron's wrappers form cycles, which keep memory and the sockets of groups until they are collected
        gc.collect()
        if self._mesh.device.type == "cuda":
            torch.cuda.empty_cache()

    def _read(self, batch: Batch, reads: Sequence[Read], temperature: float) -> Batch | None:
        from rl_megatron.step import run_reads

        return run_reads(self._model, batch, reads, temperature=temperature, batching=self._reading, mesh=self._mesh)

    def _fetch(self, name: str) -> Path:
        """A folder or hub name as a folder; one rank downloads, the others find it in the cache."""
        from rl_core.torch.teamwork import lead

        folders: list[Path] = []
        lead(self._mesh.control, lambda: folders.append(model_folder(name)))
        return folders[0] if folders else model_folder(name)
