"""Checks of settings that depend on the device or on the size of the model's heads."""

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


def without_softcap(backend: AttentionBackend) -> Problem | None:
    """Return the problem of a backend that cannot bound attention scores; None if it can."""
    return _without("soft cap of attention scores", backend) if backend == "sdpa" else None


def without_sinks(backend: AttentionBackend) -> Problem | None:
    """Return the problem of a backend that cannot add sinks to the softmax; None if it can."""
    return None if backend in ("auto", "eager", "flex") else _without("attention sinks", backend)


def _without(needed: str, backend: AttentionBackend) -> Problem:
    return Problem(
        f"{SECTION}.attention_backend",
        f"does not support the {needed} of this model",
        got=backend,
        remedy="Set it to auto or eager, or to flex on GPUs",
    )


def kernel_problems(backend: DTensorConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """An attention backend whose kernels do not take heads of this model's size, or its soft cap.

    Args:
        backend: Settings of the backend.
        model: Fields of the model's Hugging Face config; missing fields are not checked.
    """
    largest = largest_head(model)
    if backend.attention_backend in ("flash_attention_2", "flash_attention_3") and largest > MOST_FLASH_DIM:
        yield Problem(
            f"{SECTION}.attention_backend",
            f"supports head dimensions up to {MOST_FLASH_DIM}, but this model uses {largest}",
            got=backend.attention_backend,
            remedy="Set it to auto or sdpa",
        )
    capped = text_fields(model).get("attn_logit_softcapping") is not None
    if capped and (problem := without_softcap(backend.attention_backend)):
        yield problem


def largest_head(model: Mapping[str, Any]) -> int:
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
        backend: Settings of the backend.
        precision: Name of the compute dtype, such as `bfloat16`.
        device: Device of the workers; None if it is not known yet.
    """
    attention = backend.attention_backend
    if (
        device is not None
        and not device.runs_on_gpus
        and attention in ("flash_attention_2", "flash_attention_3", "flex")
    ):
        yield Problem(
            f"{SECTION}.attention_backend",
            f"needs GPUs, but the device is {device.name}",
            got=attention,
            allowed="auto, sdpa, eager",
        )
    if precision == "float32" and attention in ("flash_attention_2", "flash_attention_3"):
        yield Problem(
            f"{SECTION}.attention_backend",
            "needs half precision, but precision is float32",
            got=attention,
            remedy="Set precision=bfloat16, or set this key to auto, sdpa or flex",
        )
    if backend.expert_dispatcher == "deep_ep" and backend.expert_parallel_size > 1:
        yield from _deep_ep_problems(precision, device)


def _deep_ep_problems(precision: str, device: Device | None) -> Iterator[Problem]:
    key = f"{SECTION}.expert_dispatcher"
    if device is not None and not device.runs_on_gpus:
        yield Problem(key, f"needs GPUs, but the device is {device.name}", got="deep_ep", allowed="all_to_all")
    if precision != "bfloat16":
        yield Problem(
            key,
            f"sends bfloat16, but precision is {precision}",
            got="deep_ep",
            remedy="Set precision=bfloat16, or expert_dispatcher=all_to_all",
        )
