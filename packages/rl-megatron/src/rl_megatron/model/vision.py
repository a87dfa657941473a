"""Images on Megatron: the vision tower and the projector of `transformers` next to Megatron's layers.

Every rank of the first pipeline stage holds both whole and computes them for all images of its rows, whichever of the
rows' tokens it has. Features take the places of image tokens after the embedding. The gradients of each rank come from
its own tokens, and are summed with those of Megatron's norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from rl_core.data.batch import Batch
from rl_core.model_config import ModelConfig
from rl_core.torch.files.buffers import rebuild_buffers
from rl_core.torch.files.file_names import FileNames
from rl_core.torch.loss import Rows
from rl_core.torch.vision.columns import AXES, COLUMN_PREFIX, FEATURES, ImageColumns, ProcessedImages
from rl_core.torch.vision.families import VISION_FAMILIES
from rl_core.torch.vision.parts import VisionParts, features_of
from rl_megatron.conversion.splits import Whole
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.model.layout import RowLayout

PREFIX = "vision."
"""Start of Megatron's names of the weights of tower and projector."""
_MODEL, _HEAD = "model.", "lm_head."


class MegatronVision:
    """The parts of a model next to its language model, the names of all its weights, and the inputs of passes.

    Args:
        hf: Hugging Face config of the whole model.
        config: Config of the model.
        folder: Folder of the model, with the files of its image processor.

    Attributes:
        hf: Hugging Face config of the whole model.
        rotary: Rotary embedding of tokens with three places each; None if tokens have one.
        num_deep: Number of the first layers whose results get features of images.
        architecture: Name of the `transformers` class of the whole model.
        frozen: Names in `transformers` of the parameters of tower and projector that do not train.
        names: Name in the files of each weight, to its name in `transformers`; complete after `maps`.
    """

    def __init__(self, hf: PreTrainedConfig, config: ModelConfig, folder: Path) -> None:
        self.hf = hf
        self._compute: torch.dtype = getattr(torch, config.precision)
        with torch.device("meta"):
            whole: Any = AutoModelForImageTextToText.from_config(hf, dtype=self._compute, attn_implementation="sdpa")
        self.architecture = type(whole).__name__
        self._files = FileNames(whole)
        language = whole.get_decoder()
        self._language = next(name for name, module in whole.named_modules() if module is language)
        self._family = VISION_FAMILIES[hf.model_type]
        self.rotary: Any = type(language.rotary_emb)(hf.get_text_config()) if self._family.has_axes else None
        self._base = whole.base_model
        self._base_name = next(name for name, module in whole.named_modules() if module is self._base)
        parent, _, name = self._language.rpartition(".")
        delattr(whole.get_submodule(parent), name)
        self.num_deep = len(getattr(hf.vision_config, "deepstack_visual_indexes", None) or ())
        parameters = {f"{self._base_name}.{name}": each for name, each in self._base.named_parameters()}
        self._shapes = {name: tuple(each.shape) for name, each in parameters.items()}
        self.frozen = VisionParts.of(hf.model_type, config.vision).frozen(self._shapes)
        images = ProcessedImages(folder, self._family, hf, config.vision, self._compute)
        self._columns = ImageColumns(self._family, self._base, images, max_images=config.vision.max_images)
        self._has_tower = False
        self.names: dict[str, str] = {}

    def maps(self, language: Sequence[WeightMap]) -> list[WeightMap]:
        """Return the maps of the whole model.

        Args:
            language: Maps of the language model.
        """

        def in_files(source: HFTensor) -> HFTensor:
            return source._replace(name=self.file_name(source.name))

        own = [replace(entry, sources=tuple(map(in_files, entry.sources))) for entry in language]
        for name, shape in self._shapes.items():
            source = HFTensor(self._files.of(name), shape)
            self.names[source.name] = name
            own.append(WeightMap(PREFIX + name.removeprefix(f"{self._base_name}."), (source,), Whole()))
        return own

    def file_name(self, name: str) -> str:
        """Return the name in the files of a weight of the language model, which is named as if it were alone."""
        within = name if name.startswith(_HEAD) else f"{self._language}.{name.removeprefix(_MODEL)}"
        found = self._files.of(within)
        self.names[found] = within
        return found

    def add_to(self, chunk: Any) -> None:
        """Give a chunk of layers what it computes of images, without weights."""
        if self.rotary is not None:
            chunk.rotary_of_axes = self.rotary.to(torch.cuda.current_device())
        if not chunk.pre_process:
            return
        self._has_tower = True
        self._base.to_empty(device=torch.cuda.current_device())
        rebuild_buffers(self._base)
        for name, parameter in self._base.named_parameters():
            parameter.requires_grad_(f"{self._base_name}.{name}" not in self.frozen)
            # Megatron sums marked gradients over the tensor-parallel ranks: a rank has seen only its own tokens.
            parameter.sequence_parallel = chunk.config.sequence_parallel
        chunk.vision = self._base
        if self.num_deep > len(chunk.decoder.layers):
            raise ValueError(
                f"megatron_cfg.pipeline_model_parallel_size: the first pipeline stage has {len(chunk.decoder.layers)} "
                f"layers, and features of images enter the results of the first {self.num_deep} layers of this model; "
                "use fewer stages, or set megatron_cfg.num_layers_in_first_pipeline_stage"
            )
        for number, layer in enumerate(chunk.decoder.layers[: self.num_deep]):
            layer.register_forward_hook(partial(_add_features, number), with_kwargs=True)

    def columns(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Return the columns of the images of rows; without pixels on later pipeline stages."""
        found = self._columns(batch)
        if self._has_tower:
            return found
        return {name: values for name, values in found.items() if not name.startswith(COLUMN_PREFIX)}

    def arguments(self, chunk: Any, rows: Rows, layout: RowLayout) -> dict[str, Any]:
        """Return arguments of a pass of a chunk: its `position_ids`, and on the first stage embeddings with features.

        A tower that trains computes in each training pass, also for rows without images, because gradients that are
        reduced while others are computed are waited for.

        Args:
            chunk: Layers of this rank.
            rows: Rows of the microbatch.
            layout: This rank's tokens of them.
        """
        shape, has_images = layout.input_ids.shape, FEATURES in rows.columns
        places, is_token = layout.places.clamp(min=0), layout.places >= 0
        found: dict[str, Any] = {"position_ids": layout.position_ids}
        if AXES in rows.columns:
            axes = rows[AXES][places].T.reshape(3, *shape)
            found["position_ids"] = axes.where(is_token.view(shape), layout.position_ids)
        if not chunk.pre_process:
            return found
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in chunk.vision.parameters())
        if not has_images and not trains:
            return found
        values, deep = features_of(self._family, chunk.vision, rows, self._compute)
        index = torch.full_like(places, -1)
        if has_images:
            index = rows[FEATURES][places].where(is_token, -1)
        index = index.view(shape)
        # In some families image tokens have an id that is not in the table.
        embeddings = chunk.embedding(layout.input_ids.where(index < 0, 0), position_ids=None)
        own = index.T.contiguous()
        if chunk.config.sequence_parallel:
            size = parallel_state.get_tensor_model_parallel_world_size()
            own = own.chunk(size)[parallel_state.get_tensor_model_parallel_rank()].contiguous()
        found["decoder_input"] = _placed(own, values, embeddings)
        if deep:
            # Megatron hands the inputs of cross attention, which no layer has, to every layer.
            found["extra_block_kwargs"] = {"context": torch.stack(list(deep)), "context_mask": own}
        return found


def _placed(index: Tensor, values: Tensor, others: Tensor) -> Tensor:
    """Return `[seq, batch, hidden]`, the features `[features, hidden]` of an index, and other values where it is
    -1."""
    chosen = values.to(others.dtype)[index.clamp(min=0)]
    return torch.where((index >= 0)[..., None], chosen, others)


def _add_features(
    number: int, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Add the features of a layer to its results."""
    hidden, context = output
    if kwargs.get("context") is None:
        return output
    return hidden + _placed(kwargs["context_mask"], kwargs["context"][number], torch.zeros_like(hidden)), context
