"""Bytes of a rank of a training step, counted on Megatron's own layers without data and without other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from rl_core.model_config import ModelConfig
from rl_core.torch.optim.parameters import is_hidden_matrix
from rl_core.torch.training.recompute import logit_bytes, max_tokens, passes_kept
from rl_megatron import cpu_shim
from rl_megatron.config import MegatronConfig
from rl_megatron.conversion.splits import padded_vocab
from rl_megatron.model.architecture import transformer_config
from rl_megatron.model.build import chunk_of
from rl_megatron.model.recompute import WHOLE, recomputed_modules
from rl_megatron.rank_memory import RankPart, rank_memory
from rl_megatron.transformer_fields import ANYWHERE


def counted(
    section: Mapping[str, Any], settings: Mapping[str, Any], fields: Mapping[str, Any], ranks: int
) -> dict[str, float]:
    """Count the last rank; see `rl_core.plugins.BackendPlugin.counted`.

    The rank is a process of a group whose other ranks do not exist, and its tensors have sizes and no values. Routers
    send tokens by values, so that activations of mixtures of experts are not counted.

    Args:
        section: Section of the model, without those of backends and engines.
        settings: Settings of this backend.
        fields: Fields of the language model's Hugging Face config.
        ranks: Number of ranks.
    """
    config, backend = ModelConfig.model_validate(dict(section)), MegatronConfig.model_validate(dict(settings))
    # Layers are those of the CPU, which has no fields of Transformer Engine.
    fitting = {name: value for name, value in backend.megatron_kwargs.items() if name in ANYWHERE}
    backend = backend.model_copy(update={"megatron_kwargs": fitting})
    cpu_shim.install()
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    # Generators compare their states, which tensors without values cannot.
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.fork = lambda *_: nullcontext()
    try:
        parallel_state.initialize_model_parallel(
            backend.tensor_model_parallel_size,
            backend.pipeline_model_parallel_size,
            backend.virtual_pipeline_model_parallel_size,
            context_parallel_size=backend.context_parallel_size,
            expert_model_parallel_size=backend.expert_model_parallel_size,
            expert_tensor_parallel_size=backend.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _counted(config, backend, AutoConfig.for_model(**fields))
    finally:
        del tracker.fork
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _counted(config: ModelConfig, backend: MegatronConfig, hf: Any) -> dict[str, float]:
    dtype, virtual = getattr(torch, config.precision), backend.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    tensor = backend.tensor_model_parallel_size

    def chunks_of(recompute: Mapping[str, Any]) -> list[nn.Module]:
        shape = transformer_config(hf, backend, dtype=dtype, is_cuda=False, has_te=False, recompute=dict(recompute))
        return [chunk_of(hf, shape, stage, has_te=False, is_headless=False, vision=None) for stage in stages]

    chunks = chunks_of({})
    memory = rank_memory(config, backend, _parts(chunks, is_frozen=config.lora_cfg.enabled), dtype.itemsize)
    found = {
        "weights": memory.kept - memory.optimizer,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
    }
    shape = transformer_config(hf, backend, dtype=dtype, is_cuda=False, has_te=False)
    found["logits"] = logit_bytes(config, padded_vocab(hf.vocab_size, tensor) // tensor)
    if shape.num_moe_experts is None:
        tokens = max_tokens(config, backend.context_parallel_size)
        parts = recomputed_modules(backend, shape, has_te=False)
        modules = {"recompute_granularity": "selective", "recompute_modules": parts}
        passes = passes_kept(backend.pipeline_model_parallel_size, virtual or 1)
        layers = sum(len(chunk.decoder.layers) for chunk in chunks)
        kept = {
            name: _kept(chunks_of(recompute), config, tokens)
            for name, recompute in (("none", {}), ("selective", modules), ("full", WHOLE))
        }
        # Layers that are recomputed in full keep their inputs; the rest is outside of layers, for one microbatch.
        shared = tensor if backend.sequence_parallel else 1
        outside = kept["full"] - layers * tokens * shape.hidden_size * dtype.itemsize / shared
        again = (kept["none"] - outside) / layers
        for name, size in kept.items():
            again_here = 0.0 if name == "none" else again
            found[f"activations, recompute {name}"] = passes * (size - outside) + outside + again_here
    return found


def _parts(chunks: list[nn.Module], *, is_frozen: bool) -> list[RankPart]:
    copies = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    of_experts = parallel_state.get_expert_data_parallel_world_size()
    return [
        RankPart(
            parameter.numel(),
            0 if is_frozen else parameter.numel(),
            copies if getattr(parameter, "allreduce", True) else of_experts,
            is_matrix=is_hidden_matrix(name, parameter.shape),
        )
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    ]


def _kept(chunks: list[nn.Module], config: ModelConfig, tokens: int) -> float:
    """Return the bytes that autograd keeps of a forward pass through the layers of this rank, without the masks of
    attention, which only the CPU's attention keeps."""
    longest = min(tokens, config.max_total_sequence_length)
    rows, sizes = max(1, tokens // longest), {}
    # A mask is a matrix of queries and keys, which are whole halves of a rank's part of a row.
    half = max(1, longest // 2)
    parameters = {each.untyped_storage()._cdata for chunk in chunks for each in chunk.parameters()}
    alive: list[Tensor] = []  # Another storage must not get the address of one that was counted.

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_mask = tensor.dim() == 2 and not any(size % half for size in tensor.shape)
        if storage._cdata not in parameters and storage._cdata not in sizes and not is_mask:
            alive.append(tensor)
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for chunk in chunks:
            chunk.train()
            length = longest // (chunk.config.tensor_model_parallel_size if chunk.config.sequence_parallel else 1)
            hidden = torch.empty(length, rows, chunk.config.hidden_size, dtype=chunk.config.params_dtype)
            chunk.set_input_tensor(hidden.requires_grad_())
            ids = torch.zeros(rows, longest, dtype=torch.long)
            chunk(ids, ids, None)
    return float(sum(sizes.values()))
