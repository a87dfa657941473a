"""Hugging Face files from a sharded model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from rl_core.model_config import TokenizerConfig
from rl_core.torch.collective_errors import on_all_ranks, on_rank0
from rl_core.torch.files.model_files import copy_side_files
from rl_core.torch.training.export import ExportPlan
from rl_dtensor.model import ShardedModel
from rl_dtensor.parallel.mesh import Mesh


def export_model(
    model: ShardedModel,
    path: Path,
    *,
    source: Path,
    tokenizer: Path,
    settings: TokenizerConfig,
    dtype: str,
    mesh: Mesh,
) -> None:
    """Write config, generation config, tokenizer files and weights that `transformers` loads; collective.

    Weights are gathered one file at a time; ranks take turns to write, each while the next file is gathered. A shared
    parameter is written once, adapters are merged.

    Args:
        source: folder that the generation config is copied from.
        tokenizer: folder that the tokenizer files are copied from.
        settings: of the tokenizer, whose chat template is written with it.
        dtype: of floating weights on disk.
    """
    plan = ExportPlan.of(path, model.weights.specs(dtype))
    on_rank0(mesh.control, lambda: _write_settings(model, path, dtype=dtype))
    on_rank0(mesh.control, lambda: copy_side_files(path, source=source, tokenizer=tokenizer, settings=settings))
    with ThreadPoolExecutor(1) as writer:
        writes: list[Future[None]] = []
        files = enumerate(plan.files)
        index, bucket = next(files)
        gathered: dict[str, Tensor] = {}
        count = 0
        for tensors in model.weights.stream(dtype):
            for name, tensor in tensors:
                if index % mesh.world_size == mesh.rank:
                    gathered[name] = tensor.cpu().contiguous()
                count += 1
                if count < len(bucket):
                    continue
                if gathered:
                    writes.append(writer.submit(plan.write, index, gathered))
                gathered, count = {}, 0
                index, bucket = next(files, (index, bucket))
        on_all_ranks(mesh.control, lambda: _finish(writes))
    on_rank0(mesh.control, plan.write_index)


def _finish(writes: Sequence[Future[None]]) -> None:
    for write in writes:
        write.result()


def _write_settings(model: ShardedModel, path: Path, *, dtype: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    config = type(model.hf.config).from_dict(model.hf.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model.hf).__name__]
    config.save_pretrained(path)
