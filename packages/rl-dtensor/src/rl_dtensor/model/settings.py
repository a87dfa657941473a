"""Which settings a device can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.config import Problem
from rl_core.devices import Device
from rl_dtensor.config import AttentionBackend, DTensorConfig
from rl_dtensor.parallel.sizes import SECTION, text_fields

MOST_FLASH_DIM = 256
"""Largest heads that flash attention takes."""

HEAD_DIMS = ("head_dim", "global_head_dim", "v_head_dim")
"""Fields of a Hugging Face config that size heads."""


def without_softcap(backend: AttentionBackend) -> str:
    """Why a backend cannot bound scores, and the remedy; empty if it can."""
    if backend != "sdpa":
        return ""
    return "is sdpa, which has no soft cap of scores, and the model has one; set it to auto or eager, or on GPUs flex"


def without_sinks(backend: AttentionBackend) -> str:
    """Why a backend cannot add sinks to the softmax, and the remedy; empty if it can."""
    if backend in ("auto", "eager", "flex"):
        return ""
    return (
        f"is {backend}, which has no attention sinks, and the model has some; set it to auto or eager, or on GPUs flex"
    )


def kernel_problems(backend: DTensorConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """An attention backend whose kernels do not take heads of this model's size, or its soft cap.

    Args:
        model: fields of its Hugging Face config; those that are missing are not checked.
    """
    largest = _largest_head(model)
    if backend.attention_backend in ("flash_attention_2", "flash_attention_3") and largest > MOST_FLASH_DIM:
        yield Problem(
            f"{SECTION}.attention_backend",
            f"{backend.attention_backend} takes heads of at most {MOST_FLASH_DIM} and the model's have {largest}; set "
            "it to auto or sdpa",
        )
    capped = text_fields(model).get("attn_logit_softcapping") is not None
    if capped and (problem := without_softcap(backend.attention_backend)):
        yield Problem(f"{SECTION}.attention_backend", problem)


def _largest_head(model: Mapping[str, Any]) -> int:
    """Entries of the largest query, key or value head; 0 if the fields do not say."""
    model = text_fields(model)
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    stated = [model.get(name) for name in HEAD_DIMS]
    joined = [model.get("qk_nope_head_dim"), model.get("qk_rope_head_dim")]  # of latent attention
    sizes = [*(size for size in stated if isinstance(size, int)), sum(size for size in joined if isinstance(size, int))]
    if not any(sizes) and isinstance(hidden, int) and isinstance(heads, int) and heads:
        return hidden // heads
    return max(sizes)


def device_problems(backend: DTensorConfig, *, precision: str, device: Device | None) -> Iterator[Problem]:
    """Settings that this device or compute dtype cannot run.

    Args:
        device: None if it is not known yet.
    """
    attention = backend.attention_backend
    if (
        device is not None
        and not device.runs_on_gpus
        and attention in ("flash_attention_2", "flash_attention_3", "flex")
    ):
        yield Problem(
            f"{SECTION}.attention_backend",
            f"{attention} runs on GPUs and this is {device.name}; set it to auto, sdpa or eager",
        )
    if precision == "float32" and attention in ("flash_attention_2", "flash_attention_3"):
        yield Problem(
            f"{SECTION}.attention_backend",
            f"{attention} computes in half precision and precision is float32; set precision=bfloat16, "
            "or this to auto, sdpa or flex",
        )
