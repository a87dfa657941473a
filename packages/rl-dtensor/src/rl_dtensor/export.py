"""Hugging Face files from a sharded model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from rl_core.model_config import TokenizerConfig
from rl_core.torch.model_files import INDEX, SINGLE, copy_side_files
from rl_core.weights import TensorSpec, buckets, num_bytes
from rl_dtensor.model import ShardedModel
from rl_dtensor.parallel.lead import lead, together
from rl_dtensor.parallel.mesh import Mesh

FILE_BYTES = 2 * 2**30
"""Most bytes of one safetensors file, and of what the writing rank gathers at a time."""


def export_dtype(folder: Path, precision: str) -> str:
    """float32 where the model computes in it, else the dtype its source has on disk (the compute dtype where it
    doesn't say)."""
    if precision == "float32":
        return precision
    source = AutoConfig.from_pretrained(folder).dtype
    return precision if source is None else str(source).removeprefix("torch.")


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
    plan = list(buckets(model.weights.specs(dtype), FILE_BYTES))
    lead(mesh, lambda: _write_settings(model, path, dtype=dtype))
    lead(mesh, lambda: copy_side_files(path, source=source, tokenizer=tokenizer, settings=settings))
    with ThreadPoolExecutor(1) as writer:
        writes: list[Future[None]] = []
        files = enumerate(plan)
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
                    writes.append(writer.submit(_write_file, path, index, len(plan), gathered))
                gathered, count = {}, 0
                index, bucket = next(files, (index, bucket))
        together(mesh, lambda: _finish(writes))
    lead(mesh, lambda: _write_index(path, plan))


def _finish(writes: Sequence[Future[None]]) -> None:
    for write in writes:
        write.result()


def _file_name(index: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_file(path: Path, index: int, count: int, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path / _file_name(index, count), metadata={"format": "pt"})


def _write_index(path: Path, plan: list[list[TensorSpec]]) -> None:
    if len(plan) == 1:
        return
    files = {spec.name: _file_name(index, len(plan)) for index, bucket in enumerate(plan) for spec in bucket}
    size = sum(num_bytes(spec) for bucket in plan for spec in bucket)
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2))


def _write_settings(model: ShardedModel, path: Path, *, dtype: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    config = type(model.hf.config).from_dict(model.hf.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model.hf).__name__]
    config.save_pretrained(path)
