"""Which settings a device can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rl_core.config import Problem
from rl_dtensor.config import DTensorConfig
from rl_dtensor.parallel.sizes import SECTION


def device_problems(
    backend: DTensorConfig, *, precision: str, device: Literal["auto", "cpu", "cuda"]
) -> Iterator[Problem]:
    """Settings that this device or compute dtype cannot run; `auto` may still become either device."""
    attention = backend.attention_backend
    if device == "cpu" and attention in ("flash_attention_2", "flash_attention_3", "flex"):
        yield Problem(
            f"{SECTION}.attention_backend", f"{attention} runs on GPUs and this is cpu; set it to auto, sdpa or eager"
        )
    if precision == "float32" and attention in ("flash_attention_2", "flash_attention_3"):
        yield Problem(
            f"{SECTION}.attention_backend",
            f"{attention} computes in half precision and policy.precision is float32; set policy.precision=bfloat16, "
            "or this to auto, sdpa or flex",
        )
