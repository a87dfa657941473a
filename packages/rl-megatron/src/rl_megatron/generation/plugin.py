"""The Megatron generator, as rl-launch finds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.config import Problem
from rl_core.model_config import local_hf_config
from rl_core.plugins import BackendPlugin, Requirement, reports_routing
from rl_core.run_config import RunConfig
from rl_megatron.families.rope import rope_problem
from rl_megatron.generation.config import MegatronGenerationConfig

LINEAR_PROBLEM = (
    "the megatron generator does not decode models with linear attention: its cache holds keys and values, no state "
    "of such layers; set generation.backend=vllm"
)


def ranks(backend: MegatronGenerationConfig) -> int:
    """A replica is one process on one device."""
    del backend
    return 1


def check_size(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Replicas of several ranks, which this generator does not have."""
    size = section.generation.megatron_cfg.tensor_model_parallel_size
    if size > 1:
        yield Problem(
            "generation.megatron_cfg.tensor_model_parallel_size",
            f"got {size}; a replica of the megatron generator is one rank: set it to 1, or generation.backend=vllm",
        )


def check_layers(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Layers that cannot be decoded, if the model's config is on this machine."""
    fields = local_hf_config(section)
    if fields.get("linear_num_key_heads"):
        yield Problem("generation.backend", LINEAR_PROBLEM)
    problem = rope_problem(fields)
    if problem:
        yield Problem("generation.backend", problem)


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
    checks=(check_size, check_layers),
    routing_problem=reports_routing,
)
