"""Fields of Megatron's `TransformerConfig` that `megatron_kwargs` may set, and those that it refuses by decision.

The check of names here needs no megatron-core. `rl_megatron.preflight` derives all other fields from the installed
dataclass.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from rl_core.config import Problem


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


ANYWHERE = _fields(
    """clone_scatter_output_in_embedding deallocate_pipeline_outputs overlap_moe_expert_parallel_comm
    overlap_p2p_comm_warmup_flush pipeline_model_parallel_layout recompute_method recompute_num_layers"""
)
"""Fields that may be set on every device."""

ON_CUDA = _fields(
    """activation_func_fp8_input_store batch_p2p_sync bias_activation_fusion bias_dropout_fusion
    disable_bf16_reduced_precision_matmul fine_grained_activation_offloading min_offloaded_tensor_size
    moe_deepep_num_sms moe_flex_dispatcher_backend moe_hybridep_num_sms moe_shared_expert_overlap
    offload_modules"""
)
"""Fields of kernels, streams and copies of CUDA."""

WITH_FP8 = _fields(
    """disable_parameter_transpose_cache first_last_layers_bf16 fp8_amax_compute_algo fp8_amax_history_len
    fp8_dot_product_attention fp8_margin fp8_multi_head_attention fp8_wgrad moe_router_padding_for_quantization
    num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 tp_only_amax_red"""
)
"""Fields of Transformer Engine's products in 8 bits."""

OF_TENSOR_OVERLAP = _fields(
    """tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_disable_fc1
    tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad"""
)
"""Fields that `tp_comm_overlap` reads."""

WITH_FIXED_LENGTH = frozenset({"tp_comm_overlap"})
"""Fields that need microbatches of one length."""

WITH_TE = _fields(
    """apply_rope_fusion attention_backend cp_comm_type cpu_offloading cpu_offloading_activations
    cpu_offloading_double_buffering cpu_offloading_num_layers cpu_offloading_weights gradient_accumulation_fusion
    moe_permute_fusion moe_router_fusion use_te_activation_func"""
).union(WITH_FP8, OF_TENSOR_OVERLAP, WITH_FIXED_LENGTH)
"""Fields of Transformer Engine's layers and kernels."""

FUSIONS = _fields(
    """apply_rope_fusion bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion moe_permute_fusion
    moe_router_fusion tp_comm_overlap use_te_activation_func"""
)
"""Fields of fused kernels, which false turns off anywhere. All except `tp_comm_overlap` are on by default where a
kernel is there and fits."""

RECOMPUTED_WITH_TE = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""Parts of a layer whose recomputation megatron-core builds on Transformer Engine."""

PASSED = ANYWHERE | ON_CUDA | WITH_TE
"""All fields that may be set."""

MODEL_REASON = "it follows from the model; set `policy.hf_config_overrides`"
"""Reason why the fields that no table here contains may not be set."""

_REASONS: Mapping[str, str] = {
    "set `policy.precision`": "fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype",
    "weights and hidden states stay in `policy.precision`": """
        fp32_residual_connection fp8_param fp4 fp4_recipe fp4_param fp4_quantizer_factory""",
    "set `megatron_cfg.fp8_cfg`": "fp8 fp8_recipe fp8_quantizer_factory",
    "set `megatron_cfg.transformer_engine`": """
        transformer_impl moe_grouped_gemm moe_use_legacy_grouped_gemm persist_layer_norm use_te_rng_tracker""",
    "set `megatron_cfg.recompute`": "recompute_granularity",
    "set `megatron_cfg.recompute_modules`": "moe_layer_recompute",
    "set `megatron_cfg.sequence_parallel`, which also shards saved activations": "distribute_saved_activations",
    "set `megatron_cfg.moe_token_dispatcher_type: flex`": "moe_enable_deepep",
    "set `megatron_cfg.moe_router_replay`": "moe_enable_routing_replay",
    "padding would count in this loss; set `megatron_cfg.moe_aux_loss_coeff`": "moe_z_loss_coeff",
    "set `megatron_kwargs.pipeline_model_parallel_layout`": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split""",
    "set `megatron_kwargs.moe_router_padding_for_quantization`": "moe_router_padding_for_fp8",
    "weights come from the model's files": """
        init_method output_layer_init_method init_method_std embedding_init_method embedding_init_method_std
        init_model_with_meta_device perform_initialization use_cpu_initialization""",
    "losses are computed outside Megatron": """
        calculate_per_token_loss cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute
        wgrad_deferral_limit""",
    "layers for multi-token prediction are not trained": "mtp_num_layers mtp_loss_scaling_factor mtp_standalone",
    "the training step of rl-megatron determines it": """
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        variable_seq_lengths overlap_p2p_comm batch_p2p_comm microbatch_group_size_per_vp_stage
        _cpu_offloading_context""",
    "rl-megatron reduces gradients as soon as a backward pass has made them": "delay_wgrad_compute",
    "rl-megatron does not run the schedules that it belongs to": """
        num_microbatches_with_partial_activation_checkpoints ep_overlap_early_attn_memory_release""",
    "a graph repeats the addresses of weights, which leave the device between uses, and the number of rows": """
        enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
        external_cuda_graph cuda_graph_impl cuda_graph_scope""",
    "Transformer Engine no longer reads it": "tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs",
    "its kernel does not take packed rows": "fused_single_qkv_rope",
    # Transformer Engine 2.20 turns cuDNN's kernel off for them on compute capability 9.0 (`get_attention_backend`).
    "deterministic attention of long packed rows keeps the scores of all pairs of tokens in GPU memory": """
        deterministic_mode""",
    "rl-megatron does not create the process groups that it needs": """
        hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank
        pipeline_model_parallel_comm_backend use_ring_exchange_p2p moe_extended_tp""",
    "training must compute the model that the generators serve, whatever else is in a batch": """
        moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
        moe_router_force_load_balancing moe_input_jitter_eps""",
    "rl-megatron's optimizer step does not clip attention logits": """
        qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit""",
    "it is for generation": """
        flash_decode inference_rng_tracker inference_sampling_seed symmetric_ar_type use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents""",
    "the layers of rl-megatron do not read it": """
        attention_softmax_in_fp32 apply_query_key_layer_scaling masked_softmax_fusion memory_efficient_layer_norm
        async_tensor_model_parallel_allreduce use_fused_weighted_squared_relu use_kitchen use_kitchen_attention
        kitchen_attention_backend quant_recipe batch_invariant_mode fp8_interval barrier_with_L1_time config_logger_dir
        test_mode""",
}

REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Fields that are refused by decision, and the key that sets them or the reason."""


def name_problem(name: str, keys: Container[str]) -> Problem | None:
    """Return the problem of a field of `megatron_kwargs` that is refused whatever version is installed, or None.

    Args:
        name: Name of the field.
        keys: Keys of `megatron_cfg`.
    """
    if name in keys:
        return refusal(name, f"set `megatron_cfg.{name}`")
    return refusal(name, REFUSED[name]) if name in REFUSED else None


def refusal(name: str, reason: str) -> Problem:
    """Return the problem of a field of `megatron_kwargs` that may not be set.

    Args:
        name: Name of the field.
        reason: The cause, the key to set instead after the word "set", or both.
    """
    cause, _, setting = reason.partition("set ")
    clauses = ": ".join(filter(None, ("cannot be set here", cause.removesuffix("; "))))
    return Problem(f"megatron_kwargs.{name}", clauses, remedy=setting and f"Set {setting}")
