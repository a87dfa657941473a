"""One rank of a model on Megatron Core."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.batch import Batch
from rl_core.metrics import Metric
from rl_core.microbatch import Batching
from rl_core.model import Loss, ModelSpec, Read, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.torch.files.model_files import WeightFiles
from rl_core.torch.optim.optimizer import build_optimizer, build_schedule
from rl_core.torch.training.reference import Reference
from rl_core.torch.training.skipped_steps import SkippedSteps
from rl_core.torch.training.worker import RankWorker
from rl_core.weights import Digests, Manifest, Transport
from rl_megatron import cpu_shim
from rl_megatron.config import MegatronConfig

if TYPE_CHECKING:
    from rl_megatron.parallel import mesh


class MegatronWorker(RankWorker):
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

    _mesh: mesh.Mesh

    def __init__(self, config: ModelConfig, backend: MegatronConfig, spec: ModelSpec, rendezvous: Rendezvous) -> None:
        if rendezvous.kind.kernels == "cpu":
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
        from rl_megatron.residency import ModelResidency
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
        self._reference = Reference(lambda: list(self._weights.kept.values())) if spec.keeps_reference else None
        self._optimizer, self._schedule = None, None
        if spec.trains:
            self._optimizer = ShardedOptimizer(
                self._chunks,
                lambda parameters: build_optimizer(config.optimizer, parameters),
                self._weights.is_counted,
            )
            self._schedule = build_schedule(config.scheduler, self._optimizer.inner)
        self._skipped = SkippedSteps(config.max_skipped_steps)
        self._residency = ModelResidency(self._model, self._optimizer, self._mesh.kind)
        self._checkpoint = Checkpoint(
            self._model, self._weights, self._optimizer, self._schedule, self._mesh, spec.seed
        )

    def evaluate(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """This rank's part of the loss's metrics."""
        from rl_megatron.step import run_evaluation

        self._require_for(loss, trains=False)
        return run_evaluation(self._model, batch, loss, batching=self._training, mesh=self._mesh)

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """One optimizer and schedule step on all ranks' shards; this rank's part of the metrics."""
        from rl_megatron.step import run_train_step

        self._require_for(loss, trains=True)
        assert self._optimizer is not None
        return run_train_step(
            self._model,
            self._chunks,
            batch,
            loss,
            optimizer=self._optimizer,
            schedule=self._schedule,
            max_grad_norm=self._config.max_grad_norm,
            skipped=self._skipped,
            batching=self._training,
            mesh=self._mesh,
            reports_layers=self._reports_layers,
        )

    def _load(self, path: Path) -> None:
        self._checkpoint.load(path)

    def _export(self, path: Path) -> None:
        from rl_core.torch.training.export import export_dtype
        from rl_megatron.export import export_model

        dtype = export_dtype(self._folder, self._config.precision)
        export_model(
            self._model,
            self._weights,
            path,
            source=self._folder,
            tokenizer=self._tokenizer,
            settings=self._config.tokenizer,
            dtype=dtype,
            mesh=self._mesh,
        )

    def manifest(self, version: int) -> Manifest:
        """All weights in the compute dtype, by Hugging Face name."""
        from rl_core.torch.training.publishing import manifest_of

        return manifest_of(self._weights, version, self._config.precision)

    def send(self, manifest: Manifest, transport: Transport) -> Digests:
        """Bring the weights together bucket by bucket and send them, from rank 0 or from every rank."""
        from rl_core.torch.training.publishing import send_weights

        self._residency.require("parameters")
        stream = self._weights.stream(
            self._config.precision, everywhere=transport.every_rank_sends, bucket_bytes=transport.bucket_bytes
        )
        return send_weights(stream, manifest, transport, self._mesh)

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
        self._mesh.kind.release_memory()

    def _read(self, batch: Batch, reads: Sequence[Read], temperature: float) -> Batch | None:
        from rl_megatron.step import run_reads

        return run_reads(self._model, batch, reads, temperature=temperature, batching=self._reading, mesh=self._mesh)
