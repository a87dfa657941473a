"""Low-rank adapters on Megatron's linear layers; the weights that leave the model have them merged in.

An adapter belongs to one Hugging Face weight (`q_proj`). Megatron may keep several such weights in one parameter
(`linear_qkv`): the adapters of one layer are applied together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from rl_core.model_config import LoraConfig
from rl_core.torch.training.lora import (
    LORA_A,
    LORA_B,
    WEIGHT,
    check_sizes,
    ends_with,
    is_adapted,
    nothing_adapted,
    size_of,
)
from rl_megatron.checks import DORA_PROBLEM, EXPERTS_PROBLEM, QUANTIZATION_PROBLEM, SEVERAL_PROBLEM
from rl_megatron.conversion.splits import Chunks, Vocabulary, Whole
from rl_megatron.conversion.weight_map import AdapterMap, HFTensor, WeightMap, global_name
from rl_megatron.model.attention import WholeProjection
from rl_megatron.model.model import Chunk, ReadingModel
from rl_megatron.model.vision import PREFIX

LINEAR = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear, WholeProjection)


def add_adapters(model: ReadingModel, config: LoraConfig) -> None:
    """Put adapters on linear layers of a model without weights and freeze everything else but a score head.

    Raises:
        ValueError: If a target of the config is not a linear layer of the model, or is an expert or a router.
    """
    maps = model.maps
    num_ranks = model.config.tensor_model_parallel_size
    model.adapters = targeted_adapters(maps, model.hf.model_type, config, num_ranks, known_as=model.known_as)
    entry_of = {entry.target: entry for entry in maps if _is_linear(entry)}
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(name.startswith("score."))
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, module in list(chunk.named_modules()):
            if isinstance(module, LINEAR):
                entry = entry_of.get(global_name(f"{name}{WEIGHT}", numbers, 0))
                if entry is not None and any(source.name in model.adapters for source in entry.sources):
                    module.adapters = Adapters(entry, model.adapters, config.dropout, model.config)
                    module.register_forward_hook(_with_adapters)
        if chunk.pre_process:
            pass_gradients(chunk)


def pass_gradients(chunk: Chunk) -> None:
    """Let the output of a frozen embedding require a gradient. Recomputed layers pass no gradient to their parameters
    if none of their inputs requires one, and neither does the first stage of a pipeline."""
    chunk.embedding.word_embeddings.register_forward_hook(
        lambda _, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output
    )


def targeted_adapters(
    maps: Sequence[WeightMap], kind: str, config: LoraConfig, num_ranks: int, *, known_as: Callable[[str], str]
) -> dict[str, AdapterMap]:
    """Return the adapters of a config, by the name in files of the weight that each adapts. A vision tower has none.

    Args:
        maps: Maps of all weights of the model.
        kind: Type of the model.
        config: Settings of the adapters.
        num_ranks: Number of tensor-parallel ranks.
        known_as: Function from the name of a weight in files to its name in `transformers`, which those of its
            factors are made of.

    Raises:
        ValueError: If a target of the config is not a linear layer of the model, or is an expert or a router.
    """
    refused = (
        (EXPERTS_PROBLEM, config.target_parameters),
        (DORA_PROBLEM, config.use_dora),
        (QUANTIZATION_PROBLEM, config.base_quantization),
        (SEVERAL_PROBLEM, config.max_adapters > 1),
    )
    for problem, is_met in refused:
        if is_met:
            raise ValueError(f"{problem.key}: {problem.message}")
    linear = [(entry, source) for entry in maps if _is_linear(entry) for source in entry.sources]
    experts = [source.name for entry in maps if _is_of_experts(entry) for source in entry.sources]
    for ending in () if config.match_all_linear else config.target_modules:
        if not any(ends_with(known_as(source.name).removesuffix(WEIGHT), [ending]) for _, source in linear):
            is_of_experts = any(ends_with(name.removesuffix(WEIGHT), [ending]) for name in experts)
            without = "is a router, a gate or an expert, which get no adapters"
            raise ValueError(
                f"lora_cfg.target_modules: {ending!r} {without if is_of_experts else 'is not a linear layer'} of this "
                f"{kind} model; it has {', '.join(sorted({_short(source.name) for _, source in linear}))}"
            )
    adapters = {}
    for entry, source in linear:
        theirs = known_as(source.name).removesuffix(WEIGHT)
        if not is_adapted(theirs, config):
            continue
        outputs, inputs = source.shape
        target = f"{entry.target.removesuffix(WEIGHT)}.adapters.{_short(source.name)}"
        is_even = entry.split.dim == 0 and entry.split.is_even(num_ranks)
        size = size_of(theirs, config)
        down = HFTensor(f"{theirs}{LORA_A}", (size.dim, inputs))
        up = HFTensor(f"{theirs}{LORA_B}", (outputs, size.dim))
        adapters[source.name] = AdapterMap(
            WeightMap(f"{target}.down", (down,), Chunks(inputs, dim=1) if entry.split.dim == 1 else Whole()),
            WeightMap(f"{target}.up", (up,), Chunks(outputs) if is_even else Whole()),
            size.scale,
        )
    if not adapters:
        raise nothing_adapted(config, f"a {kind} model")
    check_sizes(config, [known_as(name).removesuffix(WEIGHT) for name in adapters])
    return adapters


class LoraAdapter(nn.Module):
    """This rank's part of an adapter, in the model's dtype."""

    def __init__(self, down: Sequence[int], up: Sequence[int], config: TransformerConfig) -> None:
        super().__init__()
        like: Any = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.down = nn.Parameter(torch.zeros(down, **like))
        self.up = nn.Parameter(torch.zeros(up, **like))


class Adapters(nn.Module):
    """The adapters of one layer, which add `scale * up(down(dropout(input)))` of each adapted weight to its output.

    Between tensor-parallel ranks travel the `dim` numbers per token that `down` gives. If ranks hold different numbers
    of an adapted weight's rows (more ranks than key-value heads), each has all of `up` and uses its own rows.

    Args:
        entry: Entry of the layer's weight.
        adapters: Adapters of the model.
        dropout: Share of the inputs that is dropped in training, for each adapter anew.
    """

    def __init__(
        self, entry: WeightMap, adapters: dict[str, AdapterMap], dropout: float, config: TransformerConfig
    ) -> None:
        super().__init__()
        self.split_dim = entry.split.dim
        self.dropout = dropout
        self.is_sequence_parallel = config.sequence_parallel
        self.num_ranks = size = config.tensor_model_parallel_size
        places = dict(_rows_of_sources(entry, parallel_state.get_tensor_model_parallel_rank(), size))
        self.num_rows = sum(len(rows) for rows, _ in places.values())
        adapted = {_short(name): (adapters[name], *found) for name, found in places.items() if name in adapters}
        self.names = list(adapted)
        self.scales = {name: found.scale for name, (found, _, _) in adapted.items()}
        self.is_uneven = self.split_dim == 0 and not entry.split.is_even(size)
        for name, (found, rows, own) in adapted.items():
            down, up = (
                [length // (size if dim == half.split.dim else 1) for dim, length in enumerate(half.sources[0].shape)]
                for half in (found.down, found.up)
            )
            adapter: Any = LoraAdapter(down, up, config)
            self.add_module(name, adapter)
            self.register_buffer(f"{name}_rows", rows.to(adapter.up.device), persistent=False)
            self.register_buffer(f"{name}_own", own.to(adapter.up.device), persistent=False)
            # Megatron sums marked gradients over the tensor-parallel ranks: a rank has seen only its own tokens.
            adapter.down.sequence_parallel = config.sequence_parallel and self.split_dim != 1
            adapter.up.sequence_parallel = config.sequence_parallel and self.split_dim != 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the sum that is added to the layer's output for its input."""
        adapters: list[Any] = [self.get_submodule(name) for name in self.names]
        downs = [adapter.down for adapter in adapters]
        if self.dropout == 0.0 or not self.training:
            low = F.linear(hidden, torch.cat(downs))
        elif self.num_ranks == 1 or (self.split_dim != 1 and not self.is_sequence_parallel):
            # Every rank has the same input and must drop the same of it.
            low = torch.cat([F.linear(F.dropout(hidden, self.dropout), down) for down in downs], -1)
        else:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                dropped = [F.dropout(hidden, self.dropout) for _ in downs]
            low = torch.cat([F.linear(part, down) for part, down in zip(dropped, downs, strict=True)], -1)
        low = self._exchanged(low)
        # In `[rows of the layer, dims]`, each adapter's rows are at the rows of its weight; the others are zeros.
        blocks = []
        scale = self.scales[self.names[0]]
        for name, adapter in zip(self.names, adapters, strict=True):
            rows, up = self.get_buffer(f"{name}_rows"), adapter.up
            block = up.new_zeros((self.num_rows, up.shape[1]))
            if self.is_uneven:
                # Each rank has the gradient from its own rows.
                up = tensor_parallel.copy_to_tensor_model_parallel_region(up)[self.get_buffer(f"{name}_own")]
            if self.scales[name] != scale:
                up = up * (self.scales[name] / scale)
            blocks.append(block.index_copy(0, rows, up))
        return F.linear(low, torch.cat(blocks, 1)) * scale

    def _exchanged(self, low: Tensor) -> Tensor:
        """Exchange the output `[seq, batch, dims]` of `down` between ranks as `up` needs it."""
        if self.num_ranks == 1 or self.split_dim is None:
            return low
        low = low.contiguous()  # megatron-core 0.16.1 sums a copy of other tensors, and returns the original.
        if self.split_dim == 0 and self.is_sequence_parallel:
            out = tensor_parallel.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        elif self.split_dim == 0:
            out = tensor_parallel.copy_to_tensor_model_parallel_region(low)
        elif self.is_sequence_parallel:
            out = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
        else:
            out = tensor_parallel.reduce_from_tensor_model_parallel_region(low)
        exchanged: Tensor = out
        return exchanged


def _with_adapters(layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    added = layer.adapters(inputs[0])
    if isinstance(layer, WholeProjection):
        added = layer.with_summed_grad(added)
    return output[0] + added, output[1]


def _rows_of_sources(entry: WeightMap, rank: int, size: int) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield for each source its name, the places of this rank's rows of it in the layer's output, and the numbers of
    these rows in the source."""
    counts = [source.shape[0] for source in entry.sources]
    if entry.split.dim != 0:
        yield entry.sources[0].name, (torch.arange(counts[0]),) * 2
        return
    numbers = list(torch.arange(sum(counts)).split(counts))
    part = entry.split.part(lambda index, slices: numbers[index][slices] if slices else numbers[index], rank, size)
    for source, own in zip(entry.sources, numbers, strict=True):
        places = ((part >= own[0]) & (part <= own[-1])).nonzero()[:, 0]
        order = part[places].argsort()
        yield source.name, (places[order], part[places][order] - own[0])


def _is_linear(entry: WeightMap) -> bool:
    """Return whether it is the matrix of a linear layer of the language model, neither a router or gate nor an
    expert."""
    is_matrix = len(entry.sources[0].shape) == 2 and entry.target.endswith(WEIGHT)
    return (
        is_matrix
        and not entry.target.startswith(PREFIX)
        and not isinstance(entry.split, Vocabulary)
        and not _is_of_experts(entry)
    )


def _is_of_experts(entry: WeightMap) -> bool:
    return entry.over == "etp" or ".router." in entry.target or entry.target.endswith(".gate_weight")


def _short(name: str) -> str:
    return name.removesuffix(WEIGHT).rpartition(".")[2]
