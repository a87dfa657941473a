"""Hugging Face files from a model spread over ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from rl_core.model_config import TokenizerConfig
from rl_core.torch.model_files import INDEX, SINGLE, copy_side_files
from rl_core.weights import TensorSpec, buckets, num_bytes
from rl_megatron.model import ReadingModel
from rl_megatron.parallel.lead import lead
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.weights import Weights

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
    model: ReadingModel,
    weights: Weights,
    path: Path,
    *,
    source: Path,
    tokenizer: Path,
    settings: TokenizerConfig,
    dtype: str,
    mesh: Mesh,
) -> None:
    """Write config, generation config, tokenizer files and weights that `transformers` loads; collective.

    Weights come to rank 0 one file at a time. A shared parameter is written once.

    Args:
        source: folder that the generation config is copied from.
        tokenizer: folder that the tokenizer files are copied from.
        settings: of the tokenizer, whose chat template is written with it.
        dtype: of floating weights on disk.
    """
    plan = list(buckets(weights.specs(dtype), FILE_BYTES))
    lead(mesh, lambda: _write_settings(model, path, dtype=dtype))
    lead(mesh, lambda: copy_side_files(path, source=source, tokenizer=tokenizer, settings=settings))
    stream = weights.stream(dtype)
    for index, bucket in enumerate(plan):
        gathered: dict[str, Tensor] = {}
        for _ in bucket:
            spec, tensor = next(stream)
            if tensor is not None:
                gathered[spec.name] = tensor.cpu().contiguous()
        lead(mesh, partial(_write_file, path, index, len(plan), gathered))
    lead(mesh, lambda: _write_index(path, plan))


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


def _write_settings(model: ReadingModel, path: Path, *, dtype: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    config: Any = type(model.hf).from_dict(model.hf.to_dict())
    config.dtype = dtype
    classes = MODEL_FOR_CAUSAL_LM_MAPPING
    if model.is_headless:
        classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        config.num_labels = 1
    if type(model.hf) not in classes:
        raise ValueError(f"transformers has no sequence classifier for {model.hf.model_type} models")
    config.architectures = [classes[type(model.hf)].__name__]
    config.save_pretrained(path)
