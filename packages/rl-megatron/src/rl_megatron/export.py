"""Hugging Face files from a model spread over ranks."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from rl_core.model_config import TokenizerConfig
from rl_core.torch.collective_errors import on_rank0
from rl_core.torch.files.model_files import copy_side_files
from rl_core.torch.training.export import ExportPlan
from rl_megatron.model import ReadingModel
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.weights import Weights


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
    plan = ExportPlan.of(path, weights.specs(dtype))
    on_rank0(mesh.control, lambda: _write_settings(model, path, dtype=dtype))
    on_rank0(mesh.control, lambda: copy_side_files(path, source=source, tokenizer=tokenizer, settings=settings))
    stream = chain.from_iterable(weights.stream(dtype))
    for index, bucket in enumerate(plan.files):
        gathered: dict[str, Tensor] = {}
        for _ in bucket:
            name, tensor = next(stream)
            if tensor is not None:
                gathered[name] = tensor.cpu().contiguous()
        on_rank0(mesh.control, partial(plan.write, index, gathered))
    on_rank0(mesh.control, plan.write_index)


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
