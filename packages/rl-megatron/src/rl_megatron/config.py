"""Settings of training on Megatron Core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rl_core.config import Config, ProblemError, Rename, WhenChanged
from rl_core.model_config import RECOMPUTE_KEYS, BackendConfig
from rl_megatron.transformer_fields import WITH_FIXED_LENGTH, name_problem

KEY = "megatron_cfg"
"""Key of this backend's settings in the section of a model."""


class Fp8Config(Config):
    """Matrix products in 8-bit floating point."""

    enabled: bool = False
    """Multiply matrices in 8-bit floating point. Needs Transformer Engine and a GPU that supports it."""
    fp8: Literal["e4m3", "hybrid"] = "hybrid"
    """8-bit formats: `e4m3` throughout, or `hybrid` with e5m2 for gradients."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """Recipe that determines the scales, by its name in Transformer Engine."""


class DistributedDataParallelConfig(Config):
    """Reduction of gradients over data-parallel ranks."""

    grad_reduce_in_fp32: bool = True
    """Sum gradients over microbatches and ranks in float32; otherwise in the compute dtype, which halves their memory
    and traffic but rounds."""
    overlap_grad_reduce: Annotated[bool, WhenChanged.RESUME] = False
    """Reduce gradients over the data-parallel ranks bucket by bucket during the backward pass."""


def _recompute_modules(modules: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
    # Version 0.1.0 recorded them whether or not they had an effect.
    has_effect = section.get("activation_checkpointing", True) and section.get("recompute_granularity") != "full"
    return {"recompute_modules": modules} if has_effect else {}


class MegatronConfig(BackendConfig):
    """Training on Megatron Core: mesh, memory and kernels."""

    renamed: ClassVar[Mapping[str, Rename]] = {
        "recompute_modules": Rename("recompute_modules", _recompute_modules),
        **RECOMPUTE_KEYS,
    }

    tensor_model_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Number of ranks that share the matrices of each layer."""
    pipeline_model_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Number of pipeline ranks, which hold consecutive layers."""
    virtual_pipeline_model_parallel_size: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=1)
    """Number of runs of consecutive layers on each pipeline rank, interleaved with the runs of the other ranks; one if
    unset."""
    num_layers_in_first_pipeline_stage: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Number of layers on the first pipeline rank; an equal share if unset."""
    num_layers_in_last_pipeline_stage: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Number of layers on the last pipeline rank; an equal share if unset."""
    context_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Number of ranks that share the tokens of each row."""
    expert_model_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Number of ranks that share the experts of each layer. They are taken from the data- and tensor-parallel ranks."""
    expert_tensor_parallel_size: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Number of ranks that share the matrices of each expert; `tensor_model_parallel_size` if unset."""
    sequence_parallel: Annotated[bool, WhenChanged.RESUME] = False
    """Share the tokens between layers across the tensor-parallel ranks, which saves activation memory."""
    recompute: Annotated[Literal["auto", "none", "selective", "full"], WhenChanged.RESUME] = "auto"
    """Activations of a layer that the backward pass computes again instead of keeping them: none, the
    `recompute_modules` only (`selective`), or all except the layer's input (`full`). `auto` recomputes as little as the
    memory that is available at the first training step allows for a microbatch of the largest size, by an estimate:
    nothing, or the `recompute_modules` of all layers, or as many layers as necessary in full. The log shows the plan of
    the memory; on `cpu` nothing is recomputed."""
    recompute_modules: Annotated[
        list[Literal["core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]] | None,
        WhenChanged.RESUME,
    ] = Field(default=None, min_length=1)
    """Parts of a layer that `selective` recomputes, by their names in Megatron. If unset, the cheap parts
    (`layernorm`, `moe_act`, `mla_up_proj`) as far as the model has them and layers are Transformer Engine's, otherwise
    `moe` or `mlp`."""
    freeze_moe_router: bool = False
    """Do not train the routers of a mixture of experts. Generation and training then route more alike."""
    moe_router_replay: bool = False
    """Send every token to the experts that the generator sent it to, in all passes. The router weighs them by its own
    scores and still learns. Logprobs of trainer and generator then differ only by rounding. For mixtures of experts,
    with a generator that reports the experts it chose: hf, megatron, or vllm on GPUs."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Dtype of the routers' logits and scores."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """Loss that spreads tokens evenly over experts, added to the policy's loss: over the tokens of a microbatch
    (`aux_loss`) or of each row (`seq_aux_loss`), weighted by tokens. Padding does not count."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the loss that `moe_router_load_balancing_type` sets."""
    moe_per_layer_logging: Annotated[bool, WhenChanged.RESUME] = False
    """Report that loss for each layer, in addition to its mean over layers."""
    moe_token_dispatcher_type: Annotated[Literal["alltoall", "flex"], WhenChanged.RESUME] = "alltoall"
    """Transport of tokens to the ranks of their experts: `alltoall` by NCCL, or `flex` by DeepEP, on GPUs only. No
    package of DeepEP exists, so it must be built in the driver's environment, with `cluster.worker_envs=shared`.
    Megatron's `allgather` needs the same number of tokens on every rank, but rows have
    different lengths."""
    moe_router_bias_update_rate: float = Field(default=0.0, ge=0)
    """Step size of the biases that routers of some models (DeepSeek-V3) use to balance experts; 0 leaves them
    unchanged."""
    transformer_engine: bool | None = None
    """Build layers of Transformer Engine on GPUs. If unset, wherever it is installed, as it is in environments that are
    built for workers (compiling it needs a CUDA toolkit). false neither installs nor uses it; true requires it."""
    fixed_length_microbatches: Annotated[Literal["auto"] | bool, WhenChanged.RESUME] = "auto"
    """Pad packed microbatches to their token budget (`sequence_packing.train_mb_tokens`, `logprob_mb_tokens`), so that
    all have one length. Padding does not change results; it costs the computation of the tokens that are missing.
    Pipelines then do not get more microbatches than the budget demands. `auto` does so if another setting needs it
    (`megatron_kwargs.tp_comm_overlap`)."""
    distributed_data_parallel_config: DistributedDataParallelConfig = DistributedDataParallelConfig()
    fp8_cfg: Fp8Config = Fp8Config()
    megatron_kwargs: dict[str, Any] = {}
    """Further fields of Megatron's `TransformerConfig`, by their names there: fused kernels, offloading of activations,
    recomputation and the layout of pipeline stages. Fields that the model or another key determines are refused, as are
    fields that the device or the layers of the run do not support."""

    @property
    def reduced_precision(self) -> str:
        """See `BackendConfig.reduced_precision`."""
        return f"{KEY}.fp8_cfg.enabled=true" if self.fp8_cfg.enabled else ""

    @property
    def pads_microbatches(self) -> bool:
        """Return whether packed microbatches are padded to one length."""
        if self.fixed_length_microbatches == "auto":
            return any(self.megatron_kwargs.get(name) for name in WITH_FIXED_LENGTH)
        return self.fixed_length_microbatches

    @model_validator(mode="after")
    def _refuse_fields(self) -> MegatronConfig:
        problems = [
            problem for name in self.megatron_kwargs if (problem := name_problem(name, MegatronConfig.model_fields))
        ]
        if problems:
            raise ProblemError(*problems)
        return self
