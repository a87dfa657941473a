"""Settings of training on Megatron Core."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rl_core.config import Config, ProblemError, WhenChanged
from rl_core.model_config import BackendConfig
from rl_megatron.transformer_fields import name_problem

KEY = "megatron_cfg"
"""Where the settings of this backend lie in the section of a model."""


class Fp8Config(Config):
    enabled: bool = False
    """Multiply matrices in 8-bit floating point; needs Transformer Engine and a GPU that can."""
    fp8: Literal["e4m3", "hybrid"] = "hybrid"
    """Formats: e4m3 throughout, or e5m2 for gradients."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """Recipe by which scales are found, as Transformer Engine names it."""


class DistributedDataParallelConfig(Config):
    grad_reduce_in_fp32: bool = True
    """Sum gradients over microbatches and ranks in float32; otherwise in the compute dtype, which halves their memory
    and traffic, and rounds."""
    overlap_grad_reduce: Annotated[bool, WhenChanged.RESUME] = False
    """Reduce gradients over the data-parallel ranks bucket by bucket while the backward pass goes on."""


class MegatronConfig(BackendConfig):
    """Training on Megatron Core: mesh, memory and kernels."""

    tensor_model_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Ranks that hold consecutive layers."""
    virtual_pipeline_model_parallel_size: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=1)
    """Runs of consecutive layers that each pipeline rank holds, interleaved with the others'; one if unset."""
    num_layers_in_first_pipeline_stage: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Layers of the first pipeline rank; an equal share if unset."""
    num_layers_in_last_pipeline_stage: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Layers of the last pipeline rank; an equal share if unset."""
    context_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Ranks that share the tokens of each row."""
    expert_model_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Ranks that share the experts of each layer; they are taken from the data- and tensor-parallel ones."""
    expert_tensor_parallel_size: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Ranks that share each expert's matrices; `tensor_model_parallel_size` if unset."""
    sequence_parallel: Annotated[bool, WhenChanged.RESUME] = False
    """Share the tokens between layers over the tensor-parallel ranks, which saves activation memory."""
    activation_checkpointing: Annotated[bool, WhenChanged.RESUME] = False
    """Keep only each layer's input and compute the rest again in the backward pass."""
    recompute_granularity: Annotated[Literal["full", "selective"], WhenChanged.RESUME] = "full"
    """Parts that `activation_checkpointing` computes again: whole layers, or the `recompute_modules` in each."""
    recompute_modules: Annotated[
        list[Literal["core_attn", "mlp", "moe", "layernorm", "mla_up_proj"]], WhenChanged.RESUME
    ] = ["core_attn"]
    """Parts of a layer that are computed again if `recompute_granularity` is selective."""
    freeze_moe_router: bool = False
    """Leave the routers of a mixture of experts as they are; generation and training then route more alike."""
    moe_router_replay: bool = False
    """Send every token to the experts that the generator sent it to, in all passes; the router weighs them by its own
    scores and still learns. Logprobs of trainer and generator then differ by rounding alone. For mixtures of experts,
    with a generator that reports the experts it chose: hf, megatron, or vllm on GPUs."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Dtype of the routers' logits and scores."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """Loss that spreads tokens evenly over experts, added to the policy's: over those of a microbatch (aux_loss) or of
    each row (seq_aux_loss), weighed by tokens. Padding does not count."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of that loss."""
    moe_per_layer_logging: Annotated[bool, WhenChanged.RESUME] = False
    """Report that loss for each layer beside its mean over layers."""
    moe_token_dispatcher_type: Annotated[Literal["alltoall", "flex"], WhenChanged.RESUME] = "alltoall"
    """Transport of tokens to their experts' ranks: `alltoall` by NCCL, `flex` by DeepEP, which has to be installed and
    runs on GPUs alone. Megatron's `allgather` needs as many tokens on every rank, which rows of different lengths do
    not give."""
    moe_router_bias_update_rate: float = Field(default=0.0, ge=0)
    """Step size of the biases by which routers of some models (DeepSeek-V3) balance experts; 0 leaves them."""
    transformer_engine: bool | None = None
    """Build layers of Transformer Engine on GPUs. If unset, wherever it is installed, as it is in environments that are
    built for workers (compiling it takes a CUDA toolkit). false neither installs nor uses it; true demands it."""
    distributed_data_parallel_config: DistributedDataParallelConfig = DistributedDataParallelConfig()
    fp8_cfg: Fp8Config = Fp8Config()
    megatron_kwargs: dict[str, Any] = {}
    """Further fields of Megatron's `TransformerConfig`, by their names there: fused kernels, offload of activations,
    recomputation and the layout of pipeline stages. Fields that the model or another key determines are refused, and so
    are those that the run's device or layers do not have."""

    @model_validator(mode="after")
    def _refuse_fields(self) -> MegatronConfig:
        problems = [problem for name in self.megatron_kwargs if (problem := name_problem(name))]
        if problems:
            raise ProblemError(*problems)
        return self
