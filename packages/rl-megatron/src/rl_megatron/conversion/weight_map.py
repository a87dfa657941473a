"""Megatron parameters, named over the whole model, and the Hugging Face tensors they are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rl_core.resharding import Box
from rl_megatron.conversion.splits import Blocks, Split

LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")

EXPERT_SOURCE = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
"""Name of each norm in Transformer Engine's fused layers to its name in the local layers."""


class HFTensor(NamedTuple):
    """Name and shape of a tensor in Hugging Face files, or one expert's part of a tensor that stacks all experts.

    Splits, boxes and adapters are in terms of the part.

    Args:
        name: Name of the whole tensor.
        shape: Shape of the whole tensor.
        expert: Number of the expert along the first dim; None if the tensor is not a stack.
        is_transposed: True if the stack has the inputs of each matrix before its outputs.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    is_transposed: bool = False

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part: the whole tensor, or the matrix `[outputs, inputs]` or vector of one expert."""
        if self.expert is None:
            return self.shape
        return self.shape[:0:-1] if self.is_transposed else self.shape[1:]

    def part_of(self, stack: Tensor) -> Tensor:
        """Return the part, a view of the whole tensor."""
        return stack if self.expert is None else self._turned(stack[self.expert])

    def read(self, read: Callable[[tuple[slice, ...]], Tensor], slices: tuple[slice, ...]) -> Tensor:
        """Return slices of the part.

        Args:
            read: Function that reads slices of the whole tensor.
            slices: Slices of the first dims of the part.
        """
        if self.expert is None:
            return read(slices)
        full = (*slices, *(slice(None),) * (len(self.part_shape) - len(slices)))
        within = full[::-1] if self.is_transposed else full
        return self._turned(read((slice(self.expert, self.expert + 1), *within))[0])

    def place_of(self, box: Box) -> Box:
        """Return the place in the whole tensor of a place in the part."""
        if self.expert is None:
            return box
        return ((self.expert, self.expert + 1), *(box[::-1] if self.is_transposed else box))

    def placed(self, values: Tensor) -> Tensor:
        """Return a view of values of the part with the dims of the whole tensor."""
        return values if self.expert is None else self._turned(values)[None]

    def _turned(self, part: Tensor) -> Tensor:
        return part.mT if self.is_transposed else part


@dataclass(frozen=True)
class WeightMap:
    """Source and target of a parameter.

    Args:
        target: Megatron's name with the local layers, layers and experts numbered over the whole model.
        sources: The Hugging Face tensors, in the order that `split` numbers them.
        split: How it is made of them, and spread.
        over: The ranks it is spread over: `tp`, or `etp` for experts.
        copy_of: Target of the map whose weights it repeats (a tied head on its own pipeline rank); a copy is
            loaded, and never sent, exported or saved.
        dtype: Dtype of the parameter in this family, and of its tensors in exports and on the wire, whatever the
            rest of the model has; None if it has the model's. Tensors may also stay float32 because the files or
            `transformers` have them so (`rl_megatron.model.precision`).
    """

    target: str
    sources: tuple[HFTensor, ...]
    split: Split
    over: Literal["tp", "etp"] = "tp"
    copy_of: str | None = None
    dtype: Literal["float32"] | None = None

    @property
    def stored(self) -> str:
        """Name of the parameter in checkpoints."""
        return self.copy_of or self.target

    def check_split(self, size: int) -> None:
        """Refuse to spread it over a number of ranks that does not fit.

        Raises:
            ValueError: If the number does not fit, with the name of the tensor.
        """
        if not self.split.divides(size):
            name = "expert_tensor" if self.over == "etp" else "tensor_model"
            raise ValueError(
                f"megatron_cfg.{name}_parallel_size: {self.sources[0].name} cannot be spread over {size} ranks; use "
                "fewer"
            )


class AdapterMap(NamedTuple):
    """A low-rank adapter of one Hugging Face weight. It adds `scale * up @ down` to the weight.

    Args:
        down: `[dim, inputs]`.
        up: `[outputs, dim]`.
    """

    down: WeightMap
    up: WeightMap
    scale: float


def as_stored(maps: Sequence[WeightMap], num_experts: int, names: Set[str]) -> list[WeightMap]:
    """Return the maps with experts in stacks (`experts.gate_up_proj`, `experts.down_proj`) if files have them so, as
    they are published for some families that `transformers` writes expert by expert.

    Args:
        maps: Maps of a model.
        num_experts: Number of experts of a layer.
        names: Names of the tensors in the files.
    """
    stacked: dict[str, list[WeightMap]] = {}
    for entry in maps:
        found = EXPERT_SOURCE.fullmatch(entry.sources[0].name)
        name = f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}" if found else ""
        if found is None or name not in names:
            stacked[entry.target] = [entry]
            continue
        height, width = sum(source.shape[0] for source in entry.sources), entry.sources[0].shape[1]
        source = HFTensor(name, (num_experts, height, width), int(found[2]))
        split = Blocks((tuple(each.shape[0] for each in entry.sources),)) if len(entry.sources) > 1 else entry.split
        stacked.setdefault(name, []).append(replace(entry, sources=(source,), split=split))
    return [entry for group in stacked.values() for entry in group]


def by_tensor(maps: Iterable[WeightMap]) -> Iterator[list[WeightMap]]:
    """Yield the maps in their order, each alone or together with the maps of the other experts in the same tensors."""
    for _, group in groupby(maps, lambda entry: tuple(source.name for source in entry.sources)):
        yield list(group)


def whole_tensors(group: Sequence[WeightMap], parts: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return the Hugging Face tensors of maps that `by_tensor` yields together.

    Args:
        group: The maps.
        parts: Parts of the tensors that each map joins.
    """
    first = group[0].sources
    if first[0].expert is None:
        return list(parts[0])
    columns = zip(first, zip(*parts, strict=True), strict=True)
    return [torch.cat([source.placed(part) for part in column]) for source, column in columns]


def held_weights(chunks: Sequence[Any], config: TransformerConfig, expert_rank: int) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of this rank by their global local-layer names.

    Args:
        chunks: This rank's virtual stages, each a `megatron.core.models.gpt.GPTModel`.
        config: Config of the model.
        expert_rank: Rank among those that share the experts; each holds consecutive ones.
    """
    first_expert = 0
    if config.num_moe_experts is not None:
        first_expert = expert_rank * (config.num_moe_experts // config.expert_model_parallel_size)
    held = {}
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        # Checkpoints do not hold non-persistent buffers.
        transient = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in chunk.named_modules()
            for name in module._non_persistent_buffers_set
        }
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name not in transient:
                held[global_name(name, numbers, first_expert)] = tensor
    return held


def global_name(name: str, layer_numbers: list[int], first_expert: int) -> str:
    """Return the name of a parameter over the whole model.

    Args:
        name: Name of a parameter or buffer in a chunk of this rank.
        layer_numbers: Numbers of the chunk's layers in the whole model, from 0.
        first_expert: Number of this rank's first expert.
    """
    name = LAYER.sub(lambda found: f"decoder.layers.{layer_numbers[int(found[1])]}.", name)
    name = GROUPED_EXPERT.sub(lambda found: f".experts.local_experts.{found[3]}.{found[1]}.{found[2]}", name)
    name = LOCAL_EXPERT.sub(lambda found: f".experts.local_experts.{int(found[1]) + first_expert}.", name)
    for fused, plain in FUSED_NORMS.items():
        if name.endswith(f".{fused}"):
            return name.removesuffix(fused) + plain
    return name
