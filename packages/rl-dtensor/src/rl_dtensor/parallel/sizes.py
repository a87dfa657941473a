"""Numbers of ranks along each axis, and the combinations of settings that can run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.config import Problem
from rl_core.facts.hf_config import num_experts_of
from rl_dtensor.config import DTensorConfig

SECTION = "dtensor_cfg"


@dataclass(frozen=True)
class AxisSizes:
    """Ranks along each axis of a mesh; ranks count fastest along `tp`, then `cp`, `dp_shard`, `dp_replicate`, `pp`.

    Args:
        ep: Ranks that share the experts, together with the tensor-parallel ranks of each; they fold into
            `dp_shard x cp`.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int

    @classmethod
    def of(cls, config: DTensorConfig, world: int) -> AxisSizes:
        """Compute the sizes; all ranks that the other axes leave shard the parameters.

        Raises:
            ValueError: If the world is not a multiple of the number of ranks in the config.
        """
        needed = num_ranks(config)
        if world % needed:
            nearest = max(needed, world // needed * needed)
            sizes = {name: size for name, size in config.model_dump().items() if name.endswith("_size")}
            product = " x ".join(f"{name}={size}" for name, size in sizes.items() if isinstance(size, int) and size > 1)
            raise ValueError(
                f"{product or 'the mesh'} needs a multiple of {needed} ranks, but there are {world}. "
                f"Use {nearest}, or lower one of the sizes"
            )
        pp, cp, tp = config.pipeline_parallel_size, config.context_parallel_size, config.tensor_parallel_size
        dp_shard = world // (pp * config.dp_replicate_size * cp * tp)
        return cls(pp, config.dp_replicate_size, dp_shard, cp, tp, config.expert_parallel_size)

    @property
    def dp(self) -> int:
        """Number of ranks with different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks that share one copy of a parameter."""
        return self.dp_shard * self.cp


def num_ranks(config: DTensorConfig) -> int:
    """Return the number of ranks that one model needs at least; the world is a multiple of it."""
    shards = math.lcm(config.context_parallel_size, config.expert_parallel_size)
    return config.pipeline_parallel_size * config.dp_replicate_size * shards * config.tensor_parallel_size


def combination_problems(config: DTensorConfig) -> Iterator[Problem]:
    """Yield the settings that do not go together, whatever the model."""
    no_tensor = "needs tensor parallelism, but tensor_parallel_size is 1"
    if config.sequence_parallel and config.tensor_parallel_size == 1:
        remedy = "Set tensor_parallel_size=2 or more, or sequence_parallel=false"
        yield Problem(f"{SECTION}.sequence_parallel", no_tensor, remedy=remedy)
    if config.custom_parallel_plan is not None and config.tensor_parallel_size == 1:
        yield Problem(f"{SECTION}.custom_parallel_plan", no_tensor, remedy="Set tensor_parallel_size=2 or more")
    if config.expert_dispatcher != "all_to_all" and config.expert_parallel_size == 1:
        remedy = "Set expert_parallel_size=2 or more, or remove this key"
        yield Problem.unused(f"{SECTION}.expert_dispatcher", "without expert parallelism", remedy=remedy)
    if config.expert_chunks is not None and config.expert_parallel_size == 1:
        remedy = "Set expert_parallel_size=2 or more, or remove this key"
        yield Problem.unused(f"{SECTION}.expert_chunks", "without expert parallelism", remedy=remedy)
    elif config.expert_chunks is not None and config.expert_dispatcher == "deep_ep":
        remedy = "Set expert_dispatcher=all_to_all, or remove this key"
        yield Problem.unused(f"{SECTION}.expert_chunks", "with expert_dispatcher=deep_ep", remedy=remedy)
    if (chunks := config.pipeline_chunks_per_rank) > 1 and config.pipeline_parallel_size == 1:
        reason = "needs pipeline parallelism, but pipeline_parallel_size is 1"
        remedy = "Set pipeline_parallel_size=2 or more, or pipeline_chunks_per_rank=1"
        yield Problem(f"{SECTION}.pipeline_chunks_per_rank", reason, got=chunks, remedy=remedy)


def shape_problems(config: DTensorConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the settings that do not go with a model.

    Args:
        config: Settings of the backend.
        model: Fields of the model's Hugging Face config; missing fields are not checked, so that there are no problems
            if the config is not available.
    """
    model = text_fields(model)
    heads, stated_kv, layers = (
        value if isinstance(value := model.get(name), int) else None
        for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    kv_heads = stated_kv or heads
    tp, cp, pp = config.tensor_parallel_size, config.context_parallel_size, config.pipeline_parallel_size
    for counted, count in (("attention heads", heads), ("key-value heads", kv_heads)):
        if count and count % tp:
            yield _indivisible("tensor_parallel_size", tp, count, counted)
            return
    if config.context_parallel_method == "ulysses" and heads and kv_heads:
        own_heads, own_kv = heads // tp, kv_heads // tp
        if own_heads % cp:
            yield _indivisible("context_parallel_size", cp, own_heads, "attention heads of a rank (ulysses)")
        elif own_kv % cp and cp % own_kv:
            reason = f"neither divides the {own_kv} key-value heads of a rank nor is a multiple of them"
            remedy = f"Set it to {_nearest(own_kv, cp)}, or set context_parallel_method=all_gather"
            yield Problem(f"{SECTION}.context_parallel_size", reason, got=cp, remedy=remedy)
    experts = num_experts_of(model)
    ep = config.expert_parallel_size
    if ep > 1 and model and not any("expert" in name for name in model):
        reason = "must be 1 because this model has no experts"
        yield Problem(f"{SECTION}.expert_parallel_size", reason, got=ep, remedy="Set it to 1")
    elif experts and experts % tp:
        yield _indivisible("tensor_parallel_size", tp, experts, "experts")
    elif experts and experts // tp % ep:
        of_each = f"experts of each of {tp} tensor-parallel ranks" if tp > 1 else "experts"
        yield _indivisible("expert_parallel_size", ep, experts // tp, of_each)
    stages = pp * config.pipeline_chunks_per_rank
    if layers and stages > layers:
        reason = (
            f"results in {stages} pipeline stages (pipeline_parallel_size x pipeline_chunks_per_rank), but the model "
            f"has only {layers} layers"
        )
        yield Problem(f"{SECTION}.pipeline_parallel_size", reason, got=pp, remedy=f"Use at most {layers} stages")


def text_fields(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the language model in a Hugging Face config, which may hold other models next to it."""
    text = model.get("text_config")
    return {**model, **text} if isinstance(text, Mapping) else model


def _indivisible(key: str, size: int, count: int, counted: str) -> Problem:
    reason, remedy = f"does not divide the model's {count} {counted}", f"Set it to {_nearest(count, size)}"
    return Problem(f"{SECTION}.{key}", reason, got=size, remedy=remedy)


def _nearest(count: int, size: int) -> int:
    divisors = [candidate for candidate in range(1, count + 1) if count % candidate == 0]
    return min(divisors, key=lambda candidate: (abs(candidate - size), candidate))
