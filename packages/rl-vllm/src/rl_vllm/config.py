"""Settings of the vLLM generator, `policy.generation.vllm_cfg`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rl_core.config import Config, PathText, Problem, ProblemError, WhenChanged
from rl_core.devices import Device
from rl_core.model_config import EngineConfig
from rl_vllm.quantization_config import QuantizationConfig

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature to the first and refuses one above the second."""

_PLACED = "the runtime places replicas and their ranks. Give generation more devices"
_SPECULATION = "set `vllm_cfg.speculation`, which refuses what would be wrong"
_QUANTIZATION = "set `vllm_cfg.quantization`, which verifies every weight sync"
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
    "language_model_only": "set `policy.vision.enabled`",
    "limit_mm_per_prompt": "set `policy.vision.max_images`",
    "logprobs_mode": "training needs processed logprobs",
    "master_addr": _PLACED,
    "master_port": _PLACED,
    "max_cpu_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_model_len": "set `vllm_cfg.max_model_len`",
    "max_num_batched_tokens": "set `vllm_cfg.max_num_batched_tokens`",
    "max_num_seqs": "set `vllm_cfg.max_num_seqs`",
    "mm_device_do_normalize": "images are normalised as the trainer does",
    "mm_encoder_only": _TASK,
    "mm_processor_cache_gb": "the generator keeps processed images itself",
    "mm_processor_kwargs": "set `policy.vision.min_pixels` and `max_pixels`",
    "model": "set `policy.model_name`",
    "nnodes": _PLACED,
    "node_rank": _PLACED,
    "override_generation_config": _SAMPLING,
    "pipeline_parallel_size": "set `vllm_cfg.pipeline_parallel_size`",
    "prefill_context_parallel_size": "a replica has tensor_parallel_size x pipeline_parallel_size ranks",
    "quantization": _QUANTIZATION,
    "per_request_spec_decode_metrics": "the generator counts drafts by them, and reports through `health`",
    "quantization_config": _QUANTIZATION,
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
    remedy = f"Set {setting}" if setting else ""
    return Problem(f"vllm_kwargs.{name}", reason, remedy=remedy)


_REFUSED_METHODS = {
    "suffix": "needs arctic-inference 0.1.1, which has no builds and is not among the packages of the engine",
}


class SpeculationConfig(Config):
    """Speculative decoding: a drafter proposes several tokens, and one step of the model accepts or replaces them.

    Neither the distribution of the tokens nor their logprobs depend on the drafter, which may be far from the policy:
    it then costs more than it saves. A request's tokens depend on its seed and on the drafter's proposals.
    """

    when_changed = WhenChanged.RESUME

    method: Literal["ngram", "draft_model", "eagle3", "suffix", "mtp"]
    """Drafter: `ngram` continues the last tokens as they continued earlier in the same row, without a model.
    `draft_model` is a smaller model with the same vocabulary, which keeps the weights of its files while the policy
    trains, unless the section `drafter` trains it too. `eagle3` is an EAGLE-3 head for this policy, which reads its
    hidden states and keeps the weights of its files, unless `policy.draft_head` trains it too; `mtp` is the same with
    the layer for multi-token prediction in the files of the policy's model. `suffix` is refused, with the reason."""
    num_tokens: int = Field(default=3, ge=1, le=64)
    """Maximum number of tokens in a draft."""
    model: PathText | None = None
    """`draft_model`, `eagle3` and `mtp`: folder of the drafter's files, on every node; for `mtp` the folder of the
    policy's model."""
    prompt_lookup_min: int | None = Field(default=None, ge=1)
    """`ngram`: smallest number of last tokens that must occur earlier in the row; 2 if unset."""
    prompt_lookup_max: int | None = Field(default=None, ge=1)
    """`ngram`: largest number of last tokens that are looked up; 5, or `prompt_lookup_min` if that is larger, if
    unset."""
    min_tokens_per_step: float = Field(default=1.3, ge=1)
    """Break-even: the run warns in a step in which requests got fewer tokens per engine step
    (`speculation/tokens_per_step`), because the drafts then cost more than they save. Measure it for your model and
    device: the time of an engine step with drafts divided by its time without."""

    @model_validator(mode="after")
    def _refuse_methods(self) -> SpeculationConfig:
        reason = _REFUSED_METHODS.get(self.method)
        if reason:
            remedy = "Set ngram, or draft_model, eagle3 or mtp with the folder of a drafter"
            raise ProblemError(Problem("method", reason, got=self.method, remedy=remedy))
        return self

    @model_validator(mode="after")
    def _refuse_keys_of_other_methods(self) -> SpeculationConfig:
        if self.has_weights:
            if self.model is None:
                reason = f"is needed by method {self.method}"
                raise ProblemError(Problem("model", reason, remedy="Set it to the folder of the drafter"))
            unread = ["prompt_lookup_min", "prompt_lookup_max"]
        else:
            unread = ["model"]
        for name in unread:
            if (value := getattr(self, name)) is not None:
                reason = f"is not read by method {self.method}"
                raise ProblemError(Problem(name, reason, got=value, remedy="Remove this key, or set another method"))
        return self

    @model_validator(mode="after")
    def _refuse_empty_range(self) -> SpeculationConfig:
        smallest, largest = self.lookup
        if smallest > largest:
            reason = f"is larger than prompt_lookup_max, which is {largest}"
            raise ProblemError(Problem("prompt_lookup_min", reason, got=smallest, remedy="Lower it"))
        return self

    @property
    def has_weights(self) -> bool:
        """Return whether the drafter is a model."""
        return self.method != "ngram"

    @property
    def drafts_with_head(self) -> bool:
        """Return whether the drafter reads the policy's hidden states."""
        return self.method in ("eagle3", "mtp")

    @property
    def lookup(self) -> tuple[int, int]:
        """Smallest and largest number of last tokens that `ngram` looks up."""
        smallest = self.prompt_lookup_min or min(2, self.prompt_lookup_max or 2)
        return smallest, self.prompt_lookup_max or max(5, smallest)


class VllmConfig(EngineConfig):
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
    """Dtype of the KV cache; `auto` is the dtype of the model. `fp8` (E4M3) halves its size: keys and values are
    divided by the scales in the model's files, and by 1 if these have none. Needs a device with kernels for it, and a
    correction in the loss."""
    quantization: QuantizationConfig | None = None
    """Quantised weights in rollouts; none if unset."""
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
    sent again. If unset, 2, because a weight sync follows nearly every sleep; 1 if no weights are sent, or if a
    drafter has weights that nobody sends."""
    speculation: SpeculationConfig | None = None
    """Speculative decoding; off if unset. It pays where a step of the engine waits for memory rather than for
    computation: large models, few requests at a time, long completions."""
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

    @model_validator(mode="after")
    def _refuse_what_speculation_excludes(self) -> VllmConfig:
        if self.speculation is None:
            return self
        on = f"vllm_cfg.speculation (method {self.speculation.method})"
        if self.pipeline_parallel_size > 1:
            reason = f"must be 1 with {on}: drafts have not been verified across pipeline ranks"
            remedy = "Use tensor_parallel_size, or remove speculation"
            raise ProblemError(
                Problem("pipeline_parallel_size", reason, got=self.pipeline_parallel_size, remedy=remedy)
            )
        if self.speculation.has_weights and self.sleep_level == 2:
            reason = f"would drop the drafter's weights, which nobody sends again, with {on}"
            raise ProblemError(Problem("sleep_level", reason, got=2, remedy="Set 1, or remove this key"))
        if self.speculation.method == "ngram" and self.vllm_kwargs.get("async_scheduling"):
            reason = f"does not work with {on}: the engine looks up n-grams between two steps"
            raise ProblemError(Problem("vllm_kwargs.async_scheduling", reason, got=True, remedy="Remove this key"))
        return self

    @model_validator(mode="after")
    def _refuse_what_quantization_excludes(self) -> VllmConfig:
        if self.quantization is not None and self.speculation is not None and self.speculation.has_weights:
            reason = "has not been verified with a drafter, which would be quantised as well"
            remedy = "Set vllm_cfg.speculation.method=ngram, or remove one of the two"
            raise ProblemError(Problem("quantization", reason, got=self.quantization.method, remedy=remedy))
        return self

    @property
    def reduced_precision(self) -> str:
        """See `EngineConfig`."""
        if self.quantization is not None:
            return f"vllm_cfg.quantization.method={self.quantization.method}"
        is_reduced = "8" in self.kv_cache_dtype or "4" in self.kv_cache_dtype
        return f"vllm_cfg.kv_cache_dtype={self.kv_cache_dtype}" if is_reduced else ""

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
