"""The Megatron generator, as rl-launch finds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.config import Problem
from rl_core.plugins import BackendPlugin, Requirement, reports_routing
from rl_megatron.generation.config import MegatronGenerationConfig


def ranks(backend: MegatronGenerationConfig) -> int:
    """A replica is one process on one device."""
    del backend
    return 1


def check_size(section: Any, config: Any) -> Iterable[Problem]:
    """Replicas of several ranks, which this generator does not have."""
    size = section.generation.megatron_cfg.tensor_model_parallel_size
    if size > 1:
        yield Problem(
            "generation.megatron_cfg.tensor_model_parallel_size",
            f"got {size}; a replica of the megatron generator is one rank: set it to 1, or generation.backend=vllm",
        )


PLUGIN = BackendPlugin(
    name="megatron",
    key="megatron_cfg",
    config=MegatronGenerationConfig,
    worker="rl_megatron.generation.generator:MegatronGenerator",
    requirement=Requirement(
        "rl-megatron",
        extras={"cpu": ("worker",), "cuda": ("worker",)},
        imports=("torch", "megatron.core", "transformers", "safetensors"),
    ),
    ranks=ranks,
    checks=(check_size,),
    routing_problem=reports_routing,
)
