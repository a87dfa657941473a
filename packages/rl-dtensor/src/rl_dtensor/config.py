"""Settings of training on DTensor and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rl_core.config import Config, Rename, WhenChanged
from rl_core.model_config import RECOMPUTE_KEYS, BackendConfig

Style = Literal[
    "colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "replicated", "whole", "embedding", "head",
    "experts",
]  # fmt: skip
"""Split of a module's parameters over tensor-parallel ranks; see `rl_dtensor.parallel.plan`."""

AttentionBackend = Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex"]
"""Kernels that compute attention; see `rl_dtensor.model.kernels`."""


GradientAccumulation = Literal["auto", "sharded", "unsharded"]
"""Accumulation of the gradients of several microbatches; see `rl_dtensor.parallel.accumulation`."""

ExpertDispatcher = Literal["all_to_all", "deep_ep"]
"""Transport of tokens to the ranks of their experts; see `rl_dtensor.parallel.dispatch`."""


Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""Recipes of `rl_dtensor.model.layers.low_precision.Float8Linear`."""


class Float8Config(Config):
    """Matrix products of linear layers in 8 bits (float8)."""

    enabled: bool = False
    """Compute the products of linear layers, forward and backward, on 8-bit values with scales that are measured in
    every pass. Parameters, gradients, optimizer state, checkpoints and weight sync keep their precision. The head, the
    embedding, routers, stacked experts and adapters keep `precision`. Needs GPUs of compute capability 8.9 or higher,
    or `emulate`."""
    recipe: Float8Recipe = "rowwise"
    """Values that share a scale: all of a tensor (`tensorwise`; gradients have 5 bits of exponent), or each row and
    column (`rowwise`, with powers of two as scales). `rowwise_with_gw_hp` computes the gradients of weights in
    `precision`, the most exact."""
    emulate: bool = False
    """Round values to 8 bits and multiply them in float32: the error of float8 without its speed, on any device.
    For tests, and to find out what a recipe does to a model without a GPU."""
    num_first_layers_in_bf16: int = Field(default=0, ge=0)
    """Number of layers at the start of the model that keep `precision`."""
    num_last_layers_in_bf16: int = Field(default=0, ge=0)
    """Number of layers at the end of the model that keep `precision`."""
    exclude_modules: list[str] = []
    """Names, or endings of names, of linear layers that keep `precision`, such as `o_proj` or `mlp.down_proj`."""


class QATConfig(Config):
    """Quantisation-aware training: the model trains with the rounded weights that an engine will serve."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.BRANCH

    enabled: bool = False
    """Compute with weights of linear layers that are rounded to `format` in every pass; gradients pass the rounding
    unchanged (the straight-through estimator, arXiv:1308.3432). Parameters, checkpoints and exports keep the exact
    weights, whose rounding `rl convert --quantize` writes for engines. The head, the embedding, routers and stacked
    experts are not rounded."""
    format: Literal["int4", "mxfp4", "float8"] = "int4"
    """Format of the weights: 4-bit integers with a scale for each group of `group_size` inputs (`int4`, symmetric, as
    w4a16 checkpoints have them), 4-bit floating point with a power of two for each 32 inputs (`mxfp4`), or 8-bit
    floating point with a scale per output (`float8`)."""
    group_size: int = Field(default=128, gt=0)
    """Number of inputs that share a scale. Used only for `int4`."""
    sync: Annotated[Literal["rounded", "exact"], WhenChanged.RESUME] = "rounded"
    """Weights that generators receive: `rounded` ones, so that an engine which computes in `precision` samples from the
    policy that is trained; or `exact` ones, for an engine that rounds them itself in the same format."""
    num_first_layers_in_bf16: int = Field(default=0, ge=0)
    """Number of layers at the start of the model whose weights are not rounded."""
    num_last_layers_in_bf16: int = Field(default=0, ge=0)
    """Number of layers at the end of the model whose weights are not rounded."""
    exclude_modules: list[str] = []
    """Names, or endings of names, of linear layers whose weights are not rounded."""


class DTensorConfig(BackendConfig):
    """Training on PyTorch DTensor and FSDP2: mesh, memory and kernels."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME
    renamed: ClassVar[Mapping[str, Rename]] = RECOMPUTE_KEYS

    dp_replicate_size: int = Field(default=1, gt=0)
    """Number of replicas of the sharded parameters (HSDP); the ranks of each replica share one copy."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks that share the matrices of each layer, and the vocabulary."""
    sequence_parallel: bool = False
    """Share the tokens between layers across the tensor-parallel ranks, which saves activation memory."""
    custom_parallel_plan: dict[str, Style] | None = None
    """Sharding of each module or parameter by name (`*` matches the number of a layer), instead of the family's own
    plan."""
    context_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks that share the tokens of each row."""
    context_parallel_method: Literal["all_gather", "ulysses"] = "all_gather"
    """Method of attention over whole rows: gather the keys and values of all ranks, or assign each rank some of
    the heads (`ulysses`)."""
    pipeline_parallel_size: int = Field(default=1, gt=0)
    """Number of pipeline ranks, which hold consecutive layers."""
    pipeline_chunks_per_rank: int = Field(default=1, gt=0)
    """Number of runs of consecutive layers on each pipeline rank, interleaved with the runs of the other ranks."""
    expert_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks that share the experts of each layer. They are taken from the ranks that shard parameters. With
    tensor parallelism each of them counts for `tensor_parallel_size` ranks, and all of these have experts that the
    others do not have."""
    expert_dispatcher: ExpertDispatcher = "all_to_all"
    """Transport of tokens to the ranks of their experts: all-to-all exchanges by NCCL or gloo, first between nodes and
    then inside if the experts of a layer are on several nodes; or the kernels of DeepEP (`deep_ep`), which need its
    package, GPUs and bfloat16. Both send a token once to each rank that has experts of it."""
    expert_chunks: int | None = Field(default=None, gt=0)
    """Number of chunks that the tokens of a microbatch are split into in layers with experts, so that one chunk travels
    while experts compute on another; not with `deep_ep`. By default two if a microbatch may have 16,384 tokens or more
    on each rank of the experts, otherwise one: the kernels of another chunk cost more than small exchanges."""
    moe_router_replay: bool = False
    """Send every token to the experts that the generator sent it to, in all passes. The router weighs them by its own
    scores and still learns. Logprobs of trainer and generator then differ only by rounding. For mixtures of experts,
    with a generator that reports the experts it chose: hf, megatron, or vllm on GPUs."""
    attention_backend: AttentionBackend = "auto"
    """Kernel that computes attention: torch's scaled dot-product attention row by row (`sdpa`), the same in plain
    matrix products (`eager`), or one kernel for all rows, on GPUs: `flash_attention_2` (needs flash-attn and half
    precision), `flash_attention_3` (on Hopper) or torch's `flex`. `auto` uses torch's flash attention if it can run,
    otherwise `sdpa`; for scores with a soft cap or sinks, which `sdpa` does not support, `flex` on GPUs and `eager`
    elsewhere. Torch's flash attention is FlashAttention 3 on Hopper and 4 on Blackwell if the package is installed.
    Only `eager` and `flex` support sinks."""
    fused_kernels: bool = True
    """Compute RMSNorm with the residual before it, rotary embeddings with the norms of heads, SwiGLU of layers, and
    copies of tokens for their experts by Triton kernels on GPUs: less memory traffic, and rounding once instead of
    after each operation. Modules whose code computes something else keep it. Other devices compute as with `false`."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory and load parameters layer by layer. On `cpu` they
    are there already."""
    gradient_accumulation: GradientAccumulation = "auto"
    """How gradients of the microbatches of a step are added up. `sharded` reduces them over the ranks after every
    microbatch. `unsharded` adds them up on each rank and reduces once, after the last microbatch, which takes 4 bytes
    of device memory for each parameter of the rank's layers. `auto` uses `unsharded` if parameters, optimizer state and
    these gradients fit into half of the device's memory, and logs its choice; on `cpu` it is `sharded`."""
    reshard_after: Literal["auto", "layer", "step"] = "auto"
    """When parameters that FSDP gathered are freed. `layer` frees the parameters of a layer after each of its passes,
    and gathers them again for the next one. `step` keeps them from the first microbatch of a step, or of a pass that
    reads logprobs, to the last one (ZeRO-2). That takes 2 bytes of device memory in bfloat16 for each parameter of the
    rank's layers. `auto` uses `step` if that fits without more recomputation, and logs its choice; on `cpu`, and for
    models that do not train, it is `layer`."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations of a layer that the backward pass computes again instead of keeping them: none, all except the
    results of matrix products and attention (`selective`), or all except the layer's input (`full`). `auto` recomputes
    as little as the memory that is available at the first training step allows for a microbatch of the largest size:
    nothing, or as many layers as necessary selectively, or as many as necessary in full. The log shows the plan of the
    memory; on `cpu` nothing is recomputed."""
    compile: bool = False
    """Compile each layer with `torch.compile`, in two graphs for all layers and numbers of tokens: up to attention, and
    from there on. Attention and stacked experts stay outside. Norms, rotary embeddings and gates are then the
    compiler's, and `fused_kernels` serves experts only. Each process compiles when a layer first runs, and logs it. On
    `cpu` that needs a C++ compiler. Layers that cannot be compiled keep their code, with a warning."""
    float8: Float8Config = Float8Config()
    qat: QATConfig = QATConfig()

    @property
    def reduced_precision(self) -> str:
        """See `BackendConfig.reduced_precision`. Weights that `qat` rounds are those that generators get."""
        return "dtensor_cfg.float8.enabled=true" if self.float8.enabled else ""
