"""Numbers of ranks along each axis, and the combinations of settings that can run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.config import Problem
from rl_core.model_config import num_experts_of
from rl_dtensor.config import DTensorConfig

SECTION = "dtensor_cfg"


@dataclass(frozen=True)
class AxisSizes:
    """Ranks along each axis of a mesh; ranks count fastest along `tp`, then `cp`, `dp_shard`, `dp_replicate`, `pp`.

    Args:
        ep: ranks that share the experts; they fold into `dp_shard x cp`.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int

    @classmethod
    def of(cls, config: DTensorConfig, world: int) -> AxisSizes:
        """All ranks that the other axes leave shard the parameters.

        Raises:
            ValueError: if the world is not a multiple of what the config asks for.
        """
        needed = num_ranks(config)
        if world % needed:
            nearest = max(needed, world // needed * needed)
            raise ValueError(
                f"{_product(config)} needs a multiple of {needed} ranks and there are {world}; "
                f"use {nearest}, or lower one of them"
            )
        outer = config.pipeline_parallel_size * config.dp_replicate_size
        inner = config.context_parallel_size * config.tensor_parallel_size
        return cls(
            config.pipeline_parallel_size,
            config.dp_replicate_size,
            world // (outer * inner),
            config.context_parallel_size,
            config.tensor_parallel_size,
            config.expert_parallel_size,
        )

    @property
    def dp(self) -> int:
        """Ranks with different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that share one copy of a parameter."""
        return self.dp_shard * self.cp


def num_ranks(config: DTensorConfig) -> int:
    """Ranks that one model needs at least; the world is a multiple of it."""
    shards = math.lcm(config.context_parallel_size, config.expert_parallel_size)
    return config.pipeline_parallel_size * config.dp_replicate_size * shards * config.tensor_parallel_size


def combination_problems(config: DTensorConfig) -> Iterator[Problem]:
    """Settings that do not go together, whatever the model."""
    if config.sequence_parallel and config.tensor_parallel_size == 1:
        yield Problem(
            f"{SECTION}.sequence_parallel",
            "shares tokens over tensor-parallel ranks and there is one; set tensor_parallel_size=2 or more, "
            "or sequence_parallel=false",
        )
    if config.custom_parallel_plan is not None and config.tensor_parallel_size == 1:
        yield Problem(
            f"{SECTION}.custom_parallel_plan",
            "splits modules over tensor-parallel ranks and there is one; set tensor_parallel_size=2 or more",
        )
    if config.expert_parallel_size > 1 and config.tensor_parallel_size > 1:
        yield Problem(
            f"{SECTION}.expert_parallel_size",
            "tensor parallelism splits the experts over its ranks already; set expert_parallel_size=1",
        )
    if config.recompute_granularity != "full" and not config.activation_checkpointing:
        yield Problem(
            f"{SECTION}.recompute_granularity",
            "says what activation_checkpointing computes again, and that is off; set activation_checkpointing=true",
        )
    if config.compile and config.activation_checkpointing and config.recompute_granularity == "selective":
        yield Problem(
            f"{SECTION}.compile",
            "fuses the operations among which recompute_granularity=selective chooses; set recompute_granularity=full, "
            "or compile=false",
        )
    axes = {
        "tensor_parallel_size": config.tensor_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "expert_parallel_size": config.expert_parallel_size,
    }
    for name, size in axes.items():
        if config.compile and size > 1:
            yield Problem(
                f"{SECTION}.compile",
                f"goes with data parallelism alone, and {name} is {size}; set {name}=1, or compile=false",
            )
    if config.compile and config.attention_backend == "flex":
        yield Problem(
            f"{SECTION}.compile",
            "compiles layers around attention, and flex is compiled for itself; set attention_backend=auto, or "
            "compile=false",
        )
    if config.pipeline_chunks_per_rank > 1 and config.pipeline_parallel_size == 1:
        yield Problem(
            f"{SECTION}.pipeline_chunks_per_rank",
            "interleaves the layers of pipeline ranks and there is one; set pipeline_parallel_size=2 or more, "
            "or pipeline_chunks_per_rank=1",
        )


def shape_problems(config: DTensorConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Settings that do not go with a model.

    Args:
        model: fields of its Hugging Face config; those that are missing are not checked, so nothing is of a model whose
            config is not at hand.
    """
    model = text_fields(model)
    heads = _number(model, "num_attention_heads")
    kv_heads = _number(model, "num_key_value_heads") or heads
    tp, cp = config.tensor_parallel_size, config.context_parallel_size
    for what, count in (("attention heads", heads), ("key-value heads", kv_heads)):
        if count and count % tp:
            yield _indivisible("tensor_parallel_size", tp, count, what)
            return
    if config.context_parallel_method == "ulysses" and heads and kv_heads:
        own_heads, own_kv = heads // tp, kv_heads // tp
        if own_heads % cp:
            yield _indivisible("context_parallel_size", cp, own_heads, "attention heads of a rank (ulysses)")
        elif own_kv % cp and cp % own_kv:
            yield Problem(
                f"{SECTION}.context_parallel_size",
                f"{cp} neither divides nor is a multiple of the {own_kv} key-value heads of a rank; "
                f"set it to {_nearest(own_kv, cp)}, or context_parallel_method=all_gather",
            )
    experts = num_experts_of(model)
    if experts and config.compile:
        yield Problem(
            f"{SECTION}.compile", "compiles layers without experts, and the model has some; set compile=false"
        )
    ep = config.expert_parallel_size
    if ep > 1 and model and not any("expert" in name for name in model):
        yield Problem(f"{SECTION}.expert_parallel_size", f"is {ep} and the model has no experts; set it to 1")
    elif experts and experts % ep:
        yield _indivisible("expert_parallel_size", ep, experts, "experts")
    elif experts and experts % tp:
        yield _indivisible("tensor_parallel_size", tp, experts, "experts")
    layers = _number(model, "num_hidden_layers")
    stages = config.pipeline_parallel_size * config.pipeline_chunks_per_rank
    if layers and stages > layers:
        yield Problem(
            f"{SECTION}.pipeline_parallel_size",
            f"{stages} stages (pipeline_parallel_size x pipeline_chunks_per_rank) of {layers} layers leave some empty; "
            f"have at most {layers}",
        )


def text_fields(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of the language model in a Hugging Face config, which may hold those of other models beside it."""
    text = model.get("text_config")
    return {**model, **text} if isinstance(text, Mapping) else model


def _indivisible(key: str, size: int, count: int, what: str) -> Problem:
    return Problem(
        f"{SECTION}.{key}", f"{size} does not divide the model's {count} {what}; set it to {_nearest(count, size)}"
    )


def _nearest(count: int, size: int) -> int:
    divisors = [candidate for candidate in range(1, count + 1) if count % candidate == 0]
    return min(divisors, key=lambda candidate: (abs(candidate - size), candidate))


def _number(model: Mapping[str, Any], name: str) -> int | None:
    value = model.get(name)
    return value if isinstance(value, int) else None


def _product(config: DTensorConfig) -> str:
    sizes = {
        name: size
        for name, size in config.model_dump().items()
        if name.endswith("_size") and isinstance(size, int) and size > 1
    }
    return " x ".join(f"{name}={size}" for name, size in sizes.items()) or "the mesh"
