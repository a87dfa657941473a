"""Kernels for quantised weights and caches: which of them this machine has."""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm import MarlinFP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import current_platform

from rl_vllm.config import QuantizationConfig
from rl_vllm.weights.quantised_layers import METHODS, RECIPES


def quantisation_problems(quantization: QuantizationConfig | None, kv_cache_dtype: str) -> list[str]:
    """Return the problems of quantised weights and caches on this machine, as text that begins with a key of
    `vllm_cfg`.

    Args:
        quantization: Settings of the weights; None if they are not quantised.
        kv_cache_dtype: Dtype of the KV cache.
    """
    found: list[str] = []
    if not current_platform.is_cpu() and not torch.cuda.is_available():
        return found  # This machine lacks the engine's devices; the engine checks its own.
    if quantization is not None:
        reasons = {method: _method_problem(method) for method in METHODS}
        if reason := reasons[quantization.method]:
            able = [method for method, problem in reasons.items() if not problem]
            remedy = f"Set it to {' or '.join(able)}" if able else "Remove vllm_cfg.quantization: no method runs here"
            found.append(f"quantization.method: {quantization.method} does not run on this machine: {reason}. {remedy}")
    if kv_cache_dtype.startswith("fp8") and (reason := _cache_problem()):
        found.append(
            f"kv_cache_dtype: {kv_cache_dtype} does not run on this machine: {reason}. Remove this key to keep the "
            "cache in the dtype of the model"
        )
    return found


def _method_problem(method: str) -> str:
    """Return why this machine cannot run a method; empty if it can. vLLM chooses its kernel for a layer of a common
    size."""
    try:
        with set_current_vllm_config(VllmConfig()):
            _try_method(METHODS[method])
    except Exception as error:  # noqa: BLE001 - whatever its parts raise is the answer
        return " ".join(str(error).split()).removesuffix("Reasons:").strip()
    return ""


def _try_method(kind: type[OnlineLinearBase]) -> None:
    """Make a method's kernel. On CPU, quantise a small matrix as well: some builds of vLLM lack the kernel for it."""
    recipe = RECIPES[kind]
    keys = {"per_channel": kFp8StaticChannelSym, "per_block": kFp8Static128BlockSym, "per_tensor": kFp8StaticTensorSym}
    kernel = init_fp8_linear_kernel(
        activation_quant_key=kind.activation_quant_key,
        weight_quant_key=keys[recipe.granularity],
        weight_shape=(256, 128),
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
    )
    if recipe.granularity == "per_channel" and isinstance(kernel, MarlinFP8ScaledMMLinearKernel):
        raise ValueError("it needs a kernel that multiplies in 8 bits (GPUs from compute capability 8.9 on)")
    if recipe.granularity == "per_tensor" and current_platform.is_cpu():
        try:
            ops.scaled_fp8_quant(torch.ones(16, 16, dtype=torch.bfloat16), scale=torch.ones(1))
        except RuntimeError as error:
            raise ValueError(
                "vLLM's build for this CPU has no kernel that quantises a matrix with one scale"
            ) from error


def _cache_problem() -> str:
    """Return why attention has no kernels for an 8-bit cache here; empty if it has, or if that is not known."""
    has_kernels = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    return "" if has_kernels or not current_platform.is_cpu() else "on CPUs it needs AVX-512 or AMX"
