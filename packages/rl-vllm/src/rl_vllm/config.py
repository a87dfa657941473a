"""Settings of the vLLM generator, `policy.generation.vllm_cfg`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rl_core.config import Config, PathText, Problem, ProblemError, WhenChanged
from rl_core.devices import Device
from rl_core.model_config import EngineConfig

Method = Literal["fp8_per_channel", "fp8_per_block", "fp8_per_tensor", "mxfp8", "nvfp4"]

ROUTERS = ("*.gate", "*.router", "*.shared_expert_gate")
"""Patterns of the names of linear layers that choose experts."""

_REFUSED_METHODS = {
    "mxfp8": "stores scales in an order that vLLM's kernels choose, so that a weight sync could not be verified "
    "against what was sent",
    "nvfp4": "is not applied to linear layers of bfloat16 models by vLLM 0.32, only to experts",
}


class QuantizationConfig(Config):
    """Rollouts with quantised weights.

    The policy sends its weights in `policy.precision`. Every rank of the engine quantises them again at each weight
    sync, and the sync is refused if the engine does not hold what its recipe gives. Embeddings, the head, norms,
    routers and the experts of a mixture keep their precision.
    """

    when_changed = WhenChanged.RESUME

    method: Method
    """Format of the weights of linear layers. 8-bit floating point (E4M3) with a scale per output
    (`fp8_per_channel`), per block of 128 by 128 (`fp8_per_block`) or per matrix (`fp8_per_tensor`). Activations are
    quantised too, as they are computed. Devices differ in the methods that they have kernels for; a run is refused
    before it starts if this one is missing. `mxfp8` and `nvfp4` are refused, with the reason."""
    num_first_layers_in_bf16: int = Field(default=0, ge=0)
    """Number of layers at the start of the model that are not quantised."""
    num_last_layers_in_bf16: int = Field(default=0, ge=0)
    """Number of layers at the end of the model that are not quantised."""
    ignored_layers: list[str] = []
    """Names of linear layers that are not quantised, with `*` for any characters, such as `*.o_proj`. Layers that the
    engine computes as one (`q_proj`, `k_proj` and `v_proj`; `gate_proj` and `up_proj`) must be named together."""
    oracle_every: int = Field(default=10, ge=1)
    """Number of weight syncs from one comparison in float64 of all quantised weights with the weights that were sent to
    the next. It measures the error of the quantisation; the first sync has one. Scales and values are compared with the
    recipe at every sync."""

    @model_validator(mode="after")
    def _refuse_methods(self) -> QuantizationConfig:
        reason = _REFUSED_METHODS.get(self.method)
        if reason:
            remedy = "Set fp8_per_channel or fp8_per_block"
            raise ProblemError(Problem("method", reason, got=self.method, remedy=remedy))
        return self

    def ignored(self, num_layers: int) -> list[str]:
        """Return the patterns of the names of the engine's layers that are not quantised.

        Args:
            num_layers: Number of layers of the model.
        """
        first = range(min(self.num_first_layers_in_bf16, num_layers))
        last = range(max(num_layers - self.num_last_layers_in_bf16, 0), num_layers)
        return [*ROUTERS, *(f"*layers.{layer}.*" for layer in sorted({*first, *last})), *self.ignored_layers]


GIB = 2**30

MAX_SHARE = 0.9
"""Maximum share of a GPU's memory that an engine takes."""

MAX_SHARED = 0.85
"""The same of a GPU that the engine takes turns on: the gaps that other processes leave there grow with time."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature to the first and refuses one above the second."""

_REASONS = {
    "the runtime places replicas and their ranks. Give generation more devices": """
        data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
        data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size_local
        data_parallel_start_rank device_ids enable_elastic_ep master_addr master_port nnodes node_rank""",
    "`policy.generation.lora_sync` determines how the policy's adapters are applied": """
        enable_lora fully_sharded_loras lora_dtype lora_target_modules max_cpu_loras max_lora_rank max_loras""",
    "set `vllm_cfg.speculation`, which refuses what would be wrong": """
        spec_method spec_model spec_tokens speculative_config""",
    "set `vllm_cfg.quantization`, which verifies every weight sync": "quantization quantization_config",
    "sampling parameters come from `policy.generation` only": "generation_config override_generation_config",
    "the engine only generates": "convert mm_encoder_only runner",
    "the generator reports through `health`": "disable_log_stats",
    "each rank of a replica is its own process": "distributed_executor_backend",
    "set `policy.precision`": "dtype",
    "the generator chooses it for the device": "enable_chunked_prefill",
    "set `moe_router_replay` in the section of the policy's training backend": "enable_return_routed_experts",
    "the generator sleeps if it shares its device": "enable_sleep_mode",
    "set `policy.hf_config_overrides`": "hf_overrides",
    "set `vllm_cfg.kv_cache_gib`": "kv_cache_memory_bytes",
    "set `policy.vision.enabled`": "language_model_only",
    "set `policy.vision.max_images`": "limit_mm_per_prompt",
    "training needs processed logprobs": "logprobs_mode",
    "images are normalised as the trainer does": "mm_device_do_normalize",
    "the generator keeps processed images itself": "mm_processor_cache_gb",
    "set `policy.vision.min_pixels` and `max_pixels`": "mm_processor_kwargs",
    "set `policy.model_name`": "model",
    "a replica has tensor_parallel_size x pipeline_parallel_size x data_parallel_size ranks": """
        prefill_context_parallel_size""",
    "the generator counts drafts by them, and reports through `health`": "per_request_spec_decode_metrics",
    "every request carries its own seed": "seed",
    "the generator's scheduler holds tokens until a request ends": "scheduler_cls",
    "stop strings need the tokenizer": "skip_tokenizer_init",
    "the trainer finds the allowed tokens with xgrammar": "structured_outputs_config",
    "set `policy.tokenizer.name`": "tokenizer",
    "a watermark changes the distribution that is sampled from": "watermark_config",
    "weights arrive through the run's own transport": "weight_transfer_config",
    "the generator's own extension receives the weights": "worker_extension_cls",
}

_SAME_KEYS = """
    data_parallel_size enforce_eager gpu_memory_utilization kv_cache_dtype max_model_len max_num_batched_tokens
    max_num_seqs pipeline_parallel_size tensor_parallel_size"""
"""Engine arguments that are keys of `vllm_cfg` by the same name."""

OWNED_ARGUMENTS = {
    **{name: reason for reason, names in _REASONS.items() for name in names.split()},
    **{name: f"set `vllm_cfg.{name}`" for name in _SAME_KEYS.split()},
}
"""Engine arguments that other settings determine, and the key or the reason."""


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
    def _refuse(self) -> SpeculationConfig:
        if self.method == "suffix":
            reason = "needs arctic-inference 0.1.1, which has no builds and is not among the packages of the engine"
            remedy = "Set ngram, or draft_model, eagle3 or mtp with the folder of a drafter"
            raise ProblemError(Problem("method", reason, got=self.method, remedy=remedy))
        if self.has_weights and self.model is None:
            reason = f"is needed by method {self.method}"
            raise ProblemError(Problem("model", reason, remedy="Set it to the folder of the drafter"))
        for name in ("prompt_lookup_min", "prompt_lookup_max") if self.has_weights else ("model",):
            if (value := getattr(self, name)) is not None:
                reason = f"is not read by method {self.method}"
                raise ProblemError(Problem(name, reason, got=value, remedy="Remove this key, or set another method"))
        smallest, largest = self.lookup
        if smallest > largest:
            reason = f"is larger than prompt_lookup_max, which is {largest}"
            raise ProblemError(Problem("prompt_lookup_min", reason, got=smallest, remedy="Lower it"))
        return self

    @property
    def has_weights(self) -> bool:
        """True if the drafter is a model."""
        return self.method != "ngram"

    @property
    def drafts_with_head(self) -> bool:
        """True if the drafter reads the policy's hidden states."""
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
    data_parallel_size: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Number of engines of one replica of a mixture of experts. Each has a copy of the attention layers and a KV cache
    for its own requests, and the experts of a layer are distributed over all ranks of all engines. It suits latent
    attention, whose cache tensor parallelism would repeat on every rank. The later turns of a conversation, and
    completions of the same prompt, go to the engine that has their keys and values, unless it has far more requests
    than the others."""
    gpu_memory_utilization: Annotated[float | None, WhenChanged.RESUME] = Field(default=None, gt=0, le=1)
    """Fraction of a GPU's memory for weights, activations and the KV cache if `kv_cache_gib` is unset. If this is unset
    too, the memory that is free when the engine starts, except for a reserve: at most 0.85 on GPUs that the policy
    shares, otherwise 0.9. The log of the replica shows the numbers. A replica with opponents
    (`grpo.agents.NAME.opponent`) divides it equally among its engines."""
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
    """Maximum number of tokens in one forward pass. If unset, vLLM's number for generation offline: 16384 on GPUs of
    70 GiB or more except A100, 8192 on others, divided by the number of engines of a replica with opponents. On CPU at
    least 4096 and one whole row."""
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
    def _refuse(self) -> VllmConfig:
        owned = []
        for name in self.vllm_kwargs:
            if name in OWNED_ARGUMENTS:
                cause, _, setting = OWNED_ARGUMENTS[name].partition("set ")
                reason = ": ".join(filter(None, ("cannot be set here", cause)))
                owned.append(Problem(f"vllm_kwargs.{name}", reason, remedy=f"Set {setting}" if setting else ""))
        if owned:
            raise ProblemError(*owned)
        if self.own_process is False and self.num_ranks > 1:
            reason = f"must be true because each of the {self.num_ranks} ranks is a separate process"
            raise ProblemError(Problem("own_process", reason, got=False, remedy="Remove this key"))
        if self.data_parallel_size > 1:
            for name in ("speculation", "quantization"):
                if getattr(self, name) is not None:
                    reason = f"must be 1 with vllm_cfg.{name}, which has not been verified in several engines"
                    remedy = f"Use tensor_parallel_size, or remove {name}"
                    got = self.data_parallel_size
                    raise ProblemError(Problem("data_parallel_size", reason, got=got, remedy=remedy))
        if self.speculation is None:
            return self
        on = f"vllm_cfg.speculation (method {self.speculation.method})"
        if (ranks := self.pipeline_parallel_size) > 1:
            reason = f"must be 1 with {on}: drafts have not been verified across pipeline ranks"
            remedy = "Use tensor_parallel_size, or remove speculation"
            raise ProblemError(Problem("pipeline_parallel_size", reason, got=ranks, remedy=remedy))
        if self.speculation.has_weights and self.sleep_level == 2:
            reason = f"would drop the drafter's weights, which nobody sends again, with {on}"
            raise ProblemError(Problem("sleep_level", reason, got=2, remedy="Set 1, or remove this key"))
        if self.speculation.method == "ngram" and self.vllm_kwargs.get("async_scheduling"):
            reason = f"does not work with {on}: the engine looks up n-grams between two steps"
            raise ProblemError(Problem("vllm_kwargs.async_scheduling", reason, got=True, remedy="Remove this key"))
        if self.quantization is not None and self.speculation.has_weights:
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
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
