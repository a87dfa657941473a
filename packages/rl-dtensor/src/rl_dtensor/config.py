"""Settings of training on DTensor and FSDP2."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl_core.config import WhenChanged
from rl_core.model_config import BackendConfig

Style = Literal[
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "replicated",
    "whole",
    "embedding",
    "head",
    "experts",
]
"""How a module's parameters are split over tensor-parallel ranks; see `rl_dtensor.parallel.plan`."""

AttentionBackend = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex"]
"""Kernels that compute attention; see `rl_dtensor.model.kernels`."""


class DTensorConfig(BackendConfig):
    """Training on PyTorch DTensor and FSDP2: mesh, memory and kernels."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    dp_replicate_size: int = Field(default=1, gt=0)
    """Replicas of the sharded parameters (HSDP); the ranks of each replica share one copy."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Ranks that share each layer's matrices, and the vocabulary."""
    sequence_parallel: bool = False
    """Share the tokens between layers over the tensor-parallel ranks, which saves activation memory."""
    custom_parallel_plan: dict[str, Style] | None = None
    """Module or parameter name (`*` for a layer's number) to how it is split, in place of the family's own plan."""
    context_parallel_size: int = Field(default=1, gt=0)
    """Ranks that share the tokens of each row."""
    context_parallel_method: Literal["all_gather", "ulysses"] = "all_gather"
    """How attention sees whole rows: keys and values of all ranks are gathered, or each rank takes some heads."""
    pipeline_parallel_size: int = Field(default=1, gt=0)
    """Ranks that hold consecutive layers."""
    pipeline_chunks_per_rank: int = Field(default=1, gt=0)
    """Runs of consecutive layers that each pipeline rank holds, interleaved with those of the others."""
    expert_parallel_size: int = Field(default=1, gt=0)
    """Ranks that share the experts of each layer; they are taken from those that shard parameters."""
    moe_router_replay: bool = False
    """Send every token to the experts that the generator sent it to, in all passes; the router weighs them by its own
    scores and still learns. Logprobs of trainer and generator then differ by rounding alone. For mixtures of experts,
    with a generator that reports the experts it chose: hf, megatron, or vllm on GPUs."""
    attention_backend: AttentionBackend = "auto"
    """Kernel that computes attention: torch's scaled dot-product attention row by row (`sdpa`), the same in plain
    matrix products (`eager`), or one kernel for all rows, on GPUs: `flash_attention_2` (flash-attn is installed, half
    precision), `flash_attention_3` (on Hopper) or torch's `flex`. `auto` is torch's own flash attention if it can run,
    else `sdpa`; for scores with a soft cap or sinks, which `sdpa` does not have, `flex` on GPUs, else `eager`. Sinks
    are in `eager` and `flex` alone."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory and bring parameters over layer by layer; on
    `cpu` they are there anyway."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in the backward pass."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """Parts that `activation_checkpointing` computes again: whole layers, or all in them but matrix products and
    attention."""
    compile: bool = False
    """Compute each layer, but for its attention, by code that `torch.compile` makes when the layer first runs, which
    takes a minute or so in every process; on `cpu` it needs a C++ compiler. It goes with data parallelism, and with
    whole layers computed again."""
