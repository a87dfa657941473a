"""Checks of settings that let linear layers compute in fewer bits than `precision`."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config import Problem
from rl_core.devices import Device
from rl_core.model_config import LoraConfig
from rl_dtensor.config import DTensorConfig
from rl_dtensor.parallel.sizes import SECTION

FLOAT8, QAT = f"{SECTION}.float8", f"{SECTION}.qat"


def low_precision_problems(
    backend: DTensorConfig, adapters: LoraConfig, *, precision: str, device: Device | None
) -> Iterator[Problem]:
    """Settings of float8 and quantisation-aware training that cannot run, or would have no effect.

    Args:
        backend: Settings of the backend.
        adapters: Adapters of the model.
        precision: Name of the compute dtype, such as `bfloat16`.
        device: Device of the workers; None if it is not known yet.
    """
    if backend.float8.enabled:
        yield from _float8_problems(backend, precision, device)
    if backend.qat.enabled:
        yield from _qat_problems(backend, adapters)


def _float8_problems(backend: DTensorConfig, precision: str, device: Device | None) -> Iterator[Problem]:
    if backend.float8.emulate:
        return
    if device is not None and not device.runs_on_gpus:
        yield Problem(
            f"{FLOAT8}.enabled",
            f"needs GPUs of compute capability 8.9 or higher, but the device is {device.name}",
            got=True,
            remedy=f"Set {FLOAT8}.emulate=true to round as float8 does, without its speed, or remove this key",
        )
    if precision != "bfloat16":
        yield Problem(
            f"{FLOAT8}.enabled",
            f"multiplies into bfloat16, but precision is {precision}",
            got=True,
            remedy=f"Set precision=bfloat16, or {FLOAT8}.emulate=true",
        )


def _qat_problems(backend: DTensorConfig, adapters: LoraConfig) -> Iterator[Problem]:
    qat = backend.qat
    if backend.float8.enabled:
        yield Problem(
            f"{QAT}.enabled",
            "rounds the weights that float8 products would round again",
            got=True,
            remedy=f"Remove {FLOAT8}.enabled or this key",
        )
    if adapters.enabled:
        yield Problem(
            f"{QAT}.enabled",
            "rounds the weights that train, but with lora_cfg.enabled only adapters train",
            got=True,
            remedy="Set lora_cfg.enabled=false, or remove this key",
        )
    if qat.format != "int4" and "group_size" in qat.model_fields_set:
        yield Problem.unused(f"{QAT}.group_size", f"with {QAT}.format={qat.format}")
