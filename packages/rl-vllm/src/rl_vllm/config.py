"""Settings of the vLLM generator, `policy.generation.vllm_cfg`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rl_core.config import Config, Problem, ProblemError, WhenChanged
from rl_core.devices import Device

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature to the first and refuses one above the second."""

_PLACED = "the runtime places replicas and their ranks. Give generation more devices"
_SPECULATION = (
    "speculative decoding, with a draft model or n-grams, is not supported: a draft model would keep its old weights "
    "after a weight sync, and no method has been verified to report the policy's logprobs"
)
_SAMPLING = "sampling parameters come from `policy.generation` only"
_TASK = "the engine only generates"
_ADAPTERS = "`policy.generation.lora_sync` determines how the policy's adapters are applied"

OWNED_ARGUMENTS = {
    "convert": _TASK,
    "data_parallel_address": _PLACED,
    "data_parallel_backend": _PLACED,
    "data_parallel_external_lb": _PLACED,
    "data_parallel_hybrid_lb": _PLACED,
    "data_parallel_multi_port_external_lb": _PLACED,
    "data_parallel_rank": _PLACED,
    "data_parallel_rpc_port": _PLACED,
    "data_parallel_size": _PLACED,
    "data_parallel_size_local": _PLACED,
    "data_parallel_start_rank": _PLACED,
    "device_ids": _PLACED,
    "disable_log_stats": "the generator reports through `health`",
    "distributed_executor_backend": "each rank of a replica is its own process",
    "dtype": "set `policy.precision`",
    "enable_chunked_prefill": "the generator chooses it for the device",
    "enable_lora": _ADAPTERS,
    "enable_return_routed_experts": "set `moe_router_replay` in the section of the policy's training backend",
    "enable_sleep_mode": "the generator sleeps if it shares its device",
    "enforce_eager": "set `vllm_cfg.enforce_eager`",
    "fully_sharded_loras": _ADAPTERS,
    "generation_config": _SAMPLING,
    "gpu_memory_utilization": "set `vllm_cfg.gpu_memory_utilization`",
    "hf_overrides": "set `policy.hf_config_overrides`",
    "kv_cache_dtype": "set `vllm_cfg.kv_cache_dtype`",
    "kv_cache_memory_bytes": "set `vllm_cfg.kv_cache_gib`",
    "lora_dtype": _ADAPTERS,
    "lora_target_modules": _ADAPTERS,
    "logprobs_mode": "training needs processed logprobs",
    "master_addr": _PLACED,
    "master_port": _PLACED,
    "max_cpu_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_model_len": "set `vllm_cfg.max_model_len`",
    "max_num_batched_tokens": "set `vllm_cfg.max_num_batched_tokens`",
    "max_num_seqs": "set `vllm_cfg.max_num_seqs`",
    "model": "set `policy.model_name`",
    "nnodes": _PLACED,
    "node_rank": _PLACED,
    "override_generation_config": _SAMPLING,
    "pipeline_parallel_size": "set `vllm_cfg.pipeline_parallel_size`",
    "prefill_context_parallel_size": "a replica has tensor_parallel_size x pipeline_parallel_size ranks",
    "runner": _TASK,
    "seed": "every request carries its own seed",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "spec_method": _SPECULATION,
    "spec_model": _SPECULATION,
    "spec_tokens": _SPECULATION,
    "speculative_config": _SPECULATION,
    "tensor_parallel_size": "set `vllm_cfg.tensor_parallel_size`",
    "tokenizer": "set `policy.tokenizer.name`",
    "watermark_config": "a watermark changes the distribution that is sampled from",
    "weight_transfer_config": "weights arrive through the run's own transport",
    "worker_extension_cls": "the generator's own extension receives the weights",
}
"""Engine arguments that other settings determine, and the key or the reason."""


def _owned_problem(name: str) -> Problem:
    cause, _, setting = OWNED_ARGUMENTS[name].partition("set ")
    reason = ": ".join(filter(None, ("cannot be set here", cause.removesuffix("; "))))
    is_draft = OWNED_ARGUMENTS[name] == _SPECULATION
    remedy = f"Set {setting}" if setting else ""
    return Problem(f"vllm_kwargs.{name}", reason, remedy=remedy, feature="speculative decoding" if is_draft else "")


class VllmConfig(Config):
    """Settings of the vLLM generator."""

    tensor_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Number of ranks that each layer is split over."""
    pipeline_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Number of ranks that the layers are distributed over."""
    gpu_memory_utilization: Annotated[float | None, WhenChanged.RESUME] = Field(default=None, gt=0, le=1)
    """Fraction of a GPU's memory for weights and KV cache if `kv_cache_gib` is unset. If this is unset too, 0.6 on GPUs
    that the policy shares, otherwise 0.9. A replica with opponents (`grpo.agents.NAME.opponent`) divides it equally
    among its engines."""
    kv_cache_gib: Annotated[float | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Size of the KV cache per rank in GiB. If unset, 1 on CPU, and on a GPU the memory that `gpu_memory_utilization`
    leaves."""
    kv_cache_dtype: str = "auto"
    """Dtype of the KV cache; `auto` is the dtype of the model."""
    max_model_len: int | None = Field(default=None, gt=1)
    """Maximum number of tokens in a prompt and its completion; `policy.max_total_sequence_length` if unset."""
    max_num_seqs: Annotated[int, WhenChanged.RESUME] = Field(default=256, gt=0)
    """Maximum number of completions decoded at a time."""
    max_num_batched_tokens: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Maximum number of tokens in one forward pass. If unset, vLLM chooses, and on CPU at least 4096 and one whole
    row."""
    enforce_eager: Annotated[bool | None, WhenChanged.RESUME] = None
    """Run without compilation and CUDA graphs. If unset, true on CPU, because compiling costs more than it saves
    there."""
    own_process: Annotated[bool | None, WhenChanged.RESUME] = None
    """Run the engine in a separate process next to the replica's. If unset, true, except for one rank on CPU, which
    starts in half the time without it; with opponents always true."""
    sleep_level: Annotated[Literal[1, 2] | None, WhenChanged.RESUME] = None
    """Treatment of the weights when the engine sleeps on a GPU: 1 keeps them in host memory, 2 drops them, and they are
    sent again. If unset, 2, because a weight sync follows nearly every sleep; 1 if no weights are sent."""
    vllm_kwargs: dict[str, Any] = {}
    """Further arguments of vLLM's engine, passed on unchanged."""

    @model_validator(mode="after")
    def _refuse_owned_arguments(self) -> VllmConfig:
        owned = [name for name in self.vllm_kwargs if name in OWNED_ARGUMENTS]
        if owned:
            raise ProblemError(*map(_owned_problem, owned))
        return self

    @model_validator(mode="after")
    def _refuse_ranks_in_one_process(self) -> VllmConfig:
        if self.own_process is False and self.num_ranks > 1:
            reason = f"must be true because each of the {self.num_ranks} ranks is a separate process"
            raise ProblemError(Problem("own_process", reason, got=False, remedy="Remove this key"))
        return self

    def is_eager(self, device: Device) -> bool:
        """Return whether the model runs without compilation and CUDA graphs."""
        return not device.runs_on_gpus if self.enforce_eager is None else self.enforce_eager

    def has_own_process(self, device: Device) -> bool:
        """Return whether the engine runs next to the replica's process."""
        if self.own_process is not None:
            return self.own_process
        return self.num_ranks > 1 or device.runs_on_gpus

    @property
    def num_ranks(self) -> int:
        """Processes of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
