"""The Megatron generator, as rl-launch finds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from rl_core.config import Config, Problem, WhenChanged
from rl_core.devices import Device
from rl_core.facts.rank_layout import EngineLayout
from rl_core.model_config import ModelConfig, local_hf_config
from rl_core.plugins import BackendPlugin, Requirement, reports_routing
from rl_core.run_config import RunConfig
from rl_core.weights import ITEM_BYTES
from rl_megatron.families.supported import rope_problem


class MegatronGenerationConfig(Config):
    """Generation with Megatron Core."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    tensor_model_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks that share the matrices of each layer; a replica has one."""
    max_batch_size: int = Field(default=64, gt=0)
    """Maximum number of completions decoded together, from first to last. Further requests wait until all of them have
    ended."""
    max_prefill_tokens: int = Field(default=16384, gt=0)
    """Maximum number of tokens in one forward pass over prompts. A single longer prompt is an exception."""


LINEAR_PROBLEM = Problem(
    "generation.backend",
    "does not decode models with linear attention, because its cache holds keys and values but not the state of such "
    "layers",
    got="megatron",
    remedy="Set generation.backend=vllm",
)
"""The refusal of a model with linear attention."""


def check_size(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problem of a replica with several ranks, which this generator does not support."""
    size = section.generation.megatron_cfg.tensor_model_parallel_size
    if size > 1:
        key = "generation.megatron_cfg.tensor_model_parallel_size"
        reason = "must be 1 because a replica of the megatron generator is one rank"
        remedy = "Set it to 1, or set generation.backend=vllm"
        yield Problem(key, reason, got=size, remedy=remedy)


def check_layers(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problems of layers that cannot be decoded, if the model's config is on this machine."""
    fields = local_hf_config(section)
    if fields.get("linear_num_key_heads"):
        yield LINEAR_PROBLEM
    if problem := rope_problem(fields):
        reason = problem.reason.removeprefix("has ")
        yield replace(problem, key="generation.backend", reason=f"cannot decode {reason}", got="megatron")


def engine_layout(
    model: ModelConfig, config: MegatronGenerationConfig, device: Device, *, is_shared: bool
) -> EngineLayout:
    """Return what an engine keeps of a device; see `BackendPlugin.engine_layout`."""
    each = ITEM_BYTES[model.precision]
    return EngineLayout(weight_bytes=each, cache_bytes=each, num_sequences=config.max_batch_size, is_eager=True)


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
    engine_layout=engine_layout,
    ranks=lambda backend: 1,  # A replica is one process on one device.
    checks=(check_size, check_layers),
    routing_problem=reports_routing,
)
